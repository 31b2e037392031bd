"""One global batch, and the ways in which its rows are held."""

import abc
import dataclasses
from typing import Any

import numpy as np

from .. import _errors
from . import _leaves
from ._layout import Layout, read
from ._weights import batch_weights


class Rows(abc.ABC):
    """The rows of one batch, wherever they are."""

    @abc.abstractmethod
    def take(self, order: np.ndarray) -> list[Any]:
        """The rows at these positions of the batch, one array per row leaf."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the next batch begins in an iterator that can say where it is.

    `state` is the iterator's own word for the place before an item, as JSON or base64
    text; `used` are the rows of that item which were taken already.
    """

    state: str
    used: int


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The examples of one update.

    `count` is its number of rows, `index` its place in the epoch, `first_row` the
    number of the epoch's rows before it. `weights` is None where all rows weigh 1.
    `after` is where the next batch begins, None where its number says it all.
    Where these are only this process's rows, `counts` are those of each process.
    """

    layout: Layout
    count: int
    weights: np.ndarray | None
    whole: list[Any]
    rows: Rows
    epoch: int = 0
    index: int = 0
    first_row: int = 0
    after: Place | None = None
    counts: tuple[int, ...] = ()

    @property
    def examples(self) -> int:
        """Rows of the global batch, in all processes."""
        return sum(self.counts) if self.counts else self.count

    def take(self, order: np.ndarray) -> list[Any]:
        """The rows at these positions, which may repeat, in their final dtypes.

        The arrays never share memory with the user's, so the step may keep them after
        the call. Arrays that are read-only are the batch's own: nobody writes to them.
        """
        order = np.asarray(order, np.intp)
        if len(order) and not 0 <= order.min() <= order.max() < self.count:
            raise IndexError(
                f"positions {order.min()} to {order.max()} of a batch of {self.count}"
            )
        return self.rows.take(order)


def batch_of(tree: Any, *, in_axes: Any = 0, weights: Any = None) -> Batch:
    """The batch that a pytree of arrays is, as a user hands it to a step.

    The rows stay in the user's memory until `take` copies them.
    """
    flat = read(tree, in_axes=in_axes, what="the batch")
    if not flat.has_values:
        raise _errors.only_shapes()
    weights = batch_weights(weights, flat.count)
    rows = ColumnRows(flat.layout, flat.rows)
    return Batch(flat.layout, flat.count, weights, flat.whole, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnRows(Rows):
    """Rows that stay where the user holds them until they are copied, once."""

    layout: Layout
    columns: list[Any]
    indices: np.ndarray | None = None

    def take(self, order: np.ndarray) -> list[Any]:
        at = order if self.indices is None else self.indices[order]
        run = _leaves.as_run(at)
        return [
            _leaves.gather(column, at, struct.dtype, run=run)
            for column, struct in zip(
                self.columns, self.layout.row_structs, strict=True
            )
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class OwnRows(Rows):
    """Rows that were copied already, and that nobody else can reach."""

    leaves: list[Any]

    def take(self, order: np.ndarray) -> list[Any]:
        return _leaves.take_own(self.leaves, order)
