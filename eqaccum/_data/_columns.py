"""Kind 1: a pytree of arrays whose axis 0 counts examples."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .. import _errors
from . import _leaves
from ._batch import Batch, ColumnRows
from ._layout import Flat, Layout, read
from ._source import Cut, Source, count_batches, cuts
from ._weights import example_weights


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnSource(Source):
    """Columns in memory, in a file (`np.memmap`), on a device, or only their shapes."""

    flat: Flat
    rows: int | None
    layout: Layout
    description: str
    weights: np.ndarray | None
    kind = "columns"
    can_shuffle = True
    restartable = True

    @property
    def has_values(self) -> bool:
        return self.flat.has_values

    def epoch(
        self,
        epoch: int,
        *,
        global_batch: int,
        order: np.ndarray | None = None,
        drop_remainder: bool = False,
        start: int = 0,
    ) -> Iterator[Batch]:
        if not self.flat.has_values:
            raise _errors.only_shapes()
        all_cuts = cuts(
            self.flat.count,
            global_batch=global_batch,
            order=order,
            drop_remainder=drop_remainder,
            start=start,
        )
        return (self._batch(cut, epoch) for cut in all_cuts)

    def _batch(self, cut: Cut, epoch: int) -> Batch:
        return Batch(
            layout=self.layout,
            count=len(cut.rows),
            weights=None if self.weights is None else self.weights[cut.rows],
            whole=self.flat.whole,
            rows=ColumnRows(self.layout, self.flat.rows, cut.rows),
            epoch=epoch,
            index=cut.index,
            first_row=cut.first_row,
        )

    def batches_per_epoch(self, global_batch: int, drop_remainder: bool = False) -> int:
        return count_batches(self.flat.count, global_batch, drop_remainder)

    def column_chunks(self, leaf: int) -> Iterator[np.ndarray]:
        column = self.flat.rows[leaf]
        if not isinstance(column, jax.ShapeDtypeStruct):
            yield from _leaves.chunks(column)


def open_columns(data: Any, *, in_axes: Any, weights: Any) -> ColumnSource:
    """Opens a pytree of arrays, checking the whole of every integer column."""
    flat = read(data, in_axes=in_axes, what="the data")
    return ColumnSource(
        flat=flat,
        rows=flat.count,
        layout=flat.layout,
        description=f"{flat.count:,} rows (columns)",
        weights=example_weights(weights, flat.count),
    )
