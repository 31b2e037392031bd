"""The losses that are used where none is given, chosen by the target's dtype."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from .. import _errors
from .._tree import partition, struct
from .._types import accumulator_dtype, wider

_CROSS_ENTROPY = """
    def loss(model, example, key):
        x, y = example
        return optax.{}(model(x), y).mean()"""


@dataclass(frozen=True)
class DefaultLoss:
    """A loss chosen by eqaccum and what it is called in the first line."""

    fn: Any
    name: str
    classes: int | None  # labels must lie below it; None where there are none


@dataclass(frozen=True)
class _Default:
    """(prediction, target) -> loss, around the model call that the model accepts."""

    measure: Callable[[Array, Array], Float[Array, ""]]
    takes_key: bool
    has_state: bool
    compute_dtype: Any

    def __call__(self, model: Any, *rest: Any) -> Any:
        *state, (x, y), key = rest
        x = narrowed(x, self.compute_dtype)
        named = {"key": key} if self.takes_key else {}
        out = model(x, *state, **named)
        if self.has_state:
            return self.measure(out[0], y), out[1]
        return self.measure(out, y)


def choose_default_loss(
    model: PyTree,
    state: PyTree | None,
    example: PyTree,
    *,
    axis_names: tuple[str, ...] = (),
    compute_dtype: Any = None,
) -> DefaultLoss:
    """Cross-entropy for integer targets, mean squared error for floating ones.

    **Arguments:**

    - `model`, `state`: as passed to `fit`; structs will do.
    - `example`: one example's structs, which must be `(x, y)`.
    - `axis_names`: the axes that layers such as BatchNorm may reduce over.
    - `compute_dtype`: floating inputs are cast to it.
    """
    if not isinstance(example, tuple) or len(example) != 2:
        raise _errors.default_needs_pair(jax.tree.structure(example))
    target = example[1]
    if not isinstance(target, jax.ShapeDtypeStruct):
        raise _errors.default_needs_pair(jax.tree.structure(example))
    if not callable(model):
        raise _errors.model_not_callable(model)
    takes_key = accepts_key(model)
    call = _Call(takes_key, axis_names, compute_dtype)
    output = call.output(model, state, example[0])
    measure, name, classes = _by_target(output, target)
    fn = _Default(measure, takes_key, state is not None, compute_dtype)
    return DefaultLoss(fn, name, classes)


def check_labels(chunks: Iterable[np.ndarray], classes: int) -> None:
    """Refuses labels outside of `range(classes)`."""
    ends = [int(end) for c in chunks if c.size for end in (c.min(), c.max())]
    if ends and not 0 <= min(ends) <= max(ends) < classes:
        raise _errors.label_range(min(ends), max(ends), classes)


def check_not_one_hot(rows: np.ndarray) -> None:
    """Refuses floating targets that are one-hot labels in disguise."""
    flat = rows.reshape(-1, rows.shape[-1]) if rows.ndim > 1 else rows[:, None]
    if flat.shape[-1] < 2 or not np.all((flat == 0) | (flat == 1)):
        return
    if np.all(flat.sum(-1) == 1):
        raise _errors.default_target(
            rows.dtype,
            "its rows look one-hot. For classes pass integer labels, or write the loss:"
            + _CROSS_ENTROPY.format("softmax_cross_entropy"),
        )


def _by_target(
    output: jax.ShapeDtypeStruct, target: jax.ShapeDtypeStruct
) -> tuple[Callable, str, int | None]:
    dtype = target.dtype
    if dtype == np.bool_:
        raise _errors.default_target(
            dtype,
            "for two classes write the loss:"
            + _CROSS_ENTROPY.format("sigmoid_binary_cross_entropy"),
        )
    if jnp.issubdtype(dtype, jnp.integer):
        if output.shape == target.shape and output.shape[-1:] != ():
            raise _errors.default_target(
                dtype,
                "it has the shape of the model's output, so it looks one-hot. Pass "
                "labels, or write the loss:"
                + _CROSS_ENTROPY.format("softmax_cross_entropy"),
            )
        if output.shape[:-1] != target.shape or len(output.shape) == 0:
            raise _errors.default_shapes(
                output.shape, target.shape, "logits of shape (*targets, classes)", ""
            )
        if output.shape[-1] < 2:
            raise _errors.default_target(
                dtype,
                "the model gives a single logit. Write the loss:"
                + _CROSS_ENTROPY.format("sigmoid_binary_cross_entropy"),
            )
        return _cross_entropy, "cross-entropy (integer targets)", output.shape[-1]
    if jnp.issubdtype(dtype, jnp.floating):
        if _trimmed(output.shape) != _trimmed(target.shape):
            raise _errors.default_shapes(
                output.shape, target.shape, "equal shapes, up to a trailing 1", ""
            )
        return _squared_error, "mean squared error (floating targets)", None
    raise _errors.default_target(
        dtype, "expected integers (labels) or floats. Pass loss=."
    )


def _cross_entropy(logits: Array, labels: Array) -> Float[Array, ""]:
    wide = logits.astype(accumulator_dtype(logits.dtype))
    losses = optax.softmax_cross_entropy_with_integer_labels(wide, labels)
    return jnp.mean(losses)


def _squared_error(prediction: Array, target: Array) -> Float[Array, ""]:
    dtype = wider(prediction.dtype, target.dtype)
    wide = prediction.astype(dtype).reshape(-1) - target.astype(dtype).reshape(-1)
    return jnp.mean(wide**2)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:-1] if shape[-1:] == (1,) else shape


def narrowed(x: PyTree, dtype: Any) -> PyTree:
    """The floating leaves in `dtype`, everything as it is for None."""
    if dtype is None:
        return x
    return jax.tree.map(
        lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, x
    )


def accepts_key(model: Any) -> bool:
    """Whether the model can be called with `key=`."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        p.name == "key" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters
    )


@dataclass(frozen=True)
class _Call:
    """How the model is called for one example."""

    takes_key: bool
    axis_names: tuple[str, ...]
    compute_dtype: Any

    def output(self, model: Any, state: Any, x: Any) -> jax.ShapeDtypeStruct:
        """The struct of the model's output, found without computing it."""
        parts = partition((model, state, x))
        arrays = [struct(leaf) for leaf in parts.split((model, state, x)).frozen]

        def call(arrays: list[Any]) -> Any:
            return self._on_axes(*parts.join([], arrays))

        output = jax.eval_shape(call, arrays)
        if isinstance(output, tuple) and state is None:
            raise _errors.default_state_missing()
        if not isinstance(output, jax.ShapeDtypeStruct):
            raise _errors.default_output(jax.tree.structure(output))
        return output

    def _on_axes(self, model: Any, state: Any, x: Any) -> Any:
        def call(_: Array) -> Any:
            named = {"key": jax.random.key(0)} if self.takes_key else {}
            narrow = narrowed(x, self.compute_dtype)
            if state is None:
                return model(narrow, **named)
            out = model(narrow, state, **named)
            if not isinstance(out, tuple) or len(out) != 2:
                raise _errors.default_state(out)
            return out[0]

        for name in self.axis_names:
            call = jax.vmap(call, axis_name=name)
        out = call(jnp.zeros((1,) * len(self.axis_names)))
        return jax.tree.map(lambda a: a.reshape(a.shape[len(self.axis_names) :]), out)
