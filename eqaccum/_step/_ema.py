"""The exponential moving average of the parameters, on the step's clock."""

from typing import Any

import jax
import optax

from .._types import Averaged, accumulator_dtype


def with_ema(
    optimizer: optax.GradientTransformationExtraArgs, decay: float
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with an average of the parameters beside its state.

    After each update `average <- decay * average + (1 - decay) * parameters`, in
    float32 for narrower parameters; it starts as the parameters.
    """

    def init(params: optax.Params) -> Any:
        average = jax.tree.map(lambda p: p.astype(accumulator_dtype(p.dtype)), params)
        return Averaged(optimizer.init(params), average)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda a, p: decay * a + (1 - decay) * p.astype(a.dtype), state.average, new
        )
        return updates, Averaged(inner, average)

    return optax.GradientTransformationExtraArgs(init, update)


def is_decay(value: Any) -> bool:
    """Whether a value can be the decay of an average."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < 1
