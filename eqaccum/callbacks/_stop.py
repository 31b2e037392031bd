"""Stopping a run that no longer improves."""

from typing import Any

import numpy as np

from .. import _errors
from .._fit import Info
from .._types import Own
from ._watch import Watch


class EarlyStopping:
    """Stops the run when a value has not improved for a while.

    It looks at the history alone, so a resumed run stops where one that was never
    interrupted would. `result.model` is the newest model; `BestCheckpoint` keeps the
    best one.

    **Arguments:**

    - `name`: a name of the history, such as `"validation_loss"` or `"loss"`.
    - `patience`: how many entries in a row may be no better than the best one:
        validations for `"validation_..."`, batches for other names.
    - `maximize`: whether more is better (an accuracy).
    - `margin`: what counts as better: by more than this.

    **Raises:**

    `eqaccum.InputError` for arguments that cannot work, and where the history has no
    such name.

    !!! Example

        ```python
        stop = eqaccum.callbacks.EarlyStopping("validation_loss", patience=5)
        eqaccum.fit(model, data, global_batch=64, validation=held_out, callbacks=[stop])
        ```
    """

    @_errors.short_tracebacks
    def __init__(
        self,
        name: Own[str, ...] = "validation_loss",
        *,
        patience: Own[int, ...] = 3,
        maximize: Own[bool, ...] = False,
        margin: Own[float, ...] = 0.0,
    ) -> None:
        self._watch = Watch("EarlyStopping", name, maximize=maximize, margin=margin)
        self._patience = _whole(patience)
        self.watches = name

    def __call__(self, info: Info) -> bool:
        if not self._watch.look(info) or self._watch.since_best < self._patience:
            return False
        _errors.say(
            f"{self._watch.name} is no better than {self._watch.best:.6g} for "
            f"{self._watch.since_best} entries (EarlyStopping)"
        )
        return True


def _whole(patience: Any) -> int:
    whole = isinstance(patience, int | np.integer) and not isinstance(patience, bool)
    if not whole or patience < 1:
        raise _errors.bad_patience(patience)
    return int(patience)
