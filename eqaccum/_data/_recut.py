"""Items of any size, cut again into batches of one size."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _errors
from . import _leaves
from ._batch import Batch, OwnRows, Place
from ._layout import Flat


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """One item of an iterable, what to call it, and where the iterator was before it.

    `state` is None where the iterator cannot say where it is.
    """

    flat: Flat
    name: str
    state: str | None = None

    def after(self, row: int) -> Place | None:
        """The place of the item's row of this number."""
        return None if self.state is None else Place(self.state, row)


def recut(
    items: Iterator[Item],
    *,
    epoch: int,
    global_batch: int,
    drop_remainder: bool,
    start: int,
    used: int | None = None,
) -> Iterator[Batch]:
    """Batches of exactly `global_batch` rows across the items' borders.

    What is left at the end is a short batch, or is dropped; if it is all there is, it
    is kept in any case. Rows are copied out of an item before the next is asked for: a
    loader may use its buffer again. With `used` the items begin at the place of batch
    number `start`, which is that many rows into the first one.
    """
    index, pending = 0 if used is None else start, _Pending(epoch=epoch)
    skipped, last = used or 0, None
    for item in items:
        if pending.count:
            _check_joins(item, pending, global_batch)
        at, skipped = skipped, 0
        while at < item.flat.count:
            stop = min(item.flat.count, at + global_batch - pending.count)
            pending.add(item.flat, at, stop, keep=index >= start)
            at = stop
            if pending.count == global_batch:
                if index >= start:
                    first = index * global_batch
                    yield pending.batch(index, first_row=first, after=item.after(at))
                index, pending = index + 1, _Pending(epoch=epoch)
        last = item
    is_wanted = index >= start and (index == 0 or not drop_remainder)
    if pending.count and is_wanted:
        after = None if last is None else last.after(last.flat.count)
        yield pending.batch(index, first_row=index * global_batch, after=after)


class _Pending:
    """Rows on their way into a batch."""

    def __init__(self, *, epoch: int):
        self.epoch = epoch
        self.count = 0
        self.flat: Flat | None = None
        self._pieces: list[list[Any]] = []

    def add(self, flat: Flat, start: int, stop: int, *, keep: bool) -> None:
        """Takes rows of an item; only counts them if the batch is to be passed over."""
        self.flat = flat
        self.count += stop - start
        if keep:
            self._pieces.append(
                [
                    _leaves.copy(_leaves.cut(array, start, stop), struct.dtype)
                    for array, struct in zip(
                        flat.rows, flat.layout.row_structs, strict=True
                    )
                ]
            )

    def batch(self, index: int, *, first_row: int, after: Place | None) -> Batch:
        if self.flat is None:
            raise ValueError("no rows were added")
        leaves = [_leaves.join(parts) for parts in zip(*self._pieces, strict=True)]
        return Batch(
            layout=self.flat.layout,
            count=self.count,
            weights=None,
            whole=self.flat.whole,
            rows=OwnRows(leaves),
            epoch=self.epoch,
            index=index,
            first_row=first_row,
            after=after,
        )


def _check_joins(item: Item, pending: _Pending, global_batch: int) -> None:
    """Raises if an item's rows cannot share a batch with those that wait."""
    before = pending.flat
    if before is None:
        return
    changes = [
        f"{leaf.name} has shape {leaf.struct.shape} after {other.struct.shape}"
        for leaf, other in zip(
            item.flat.layout.leaves, before.layout.leaves, strict=True
        )
        if leaf.struct is not None
        and other.struct is not None
        and leaf.struct.shape != other.struct.shape
    ]
    if not changes:
        names = (x.name for x in before.layout.leaves if x.role == "whole")
        changes = [
            f"{name}, an array without an example axis, has other values"
            for name, new, old in zip(names, item.flat.whole, before.whole, strict=True)
            if not _same_bytes(new, old)
        ]
    if changes:
        raise _errors.shapes_cannot_mix(
            item.name,
            pending=pending.count,
            global_batch=global_batch,
            changes=changes,
        )


def _same_bytes(new: Any, old: Any) -> bool:
    return new is old or np.asarray(new).tobytes() == np.asarray(old).tobytes()
