"""Single arrays: what dtype they become, and how rows are copied out of them."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import _errors

# XLA:CPU takes a numpy array as it is only at this alignment, and copies it otherwise;
# numpy itself promises 16 bytes.
_ALIGNMENT = 64
# What is converted at a time stays in the processor's cache.
_CHUNK_BYTES = 1 << 20


def is_number_list(node: Any) -> bool:
    """Whether a node is a list of plain numbers, possibly nested: it means an array.

    So come token ids out of datasets that know no arrays; as a pytree it would be one
    leaf per token.
    """
    return isinstance(node, list) and bool(node) and all(map(_is_number, node))


def _is_number(node: Any) -> bool:
    return isinstance(node, (bool, int, float, complex, np.number)) or is_number_list(
        node
    )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, of whichever library (known by `__array__`)."""
    if isinstance(leaf, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)):
        return not isinstance(leaf, (str, bytes))
    return (
        hasattr(leaf, "__array__")
        and hasattr(leaf, "shape")
        and not isinstance(leaf, type)
    )


def as_array(leaf: Any, *, name: str, what: str) -> Any:
    """The leaf as a numpy array, a device's (or traced) array or a `ShapeDtypeStruct`.

    Memory is shared where it can be; nothing here may be kept beyond the call.
    """
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, list):
        try:
            return np.asarray(leaf)
        except ValueError:
            raise _errors.ragged_list(name, what) from None
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise _errors.typed_key(name, what)
    if isinstance(leaf, (jax.ShapeDtypeStruct, Tracer)):
        return leaf
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise _errors.not_whole_here(name, what)
        on_host = all(device.platform == "cpu" for device in leaf.devices())
        return np.asarray(leaf) if on_host else leaf
    return np.asarray(leaf)


def final_dtype(dtype: Any, *, name: str, what: str) -> np.dtype:
    """The dtype with which the compiled step sees an array of this one."""
    x64 = jax.dtypes.canonicalize_dtype(np.int64).itemsize == 8
    final = _final_dtype(np.dtype(dtype), x64)
    if final is None:
        raise _errors.bad_dtype(name, dtype, what)
    return final


@functools.cache
def _final_dtype(dtype: np.dtype, x64: bool) -> np.dtype | None:
    numeric = dtype.kind == "b" or jnp.issubdtype(dtype, np.number)
    if not numeric or dtype.type in (np.longdouble, np.clongdouble):
        return None
    native = dtype.newbyteorder("=")
    return native if x64 else np.dtype(jax.dtypes.canonicalize_dtype(native))


def widest(final: np.dtype) -> np.dtype:
    """The dtype that holds whatever becomes this one without loss of an integer."""
    if final in (np.int32, np.uint32):
        return np.dtype(f"{final.kind}8")
    return final


def check_range(array: Any, final: np.dtype, *, name: str, what: str) -> None:
    """Raises if an integer of the array is lost in the narrower dtype."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        return
    if array.dtype.itemsize <= final.itemsize or array.size == 0:
        return
    bounds = np.iinfo(final)
    for chunk in chunks(array) if array.ndim else (array,):
        for value in (int(chunk.min()), int(chunk.max())):
            if not bounds.min <= value <= bounds.max:
                raise _errors.out_of_range(
                    name, value=value, stored=array.dtype, final=final, what=what
                )


def chunks(array: Any) -> Iterator[np.ndarray]:
    """The array in pieces of some rows each, as numpy arrays."""
    size = _rows_per_chunk(array)
    for start in range(0, array.shape[0], size):
        yield np.asarray(cut(array, start, min(start + size, array.shape[0])))


def _rows_per_chunk(array: Any) -> int:
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    return max(1, _CHUNK_BYTES // max(1, row_bytes))


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory of its own, aligned so that a CPU device can use it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def as_run(positions: np.ndarray) -> slice | None:
    """The slice that consecutive positions make, or None."""
    if len(positions) == 0:
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    if last - first != len(positions) - 1:
        return None
    if len(positions) > 2 and not bool((np.diff(positions) == 1).all()):
        return None
    return slice(first, last + 1)


def gather(
    column: Any, positions: np.ndarray, dtype: np.dtype, *, run: slice | None
) -> Any:
    """A fresh copy of the rows at these positions (`run` if they are consecutive)."""
    if not isinstance(column, np.ndarray):
        return _gather_on_device(column, positions, dtype)
    out = empty((len(positions), *column.shape[1:]), dtype)
    if run is not None:
        out[...] = column[run]
    elif column.dtype == dtype and column.flags.c_contiguous:
        # "clip" writes straight into `out`; the positions were checked by the caller.
        np.take(column, positions, axis=0, out=out, mode="clip")
    else:
        # `take` would copy the whole of a strided column; rows that change their dtype
        # go through a piece that stays in the cache.
        size = _rows_per_chunk(column)
        for start in range(0, len(positions), size):
            some = slice(start, start + size)
            out[some] = column[positions[some]]
    return out


def _gather_on_device(column: jax.Array, positions: np.ndarray, dtype: np.dtype) -> Any:
    index = positions.astype(np.int32 if column.shape[0] <= 1 << 31 else np.int64)
    rows = jnp.take(column, index, axis=0, mode="clip")
    return rows if rows.dtype == dtype else rows.astype(dtype)


def copy(array: Any, dtype: np.dtype) -> Any:
    """A copy that shares no memory with the user's (device arrays cannot change)."""
    if isinstance(array, np.ndarray):
        out = empty(array.shape, dtype)
        out[...] = array
        return out
    return array if array.dtype == dtype else array.astype(dtype)


def cut(array: Any, start: int, stop: int) -> Any:
    """Consecutive rows, as a view where the array is numpy's."""
    if isinstance(array, np.ndarray) or (start, stop) == (0, array.shape[0]):
        return array[start:stop]
    # Compiled once per size; `array[start:stop]` would be for every start.
    return jax.lax.dynamic_slice_in_dim(array, start, stop - start)


def join(pieces: Sequence[Any]) -> Any:
    """The rows of all the pieces, one after another, in one array."""
    if len(pieces) == 1:
        return pieces[0]
    if not all(isinstance(piece, np.ndarray) for piece in pieces):
        return jnp.concatenate(pieces)
    rows = sum(len(piece) for piece in pieces)
    joined = empty((rows, *pieces[0].shape[1:]), pieces[0].dtype)
    return np.concatenate(pieces, out=joined)


def take_own(leaves: Sequence[Any], order: np.ndarray) -> list[Any]:
    """The rows at these positions of arrays that nobody else can reach.

    All of them, in order, are handed over as they are, read-only. A part is copied,
    even if consecutive: where it does not begin at an aligned address a CPU device
    would copy it too, and slower.
    """
    run = as_run(order)
    return [_take_own(leaf, order, run) for leaf in leaves]


def _take_own(leaf: Any, order: np.ndarray, run: slice | None) -> Any:
    if run != slice(0, leaf.shape[0]):
        return gather(leaf, order, leaf.dtype, run=run)
    if isinstance(leaf, np.ndarray):
        leaf = leaf[:]
        leaf.flags.writeable = False
    return leaf
