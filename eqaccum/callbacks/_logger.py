"""What all loggers share: which steps are written, and what of them."""

import abc
from typing import Any

import jax
import numpy as np

from .. import _errors
from .._fit import VALIDATION as VALIDATION, History, Info


class Logger(abc.ABC):
    """Writes every so many steps, and each step after which there was a validation.

    `fit` calls it after each step: with an attribute `every` it would miss the
    validations in between. In a job of several processes the first one writes.
    """

    def __init__(self, every: Any) -> None:
        self._every = check_every(type(self).__name__, every)
        self._history: History | None = None

    def __call__(self, info: Info) -> None:
        if jax.process_index() != 0:
            return
        if info.history is not self._history:
            self._history = info.history
            self._open(info.step)
        if info.step % self._every == 0 or info.validation is not None:
            self._write(info.step, entry(info))

    @abc.abstractmethod
    def _open(self, step: int) -> None:
        """A run begins, or goes on, with this step: later ones are no longer true."""

    @abc.abstractmethod
    def _write(self, step: int, values: dict[str, Any]) -> None:
        """Writes what was measured, Python numbers by name."""


def entry(info: Info) -> dict[str, Any]:
    """The names of the history with what this step measured."""
    values = {"step": info.step, "epoch": info.epoch, **info.history.newest()}
    if info.validation is not None:
        values |= {f"{VALIDATION}{k}": v for k, v in info.validation.items()}
    return {name: plain(value) for name, value in values.items()}


def plain(value: Any) -> bool | int | float:
    """A scalar as a Python number, a float with no more digits than it has."""
    value = np.asarray(value)
    if value.dtype == bool or np.issubdtype(value.dtype, np.integer):
        return value.item()
    if value.dtype.itemsize < 8:
        return float(str(value.astype(np.float32)))
    return float(value)


def check_every(name: str, every: Any) -> int:
    whole = isinstance(every, int | np.integer) and not isinstance(every, bool)
    if not whole or every < 1:
        raise _errors.bad_every(name, every)
    return int(every)
