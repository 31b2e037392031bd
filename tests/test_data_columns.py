"""Columns and batches: rows are copied once, in order, and never alias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from eqaccum._data import batch_of, epoch_order, open_source
from eqaccum._data._leaves import cut, gather, join
from eqaccum._errors import InputError

KEY = np.array([1, 2], np.uint32)


def rows_of(batch) -> np.ndarray:
    """The first row leaf of the whole batch."""
    return np.array(batch.take(np.arange(batch.count))[0])


@given(
    rows=st.integers(1, 40),
    global_batch=st.integers(1, 50),
    drop_remainder=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_every_row_once_per_epoch(rows, global_batch, drop_remainder, epoch):
    source = open_source((np.arange(rows), np.arange(rows) * 2.0))
    order = epoch_order(KEY, epoch, rows)
    batches = list(
        source.epoch(
            epoch,
            global_batch=global_batch,
            order=order,
            drop_remainder=drop_remainder,
        )
    )
    assert len(batches) == source.batches_per_epoch(global_batch, drop_remainder)
    seen = np.concatenate([rows_of(batch) for batch in batches])
    np.testing.assert_array_equal(seen, order[: len(seen)])
    if not drop_remainder or rows < global_batch:
        assert len(seen) == rows
    else:
        assert len(seen) == rows - rows % global_batch
    for number, batch in enumerate(batches):
        assert (batch.epoch, batch.index) == (epoch, number)
        assert batch.first_row == number * global_batch
        x, y = batch.take(np.array([0]))
        assert y[0] == 2 * x[0]


def test_ten_rows_in_batches_of_four():
    source = open_source(np.arange(10))
    assert source.rows == 10 and source.kind == "columns"
    assert source.can_shuffle and source.restartable
    for epoch in range(3):
        batches = list(source.epoch(epoch, global_batch=4))
        assert [rows_of(batch).tolist() for batch in batches] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
        ]
    assert source.batches_per_epoch(4) == 3
    assert source.batches_per_epoch(4, drop_remainder=True) == 2
    small = open_source(np.arange(3))
    assert small.batches_per_epoch(4) == 1
    assert small.batches_per_epoch(4, drop_remainder=True) == 1


def test_resuming_in_an_epoch():
    source = open_source(np.arange(64))
    order = epoch_order(KEY, 0, 64)
    batch = next(source.epoch(0, global_batch=8, order=order, start=3))
    assert (batch.index, batch.first_row) == (3, 24)
    np.testing.assert_array_equal(rows_of(batch), order[24:32])


def test_an_order_of_another_length():
    source = open_source(np.arange(6))
    with pytest.raises(ValueError, match="for 6 rows"):
        source.epoch(0, global_batch=2, order=np.arange(5))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 2], [3, 0, 3]])
def test_rows_never_alias_the_users_memory(dtype, order):
    column = np.arange(8).reshape(4, 2).astype(dtype)
    table = np.arange(4).astype(dtype)
    expected = column[order].copy()
    for batch in (
        batch_of((column, table), in_axes=(0, None)),
        *open_source((column, table), in_axes=(0, None)).epoch(0, global_batch=4),
    ):
        (first,) = batch.take(np.array(order))
        (second,) = batch.take(np.array(order))
        assert not np.shares_memory(first, column)
        assert not np.shares_memory(first, second)
        assert not np.shares_memory(batch.whole[0], table)
        column += 1
        table += 1
        np.testing.assert_array_equal(first, expected)
        np.testing.assert_array_equal(batch.whole[0], [0, 1, 2, 3])
        column -= 1
        table -= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0]])
def test_rows_can_be_used_where_they_are(dtype, order):
    # XLA:CPU copies what is not aligned to 64 bytes: a second copy of each batch.
    batch = batch_of(np.ones((3, 5), dtype))
    for _ in range(10):
        (rows,) = batch.take(np.array(order))
        assert rows.ctypes.data % 64 == 0
        assert rows.flags.c_contiguous


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2],
        lambda x: x[:, ::3],
        lambda x: x.T,
        lambda x: x[::-1],
        lambda x: np.asfortranarray(x),
        lambda x: np.broadcast_to(x[:1], x.shape),
    ],
)
def test_strided_columns(view):
    column = view(np.arange(600.0, dtype=np.float32).reshape(20, 30))
    batch = batch_of(column)
    for order in ([0, 1, 2], [5, 1, 5]):
        np.testing.assert_array_equal(batch.take(np.array(order))[0], column[order])


def test_many_rows_of_another_dtype():
    column = np.arange(3 << 17, dtype=np.float64).reshape(-1, 2)  # several chunks
    order = epoch_order(KEY, 0, len(column))
    (rows,) = batch_of(column).take(order)
    np.testing.assert_array_equal(rows, column[order].astype(np.float32))


def test_memory_mapped_columns(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(40.0).reshape(10, 4))
    column = np.load(path, mmap_mode="r")
    assert isinstance(column, np.memmap)
    source = open_source({"x": column})
    order = epoch_order(KEY, 0, 10)
    batches = list(source.epoch(0, global_batch=4, order=order))
    (rows,) = batches[2].take(np.array([1, 0]))
    assert type(rows) is np.ndarray and rows.dtype == np.float32
    np.testing.assert_array_equal(rows, np.asarray(column)[order[[9, 8]]])


def test_jax_columns_on_the_cpu():
    column = jnp.arange(12.0).reshape(6, 2)
    spread = jax.device_put(
        jnp.arange(8),
        jax.sharding.NamedSharding(
            jax.make_mesh((4,), ("data",)), jax.sharding.PartitionSpec("data")
        ),
    )
    for array in (column, spread):
        (rows,) = batch_of(array).take(np.array([5, 1]))
        assert isinstance(rows, np.ndarray)
        np.testing.assert_array_equal(rows, np.asarray(array)[[5, 1]])
        assert not np.shares_memory(rows, np.asarray(array))


def test_rows_on_a_device():
    # What columns on an accelerator go through, here with arrays of the CPU.
    column = jnp.arange(12).reshape(6, 2)
    order = np.array([4, 0, 4])
    rows = gather(column, order, np.dtype(np.int32), run=None)
    assert isinstance(rows, jax.Array)
    np.testing.assert_array_equal(rows, np.asarray(column)[order])
    assert gather(column, order, np.dtype(np.int16), run=None).dtype == np.int16
    parts = [cut(column, 0, 2), cut(column, 2, 6)]
    np.testing.assert_array_equal(join(parts), column)
    np.testing.assert_array_equal(join([parts[0], np.asarray(parts[1])]), column)


def test_shapes_are_enough_to_plan_with():
    data = {
        "x": jax.ShapeDtypeStruct((10, 3), np.float64),
        "t": jax.ShapeDtypeStruct((5,), np.int32),
        "s": 2,
    }
    source = open_source(data, in_axes={"x": 0, "t": None, "s": None})
    assert source.rows == 10 and source.batches_per_epoch(4) == 3
    assert source.layout.row_structs == (jax.ShapeDtypeStruct((3,), np.float32),)
    assert source.layout.whole_structs == (jax.ShapeDtypeStruct((5,), np.int32),)
    assert list(source.column_chunks(0)) == []
    with pytest.raises(InputError, match="enough for a plan, not for training"):
        source.epoch(0, global_batch=4)
    with pytest.raises(InputError, match="enough for a plan"):
        batch_of(data["x"])


def test_whole_columns_can_be_looked_through():
    y = np.arange(300_000, dtype=np.int64)
    source = open_source((np.zeros((300_000, 1), np.float32), y))
    chunks = list(source.column_chunks(1))
    assert len(chunks) > 1
    np.testing.assert_array_equal(np.concatenate(chunks), y)


def test_example_weights():
    weights = [0, 1, 2.5, 0, 4]
    source = open_source(np.arange(5), example_weights=weights)
    order = np.array([4, 3, 2, 1, 0])
    first, second = source.epoch(0, global_batch=3, order=order)
    np.testing.assert_array_equal(first.weights, [4, 0, 2.5])
    np.testing.assert_array_equal(second.weights, [1, 0])
    assert first.weights is not None and first.weights.dtype == np.float32
    assert open_source(np.arange(5)).weights is None


def test_weights_are_copied():
    weights = np.ones(3, np.float32)
    source = open_source(np.arange(3), example_weights=weights)
    batch = batch_of(np.arange(3), weights=weights)
    weights[:] = 7
    np.testing.assert_array_equal(source.weights, [1, 1, 1])
    np.testing.assert_array_equal(batch.weights, [1, 1, 1])


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([1, 1], r"shape \(2,\), where \(3,\) was expected"),
        ([[1], [1], [1]], r"shape \(3, 1\)"),
        ([1, np.nan, 1], "weight of row 1 is nan"),
        ([1, 1, -0.5], "weight of row 2 is -0.5"),
        ([np.inf, 1, 1], "weight of row 0 is inf"),
        ([1, 1e300, 1], r"weight of row 1 is 1e\+300"),
        ([1j, 1, 1], "dtype complex128"),
        (["a", "b", "c"], "dtype <U1"),
    ],
)
def test_weights_that_are_none(weights, text):
    for call in (
        lambda: open_source(np.arange(3), example_weights=weights),
        lambda: batch_of(np.arange(3), weights=weights),
    ):
        with pytest.raises(InputError, match=text):
            call()


def test_weights_all_zero():
    with pytest.raises(InputError, match="All 3 example weights are 0"):
        open_source(np.arange(3), example_weights=[0, 1e-60, False])
    batch = batch_of(np.arange(3), weights=np.zeros(3, bool))
    np.testing.assert_array_equal(batch.weights, [0, 0, 0])


@pytest.mark.parametrize("dtype", [bool, np.int8, jnp.bfloat16])
def test_weights_of_other_dtypes(dtype):
    batch = batch_of(np.arange(2), weights=jnp.array([1, 0], dtype))
    np.testing.assert_array_equal(batch.weights, np.array([1, 0], np.float32))


@pytest.mark.parametrize("order", [[0, 3], [-1], [5]])
def test_positions_outside_of_the_batch(order):
    with pytest.raises(IndexError, match="of a batch of 3"):
        batch_of(np.arange(3)).take(np.array(order))


def test_foreign_arrays_are_known_by_protocol():
    class Tensor:
        def __init__(self, values):
            self.values = np.asarray(values)
            self.shape = self.values.shape
            self.dtype = "foreign"

        def __array__(self, dtype=None, copy=None):
            return self.values

    source = open_source((Tensor(np.arange(6.0).reshape(3, 2)), Tensor([3, 4, 5])))
    assert source.kind == "columns"
    (batch,) = source.epoch(0, global_batch=3)
    x, y = batch.take(np.array([2]))
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(x, [[4, 5]])


def test_lists_are_refused_with_both_remedies():
    for data in ([], [np.zeros(3), np.zeros(3)], [(1, 2)]):
        with pytest.raises(InputError) as caught:
            open_source(data)
        assert "`(x, y)`" in str(caught.value)
        assert "eqaccum.data.examples" in str(caught.value)
