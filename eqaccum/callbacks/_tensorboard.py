"""TensorBoard, by way of tensorboardX, which needs neither TensorFlow nor torch."""

import os
import time
from typing import Any

from .. import _errors
from .._types import Own
from ._logger import VALIDATION, Logger

_FLUSH_SECONDS = 2


class TensorBoard(Logger):
    """Writes events for TensorBoard: `train/loss`, `validation/loss` and so on.

    What was measured is on disk within some two seconds. A resumed run goes on in the
    same folder: what is there of the step at which it begins and later ones is hidden.

    **Arguments:**

    - `folder`: where the event files go, the `--logdir` of TensorBoard.
    - `every`: write every so many steps. A step after which there was a validation is
        always written.

    **Raises:**

    `eqaccum.EqaccumError` with the install command where tensorboardX is missing.

    !!! Example

        ```python
        board = eqaccum.callbacks.TensorBoard("logs/a", every=10)
        eqaccum.fit(model, data, global_batch=512, callbacks=[board])
        ```
    """

    @_errors.short_tracebacks
    def __init__(
        self, folder: Own[str | os.PathLike, ...], *, every: Own[int, ...] = 1
    ) -> None:
        super().__init__(every)
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise _errors.not_installed(
                "TensorBoard", "tensorboardX", 'pip install "eqaccum[tensorboard]"'
            ) from error
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise _errors.bad_log_path("TensorBoard", folder)
        self._folder = os.fsdecode(folder)
        self._make = SummaryWriter
        self._writer: Any = None

    def _open(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._make(
            self._folder,
            purge_step=step,
            flush_secs=_FLUSH_SECONDS,
            # Its file names count seconds: a second run within one would replace the
            # first one's file.
            filename_suffix=f".{time.time_ns()}",
        )

    def _write(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(_tag(name), value, step)


def _tag(name: str) -> str:
    if name.startswith(VALIDATION):
        return "validation/" + name.removeprefix(VALIDATION)
    return f"train/{name}"
