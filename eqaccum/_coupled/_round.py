"""One round of groups on one device, traced: embed, head, pull back."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._accumulate import (
    AuxSpec,
    Left,
    LossSpec,
    PassInputs,
    PassOutputs,
    Traced,
    channels_last,
    power_of_two_near,
    rematerialised,
    trace,
)
from ._bank import MemoryBank, check_tuple
from ._embed import Embedding, pull_back
from ._head import Heading, head_structs, scale_struct
from ._records import Banked, Embedded, Gradients, HeadInputs, HeadOutputs
from ._sweeps import Swept, sweep


class BlockInputs(eqx.Module):
    """What one round computes on one device: c whole groups, or one in s passes."""

    inputs: PassInputs  # rows, weights and positions (s, n, ...)
    banked: Banked | None


class BlockOutputs(eqx.Module):
    gradients: list[Any]
    outputs: PassOutputs  # auxiliary rows (s, n, ...)
    leaves: list[Any]  # the embeddings of all its groups, (c g, ...)


@dataclass(frozen=True)
class Shape:
    """The rows of one round on one device: c groups of g rows in s passes of n."""

    groups: int
    group: int
    passes: int
    microbatch: int

    @staticmethod
    def of(group: int, microbatch: int) -> "Shape":
        if microbatch >= group:
            return Shape(microbatch // group, group, 1, microbatch)
        return Shape(1, group, -(-group // microbatch), microbatch)

    def in_groups(self, leaf: Array) -> Array:
        """(s, n, ...) -> (c, g, ...)"""
        flat = leaf.reshape(-1, *leaf.shape[2:])[: self.groups * self.group]
        return flat.reshape(self.groups, self.group, *flat.shape[1:])

    def in_passes(self, leaf: Array) -> Array:
        """(c, g, ...) -> (s, n, ...), zeros in the slots of padding"""
        flat = leaf.reshape(-1, *leaf.shape[2:])
        more = self.passes * self.microbatch - flat.shape[0]
        padded = jnp.pad(flat, [(0, more)] + [(0, 0)] * (flat.ndim - 1))
        return padded.reshape(self.passes, self.microbatch, *flat.shape[1:])


@dataclass
class Parts:
    """Embed and head, traced, of which one round is made."""

    inputs: PassInputs  # of one microbatch
    shape: Shape
    axis_env: list[tuple[str, int]]
    embed: Traced
    again: Traced  # recomputed in its gradient, where that was asked for
    embedded: Embedded
    head: Traced
    aux_spec: AuxSpec
    bank: list[jax.ShapeDtypeStruct]
    scaled: bool
    left: tuple[Left, ...]

    @staticmethod
    def of(
        spec: LossSpec,
        inputs: PassInputs,
        shape: Shape,
        memory: MemoryBank | None,
        axis_env: list[tuple[str, int]],
    ) -> "Parts":
        embedding = Embedding(spec)
        embed, embedded, left = trace(embedding, [], inputs, axis_env=axis_env)
        bank: list[jax.ShapeDtypeStruct] = []
        banked = None
        if memory is not None:
            check_tuple(embedding.structure, embedding.in_first)
            bank = memory.structs(embedded.leaves, embedding.in_first)
            banked = Banked(bank[:-1], bank[-1])
        heading, scale = Heading(spec, embedding.structure), scale_struct(embed)
        given = head_structs(
            inputs,
            embedded,
            groups=shape.groups,
            rows=shape.group,
            scale=scale,
            banked=banked,
        )
        head, _, more = trace(heading, [], given, axis_env=axis_env)
        return Parts(
            inputs,
            shape,
            axis_env,
            embed,
            rematerialised(embed, spec.remat),
            embedded,
            head,
            heading.aux_spec,
            bank,
            scale is not None,
            left + more,
        )

    def block(self, *, gradient: bool, rewrite: bool) -> tuple[Traced, BlockOutputs]:
        """One round as a jaxpr; the head's captured arrays are the last ones."""
        fn = self._with_gradient if gradient else self._without
        banked = Banked(self.bank[:-1], self.bank[-1]) if self.bank else None
        block, out, more = trace(
            fn,
            [*self.embed.captured, *self.head.captured],
            BlockInputs(self._in_passes(self.inputs), banked),
            axis_env=self.axis_env,
        )
        self.left += more
        if rewrite:
            block = Traced(channels_last(block.jaxpr), block.captured, block.out_tree)
        return block, out

    def laid(self, outputs: PassOutputs) -> PassOutputs:
        """The outputs' structs as the program returns them, the bank with the state."""
        rows = [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in outputs.aux_rows]
        return eqx.tree_at(
            lambda o: (o.aux_rows, o.state),
            outputs,
            (rows, [*outputs.state, *self.bank]),
        )

    def _with_gradient(self, captured: list[Array], given: BlockInputs) -> BlockOutputs:
        swept = self._sweep(captured, given.inputs)
        inputs = self._head_inputs(given, swept.embedded)
        out = self._call_head(captured, inputs)
        cotangents = [self.shape.in_passes(leaf) for leaf in out.embeddings]
        gradients = swept.pull(cotangents, inputs.scale, out.parameters)
        return self._outputs(gradients, out, swept.embedded, inputs)

    def _without(self, captured: list[Array], given: BlockInputs) -> BlockOutputs:
        embedded = self._sweep(captured, given.inputs).embedded
        inputs = self._head_inputs(given, embedded)
        return self._outputs([], self._call_head(captured, inputs), embedded, inputs)

    def _sweep(self, captured: list[Array], every: PassInputs) -> Swept:
        own = captured[: len(self.embed.captured)]

        def embed(inputs: PassInputs) -> Embedded:
            return self.embed(own, inputs)

        def again(inputs: PassInputs) -> Embedded:
            return self.again(own, inputs)

        def at(k: Int[Array, ""], state: list[Array]) -> PassInputs:
            def take(leaf: Array) -> Array:
                if self.shape.passes == 1:
                    return leaf[0]
                return jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False)

            return dataclasses.replace(
                every,
                state=state,
                rows=[take(leaf) for leaf in every.rows],
                weights=take(every.weights),
                positions=take(every.positions),
            )

        return sweep(
            embed,
            again,
            lambda given: pull_back(again, given),
            at,
            state=every.state,
            passes=self.shape.passes,
        )

    def _head_inputs(self, given: BlockInputs, embedded: Embedded) -> HeadInputs:
        weights = self.shape.in_groups(given.inputs.weights)
        return HeadInputs(
            given.inputs.arguments,
            [self.shape.in_groups(leaf) for leaf in embedded.leaves],
            weights,
            given.banked,
            given.inputs.shared_key,
            power_of_two_near(1 / jnp.sum(weights)) if self.scaled else None,
        )

    def _call_head(self, captured: list[Array], inputs: HeadInputs) -> HeadOutputs:
        with jax.named_scope("eqaccum/head"):
            return self.head(captured[len(self.embed.captured) :], inputs)

    def _outputs(
        self,
        gradients: Gradients,
        out: HeadOutputs,
        embedded: Embedded,
        inputs: HeadInputs,
    ) -> BlockOutputs:
        rows = [self.shape.in_passes(leaf) for leaf in out.aux_rows]
        outputs = PassOutputs(
            [out.total], [out.weight], embedded.state, out.aux_sums, rows
        )
        leaves = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in inputs.embeddings]
        return BlockOutputs(gradients, outputs, leaves)

    def _in_passes(self, inputs: PassInputs) -> PassInputs:
        def more(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.shape.passes, *s.shape), s.dtype)

        return dataclasses.replace(
            inputs,
            rows=[more(s) for s in inputs.rows],
            weights=more(inputs.weights),
            positions=more(inputs.positions),
        )
