"""How much the passes' gradients and losses differ: the gradient's noise, for free.

Let the passes' gradients be sums G_j with weights W_j, of independent examples whose
mean gradient is mu, and G, W their sums. The cross terms hold no noise,

    E[|G|^2 - sum_j |G_j|^2] = |mu|^2 (W^2 - sum_j W_j^2),

whatever the sizes of the passes and the weights of their rows, and what is left of
|G / W|^2 is the noise of the global batch's gradient. With passes of one size these are
the estimators of McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._tree import record
from .._types import accumulator_dtype, wider
from ._records import PassOutputs

# Decay of the moving averages of both estimates.
DECAY = 0.99
# Where nearly all the weight is in one pass there is nothing to compare it with.
_ALONE = 1e-6


class Spread(NamedTuple):
    """How passes differ, as sums over them.

    It goes from program to program as one array: each more costs microseconds a call.
    """

    squares: Any  # of the norms of their gradients
    weight_squares: Any
    rows: Any  # weights of their rows
    row_squares: Any
    weight: Any
    total: Any
    loss_squares: Any  # by weight, of the distances of their losses from the mean


Packed = Float[Array, "7"]


@record
class Noise:
    """What a step tells of its gradient's noise."""

    grad_square: Float[Array, ""]
    grad_variance: Float[Array, ""]
    loss_spread: Float[Array, ""]


def spread_struct(
    gradients: list[jax.ShapeDtypeStruct], outputs: PassOutputs
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(Spread._fields),), _dtype(gradients, outputs))


def spread_of(
    gradients: list[Array],
    outputs: PassOutputs,
    ratios: list[Array],
    row_weights: Float[Array, "*rows"],
) -> Packed:
    """What one pass adds; `ratios` as in `PassInputs`."""
    dtype = _dtype(gradients, outputs)
    factors = ratios or [jnp.ones((), outputs.totals[0].dtype)]
    scaled = [t * f for t, f in zip(outputs.totals, factors, strict=True)]
    weight = outputs.weights[0].astype(dtype)
    rows = row_weights.astype(dtype)
    spread = Spread(
        squared_norm(gradients).astype(dtype),
        jnp.square(weight),
        jnp.sum(rows),
        jnp.sum(jnp.square(rows)),
        weight,
        common_sum(scaled).astype(dtype),
        jnp.zeros((), dtype),
    )
    return jnp.stack(spread)


def both(first: Packed | None, second: Packed | None) -> Packed | None:
    """The spread of two sets of passes together (Chan et al. 1979 for the losses)."""
    if first is None or second is None:
        return None
    a, b = Spread(*first), Spread(*second)
    distance = _ratio(a.total, a.weight) - _ratio(b.total, b.weight)
    shared = _ratio(a.weight * b.weight, a.weight + b.weight)
    return (first + second).at[-1].add(shared * jnp.square(distance))


def over_devices(packed: Packed, axis_name: str) -> Packed:
    """The spread of the passes of all devices."""
    own, all_ = Spread(*packed), Spread(*jax.lax.psum(packed, axis_name))
    distance = _ratio(own.total, own.weight) - _ratio(all_.total, all_.weight)
    here = packed.at[-1].add(own.weight * jnp.square(distance))
    return jax.lax.psum(here, axis_name)


def noise_of(packed: Packed, gradient: list[Array]) -> Noise:
    """The estimates of one step; NaN where one pass holds all the weight.

    `gradient` is the finished one, without a penalty.
    """
    spread = Spread(*packed)
    whole = squared_norm(gradient).astype(spread.squares.dtype)
    squares = spread.squares / jnp.square(spread.weight)
    shares = spread.weight_squares / jnp.square(spread.weight)
    several = jnp.where(1 - shares > _ALONE, 1 - shares, jnp.nan)
    # |G / W|^2 less grad_square, written so that little is lost where noise is small
    excess = (squares - whole * shares) / several
    examples = jnp.square(spread.rows) / spread.row_squares
    return Noise(
        (whole - squares) / several,
        excess * examples,
        jnp.sqrt(spread.loss_squares / spread.weight),
    )


def smoothed(averages: Float[Array, "2"], noise: Noise) -> Float[Array, "2"]:
    """Both moving averages after one more step; one that tells nothing is left out."""
    new = jnp.stack([noise.grad_square, noise.grad_variance]).astype(averages.dtype)
    known = jnp.all(jnp.isfinite(new))
    return jnp.where(known, DECAY * averages + (1 - DECAY) * new, averages)


def noise_scale(averages: Float[Array, "2"]) -> Float[Array, ""]:
    """Variance over square. The averages' bias corrections are equal and cancel."""
    square, variance = averages
    return jnp.where(square > 0, variance / jnp.where(square > 0, square, 1), jnp.nan)


def squared_norm(leaves: list[Array]) -> Float[Array, ""]:
    return common_sum(
        [
            jnp.sum(jnp.real(x * jnp.conj(x)), dtype=_real(x))
            if jnp.iscomplexobj(x)
            else jnp.sum(jnp.square(x.astype(_real(x))))
            for x in leaves
        ]
    )


def common_sum(values: list[Array]) -> Array:
    dtype = wider(*[v.dtype for v in values])
    total = values[0].astype(dtype)
    for value in values[1:]:
        total = total + value.astype(dtype)
    return total


def _real(x: Array) -> jnp.dtype:
    """The dtype in which the squares of a leaf are added up."""
    return accumulator_dtype(jnp.finfo(x.dtype).dtype)


def _dtype(gradients: list, outputs: PassOutputs) -> jnp.dtype:
    leaves = [*gradients, *outputs.totals]
    return accumulator_dtype(wider(*[jnp.finfo(x.dtype).dtype for x in leaves]))


def _ratio(x: Array, weight: Array) -> Array:
    """`x / weight`, 0 where nothing weighs."""
    return jnp.where(weight > 0, x / jnp.where(weight > 0, weight, 1), 0)
