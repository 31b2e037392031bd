"""The two sweeps of a coupled loss: embed all, the head once, pull back."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .. import _errors
from .._accumulate import (
    Arguments,
    AuxSpec,
    Batch,
    Cut,
    Kind,
    LossSpec,
    Passes,
    PassInputs,
    PassOutputs,
    SharedKey,
    Sums,
    Traced,
    channels_last,
    example_keys,
    model_of,
    positions,
    split_keys,
    state_leaves,
    trace,
    widened,
    wrap_key,
)
from .._types import Mean, Means, Sum, accumulator_dtype


class Embedded(eqx.Module):
    """Embeddings of n rows, leaves (n, ...), and the state after them."""

    leaves: list[Any]
    state: list[Any]


class HeadInputs(eqx.Module):
    """What the head sees: all rows of the global batch."""

    arguments: Arguments
    embeddings: list[Any]  # (N, ...)
    weights: Any  # (N,) float32
    shared_key: Any


class HeadOutputs(eqx.Module):
    """The head's value and gradient at the parameters and at the embeddings."""

    value: Any
    aux: list[Any]
    parameters: list[Any]  # in the accumulator's dtype
    embeddings: list[Any]


class PullInputs(eqx.Module):
    """One pass of the second sweep."""

    inputs: PassInputs
    cotangents: list[Any]  # (n, ...)


@dataclass(frozen=True, kw_only=True)
class CoupledPasses(Passes):
    """The programs' parts: `embed`, `head` and `pull`, each a jaxpr."""

    rows: int  # of the global batch
    embed: Traced
    head: Traced
    pull: Traced
    embedding_structs: list[jax.ShapeDtypeStruct]  # of one pass, (n, ...)

    def accumulate(
        self,
        cut: Cut,
        *,
        captured: list[Array],
        arguments: Arguments,
        state: list[Array],
        batch: Batch,
        ratios: list[Array],
        before: Sums | None = None,
    ) -> Sums:
        sweep = _Sweep(self, cut, captured, arguments, batch)
        embedded = sweep.embed_all(state)
        out = sweep.head(embedded.leaves)
        gradients = sweep.pull_all(state, out)
        weight = jnp.sum(batch.weights)
        if cut.axis_name is not None:
            weight = jax.lax.psum(weight, cut.axis_name)
        value, present = out.value, (weight > 0).astype(jnp.float32)
        totals, weights, aux = _once(cut, ([value], [present], out.aux))
        return Sums(gradients, PassOutputs(totals, weights, embedded.state, aux, []))

    def weigh(
        self,
        cut: Cut,
        *,
        captured: list[Array],
        arguments: Arguments,
        state: list[Array],
        batch: Batch,
        before: list[Array] | None = None,
    ) -> list[Array]:
        raise NotImplementedError("a coupled loss has one term")

    def forward_only(self) -> "CoupledForward":
        return CoupledForward(
            parameters=self.parameters,
            gradient_structs=[],
            outputs=self.outputs,
            aux_spec=self.aux_spec,
            captured=self.captured,
            jaxprs=(self.embed.jaxpr, self.head.jaxpr),
            left=self.left,
            ends_early=False,
            windowed=False,
            whole=self,
        )

    def check_zero_weights(
        self, *, captured: list[Array], arguments: Arguments
    ) -> None:
        """Runs the head twice with the content of a row of weight 0 changed."""
        weights = np.ones(self.rows, np.float32)
        weights[-1] = 0
        rng = np.random.default_rng(0)
        embeddings = [
            rng.standard_normal((self.rows, *s.shape[1:])).astype(s.dtype)
            for s in self.embedding_structs
        ]
        changed = [e.copy() for e in embeddings]
        for e in changed:
            e[-1] = (3 * e[-1] + 1).astype(e.dtype)
        key = np.zeros(2, np.uint32)

        def run(embeddings: list[Any]) -> HeadOutputs:
            inputs = HeadInputs(arguments, embeddings, weights, key)
            return self.head(self._captured(captured, self.head), inputs)

        run = jax.jit(run)
        first, second = jax.device_get((run(embeddings), run(changed)))
        finite = all(np.isfinite(g).all() for g in first.embeddings)
        scale = max(abs(float(first.value)), 1e-6)
        moved = abs(float(first.value) - float(second.value)) > 1e-5 * scale
        if moved or not finite or not np.isfinite(first.value):
            raise _errors.head_ignores_weights(
                float(first.value), float(second.value), finite
            )

    def _captured(self, captured: list[Array], part: Traced) -> list[Array]:
        """The slice of the captured arrays that belongs to one of the three parts."""
        pulled = len(self.pull.captured)
        if part is self.head:
            return captured[pulled:]
        # the pull-back was traced from embed, whose arrays are the last of its own
        return captured[pulled - len(part.captured) : pulled]


@dataclass(frozen=True, kw_only=True)
class CoupledForward(Passes):
    """One sweep and the head, for evaluation; the mean is over rows."""

    whole: CoupledPasses

    def accumulate(
        self,
        cut: Cut,
        *,
        captured: list[Array],
        arguments: Arguments,
        state: list[Array],
        batch: Batch,
        ratios: list[Array],
        before: Sums | None = None,
    ) -> Sums:
        sweep = _Sweep(self.whole, cut, captured, arguments, batch)
        embedded = sweep.embed_all(state)
        out = sweep.head(embedded.leaves)
        weight = jnp.sum(batch.weights)
        if cut.axis_name is not None:
            weight = jax.lax.psum(weight, cut.axis_name)
        total = out.value * weight.astype(out.value.dtype)
        totals, weights, aux = _once(cut, ([total], [weight], out.aux))
        return Sums([], PassOutputs(totals, weights, embedded.state, aux, []))

    def weigh(self, cut: Cut, **shared: Any) -> list[Array]:
        raise NotImplementedError("a coupled loss has one term")

    def forward_only(self) -> "CoupledForward":
        return self


@dataclass(frozen=True)
class _Sweep:
    passes: CoupledPasses
    cut: Cut
    captured: list[Array]
    arguments: Arguments
    batch: Batch

    def embed_all(self, state: list[Array]) -> Embedded:
        """All rows' embeddings on this device, leaves (K, n, ...)."""
        passes = self.passes

        def body(state: list[Array], k: Array) -> tuple[list[Array], list[Array]]:
            with jax.named_scope("eqaccum/embed"):
                out = passes.embed(
                    passes._captured(self.captured, passes.embed),
                    self._inputs(k, state),
                )
            return out.state, out.leaves

        if self.cut.num_microbatches == 1:
            state, leaves = body(state, jnp.zeros((), jnp.int32))
            return Embedded([leaf[None] for leaf in leaves], state)
        state, leaves = jax.lax.scan(body, state, self._steps)
        return Embedded(leaves, state)

    def head(self, leaves: list[Array]) -> HeadOutputs:
        """The head and its gradient at the embeddings of the whole global batch."""
        passes, shared = self.passes, split_keys(self.batch)[1]
        with jax.named_scope("eqaccum/head"):
            return passes.head(
                passes._captured(self.captured, passes.head),
                HeadInputs(
                    self.arguments,
                    [self._gathered(leaf) for leaf in leaves],
                    self._gathered(self.batch.weights),
                    shared,
                ),
            )

    def pull_all(self, state: list[Array], head: HeadOutputs) -> list[Array]:
        """The second sweep: the head's gradient back through the embeddings."""
        passes = self.passes
        own = [self._own(cotangent) for cotangent in head.embeddings]
        start = _once(self.cut, head.parameters)

        def body(
            carry: tuple[list[Array], list[Array]], xs: tuple[Array, list[Array]]
        ) -> tuple[tuple[list[Array], list[Array]], None]:
            sums, state = carry
            k, cotangents = xs
            with jax.named_scope("eqaccum/pull_back"):
                gradient, state = passes.pull(
                    passes._captured(self.captured, passes.pull),
                    PullInputs(self._inputs(k, state), cotangents),
                )
            return ([a + g for a, g in zip(sums, gradient, strict=True)], state), None

        carry = (start, state)
        if self.cut.num_microbatches == 1:
            first = (jnp.zeros((), jnp.int32), [leaf[0] for leaf in own])
            carry, _ = body(carry, first)
        else:
            carry, _ = jax.lax.scan(body, carry, (self._steps, own))
        return carry[0]

    @property
    def _steps(self) -> Array:
        return jnp.arange(self.cut.num_microbatches, dtype=jnp.int32)

    def _inputs(self, k: Array, state: list[Array]) -> PassInputs:
        def at(leaf: Array) -> Array:
            if self.cut.num_microbatches == 1:
                return leaf[0]
            return jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False)

        rows, shared = split_keys(self.batch)
        return PassInputs(
            self.arguments,
            state,
            [at(leaf) for leaf in self.batch.rows],
            at(self.batch.weights),
            positions(self.cut, k, self.batch.start),
            rows,
            shared,
            [],
        )

    def _gathered(self, leaf: Array) -> Array:
        """(K, n, ...) on each device -> (N, ...) in the global batch's order."""
        if self.cut.axis_name is not None:
            leaf = jax.lax.all_gather(leaf, self.cut.axis_name, axis=1)
            leaf = leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])
        return leaf.reshape(-1, *leaf.shape[2:])[: self.passes.rows]

    def _own(self, leaf: Array) -> Array:
        """(N, ...) in the global batch's order -> (K, n, ...) of this device."""
        cut = self.cut
        padding = [(0, cut.capacity - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
        shape = (cut.num_microbatches, cut.devices, cut.microbatch, *leaf.shape[1:])
        whole = jnp.pad(leaf, padding).reshape(shape)
        if cut.axis_name is None:
            return whole[:, 0]
        device = jax.lax.axis_index(cut.axis_name)
        return jax.lax.dynamic_index_in_dim(whole, device, axis=1, keepdims=False)


def trace_coupled(
    spec: LossSpec,
    inputs: PassInputs,
    *,
    rows: int,
    axis_env: list[tuple[str, int]],
    rewrite_convolutions: bool,
) -> CoupledPasses:
    """Traces embed, head and pull-back on structs; see `trace_additive`."""
    embedding = _Embedding(spec)
    embed, embedded, left = trace(embedding, [], inputs, axis_env=axis_env)
    pull, (gradients, _), more = trace(
        _pull_of(embed),
        list(embed.captured),
        PullInputs(inputs, embedded.leaves),
        axis_env=axis_env,
    )
    every = [
        jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype) for s in embedded.leaves
    ]
    heading = _Heading(spec, embedding.structure, [])
    head, out, last = trace(
        heading,
        [],
        HeadInputs(
            inputs.arguments,
            every,
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            inputs.shared_key,
        ),
        axis_env=axis_env,
    )
    if rewrite_convolutions:
        embed = Traced(channels_last(embed.jaxpr), embed.captured, embed.out_tree)
        pull = Traced(channels_last(pull.jaxpr), pull.captured, pull.out_tree)
    weight = jax.ShapeDtypeStruct((), jnp.float32)
    return CoupledPasses(
        parameters=inputs.arguments.trainable,
        gradient_structs=gradients,
        outputs=PassOutputs([out.value], [weight], embedded.state, out.aux, []),
        aux_spec=heading.aux[-1],
        captured=(*pull.captured, *head.captured),
        jaxprs=(embed.jaxpr, head.jaxpr, pull.jaxpr),
        left=left + more + last,
        ends_early=False,
        windowed=False,
        rows=rows,
        embed=embed,
        head=head,
        pull=pull,
        embedding_structs=embedded.leaves,
    )


class _Embedding:
    """The user's `embed` over one microbatch; notes the embeddings' structure."""

    def __init__(self, spec: LossSpec) -> None:
        self.spec = spec
        self.structure: Any = None

    def __call__(self, captured: list[Array], inputs: PassInputs) -> Embedded:
        spec = self.spec
        embed = spec.loss.join([], inputs.arguments.loss).embed
        model = model_of(spec, inputs.arguments)
        keys = shared = None
        if spec.with_key:
            keys = example_keys(wrap_key(inputs.rows_key), inputs.positions)
            shared = wrap_key(inputs.shared_key)

        def one(leaves: list[Array], key: Any) -> dict[str, list[Array]]:
            example = spec.unflatten(leaves, inputs.arguments.whole)
            args: list[Any] = [model]
            if spec.state is not None:  # a clone: a consumed State raises
                args.append(spec.state.join([], inputs.state))
            args += [example, key]
            if isinstance(embed, SharedKey):
                out = embed.fn(*args, shared)
            else:
                out = embed(*args)
            state: list[Array] = []
            if spec.state is not None:
                if not isinstance(out, tuple) or len(out) != 2:
                    raise _errors.embed_results(out)
                out, new = out
                state = state_leaves(spec.state, inputs.state, new)
            arrays, self.structure = jax.tree.flatten(out)
            if not arrays:
                raise _errors.embed_results(out)
            return {"leaves": [jnp.asarray(a) for a in arrays], "state": state}

        axes = {"leaves": 0, "state": None}
        mapped = jax.vmap(one, out_axes=axes, axis_name=spec.options.axis_name)
        return Embedded(**mapped(inputs.rows, keys))


@dataclass(frozen=True)
class _Heading:
    """The user's `head`, its value and gradient; notes the aux's structure."""

    spec: LossSpec
    structure: Any
    aux: list[AuxSpec]

    def __call__(self, captured: list[Array], inputs: HeadInputs) -> HeadOutputs:
        def value(
            trainable: list[Array], embeddings: list[Array]
        ) -> tuple[Array, list[Array]]:
            arguments = eqx.tree_at(lambda a: a.trainable, inputs.arguments, trainable)
            return self._value(arguments, embeddings, inputs)

        (loss, aux), (parameters, embeddings) = jax.value_and_grad(
            value, argnums=(0, 1), has_aux=True
        )(inputs.arguments.trainable, inputs.embeddings)
        return HeadOutputs(
            loss, aux, [widened(g, None) for g in parameters], embeddings
        )

    def _value(
        self, arguments: Arguments, embeddings: list[Array], inputs: HeadInputs
    ) -> tuple[Float[Array, ""], list[Array]]:
        spec = self.spec
        head = spec.loss.join([], arguments.loss).head
        args = (
            model_of(spec, arguments),
            jax.tree.unflatten(self.structure, embeddings),
            inputs.weights,
        )
        if isinstance(head, SharedKey):
            shared = None if inputs.shared_key is None else wrap_key(inputs.shared_key)
            out = head.fn(*args, shared)
        else:
            out = head(*args)
        aux = None
        if spec.options.has_aux:
            if not isinstance(out, tuple) or len(out) != 2:
                raise _errors.head_results(out, has_aux=True)
            out, aux = out
        if isinstance(out, tuple | Mean | Means) or jnp.shape(out) != ():
            raise _errors.head_results(out, has_aux=spec.options.has_aux)
        value = jnp.asarray(out)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise _errors.loss_dtype(value.dtype)
        spec_, arrays = _head_aux(aux)
        self.aux.append(spec_)
        return value.astype(accumulator_dtype(value.dtype)), arrays


def _head_aux(aux: PyTree) -> tuple[AuxSpec, list[Array]]:
    """The head sees all rows at once: its outputs are taken as they are."""
    leaves, treedef = jax.tree.flatten(aux, is_leaf=lambda x: isinstance(x, Mean | Sum))
    kinds: list[Kind] = []
    arrays: list[Array] = []
    for leaf in leaves:
        if isinstance(leaf, Mean):
            kinds.append(Kind.MEAN)
            arrays += [jnp.asarray(leaf.total), jnp.asarray(leaf.weight)]
        else:
            kinds.append(Kind.SUM)
            value = jnp.asarray(leaf.value if isinstance(leaf, Sum) else leaf)
            arrays.append(value.astype(jnp.int32) if value.dtype == bool else value)
    return AuxSpec(treedef, tuple(kinds)), arrays


def _pull_of(embed: Traced) -> Any:
    def pull(
        captured: list[Array], given: PullInputs
    ) -> tuple[list[Array], list[Array]]:
        def embeddings(trainable: list[Array]) -> tuple[list[Array], list[Array]]:
            inputs = eqx.tree_at(
                lambda i: i.arguments.trainable, given.inputs, trainable
            )
            out = embed(captured, inputs)
            return out.leaves, out.state

        trainable = given.inputs.arguments.trainable
        _, back, state = jax.vjp(embeddings, trainable, has_aux=True)
        (gradient,) = back(given.cotangents)
        return [widened(g, None) for g in gradient], state

    return pull


def _once(cut: Cut, tree: PyTree) -> PyTree:
    """What every device holds alike, counted once when the devices are summed."""
    if cut.axis_name is None:
        return tree
    first = jax.lax.axis_index(cut.axis_name) == 0
    return jax.tree.map(lambda x: jnp.where(first, x, jnp.zeros_like(x)), tree)
