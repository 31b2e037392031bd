"""Random access: one index is one example."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqaccum._data import epoch_order, open_source
from eqaccum._errors import InputError
from eqaccum.data import examples

KEY = np.array([3, 4], np.uint32)


class Tensor:
    """Like torch's: an array only through `__array__`, a dtype of its own."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.shape = self.values.shape
        self.dtype = "torch.float32"

    def __array__(self, dtype=None, copy=None):
        return self.values


class Images:
    """Like a torch `Dataset`: `__getitem__` and `__len__`, no `__iter__`."""

    def __init__(self, rows: int = 10):
        self.rows = rows
        self.asked: list[int] = []

    def __len__(self):
        return self.rows

    def __getitem__(self, index: int):
        assert type(index) is int and 0 <= index < self.rows
        self.asked.append(index)
        return Tensor(np.full((2, 3), index, np.float32)), index


def test_every_example_once_per_epoch():
    data = Images()
    source = open_source(data)
    assert (source.kind, source.rows, source.can_shuffle) == ("dataset", 10, True)
    assert source.restartable and source.batches_per_epoch(4) == 3
    assert source.layout.paths == ("[0]", "[1]")
    assert source.layout.row_structs == (
        jax.ShapeDtypeStruct((2, 3), np.float32),
        jax.ShapeDtypeStruct((), np.int32),
    )
    data.asked.clear()
    order = epoch_order(KEY, 2, 10)
    batches = list(source.epoch(2, global_batch=4, order=order))
    assert [batch.count for batch in batches] == [4, 4, 2]
    assert data.asked == []  # nothing is read before it is taken
    taken = [batch.take(np.arange(batch.count)) for batch in batches]
    np.testing.assert_array_equal(np.concatenate([y for _, y in taken]), order)
    np.testing.assert_array_equal(np.concatenate([x[:, 1, 2] for x, _ in taken]), order)
    assert data.asked == order.tolist()
    x, y = source.layout.unflatten(taken[0], [])
    assert x.shape == (4, 2, 3) and x.dtype == np.float32 and y.dtype == np.int32


def test_each_process_reads_its_own_share():
    data = Images()
    source = open_source(data)
    (batch,) = source.epoch(0, global_batch=10)
    data.asked.clear()
    _, y = batch.take(np.array([7, 2, 7]))
    np.testing.assert_array_equal(y, [7, 2, 7])
    assert sorted(data.asked) == [2, 7]


def test_a_second_look_sees_the_same_examples():
    rng = np.random.default_rng(0)

    class Noise:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return rng.normal(size=3)

    (batch,) = open_source(Noise()).epoch(0, global_batch=6)
    (some,) = batch.take(np.array([1, 4]))
    (every,) = batch.take(np.arange(6))
    (again,) = batch.take(np.arange(6)[::-1])
    np.testing.assert_array_equal(every[[1, 4]], some)
    np.testing.assert_array_equal(again, every[::-1])
    assert len(np.unique(every)) == 18


def test_what_is_handed_over_cannot_be_changed():
    (batch,) = open_source(Images(4)).epoch(0, global_batch=4)
    x, _ = batch.take(np.arange(4))
    with pytest.raises(ValueError, match="read-only"):
        x += 1
    part, _ = batch.take(np.array([0, 1]))
    part += 5
    np.testing.assert_array_equal(batch.take(np.array([0]))[0], np.zeros((1, 2, 3)))


def test_a_dataset_that_reuses_its_buffer():
    buffer = np.zeros(2, np.float32)

    class Reusing:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            buffer[:] = index
            return buffer

    (batch,) = open_source(Reusing()).epoch(0, global_batch=5)
    np.testing.assert_array_equal(batch.take(np.arange(5))[0][:, 0], np.arange(5))


def test_resuming_and_dropping():
    source = open_source(Images())
    order = epoch_order(KEY, 0, 10)
    (batch,) = source.epoch(
        0, global_batch=4, order=order, drop_remainder=True, start=1
    )
    assert (batch.index, batch.first_row) == (1, 4)
    np.testing.assert_array_equal(batch.take(np.arange(4))[1], order[4:8])


def test_weights_follow_the_order():
    source = open_source(Images(), example_weights=np.arange(10))
    order = epoch_order(KEY, 0, 10)
    first, *_ = source.epoch(0, global_batch=4, order=order)
    np.testing.assert_array_equal(first.weights, order[:4].astype(np.float32))


def test_many_examples_at_once():
    class Table(Images):
        def __getitems__(self, indices):
            assert all(type(index) is int for index in indices)
            return [self[index] for index in indices]

    (batch,) = open_source(Table()).epoch(0, global_batch=10)
    np.testing.assert_array_equal(batch.take(np.arange(10))[1], np.arange(10))


def test_examples_of_plain_python():
    # As Hugging Face gives them without a format: numbers and lists of numbers.
    rows = [
        {
            "ids": [i, i + 1, 2],
            "label": i % 2,
            "score": i / 2,
            "ok": i > 1,
            "n": None,
        }
        for i in range(4)
    ]
    source = open_source(examples(rows))
    assert source.description == "4 rows (examples)"
    (batch,) = source.epoch(0, global_batch=4)
    tree = source.layout.unflatten(batch.take(np.array([3, 0])), [])
    assert tree["n"] is None
    np.testing.assert_array_equal(tree["ids"], [[3, 4, 2], [0, 1, 2]])
    np.testing.assert_array_equal(tree["label"], [1, 0])
    np.testing.assert_array_equal(tree["score"], np.array([1.5, 0], np.float32))
    np.testing.assert_array_equal(tree["ok"], [True, False])
    assert [tree[name].dtype for name in ("ids", "label", "score", "ok")] == [
        np.int32,
        np.int32,
        np.float32,
        bool,
    ]


def test_examples_of_arrays():
    for sequence in (
        [np.ones(2), np.zeros(2)],
        [jnp.ones(2), jnp.zeros(2)],
        np.array([[1.0, 1], [0, 0]]),
    ):
        source = open_source(examples(sequence))
        assert source.kind == "dataset"
        (batch,) = source.epoch(0, global_batch=2)
        (rows,) = batch.take(np.array([1, 0]))
        np.testing.assert_array_equal(rows, [[0, 0], [1, 1]])
        assert rows.dtype == np.float32
    assert open_source(range(5)).rows == 5


@pytest.mark.parametrize("data", [(i for i in range(3)), "abc", 3, None, {1, 2}])
def test_examples_need_a_sequence(data):
    with pytest.raises(InputError, match="needs a sequence"):
        examples(data)


BAD_EXAMPLES = {
    "structure": ([(1.0, 2), (1.0, 2, 3)], "The structure of example 1 is"),
    "none": ([(1.0, 2), None], "The structure of example 1 is"),
    "dtype": ([(1.0, 2), (1.0, 2.5)], r"Leaf \[1\] of example 1 has dtype float32"),
    "shape": ([np.zeros(3), np.zeros(4)], r"The array of example 1 has shape \(4,\)"),
    "ragged": ([{"ids": [1, 2]}, {"ids": [1, 2, 3]}], "Pad them to one shape"),
    "nested": ([{"ids": [[1], [2, 3]]}], r"Leaf \['ids'\] of example 0 is a list"),
    "range": ([0, 2**31], "The array of the data set holds 2147483648"),
    "huge": ([0, 2**70], "The array of example 1 has dtype object"),
    "strings": ([np.array(["a"])], "The array of example 0 has dtype <U1"),
    "object": ([(1, object())], r"Leaf \[1\] of example 0 is .*\(object\)"),
    "text": ([{"text": "a cat", "y": 1}], "is the text 'a cat'.* token ids"),
    "nothing": ([(), ()], "nothing counts the examples"),
}


@pytest.mark.parametrize("name", BAD_EXAMPLES)
def test_examples_that_cannot_be_batched(name):
    sequence, text = BAD_EXAMPLES[name]
    with pytest.raises(InputError, match=text):
        source = open_source(examples(sequence))
        next(source.epoch(0, global_batch=2)).take(np.arange(2))


def test_the_users_own_exceptions_pass_through():
    class Broken(Images):
        def __getitem__(self, index):
            if index == 3:
                raise KeyError("file 3 is missing")
            return super().__getitem__(index)

    (batch,) = open_source(Broken()).epoch(0, global_batch=10)
    with pytest.raises(KeyError, match="file 3 is missing"):
        batch.take(np.arange(10))


def test_empty_and_endless():
    with pytest.raises(InputError, match="no rows in the data set .Images."):
        open_source(Images(0))
    with pytest.raises(InputError, match="repeats for ever"):
        open_source(range(sys.maxsize))


def test_in_axes_is_for_batches():
    assert open_source(Images(), in_axes=(0, 0)).rows == 10
    with pytest.raises(InputError, match="single examples"):
        open_source(Images(), in_axes=(0, None))
