"""How a pytree is read into rows, whole arrays and Python values."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqaccum._data import batch_of, open_source, read
from eqaccum._errors import InputError


def mixed():
    return {
        "x": np.arange(24.0).reshape(8, 3),
        "y": np.arange(8),
        "scale": 0.5,
        "kind": "text",
        "opt": None,
        "adj": np.arange(25.0).reshape(5, 5),
    }


MIXED_AXES = {
    "x": 0,
    "y": 0,
    "scale": None,
    "kind": None,
    "opt": None,
    "adj": None,
}


def test_leaves_of_every_kind():
    data = mixed()
    batch = batch_of(data, in_axes=MIXED_AXES)
    layout = batch.layout
    assert batch.count == 8
    assert layout.paths == ("['x']", "['y']")
    assert layout.row_structs == (
        jax.ShapeDtypeStruct((3,), np.float32),
        jax.ShapeDtypeStruct((), np.int32),
    )
    assert layout.whole_structs == (jax.ShapeDtypeStruct((5, 5), np.float32),)
    rows = batch.take(np.array([6, 6, 1]))
    tree = layout.unflatten(rows, batch.whole)
    np.testing.assert_array_equal(tree["x"], data["x"][[6, 6, 1]])
    np.testing.assert_array_equal(tree["y"], [6, 6, 1])
    np.testing.assert_array_equal(tree["adj"], data["adj"])
    assert (tree["scale"], tree["kind"], tree["opt"]) == (0.5, "text", None)
    assert type(tree["scale"]) is float


def test_array_without_examples_is_refused_until_marked():
    with pytest.raises(InputError) as caught:
        batch_of(mixed())
    text = str(caught.value)
    assert "['adj'] has 5, ['x'] has 8, ['y'] has 8" in text
    assert "in_axes" in text


def test_array_with_as_many_rows_can_be_marked():
    table = np.arange(16.0).reshape(8, 2)
    batch = batch_of((np.zeros((8, 3)), table), in_axes=(0, None))
    assert batch.layout.paths == ("[0]",)
    np.testing.assert_array_equal(batch.whole[0], table)


def test_rows_are_not_truncated():
    with pytest.raises(InputError, match=r"\['x'\] has 8, \['y'\] has 6"):
        batch_of({"x": np.zeros((8, 3)), "y": np.zeros(6)})


@pytest.mark.parametrize(
    "in_axes", [(0, None), (0, {"a": None, "b": None}), (np.int64(0), None)]
)
def test_in_axes_is_a_prefix(in_axes):
    tree = (np.zeros(4), {"a": np.zeros(4), "b": np.zeros((2, 2))})
    batch = batch_of(tree, in_axes=in_axes)
    assert batch.layout.paths == ("[0]",)
    assert [x.shape for x in batch.whole] == [(4,), (2, 2)]


@pytest.mark.parametrize("in_axes", [1, -1, True, False, "x", (0, 2), (0, 0.0)])
def test_other_axes_are_refused(in_axes):
    with pytest.raises(InputError, match="must be 0 .* or None"):
        batch_of((np.zeros(4), np.zeros(4)), in_axes=in_axes)


def test_in_axes_of_another_structure():
    with pytest.raises(InputError, match="does not match the batch"):
        batch_of((np.zeros(4), np.zeros(4)), in_axes={"x": 0})


def test_nothing_counts_the_examples():
    for tree in ({}, None, {"a": 1.0, "b": "text"}, np.float32(3), {"a": np.zeros(())}):
        with pytest.raises(InputError, match="nothing counts the examples"):
            batch_of(tree)
    with pytest.raises(InputError, match="under in_axes=None"):
        batch_of(np.zeros(4), in_axes=None)


def test_no_rows():
    with pytest.raises(InputError, match="no rows in the batch"):
        batch_of(np.zeros((0, 3)))


def test_zero_dimensional_arrays_are_whole():
    batch = batch_of({"x": np.zeros(2), "t": np.float64(0.5), "u": jnp.int32(3)})
    assert [(x.shape, x.dtype) for x in batch.whole] == [
        ((), np.float32),
        ((), np.int32),
    ]


def test_lists_of_numbers_are_arrays():
    batch = batch_of({"ids": [[1, 2], [3, 4], [5, 6]], "y": [0.0, 1.0, 0.5]})
    assert batch.layout.paths == ("['ids']", "['y']")
    ids, y = batch.take(np.array([2, 0]))
    np.testing.assert_array_equal(ids, [[5, 6], [1, 2]])
    np.testing.assert_array_equal(y, np.array([0.5, 0], np.float32))
    assert (ids.dtype, y.dtype) == (np.int32, np.float32)
    with pytest.raises(InputError, match="Leaf .'ids'. of the batch is a list"):
        batch_of({"ids": [[1, 2], [3]]})


def test_lists_of_arrays_are_structure():
    batch = batch_of([np.zeros((4, 2)), np.ones(4)])
    tree = batch.layout.unflatten(batch.take(np.arange(4)), [])
    assert isinstance(tree, list) and len(tree) == 2


def test_modules_and_other_mappings():
    class Pair(eqx.Module):
        x: np.ndarray
        y: np.ndarray

    batch = batch_of(Pair(np.zeros((3, 2)), np.ones(3)))
    assert batch.layout.paths == (".x", ".y")
    assert isinstance(batch.layout.unflatten(*[[1, 2], []]), Pair)


def test_npz_files_are_columns(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
    with np.load(tmp_path / "data.npz") as file:
        source = open_source(file)
    assert source.description == "3 rows (columns)"
    (batch,) = source.epoch(0, global_batch=3)
    np.testing.assert_array_equal(batch.take(np.array([2]))[0], [[4, 5]])


def test_layouts_compare_by_what_is_traced():
    def layout(**leaves):
        return batch_of({"x": np.zeros((2, 3)), **leaves}).layout

    same = batch_of({"x": jnp.ones((7, 3))}).layout
    assert layout() == same and hash(layout()) == hash(same)
    assert layout(s=1) == layout(s=1)
    different = [
        layout(),
        layout(s=1),
        layout(s=1.0),
        layout(s=True),
        layout(s="1"),
        layout(s=np.float32(1)),
        layout(s=np.ones(2)),
        layout(s=None),
        layout(s=-0.0),
        layout(s=0.0),
    ]
    assert len(set(different)) == len(different)
    assert layout(s=float("nan")) == layout(s=float("nan"))


@pytest.mark.parametrize(
    ("given", "final"),
    [
        (np.float64, np.float32),
        (np.complex128, np.complex64),
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (">f4", np.float32),
        (">i8", np.int32),
        (np.float16, np.float16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
        (np.int8, np.int8),
        (np.uint8, np.uint8),
        (bool, bool),
    ],
)
def test_dtypes(given, final):
    column = np.arange(6).reshape(3, 2).astype(given)
    batch = batch_of({"x": column})
    assert batch.layout.row_structs == (jax.ShapeDtypeStruct((2,), final),)
    for order in ([2, 0, 0], [0, 1, 2], [1]):
        (rows,) = batch.take(np.array(order))
        assert rows.dtype == final and rows.dtype.isnative
        np.testing.assert_array_equal(rows, column[order].astype(final))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.int64, np.uint64])
def test_wide_dtypes_stay_under_x64(dtype):
    with jax.enable_x64(True):
        batch = batch_of(np.array([0, 2**31 + 5], dtype))
        (rows,) = batch.take(np.array([1]))
    assert rows.dtype == dtype and rows[0] == 2**31 + 5


@pytest.mark.parametrize(
    ("dtype", "value", "final"),
    [
        (np.int64, 2**31, "int32"),
        (np.int64, -(2**31) - 1, "int32"),
        (np.uint64, 2**32, "uint32"),
    ],
)
def test_integers_out_of_range(dtype, value, final):
    column = np.zeros((300, 1000), dtype)  # more than one chunk
    column[299, 999] = value
    with pytest.raises(InputError) as caught:
        open_source({"ids": column})
    text = str(caught.value)
    assert f"Leaf ['ids'] of the data holds {value}" in text
    assert f"does not fit in {final}" in text and "jax_enable_x64" in text
    column[299, 999] = np.iinfo(final).max
    batch = batch_of({"ids": column})
    assert batch.take(np.array([299]))[0][0, 999] == np.iinfo(final).max


@pytest.mark.parametrize(
    "column",
    [
        np.array(["a", "b"]),
        np.array([b"a", b"b"]),
        np.array([[1, 2], None], object),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, np.longdouble),
    ],
)
def test_what_jax_cannot_compute_with(column):
    with pytest.raises(InputError, match="Leaf .'bad'. of the batch has dtype"):
        batch_of({"x": np.zeros(len(column)), "bad": column})


def test_other_objects_are_refused_by_name():
    with pytest.raises(InputError, match=r"Leaf \['f'\] of the batch is .*\(object\)"):
        batch_of({"x": np.zeros(2), "f": object()})
    with pytest.raises(InputError, match="The array of the batch has dtype"):
        batch_of(np.array(["a"]))


def test_typed_keys_are_refused(getkey):
    with pytest.raises(InputError, match="jax.random.key_data"):
        batch_of({"x": np.zeros(3), "keys": jax.random.split(getkey(), 3)})


def test_traced_batches_can_be_read():
    @jax.jit
    def doubled(x):
        flat = read({"x": x, "s": 2}, in_axes=0, what="the batch")
        assert flat.count == 3 and flat.layout.row_structs[0].shape == (2,)
        tree = flat.layout.unflatten(flat.rows, flat.whole)
        return tree["s"] * tree["x"]

    np.testing.assert_array_equal(doubled(np.ones((3, 2))), np.full((3, 2), 2))


def test_many_leaves_of_differing_lengths():
    columns = {f"c{i:03}": np.zeros(4) for i in range(200)}
    columns["c150"] = np.zeros(3)
    with pytest.raises(InputError) as caught:
        batch_of(columns)
    assert "['c000'] has 4, ['c150'] has 3." in str(caught.value)
