"""The progress bar: shown in a terminal or notebook, silent elsewhere."""

import sys
import time
from typing import Any

_EVERY = 0.1  # seconds between readings of the loss


class Progress:
    """A tqdm bar over steps with the loss and examples per second, or nothing."""

    def __init__(
        self, *, show: bool | None, total: int | None, done: int, passes: int
    ) -> None:
        self._bar: Any = None
        self._read = 0.0
        if show if show is not None else sys.stderr.isatty() or _in_notebook():
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)
            self._bar.set_description(f"{passes} passes/step" if passes > 1 else None)
        self._examples = 0
        self._start = time.perf_counter()

    def step(self, *, loss: Any, examples: int) -> None:
        if self._bar is None:
            return
        self._examples += examples
        self._bar.update(1)
        now = time.perf_counter()
        if now - self._read >= _EVERY or self._bar.n == self._bar.total:
            self._read = now
            rate = self._examples / max(now - self._start, 1e-9)
            self._bar.set_postfix_str(
                f"loss {float(loss):.4f}, {rate:,.0f} examples/s", refresh=True
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _in_notebook() -> bool:
    """Whether this is the kernel of a notebook, which shows bars without a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
