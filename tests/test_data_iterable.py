"""Iterables of batches: cut again to one size, read once, resumed."""

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st

from eqaccum._data import _leaves, open_source
from eqaccum._errors import InputError


class Loader:
    """Like a torch `DataLoader`: `__iter__` and `__len__`, lists of columns.

    It fills one buffer again and again, as loaders with pinned memory do.
    """

    def __init__(self, sizes):
        self.sizes = list(sizes)
        self.passes = 0
        self.buffer = np.zeros((max([*self.sizes, 1]), 2))

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        self.passes += 1
        first = 0
        for size in self.sizes:
            self.buffer[:size] = np.arange(first, first + size)[:, None]
            yield [self.buffer[:size], np.arange(first, first + size)]
            first += size
            self.buffer[:] = -1


def values(batches) -> list[list[int]]:
    """The rows of batches, all taken after the last was made."""
    found = []
    for batch in list(batches):
        x, y = batch.take(np.arange(batch.count))
        np.testing.assert_array_equal(x[:, 0], y)
        assert (x.dtype, y.dtype) == (np.float32, np.int32)
        found.append(y.tolist())
    return found


def expected(rows, global_batch, drop_remainder=False, start=0):
    every = np.arange(rows).tolist()
    cuts = [every[i : i + global_batch] for i in range(0, rows, global_batch)]
    if drop_remainder and len(cuts) > 1 and len(cuts[-1]) < global_batch:
        cuts.pop()
    return cuts[start:]


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    global_batch=st.integers(1, 12),
    drop_remainder=st.booleans(),
    start=st.integers(0, 3),
)
def test_recutting_is_concatenating(sizes, global_batch, drop_remainder, start):
    source = open_source(Loader(sizes))
    for epoch in range(2):
        batches = source.epoch(
            epoch,
            global_batch=global_batch,
            drop_remainder=drop_remainder,
            start=start,
        )
        assert values(batches) == expected(
            sum(sizes), global_batch, drop_remainder, start
        )


def test_what_is_known_of_an_iterable():
    loader = Loader([4, 4, 2])
    source = open_source(loader)
    assert (source.kind, source.rows, source.weights) == ("iterable", None, None)
    assert not source.can_shuffle and source.restartable
    assert source.batches_per_epoch(4) is None
    assert source.description == "batches of 4 rows (iterable Loader)"
    assert list(source.column_chunks(0)) == []
    assert source.layout.paths == ("[0]", "[1]")
    assert source.layout.row_structs == (
        jax.ShapeDtypeStruct((2,), np.float32),
        jax.ShapeDtypeStruct((), np.int32),
    )


def test_the_item_looked_at_is_put_back():
    loader = Loader([4, 4, 2])
    source = open_source(loader)
    loader.buffer[:] = -5  # a validation that uses the same buffer
    batches = list(source.epoch(0, global_batch=4))
    assert loader.passes == 1
    assert [(b.epoch, b.index, b.first_row) for b in batches] == [
        (0, 0, 0),
        (0, 1, 4),
        (0, 2, 8),
    ]
    assert values(batches) == expected(10, 4)
    assert values(source.epoch(1, global_batch=4)) == expected(10, 4)
    assert loader.passes == 2


def test_an_iterator_allows_one_epoch():
    source = open_source(iter(Loader([3, 3])))
    assert not source.restartable
    assert values(source.epoch(0, global_batch=4)) == expected(6, 4)
    with pytest.raises(InputError, match="one epoch is over and another"):
        source.epoch(1, global_batch=4)


def test_an_iterable_that_does_not_start_again():
    class Once:
        def __init__(self):
            self.items = iter(Loader([2, 2]))

        def __iter__(self):
            yield from self.items

    source = open_source(Once())
    assert values(source.epoch(0, global_batch=4)) == expected(4, 4)
    with pytest.raises(InputError, match="Once. gave no rows in epoch 1"):
        list(source.epoch(1, global_batch=4))


def test_a_remainder_that_is_all_there_is_stays():
    # As columns do: a global batch above the data set is one step of all rows.
    source = open_source(Loader([2, 1]))
    batches = source.epoch(0, global_batch=4, drop_remainder=True)
    assert values(batches) == [[0, 1, 2]]


def test_resuming_at_the_end_of_an_epoch():
    source = open_source(Loader([3, 3]))
    assert list(source.epoch(0, global_batch=4, start=2)) == []


def test_batches_passed_over_are_not_copied(monkeypatch):
    copied = []

    def counting(array, dtype):
        copied.append(array)
        return copy(array, dtype)

    copy = _leaves.copy
    source = open_source(Loader([4] * 6))
    monkeypatch.setattr(_leaves, "copy", counting)
    assert values(source.epoch(0, global_batch=4, start=5)) == [[20, 21, 22, 23]]
    assert len(copied) == 2


def test_only_what_is_needed_is_read():
    def endless():
        for number in range(10**9):
            asked.append(number)
            yield np.full((2, 1), number)

    asked: list[int] = []
    batches = open_source(endless()).epoch(0, global_batch=3)
    assert [next(batches).index, next(batches).index] == [0, 1]
    assert asked == [0, 1, 2]


def test_iterables_that_are_told_the_epoch():
    class Shuffled:
        def __init__(self):
            self.told: list[int] = []

        def set_epoch(self, epoch):
            self.told.append(epoch)

        def __iter__(self):
            yield np.arange(4) + 10 * self.told[-1]

    for epochs in ([0, 1], [3, 4]):
        source = open_source(Shuffled())
        for epoch in epochs:
            (batch,) = source.epoch(epoch, global_batch=4)
            np.testing.assert_array_equal(
                batch.take(np.arange(4))[0], np.arange(4) + 10 * epoch
            )


def test_iterable_datasets_that_inherit_random_access():
    class TorchIterableDataset:
        def __getitem__(self, index):
            raise NotImplementedError

        def __len__(self):
            return 2

        def __iter__(self):
            yield from Loader([2, 2])

    source = open_source(TorchIterableDataset())
    assert source.kind == "iterable"
    assert values(source.epoch(0, global_batch=4)) == expected(4, 4)


def test_shapes_may_change_between_batches():
    lengths = [5, 7, 5]
    items = [np.full((4, n), n, np.float32) for n in lengths]
    source = open_source(iter(items))
    batches = list(source.epoch(0, global_batch=4))
    assert [b.layout.row_structs[0].shape for b in batches] == [(5,), (7,), (5,)]
    assert batches[0].layout == source.layout == batches[2].layout
    assert batches[1].layout != source.layout
    for batch, item in zip(batches, items, strict=True):
        np.testing.assert_array_equal(batch.take(np.arange(4))[0], item)


def test_shapes_cannot_share_a_batch():
    items = [{"x": np.zeros((3, 5))}, {"x": np.zeros((4, 7))}]
    batches = open_source(iter(items)).epoch(0, global_batch=4)
    with pytest.raises(InputError) as caught:
        list(batches)
    text = str(caught.value)
    assert text.startswith("Item 1 of the iterable cannot be joined with the 3 rows")
    assert "['x'] has shape (7,) after (5,)" in text
    assert "exactly global_batch=4 rows" in text


def test_whole_arrays_travel_with_their_rows():
    def items(tables):
        for table in tables:
            yield {"x": np.zeros((2, 3)), "t": np.full(2, float(table))}

    in_axes = {"x": 0, "t": None}
    source = open_source(items([1, 2]), in_axes=in_axes)
    whole = [batch.whole[0][0] for batch in source.epoch(0, global_batch=2)]
    assert whole == [1, 2]
    source = open_source(items([1, 1]), in_axes=in_axes)
    (batch,) = source.epoch(0, global_batch=4)
    np.testing.assert_array_equal(batch.whole[0], np.array([1, 1], np.float32))
    source = open_source(items([1, 2]), in_axes=in_axes)
    with pytest.raises(InputError, match=r"\['t'\], .* has other values"):
        list(source.epoch(0, global_batch=4))


def item(**changes):
    return {"x": np.zeros((2, 3), np.float32), "kind": "a", "n": 1, **changes}


LATER_ITEMS = {
    "structure": (item(extra=np.zeros(2)), "The structure of item 1 of the iterable"),
    "dtype": (item(x=np.zeros((2, 3), int)), r"Leaf \['x'\] of item 1 .* dtype int32"),
    "text": (item(kind="b"), r"Leaf \['kind'\] of item 1 .* is str 'b', where"),
    "number": (item(n=2), r"Leaf \['n'\] of item 1 .* is int 2, .*numpy.float32"),
    "role": (item(n=np.int32(1)), "is an array without an example axis, where in the"),
    "rows": (item(x=np.zeros((2, 3)), n=np.zeros(3)), "differ in their number of rows"),
    "range": (item(x=np.array([2**40])), "Leaf .'x'. of item 1 .* holds 1099511627776"),
}


@pytest.mark.parametrize("name", LATER_ITEMS)
def test_later_items_are_like_the_first(name):
    second, text = LATER_ITEMS[name]
    source = open_source(iter([item(), second]))
    with pytest.raises(InputError, match=text):
        list(source.epoch(0, global_batch=2))


def test_single_examples_are_no_batches():
    with pytest.raises(InputError, match="must give batches, not single examples"):
        open_source(iter([{"x": 1.0, "y": 2}]))
    source = open_source((np.arange(4.0), label) for label in range(3))
    with pytest.raises(InputError, match="not a single example"):
        list(source.epoch(0, global_batch=8))


def test_empty_iterables():
    with pytest.raises(InputError, match="no rows in the iterable .list_iterator."):
        open_source(iter([]))
    with pytest.raises(InputError, match="no rows in the iterable .Loader."):
        open_source(Loader([0, 0]))


def test_iterables_have_no_numbered_rows():
    with pytest.raises(InputError, match="eqaccum.Mean.w . value, w."):
        open_source(Loader([2]), example_weights=[1, 1])
    with pytest.raises(ValueError, match="no other order"):
        open_source(Loader([2])).epoch(0, global_batch=2, order=np.arange(2))


def test_the_users_own_exceptions_pass_through():
    def broken():
        yield np.zeros(2)
        raise OSError("disk gone")

    batches = open_source(broken()).epoch(0, global_batch=2)
    next(batches)
    with pytest.raises(OSError, match="disk gone"):
        next(batches)


def test_shapes_without_values():
    with pytest.raises(InputError, match="enough for a plan"):
        open_source(iter([jax.ShapeDtypeStruct((2,), np.float32)]))


@pytest.mark.parametrize("data", [3, 1.5, "text", b"bytes", object()])
def test_what_is_no_data(data):
    with pytest.raises(InputError, match="none of the three kinds"):
        open_source(data)


def test_functions_are_not_called():
    def batches():
        yield np.zeros(2)

    for data in (batches, Loader):
        with pytest.raises(InputError, match="Pass what it returns"):
            open_source(data)
