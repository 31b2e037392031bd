"""What the ready-made losses share: rows with weights, blocks of rows, weighted means.

Everything is computed in float32 or wider. A row of weight 0 is replaced by zeros where
it comes in, so that nothing it holds, NaN included, reaches a value or a gradient.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .. import _errors
from .._types import accumulator_dtype

# What a head may pass: arrays of JAX or of numpy.
Rows = Array | np.ndarray


@dataclass(frozen=True)
class Weights:
    """The weights of rows; a row counts at all where its weight is positive."""

    values: Float[Array, "n"]

    @property
    def present(self) -> Bool[Array, "n"]:
        return self.values > 0

    @property
    def total(self) -> Float[Array, ""]:
        return jnp.sum(self.values)

    def first(self, rows: int) -> "Weights":
        return Weights(self.values[:rows])

    def clean(self, array: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
        """The rows, wide enough to add up, zeros where they do not count."""
        wide = array.astype(accumulator_dtype(array.dtype))
        return jnp.where(along(self.present, wide), wide, jnp.zeros((), wide.dtype))

    def mean(self, values: Float[Array, "n ..."]) -> Float[Array, "..."]:
        """The weighted mean over the rows, 0 where no row counts."""
        weights = along(self.values.astype(values.dtype), values)
        counted = jnp.where(weights > 0, weights * values, jnp.zeros((), values.dtype))
        return ratio(jnp.sum(counted, axis=0), self.total.astype(values.dtype))


def weights_of(loss: str, weights: Any, rows: int) -> Weights:
    """The weights given, or ones.

    **Raises:**

    `InputError` where there is not one weight for each row.
    """
    if weights is None:
        return Weights(jnp.ones(rows, jnp.float32))
    if np.shape(weights) != (rows,):
        raise _errors.loss_weights(loss, np.shape(weights), rows)
    weights = jnp.asarray(weights)
    floating = jnp.issubdtype(weights.dtype, jnp.floating)
    dtype = accumulator_dtype(weights.dtype) if floating else jnp.float32
    return Weights(jax.lax.stop_gradient(weights.astype(dtype)))


def checked_rows(loss: str, **arrays: Any) -> list[Float[Array, "n d"]]:
    """The arrays, of one dtype; refuses what is no floating array of vectors."""
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise _errors.loss_rows(loss, name, array)
        if array.ndim != 2:
            raise _errors.loss_rows(loss, name, array)
    dtypes = [jax.dtypes.canonicalize_dtype(a.dtype) for a in arrays.values()]
    common = functools.reduce(jnp.promote_types, dtypes)
    return [jnp.asarray(array, common) for array in arrays.values()]


def along(values: Array, like: Array) -> Array:
    """The values of rows, with the axes that broadcast against `like`."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def ratio(numerator: Array, denominator: Array) -> Array:
    """`numerator / denominator`, and 0 with gradient 0 where the latter is 0."""
    some = denominator > 0
    safe = jnp.where(some, denominator, jnp.ones_like(denominator))
    return jnp.where(some, numerator / safe, jnp.zeros((), numerator.dtype))


def by_blocks(
    fn: Callable[..., Array], rows: Sequence[Array], block_rows: int | None
) -> Array:
    """`fn` of the rows, one block of them after the other.

    `fn` takes arrays with n rows in front and returns one value for each. What it
    computes on the way is computed again for the gradient, so that only one block of it
    is ever held. With `block_rows=None` all rows are one block, computed once.
    """
    count = rows[0].shape[0]
    if block_rows is None:
        return fn(*rows)
    whole = isinstance(block_rows, int | np.integer)
    if isinstance(block_rows, bool) or not whole or block_rows < 1:
        raise _errors.bad_block_rows(block_rows)
    size = min(int(block_rows), max(count, 1))
    blocks = -(-count // size)

    def cut(array: Array) -> Array:
        padding = [(0, blocks * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(blocks, size, *array.shape[1:])

    one = jax.checkpoint(lambda block: fn(*block), prevent_cse=False)
    values = jax.lax.map(one, [cut(array) for array in rows])
    return values.reshape(blocks * size, *values.shape[2:])[:count]
