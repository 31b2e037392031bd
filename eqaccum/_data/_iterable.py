"""Kind 3: an iterable, each item of which is a batch of any size."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from .. import _errors
from . import _leaves
from ._batch import Batch, Place
from ._layout import Flat, Layout, read
from ._recut import Item, recut
from ._source import Source
from ._state import get_state, has_state, set_state


class IterableSource(Source):
    """A loader, a generator, or whatever else gives batches one after another.

    The first item was looked at and is put back: the first epoch begins with it. An
    iterable with a method `set_epoch` is told the epoch before each pass. An iterator
    that can say where it is, by `get_state` and `set_state` as Grain's do, is not read
    again from its start when a run goes on.
    """

    kind = "iterable"
    rows = None
    weights = None
    can_shuffle = False

    def __init__(self, data: Iterable[Any], *, in_axes: Any):
        self._data = data
        self._in_axes = in_axes
        iterator = self._start(0)
        self.restartable = iterator is not data
        items = self._read(iterator)
        first = next(items, None)
        if first is None:
            raise _errors.empty_data(f"the iterable ({type(data).__name__})")
        # A loader may use its buffer again before the first epoch begins.
        first = dataclasses.replace(first, flat=_leaves_copied(first.flat))
        self.layout = first.flat.layout
        self.description = (
            f"batches of {first.flat.count:,} rows (iterable {type(data).__name__})"
        )
        self._first_pass: Iterator[Item] | None = itertools.chain([first], items)
        self._has_state = has_state(iterator)
        self._place: Place | None = None

    def go_on_at(self, place: Place) -> bool:
        if self._has_state:
            self._place = place
        return self._has_state

    def epoch(
        self,
        epoch: int,
        *,
        global_batch: int,
        order: np.ndarray | None = None,
        drop_remainder: bool = False,
        start: int = 0,
    ) -> Iterator[Batch]:
        if order is not None:
            raise ValueError("the rows of an iterable have no other order")
        place, self._place = self._place, None
        items = self._items(epoch) if place is None else self._items_at(place, epoch)
        return recut(
            items,
            epoch=epoch,
            global_batch=global_batch,
            drop_remainder=drop_remainder,
            start=start,
            used=None if place is None else place.used,
        )

    def batches_per_epoch(
        self, global_batch: int, drop_remainder: bool = False
    ) -> None:
        return None

    def column_chunks(self, leaf: int) -> Iterator[np.ndarray]:
        return iter(())

    def _start(self, epoch: int) -> Iterator[Any]:
        set_epoch = getattr(self._data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._data)

    def _items(self, epoch: int) -> Iterator[Item]:
        first_pass, self._first_pass = self._first_pass, None
        same_in_each_epoch = not hasattr(self._data, "set_epoch")
        if first_pass is not None and (epoch == 0 or same_in_each_epoch):
            return self._checked(first_pass, epoch)
        if not self.restartable:
            raise _errors.iterator_used_up(self._data)
        return self._checked(self._read(self._start(epoch)), epoch)

    def _items_at(self, place: Place, epoch: int) -> Iterator[Item]:
        """The items from a place on, none of those before it read again."""
        self._first_pass = None
        iterator = self._start(epoch)
        set_state(iterator, place.state)
        return self._checked(self._read(iterator), epoch)

    def _read(self, iterator: Iterator[Any]) -> Iterator[Item]:
        for number in itertools.count():
            state = get_state(iterator)
            try:
                tree = next(iterator)
            except StopIteration:
                return
            name = f"item {number} of the iterable"
            flat = read(tree, in_axes=self._in_axes, what=name, may_be_empty=True)
            if not flat.has_values:
                raise _errors.only_shapes()
            if flat.count:
                yield Item(flat, name, state)

    def _checked(self, items: Iterator[Item], epoch: int) -> Iterator[Item]:
        is_empty = True
        for item in items:
            is_empty = False
            check_like_first(item.flat.layout, self.layout, what=item.name)
            yield item
        if is_empty:
            raise _errors.epoch_without_rows(epoch, self._data)


def _leaves_copied(flat: Flat) -> Flat:
    rows = [
        _leaves.copy(array, struct.dtype)
        for array, struct in zip(flat.rows, flat.layout.row_structs, strict=True)
    ]
    return dataclasses.replace(flat, rows=rows)


def check_like_first(layout: Layout, first: Layout, *, what: str) -> None:
    """Raises unless two layouts differ in shapes only, the axis of examples apart."""
    if layout is first:
        return
    if layout.treedef != first.treedef:
        raise _errors.item_structure(what, expected=first.treedef, found=layout.treedef)
    for leaf, other in zip(layout.leaves, first.leaves, strict=True):
        if leaf.role != other.role:
            raise _errors.item_role(
                leaf.name, what, expected=_ROLES[other.role], found=_ROLES[leaf.role]
            )
        if leaf.text != other.text:
            raise _errors.item_value(
                leaf.name, what, expected=other.text, found=leaf.text
            )
        if _dtype(leaf.struct) != _dtype(other.struct):
            raise _errors.item_dtype(
                leaf.name,
                what,
                expected=_dtype(other.struct),
                found=_dtype(leaf.struct),
            )


_ROLES = {
    "rows": "an array of rows",
    "whole": "an array without an example axis",
    "static": "a Python value",
}


def _dtype(struct: jax.ShapeDtypeStruct | None) -> Any:
    return None if struct is None else struct.dtype
