"""The user's Optax transformation: checked, initialised, applied once per step."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from .. import _errors
from .._tree import Partition, partition, struct

# Recognised by their state, wherever in a chain they hide.
_REFUSED = {
    "MultiStepsState": _errors.accumulates_already,
    "DifferentiallyPrivateAggregateState": _errors.needs_each_gradient,
}


def choose_optimizer(optimizer: Any, total_steps: int) -> optax.GradientTransformation:
    """The transformation given, or what a function of the number of steps returns."""
    if isinstance(optimizer, optax.MultiSteps):
        raise _errors.accumulates_already()
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    refuse_uncalled(optimizer)
    if not callable(optimizer):
        raise _errors.not_an_optimizer(optimizer)
    made = optimizer(total_steps)
    if not isinstance(made, optax.GradientTransformation):
        raise _errors.not_an_optimizer(made)
    return made


def refuse_uncalled(optimizer: Any) -> None:
    """Refuses `optax.adamw` for `optax.adamw(1e-3)`.

    A function of the total number of steps would be called with that number, which
    `optax.adamw` takes as its learning rate.
    """
    fn = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    made_by_optax = getattr(fn, "__module__", None) or ""
    if inspect.isfunction(fn) and made_by_optax.split(".")[0] == "optax":
        raise _errors.optimizer_not_called(fn)


def check_optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation in the form that takes `value=`.

    **Raises:**

    `InputError` for anything that is not an Optax gradient transformation, and for
    `optax.MultiSteps`.
    """
    if isinstance(optimizer, optax.MultiSteps):
        raise _errors.accumulates_already()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise _errors.not_an_optimizer(optimizer)
    if not _takes_value(optimizer.update):
        # Some are of the class that takes more arguments, and do not take them.
        optimizer = optax.GradientTransformation(*optimizer)
    return optax.with_extra_args_support(optimizer)


def opt_partition(
    optimizer: optax.GradientTransformationExtraArgs, parameters: PyTree
) -> tuple[Partition, list[jax.ShapeDtypeStruct]]:
    """The optimizer state's partition and its leaves' structs, from structs alone."""
    state = jax.eval_shape(optimizer.init, parameters)
    _refuse_by_state(state)
    parts = partition(state)
    structs = [struct(leaf) for leaf in parts.split(state).frozen]
    _check_update(optimizer, state, parameters)
    return parts, structs


def apply(
    optimizer: optax.GradientTransformationExtraArgs,
    gradient: PyTree,
    opt_state: PyTree,
    parameters: PyTree,
    value: Array,
) -> tuple[PyTree, PyTree]:
    """One update. Complex gradients are conjugated: Optax would ascend otherwise."""
    descent = jax.tree.map(
        lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, gradient
    )
    # Many Optax transformations cannot be traced where implicit promotion is forbidden.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(
            descent, opt_state, parameters, value=value
        )
        return optax.apply_updates(parameters, updates), opt_state


def _check_update(optimizer: Any, state: PyTree, parameters: PyTree) -> None:
    value = jax.ShapeDtypeStruct((), jnp.float32)

    def update(gradient: PyTree, state: PyTree, parameters: PyTree, value: Any) -> Any:
        return apply(optimizer, gradient, state, parameters, value)

    try:
        new, new_state = jax.eval_shape(update, parameters, state, parameters, value)
    except (TypeError, ValueError) as error:
        if "argument" in str(error) or "must be provided" in str(error):
            raise _errors.optimizer_needs_more(error) from error
        raise
    for name, before, after in (
        ("parameters", parameters, new),
        ("optimizer state", state, new_state),
    ):
        _check_same(name, before, after)


def _takes_value(update: Any) -> bool:
    parameters = inspect.signature(update).parameters.values()
    return any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters)


def _check_same(name: str, before: PyTree, after: PyTree) -> None:
    old = jax.tree_util.tree_leaves_with_path(before)
    new = jax.tree.leaves(after)
    if len(old) != len(new):
        raise _errors.optimizer_structure(name)
    for (path, was), now in zip(old, new, strict=True):
        if was.shape != now.shape or was.dtype != now.dtype:
            raise _errors.optimizer_leaf(name, jax.tree_util.keystr(path), was, now)


def _refuse_by_state(state: PyTree) -> None:
    def visit(node: Any) -> bool:
        refusal = _REFUSED.get(type(node).__name__)
        if refusal is not None:
            raise refusal()
        return False

    jax.tree.flatten(state, is_leaf=visit)
