"""What every kind of data can do, and how rows are cut into batches."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from ._batch import Batch, Place
from ._layout import Layout


class Source(abc.ABC):
    """Data of one of the three kinds, as a resumable stream of global batches.

    `rows` is None where they are not known before the end. `description` is a phrase
    for the first line of a run. A source that is not `restartable` allows one epoch.
    """

    kind: Literal["columns", "dataset", "iterable"]
    rows: int | None
    description: str
    layout: Layout
    weights: np.ndarray | None
    can_shuffle: bool
    restartable: bool

    @property
    def has_values(self) -> bool:
        """Whether there is more than shapes, which are enough for a plan."""
        return True

    def go_on_at(self, place: Place) -> bool:
        """Takes the next `epoch(..., start=...)` to this place, if it can.

        Otherwise the number of a batch has to say it all.
        """
        return False

    @abc.abstractmethod
    def epoch(
        self,
        epoch: int,
        *,
        global_batch: int,
        order: np.ndarray | None = None,
        drop_remainder: bool = False,
        start: int = 0,
    ) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on; the last may be short.

        An epoch with fewer rows than `global_batch` is one batch of them all, under
        `drop_remainder` too.
        """

    @abc.abstractmethod
    def batches_per_epoch(
        self, global_batch: int, drop_remainder: bool = False
    ) -> int | None:
        """The number of batches in an epoch, None where it cannot be known."""

    @abc.abstractmethod
    def column_chunks(self, leaf: int) -> Iterator[np.ndarray]:
        """All rows of row leaf number `leaf` in pieces; nothing unless columns."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """One batch of an epoch: its number, the rows before it, which rows it has."""

    index: int
    first_row: int
    rows: np.ndarray


def cuts(
    rows: int,
    *,
    global_batch: int,
    order: np.ndarray | None,
    drop_remainder: bool,
    start: int,
) -> Iterator[Cut]:
    """The cuts of an epoch of that many rows, from number `start` on."""
    if order is not None and order.shape != (rows,):
        raise ValueError(f"an order of shape {order.shape} for {rows} rows")
    numbers = range(start, count_batches(rows, global_batch, drop_remainder))
    return (_cut(index, rows, global_batch, order) for index in numbers)


def _cut(index: int, rows: int, global_batch: int, order: np.ndarray | None) -> Cut:
    first = index * global_batch
    stop = min(first + global_batch, rows)
    if order is None:
        return Cut(index, first, np.arange(first, stop))
    return Cut(index, first, np.asarray(order[first:stop], np.intp))


def count_batches(rows: int, global_batch: int, drop_remainder: bool) -> int:
    """The number of batches in so many rows."""
    if drop_remainder:
        return max(1, rows // global_batch)
    return -(-rows // global_batch)
