"""Weights & Biases, where it is installed."""

import importlib
from typing import Any

from .. import _errors
from .._types import Own
from ._logger import Logger


class WandB(Logger):
    """Logs to Weights & Biases under the names of the history.

    **Arguments:**

    - `run`: a run that was started already; None starts one at the first step.
    - `every`: log every so many steps. A step after which there was a validation is
        always logged.
    - `**init`: arguments of `wandb.init`, where no run is given.

    **Raises:**

    `eqaccum.EqaccumError` with the install command where wandb is missing.

    !!! Example

        ```python
        log = eqaccum.callbacks.WandB(project="digits", every=10)
        eqaccum.fit(model, data, global_batch=512, callbacks=[log])
        ```
    """

    @_errors.short_tracebacks
    def __init__(
        self, run: Any = None, *, every: Own[int, ...] = 1, **init: Any
    ) -> None:
        super().__init__(every)
        if run is not None and init:
            raise _errors.run_and_init(init)
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise _errors.not_installed(
                "WandB", "wandb", "pip install wandb"
            ) from error
        self._run: Any = run
        self._init = init
        self._start = wandb.init

    def _open(self, step: int) -> None:
        if self._run is None:
            self._run = self._start(**self._init)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)
