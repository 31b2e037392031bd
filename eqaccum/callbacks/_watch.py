"""One name of the history, looked at as a run goes on."""

from typing import Any

import numpy as np

from .. import _errors
from .._fit import History, Info
from ._logger import VALIDATION


class Watch:
    """Which of the entries under a name are better than all before.

    All it knows comes from the history, that of a resumed run included: what is decided
    does not depend on whether the run was stopped in between.
    """

    def __init__(self, door: str, name: Any, *, maximize: Any, margin: Any) -> None:
        if not isinstance(name, str):
            raise _errors.bad_watched_name(door, name)
        if not isinstance(maximize, bool):
            raise _errors.bad_flag(door, "maximize", maximize)
        number = isinstance(margin, int | float) and not isinstance(margin, bool)
        if not number or not 0 <= margin < np.inf:
            raise _errors.bad_margin(door, margin)
        self._door, self.name = door, name
        self._sign = -1.0 if maximize else 1.0
        self._margin = margin
        self._history: History | None = None

    def look(self, info: Info) -> bool:
        """Whether there are new entries; then `best` and `since_best` are up to date.

        **Raises:**

        `InputError` for a name that the history does not have.
        """
        if info.history is not self._history:
            self._history = info.history
            self._seen, self._least, self.since_best = 0, np.inf, 0
        if not self._is_there(info):
            return False
        entries = info.history.since(self.name, self._seen)
        for value in self._sign * entries.astype(np.float64):
            self._seen += 1
            self.since_best += 1
            if value < self._least - self._margin:  # never where it is NaN
                self._least, self.since_best = float(value), 0
        return len(entries) > 0

    @property
    def best(self) -> float:
        return self._sign * self._least

    def _is_there(self, info: Info) -> bool:
        if self.name in info.history:
            return True
        if self.name.startswith(VALIDATION) and info.validation is None:
            return False  # there was none yet
        raise _errors.watched_name_missing(self._door, self.name, list(info.history))
