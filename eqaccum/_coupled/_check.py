"""Whether a head counts rows of weight 0: tried on embeddings of no meaning."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .. import _errors
from .._accumulate import Arguments
from ._records import Banked, HeadInputs, HeadOutputs


def check_head(
    head: Callable[[HeadInputs], HeadOutputs],
    arguments: Arguments,
    *,
    groups: int,
    rows: int,
    embeddings: Sequence[jax.ShapeDtypeStruct],
    bank: Sequence[jax.ShapeDtypeStruct] = (),
) -> None:
    """Runs the head with the content of rows of weight 0 changed.

    The last row of each group has weight 0, and the last one of the bank. With weights
    of 1 alone the head is run too: where it is not finite then, nothing is known of
    rows of weight 0.

    **Arguments:**

    - `embeddings`: structs of which the first axis is left out of account.
    - `bank`: structs of the bank's leaves, its weights last; empty without a bank.

    **Raises:**

    `InputError` where the value moves, or the gradient is not finite.
    """
    if rows == 1 and not bank:
        return
    run = jax.jit(
        lambda zero, change: head(
            _inputs(arguments, groups, rows, embeddings, bank, zero, change)
        )
    )
    plain, still, moved = (
        _read(run(np.asarray(zero), np.asarray(change)))
        for zero, change in ((False, False), (True, False), (True, True))
    )
    if not (plain.finite and np.isfinite(plain.value)):
        return
    tolerance = 64 * plain.eps * max(abs(still.value), 1e-6)
    same = abs(still.value - moved.value) <= tolerance
    finite = still.finite and moved.finite
    if not same or not finite:
        raise _errors.head_ignores_weights(still.value, moved.value, finite)


@dataclass(frozen=True)
class _Run:
    """The value of one run, whether its gradient is finite, and in which precision."""

    value: float
    finite: bool
    eps: float


def _read(out: HeadOutputs) -> _Run:
    value = float(out.total) / float(out.weight)
    finite = all(
        bool(jnp.all(jnp.isfinite(g))) for g in (*out.embeddings, *out.parameters)
    )
    narrowest = max(
        float(jnp.finfo(leaf.dtype).eps) for leaf in (out.total, *out.embeddings)
    )
    return _Run(value, finite, narrowest)


def _inputs(
    arguments: Arguments,
    groups: int,
    rows: int,
    embeddings: Sequence[jax.ShapeDtypeStruct],
    bank: Sequence[jax.ShapeDtypeStruct],
    zero: Array,
    change: Array,
) -> HeadInputs:
    leaves = [
        _waves((groups, rows, *s.shape[1:]), s.dtype, phase=i)
        for i, s in enumerate(embeddings)
    ]
    weights = jnp.ones((groups, rows), jnp.float32)
    if rows > 1:
        leaves = [_changed(leaf, change, axis=1) for leaf in leaves]
        weights = weights.at[:, -1].set(jnp.where(zero, 0.0, 1.0))
    banked = None
    if bank:
        *structs, last = bank
        old = [
            _waves(s.shape, s.dtype, phase=len(leaves) + i)
            for i, s in enumerate(structs)
        ]
        held = jnp.ones(last.shape, jnp.float32)
        held = held.at[-1].set(jnp.where(zero, 0.0, 1.0))
        banked = Banked([_changed(leaf, change, axis=0) for leaf in old], held)
    shared = np.zeros(2, np.uint32)
    return HeadInputs(arguments, leaves, weights, banked, shared, None)


def _waves(shape: tuple[int, ...], dtype: Any, *, phase: int) -> Array:
    """Numbers of both signs that do not repeat; cheaper to compile than random ones."""
    steps = jnp.arange(math.prod(shape), dtype=jnp.float32)
    values = 1.4 * jnp.sin(1.3 * steps + phase).reshape(shape)
    if jnp.issubdtype(dtype, jnp.inexact):
        return values.astype(dtype)
    return (values > 0).astype(dtype)


def _changed(leaf: Array, change: Array, *, axis: int) -> Array:
    """The same rows with other content in the last one, where that is asked for."""
    other = ~leaf if leaf.dtype == jnp.bool_ else 3 * leaf + 1
    place = jnp.arange(leaf.shape[axis]).reshape(-1, *[1] * (leaf.ndim - axis - 1))
    place = place.reshape((1,) * axis + place.shape)
    return jnp.where((place == leaf.shape[axis] - 1) & change, other, leaf)
