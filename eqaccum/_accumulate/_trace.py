"""One microbatch's gradient as a jaxpr, traced once and free of captured arrays.

User code runs here and nowhere else. The loss is traced forward to a jaxpr, whose
gradient is then traced from that jaxpr: the number of `Mean`s of the loss and the
structure of its outputs are known before the gradient needs them, and `weigh` reads
the weights from the same forward jaxpr.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jaxtyping import Array, Float, PyTree

from .._tree import Partition, Role
from .._types import accumulator_dtype
from . import _forms, _keys
from ._aux import AuxSpec
from ._conv import channels_last
from ._jaxpr import Left, hoist, walk


@dataclass(frozen=True)
class LossSpec:
    """Everything static that the trace of a loss depends on, the microbatch excepted."""

    model: Partition
    loss: Partition
    state: Partition | None
    unflatten: Callable[[list[Any], list[Any]], PyTree]  # rows, whole -> a batch
    options: _forms.Options
    compute_dtype: Any = None
    with_key: bool = True


class Arguments(eqx.Module):
    """The arrays of a pass that are the same for all rows."""

    trainable: list[Any]
    frozen: list[Any]
    loss: list[Any]
    whole: list[Any]


class PassInputs(eqx.Module):
    """All arrays of one pass. `ratios` are there for a sum of several `Mean`s only."""

    arguments: Arguments
    state: list[Any]
    rows: list[Any]
    weights: Any  # (n,) float32
    positions: Any  # (n,) int32, in the global batch
    rows_key: Any  # key data, or None
    shared_key: Any
    ratios: list[Any]


class PassOutputs(eqx.Module):
    """What one pass adds up (`totals`, `weights`, `aux_sums`), carries and lays down."""

    totals: list[Any]
    weights: list[Any]
    state: list[Any]
    aux_sums: list[Any]
    aux_rows: list[Any]


@dataclass(frozen=True)
class Traced:
    """A jaxpr with its captured arrays as leading inputs."""

    jaxpr: Any
    captured: tuple[Any, ...]
    out_tree: Any

    def __call__(self, captured: Sequence[Any], inputs: PassInputs) -> Any:
        flat = [*captured, *jax.tree.leaves(inputs)]
        out = eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *flat)
        return jax.tree.unflatten(self.out_tree, out)


@dataclass(frozen=True)
class Pass:
    """One microbatch of n rows: its forward jaxpr and its gradient's.

    `gradient` returns (gradients in the accumulator's dtype, `PassOutputs`).
    """

    microbatch: int
    forward: Traced
    gradient: Traced
    outputs: PassOutputs  # structs
    parameters: list[jax.ShapeDtypeStruct]
    gradient_structs: list[jax.ShapeDtypeStruct]
    aux_spec: AuxSpec
    left: tuple[Left, ...]

    @property
    def num_terms(self) -> int:
        return len(self.outputs.totals)


def trace_forward(
    spec: LossSpec, loss: Any, inputs: PassInputs, *, axis_env: list[tuple[str, int]]
) -> tuple[Traced, PassOutputs, AuxSpec, tuple[Left, ...]]:
    """Runs the user's loss under trace, on structs, and hoists what it captured."""
    found: list[AuxSpec] = []

    def forward(captured: list[Array], inputs: PassInputs) -> PassOutputs:
        terms = _call_loss(spec, loss, inputs)
        found.append(terms.aux_spec)
        return PassOutputs(
            terms.totals, terms.weights, terms.state, terms.aux.sums, terms.aux.rows
        )

    traced, outputs, left = _trace(forward, [], inputs, axis_env=axis_env)
    return traced, outputs, found[-1], left


def trace_pass(
    spec: LossSpec,
    loss: Any,
    inputs: PassInputs,
    *,
    axis_env: list[tuple[str, int]],
    rewrite_convolutions: bool,
) -> Pass:
    """Traces a pass on structs.

    **Arguments:**

    - `spec`: the static description of model, loss and data.
    - `loss`: the user's loss; its arrays are replaced by `inputs.arguments.loss`.
    - `inputs`: structs; `ratios` is filled in here.
    - `axis_env`: mesh axes in scope, as `(name, size)`.
    - `rewrite_convolutions`: channels-last convolutions, for loops on CPU.
    """
    forward, outputs, aux_spec, left = trace_forward(
        spec, loss, inputs, axis_env=axis_env
    )
    ratios = list(outputs.totals) if len(outputs.totals) > 1 else []
    inputs = eqx.tree_at(lambda i: i.ratios, inputs, ratios)
    differentiate = _gradient_of(forward)
    gradient, shapes, more = _trace(
        differentiate, list(forward.captured), inputs, axis_env=axis_env
    )
    if rewrite_convolutions:
        rewritten = channels_last(gradient.jaxpr)
        gradient = Traced(rewritten, gradient.captured, gradient.out_tree)
    return Pass(
        microbatch=inputs.weights.shape[0],
        forward=forward,
        gradient=gradient,
        outputs=outputs,
        parameters=inputs.arguments.trainable,
        gradient_structs=shapes[0],
        aux_spec=aux_spec,
        left=left + more,
    )


def float32_products(pass_: Pass, dtype: Any) -> list[str]:
    """Products that a narrower `compute_dtype` did not reach, by name."""
    wide = []
    for eqn in walk(pass_.forward.jaxpr):
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            continue
        dtypes = {v.aval.dtype for v in eqn.invars}  # type: ignore[attr-defined]
        if any(jnp.issubdtype(d, jnp.floating) and d != dtype for d in dtypes):
            wide.append(eqn.primitive.name)
    return wide


def _trace(
    fn: Callable,
    captured: list[Any],
    inputs: PassInputs,
    *,
    axis_env: list[tuple[str, int]],
) -> tuple[Traced, Any, tuple[Left, ...]]:
    """`fn(captured, inputs)` as a jaxpr; newly captured arrays go in front."""
    structs = [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in captured]
    make = jax.make_jaxpr(fn, axis_env=axis_env, return_shape=True)
    closed, shapes = make(structs, inputs)
    hoisted = hoist(closed)
    traced = Traced(
        hoisted.jaxpr, (*hoisted.consts, *captured), jax.tree.structure(shapes)
    )
    return traced, shapes, hoisted.left


def _gradient_of(forward: Traced) -> Callable:
    def gradient(
        captured: list[Array], inputs: PassInputs
    ) -> tuple[list[Array], PassOutputs]:
        def totals_of(trainable: list[Array]) -> tuple[list[Array], PassOutputs]:
            bare = eqx.tree_at(
                lambda i: (i.arguments.trainable, i.ratios), inputs, (trainable, [])
            )
            out = forward(captured, bare)
            return out.totals, out

        trainable = inputs.arguments.trainable
        totals, pull, out = jax.vjp(totals_of, trainable, has_aux=True)
        ratios = inputs.ratios or [jnp.ones((), totals[0].dtype)]
        if any(leaf.dtype == jnp.float16 for leaf in trainable):
            scale = _power_of_two_near(1 / out.weights[0])
        else:
            scale = None
        seeds = [r if scale is None else r * scale.astype(r.dtype) for r in ratios]
        (grads,) = pull(seeds)
        return [_widened(grad, scale) for grad in grads], out

    return gradient


def _widened(grad: Array, scale: Array | None) -> Array:
    wide = grad.astype(accumulator_dtype(grad.dtype))
    return wide if scale is None else wide / scale.astype(wide.dtype)


def _power_of_two_near(value: Float[Array, ""]) -> Float[Array, ""]:
    """float16 sums overflow; a power of two scales them without rounding."""
    finite = jnp.where(jnp.isfinite(value) & (value > 0), value, jnp.ones_like(value))
    return jnp.exp2(jnp.round(jnp.log2(finite)))


def _call_loss(spec: LossSpec, loss: Any, inputs: PassInputs) -> _forms.Terms:
    arguments = inputs.arguments
    model = spec.model.join(
        _cast(arguments.trainable, spec.compute_dtype),
        _cast_frozen(spec.model, arguments.frozen, spec.compute_dtype),
    )
    keys = shared = None
    if spec.with_key:
        keys = _keys.example_keys(_keys.wrap(inputs.rows_key), inputs.positions)
        shared = _keys.wrap(inputs.shared_key)

    def example(leaves: list[Array]) -> PyTree:
        return spec.unflatten(leaves, arguments.whole)

    rows = _forms.Rows(inputs.rows, keys, shared, inputs.weights, example)
    return _forms.evaluate(
        spec.loss.join([], arguments.loss),
        model,
        inputs.state,
        rows,
        options=spec.options,
        state_partition=spec.state,
    )


def _cast(leaves: list[Any], dtype: Any) -> list[Any]:
    if dtype is None:
        return leaves
    return [
        leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for leaf in leaves
    ]


def _cast_frozen(partition: Partition, leaves: list[Any], dtype: Any) -> list[Any]:
    roles = [leaf for leaf in partition.leaves if leaf.role is Role.FROZEN]
    cast = _cast(leaves, dtype)
    return [
        old if role.key_impl is not None else new
        for role, old, new in zip(roles, leaves, cast, strict=True)
    ]
