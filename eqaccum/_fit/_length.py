"""How long a run is: epochs, steps, or whichever ends first."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _errors
from .._data import Source


@dataclass(frozen=True)
class Length:
    """How long a run is: `steps` is the number of updates in all, None if unknown."""

    epochs: int | None
    steps: int | None
    per_epoch: int | None
    shuffle: bool
    drop_remainder: bool

    def __str__(self) -> str:
        epochs = _counted(self.epochs, "epoch")
        steps = _counted(self.steps, "step")
        if self.epochs is None or self.steps is None:
            return epochs or steps
        return epochs + (" = " if self.per_epoch else ", at most ") + steps


def _counted(count: int | None, what: str) -> str:
    if count is None:
        return ""
    return f"{count:,} {what}" + ("s" if count > 1 else "")


def run_length(
    source: Source,
    global_batch: int,
    *,
    epochs: Any,
    steps: Any,
    drop_remainder: bool,
    shuffle: bool | None,
) -> Length:
    epochs, steps = count("epochs", epochs), count("steps", steps)
    if shuffle and not source.can_shuffle:
        raise _errors.cannot_shuffle(source.description)
    if epochs is None and steps is None:
        epochs = 1
    if epochs is not None and epochs > 1 and not source.restartable:
        raise _errors.one_epoch(epochs, source.description)
    per_epoch = source.batches_per_epoch(global_batch, drop_remainder)
    total = steps
    if epochs is not None and per_epoch is not None:
        total = min(epochs * per_epoch, steps or epochs * per_epoch)
    mixed = source.can_shuffle if shuffle is None else shuffle
    return Length(epochs, total, per_epoch, mixed, drop_remainder)


def count(name: str, value: Any) -> int | None:
    """A number of epochs or steps, checked."""
    if value is None:
        return None
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < 1:
        raise _errors.bad_count(name, value)
    return int(value)
