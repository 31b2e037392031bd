"""Auxiliary outputs: what each leaf means and how it adds up over microbatches."""

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _errors
from .._types import Mean, Means, Sum, accumulator_dtype, wider


class Kind(enum.Enum):
    AVERAGE = "average"  # a float or bool scalar, by the loss's weights
    MEAN = "mean"  # a `Mean`, by its own denominator
    SUM = "sum"  # a `Sum`
    ROWS = "rows"  # an array of each example, in the input's order


@dataclass(frozen=True)
class AuxSpec:
    """The structure of the auxiliary outputs and the kind of each leaf."""

    treedef: Any
    kinds: tuple[Kind, ...]

    def assemble(self, reduced: list[Any], rows: list[Any]) -> PyTree:
        """The user's structure again, out of reduced values and of row arrays."""
        values, stacked = iter(reduced), iter(rows)
        leaves = [
            next(stacked) if kind is Kind.ROWS else next(values) for kind in self.kinds
        ]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclass(frozen=True)
class AuxLeaves:
    """One example's auxiliary arrays: two for a `Mean`, one for anything else."""

    spec: AuxSpec
    arrays: list[Any]


@dataclass(frozen=True)
class AuxTotals:
    """A microbatch's auxiliary outputs: sums to add up and rows to lay in order."""

    sums: list[Array]
    rows: list[Array]


def read_aux(aux: PyTree, *, rows: int | None, summed: bool = False) -> AuxLeaves:
    """Sorts the leaves; those that cannot be combined are refused by name.

    **Arguments:**

    - `aux`: the auxiliary output of one example, or of a whole microbatch.
    - `rows`: the length of the example axis that the leaves already have in front,
        None for one example.
    - `summed`: whether the loss is one `Mean` of the whole microbatch. Then a scalar
        `Mean` has the weights in already too, and floats are averaged by the examples'
        own weights, for what the loss gave each row is not known.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(
        aux, is_leaf=lambda x: isinstance(x, Mean | Means | Sum)
    )
    kinds: list[Kind] = []
    arrays: list[Any] = []
    for path, leaf in pairs:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, Means):
            raise _errors.aux_is_sum_of_means(name)
        if isinstance(leaf, Mean):
            kind, values = Kind.MEAN, _of_mean(leaf, name)
        elif isinstance(leaf, Sum):
            kind, values = Kind.SUM, [_countable(leaf.value, name)]
        else:
            kind, values = _plain(leaf, name, row_axis=rows is not None)
            if summed and kind is Kind.AVERAGE:
                kind, values = Kind.MEAN, [*values, jnp.ones_like(values[0])]
        scalars = summed and isinstance(leaf, Mean) and values[0].ndim == 0
        if rows is not None and not scalars:
            _check_rows(values, name, rows)
        kinds.append(kind)
        arrays += values
    return AuxLeaves(AuxSpec(treedef, tuple(kinds)), arrays)


def total(
    spec: AuxSpec,
    arrays: list[Array],
    *,
    weights: Float[Array, "n"],
    loss_weights: Float[Array, "n"],
) -> AuxTotals:
    """Adds up one microbatch; `arrays` have the example axis in front.

    Scalars are the totals of the microbatch already.
    """
    out = AuxTotals([], [])
    stream = iter(arrays)
    present = weights > 0
    for kind in spec.kinds:
        value = next(stream)
        if kind is Kind.MEAN:
            out.sums.append(_weighted_sum(value, weights))
            out.sums.append(_weighted_sum(next(stream), weights))
        elif kind is Kind.AVERAGE:
            out.sums.append(_weighted_sum(value, loss_weights))
        elif kind is Kind.SUM:
            kept = jnp.where(_along(present, value), value, jnp.zeros_like(value))
            out.sums.append(jnp.sum(kept, axis=0, dtype=value.dtype))
        else:
            zeros = jnp.zeros_like(value)
            out.rows.append(jnp.where(_along(present, value), value, zeros))
    return out


def finish_aux(spec: AuxSpec, sums: list[Array], weight: Array) -> list[Array]:
    """The reduced values out of the sums over the global batch."""
    values = []
    stream = iter(sums)
    for kind in spec.kinds:
        if kind is Kind.MEAN:
            numerator = next(stream)
            values.append(numerator / next(stream))
        elif kind is Kind.AVERAGE:
            numerator = next(stream)
            values.append(numerator / weight.astype(numerator.dtype))
        elif kind is Kind.SUM:
            values.append(next(stream))
    return values


def _plain(leaf: Any, name: str, *, row_axis: bool) -> tuple[Kind, list[Array]]:
    array = _array(leaf, name)
    if array.ndim > (1 if row_axis else 0):
        return Kind.ROWS, [array]
    if jnp.issubdtype(array.dtype, jnp.floating) or array.dtype == jnp.bool_:
        return Kind.AVERAGE, [_wide(array, name)]
    raise _errors.aux_integer(name, array.dtype)


def _of_mean(mean: Mean, name: str) -> list[Array]:
    total, weight = _wide(mean.total, name), _wide(mean.weight, name)
    return [total, weight.astype(wider(total.dtype, weight.dtype))]


def _check_rows(values: list[Array], name: str, rows: int) -> None:
    for value in values:
        if value.shape[:1] != (rows,):
            raise _errors.aux_without_rows(name, value.shape, rows)


def _wide(value: Any, name: str) -> Array:
    array = _array(value, name)
    return array.astype(
        accumulator_dtype(array.dtype) if _inexact(array) else "float32"
    )


def _countable(value: Any, name: str) -> Array:
    array = _array(value, name)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int32)
    if _inexact(array):
        return array.astype(accumulator_dtype(array.dtype))
    return array.astype(wider(array.dtype, jnp.int32))


def _array(value: Any, name: str) -> Array:
    # JAX would try to read a number out of text.
    if isinstance(value, str | bytes):
        raise _errors.aux_not_array(name, value)
    try:
        return jnp.asarray(value)
    except TypeError as error:
        raise _errors.aux_not_array(name, value) from error


def _inexact(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _along(mask: Array, value: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (value.ndim - 1))


def _weighted_sum(value: Array, weights: Array) -> Array:
    """`sum_i w_i value_i`; a row of weight 0 counts nothing, not even as NaN."""
    if value.ndim == 0:
        return value
    w = _along(weights.astype(value.dtype), value)
    zero = jnp.zeros((), value.dtype)
    return jnp.sum(jnp.where(w > 0, value * w, zero), axis=0)
