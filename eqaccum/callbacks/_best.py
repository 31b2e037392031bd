"""Keeping the best state of a run beside the newest."""

import os

from .. import _errors
from .._fit import Info, check_save_path, save
from .._types import Own
from ._watch import Watch


class BestCheckpoint:
    """Saves the `TrainState` whenever a value is better than all before.

    `eqaccum.load(path, model)` reads the best model, `eqaccum.restore` the whole state.
    It writes where nothing else does: `fit(checkpoint=...)` needs another directory.
    The best state of an earlier run there is replaced by that of a new one.

    **Arguments:**

    - `path`: a directory of its own, made if need be.
    - `name`: a name of the history, such as `"validation_loss"`.
    - `maximize`: whether more is better (an accuracy).

    **Raises:**

    `eqaccum.InputError` for arguments that cannot work, a directory that holds the
    checkpoints of a fit, and a name that the history does not have;
    `eqaccum.CheckpointError` where nothing can be written.

    !!! Example

        ```python
        best = eqaccum.callbacks.BestCheckpoint("runs/best", "validation_loss")
        eqaccum.fit(model, data, global_batch=64, validation=held_out, callbacks=[best])
        model = eqaccum.load("runs/best", model)
        ```
    """

    @_errors.short_tracebacks
    def __init__(
        self,
        path: Own[str | os.PathLike, ...],
        name: Own[str, ...] = "validation_loss",
        *,
        maximize: Own[bool, ...] = False,
    ) -> None:
        self._watch = Watch("BestCheckpoint", name, maximize=maximize, margin=0.0)
        self._path = check_save_path(path)
        self.watches = name

    def __call__(self, info: Info) -> None:
        if self._watch.look(info) and self._watch.since_best == 0:
            save(self._path, info.train)
