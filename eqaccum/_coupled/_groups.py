"""A head over each group of consecutive examples, with or without a memory bank."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._accumulate import (
    Arguments,
    Batch,
    Cut,
    LossSpec,
    Passes,
    PassInputs,
    PassOutputs,
    Sums,
    Traced,
    run,
    split_keys,
    spread_struct,
    with_spread,
    zeros,
)
from ._bank import MemoryBank
from ._check import check_head
from ._round import BlockInputs, Parts, Shape


@dataclass(frozen=True, kw_only=True)
class GroupForward(Passes):
    """The head of each group without a gradient and without a bank, for evaluation."""

    shape: Shape
    block: Traced

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
        rounds = _Rounds(self, self.shape, self.block, None, cut)
        return rounds.run(captured, arguments, state, batch)

    def weigh(self, cut: Cut, **shared: Any) -> PassOutputs:
        raise NotImplementedError("a coupled loss has one term")

    def forward_only(self) -> "GroupForward":
        return self


@dataclass(frozen=True, kw_only=True)
class GroupPasses(Passes):
    """Groups in order; the bank, where there is one, is carried behind the state."""

    shape: Shape
    memory: MemoryBank | None
    block: Traced
    head: Traced
    embeddings: list[jax.ShapeDtypeStruct]
    noise: bool  # whether to tell how the rounds differ
    without_gradient: Callable[[], GroupForward]

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
        rounds = _Rounds(self, self.shape, self.block, self.memory, cut, self.noise)
        return rounds.run(captured, arguments, state, batch)

    def weigh(self, cut: Cut, **shared: Any) -> PassOutputs:
        raise NotImplementedError("a coupled loss has one term")

    def forward_only(self) -> GroupForward:
        return self.without_gradient()

    def check_zero_weights(
        self, *, captured: list[Array], arguments: Arguments
    ) -> None:
        own = captured[len(captured) - len(self.head.captured) :]
        check_head(
            lambda inputs: self.head(own, inputs),
            arguments,
            groups=self.shape.groups,
            rows=self.shape.group,
            embeddings=self.embeddings,
            bank=self.bank,
        )


@dataclass(frozen=True)
class _Rounds:
    """The loop over rounds: each device computes its next groups."""

    passes: Passes
    shape: Shape
    block: Traced
    memory: MemoryBank | None
    cut: Cut
    noise: bool = False

    def run(
        self,
        captured: list[Array],
        arguments: Arguments,
        state: list[Array],
        batch: Batch,
    ) -> Sums:
        keys = split_keys(batch)
        plain = len(state) - len(self.passes.bank)

        def one(
            k: Int[Array, ""] | int,
            rows: list[Array],
            weights: Array,
            carried: list[Array],
        ) -> Sums:
            inputs = PassInputs(
                arguments,
                carried[:plain],
                rows,
                weights,
                self._positions(k),
                keys[0],
                keys[1],
                [],
            )
            held = carried[plain:]
            banked = self.memory and self.memory.read(held, batch.step)
            out = self.block(captured, BlockInputs(inputs, banked))
            if self.memory is not None:
                own = self.shape.in_groups(weights)[0]
                held = self.memory.pushed(held, out.leaves, own)
            after = [*out.outputs.state, *held]
            outputs = eqx.tree_at(lambda o: o.state, out.outputs, after)
            sums = Sums(out.gradients, outputs)
            return with_spread(sums, [], weights) if self.noise else sums

        start = self._zeros(state)
        rounds, cut = self._in_rounds(batch)
        sums = run(one, cut, rounds, start)
        laid = [
            leaf.reshape(self.cut.num_microbatches, -1, *leaf.shape[3:])
            for leaf in sums.outputs.aux_rows
        ]
        after = sums.outputs.state
        if self.memory is not None:
            after = [*after[:plain], *self.memory.after_update(after[plain:])]
        return eqx.tree_at(
            lambda s: (s.outputs.aux_rows, s.outputs.state), sums, (laid, after)
        )

    def _in_rounds(self, batch: Batch) -> tuple[Batch, Cut]:
        """The same rows, (rounds, s, n, ...)."""
        s = self.shape.passes
        rounds = self.cut.num_microbatches // s

        def cut(leaf: Array) -> Array:
            return leaf.reshape(rounds, s, *leaf.shape[1:])

        bound = None if batch.bound is None else -(-batch.bound // s)
        reshaped = dataclasses.replace(
            batch,
            rows=[cut(leaf) for leaf in batch.rows],
            weights=cut(batch.weights),
            bound=bound,
        )
        return reshaped, dataclasses.replace(self.cut, num_microbatches=rounds)

    def _positions(self, k: Int[Array, ""] | int) -> Int[Array, "s n"]:
        """The positions in the global batch; those of padding are of no account."""
        cut, shape = self.cut, self.shape
        device = 0 if cut.axis_name is None else jax.lax.axis_index(cut.axis_name)
        first = (k * cut.devices + device) * shape.groups * shape.group
        slots = jnp.arange(shape.passes * shape.microbatch, dtype=jnp.int32)
        return (first + slots).reshape(shape.passes, shape.microbatch)

    def _zeros(self, state: list[Array]) -> Sums:
        out = self.passes.outputs
        return Sums(
            zeros(self.passes.gradient_structs),
            PassOutputs(
                zeros(out.totals),
                zeros(out.weights),
                state,
                zeros(out.aux_sums),
                [],
                zeros(out.spread),
            ),
        )


def trace_groups(
    spec: LossSpec,
    inputs: PassInputs,
    *,
    rows: int,
    group: int,
    memory: MemoryBank | None,
    axis_env: list[tuple[str, int]],
    rewrite_convolutions: bool,
    noise: bool = False,
) -> GroupPasses:
    """Traces one round on structs; see `trace_additive`."""
    shape = Shape.of(group, inputs.weights.shape[0])
    parts = Parts.of(spec, inputs, shape, memory, axis_env)
    block, out = parts.block(gradient=True, rewrite=rewrite_convolutions)

    def without_gradient() -> GroupForward:
        alone = Parts.of(spec, inputs, shape, None, axis_env)
        block, out = alone.block(gradient=False, rewrite=rewrite_convolutions)
        return GroupForward(
            parameters=inputs.arguments.trainable,
            gradient_structs=[],
            outputs=alone.laid(out.outputs),
            aux_spec=alone.aux_spec,
            captured=block.captured,
            jaxprs=(block.jaxpr,),
            left=alone.left,
            windowed=False,
            shape=shape,
            block=block,
        )

    outputs = parts.laid(out.outputs)
    if noise:
        spread = spread_struct(out.gradients, outputs)
        outputs = dataclasses.replace(outputs, spread=spread)
    return GroupPasses(
        parameters=inputs.arguments.trainable,
        gradient_structs=out.gradients,
        outputs=outputs,
        aux_spec=parts.aux_spec,
        captured=block.captured,
        jaxprs=(block.jaxpr,),
        left=parts.left,
        windowed=False,
        fills_up=memory is not None or rows % group != 0,
        bank=parts.bank,
        shape=shape,
        memory=memory,
        block=block,
        head=parts.head,
        embeddings=parts.embedded.leaves,
        noise=noise,
        without_gradient=without_gradient,
    )
