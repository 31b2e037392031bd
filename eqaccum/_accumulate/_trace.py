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
from ._jaxpr import Left, hoist, walk
from ._records import Arguments, PassInputs, PassOutputs
from ._remat import in_segments


@dataclass(frozen=True)
class LossSpec:
    """Everything static that the trace of a loss depends on, the size excepted."""

    model: Partition
    loss: Partition
    state: Partition | None
    unflatten: Callable[[list[Any], list[Any]], PyTree]  # rows, whole -> a batch
    options: _forms.Options
    compute_dtype: Any = None
    remat: Any = None  # True: in segments; a `jax.checkpoint` policy; None: not
    with_key: bool = True


@dataclass(frozen=True)
class Traced:
    """A jaxpr with its captured arrays as leading inputs."""

    jaxpr: Any
    captured: tuple[Any, ...]
    out_tree: Any

    def __call__(self, captured: Sequence[Any], inputs: PyTree) -> Any:
        flat = [*captured, *jax.tree.leaves(inputs)]
        out = eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *flat)
        return jax.tree.unflatten(self.out_tree, out)


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

    traced, outputs, left = trace(forward, [], inputs, axis_env=axis_env)
    return traced, outputs, found[-1], left


def trace(
    fn: Callable,
    captured: list[Any],
    inputs: PyTree,
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


def gradient_of(forward: Traced, remat: Any = None) -> Callable:
    forward = rematerialised(forward, remat)

    """`gradient(captured, inputs)` of one pass, by the forward jaxpr's transpose."""
    overflows = holds_float16(forward.jaxpr)

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
        scale = power_of_two_near(1 / out.weights[0]) if overflows else None
        seeds = [r if scale is None else r * scale.astype(r.dtype) for r in ratios]
        (grads,) = pull(seeds)
        return [widened(grad, scale) for grad in grads], out

    return gradient


@dataclass(frozen=True)
class _Segmented(Traced):
    """A traced function whose gradient recomputes it, segment by segment."""

    def __call__(self, captured: Sequence[Any], inputs: PyTree) -> Any:
        flat = [*captured, *jax.tree.leaves(inputs)]
        # positions are never negative, which the compiler cannot know
        once = jnp.where(inputs.positions[0] >= 0, 1, 2).astype(jnp.int32)
        outputs = in_segments(self.jaxpr)(once, flat)
        return jax.tree.unflatten(self.out_tree, outputs)


@dataclass(frozen=True)
class _Policed(Traced):
    """A traced function whose gradient keeps what a `jax.checkpoint` policy says."""

    policy: Any = None

    def __call__(self, captured: Sequence[Any], inputs: PyTree) -> Any:
        call = jax.checkpoint(super().__call__, policy=self.policy)
        return call(list(captured), inputs)


def rematerialised(forward: Traced, remat: Any) -> Traced:
    """The same function, recomputed in its gradient as `remat` says."""
    parts = (forward.jaxpr, forward.captured, forward.out_tree)
    if remat is None:
        return forward
    return _Segmented(*parts) if remat is True else _Policed(*parts, policy=remat)


def widened(grad: Array, scale: Array | None) -> Array:
    wide = grad.astype(accumulator_dtype(grad.dtype))
    return wide if scale is None else wide / scale.astype(wide.dtype)


def holds_float16(jaxpr: Any) -> bool:
    """Whether anything is computed in float16, the one dtype whose sums overflow."""
    return any(
        getattr(atom.aval, "dtype", None) == jnp.float16
        for eqn in walk(jaxpr)
        for atom in (*eqn.invars, *eqn.outvars)
    )


def power_of_two_near(value: Float[Array, ""]) -> Float[Array, ""]:
    """A power of two scales without rounding (`exp2` is not exact on every backend)."""
    finite = jnp.where(jnp.isfinite(value) & (value > 0), value, jnp.ones_like(value))
    exponent = jnp.round(jnp.log2(finite)).astype(jnp.int32)
    return jnp.ldexp(jnp.ones_like(finite), exponent)


def _call_loss(spec: LossSpec, loss: Any, inputs: PassInputs) -> _forms.Terms:
    arguments = inputs.arguments
    model = model_of(spec, arguments)
    keys = shared = None
    if spec.with_key:
        keys = _keys.example_keys(_keys.wrap_key(inputs.rows_key), inputs.positions)
        shared = _keys.wrap_key(inputs.shared_key)

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


def model_of(spec: LossSpec, arguments: Arguments) -> PyTree:
    """The user's model, in `compute_dtype`."""
    return spec.model.join(
        _cast(arguments.trainable, spec.compute_dtype),
        _cast_frozen(spec.model, arguments.frozen, spec.compute_dtype),
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
