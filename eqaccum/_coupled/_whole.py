"""A head over the whole global batch: embed all, the head once, pull back."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

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
    channels_last,
    positions,
    power_of_two_near,
    rematerialised,
    split_keys,
    trace,
)
from ._check import check_head
from ._embed import Embedding, is_inexact, pull_back
from ._head import Heading, head_structs, scale_struct
from ._records import Gradients, HeadInputs, HeadOutputs, PullInputs
from ._sweeps import Swept, sweep


@dataclass(frozen=True, kw_only=True)
class WholePasses(Passes):
    """The parts of the program: `embed`, `head` and `pull`, each a jaxpr."""

    rows: int  # of the global batch
    embed: Traced
    again: Traced  # recomputed in its gradient, where that was asked for
    head: Traced
    pull: Traced
    embeddings: list[jax.ShapeDtypeStruct]  # of one pass, (n, ...)
    scaled: bool  # whether the cotangents are

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
        run = _Run(self, cut, captured, arguments, batch)
        swept = run.sweep(state)
        scale = run.scale if self.scaled else None
        out = run.head(swept.embedded.leaves, scale)
        cotangents = [run.own(leaf[0]) for leaf in out.embeddings]
        gradients = swept.pull(cotangents, scale, run.counted_once(out.parameters))
        return Sums(gradients, run.outputs(swept.embedded.state, out))

    def weigh(self, cut: Cut, **shared: Any) -> PassOutputs:
        raise NotImplementedError("a coupled loss has one term")

    def forward_only(self) -> "WholeForward":
        return WholeForward(
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
        own = self.captured_by(captured, self.head)
        check_head(
            lambda inputs: self.head(own, inputs),
            arguments,
            groups=1,
            rows=self.rows,
            embeddings=self.embeddings,
        )

    def captured_by(self, captured: list[Array], part: Traced) -> list[Array]:
        """The slice of the captured arrays that belongs to one of the three parts."""
        pulled = len(self.pull.captured)
        if part is self.head:
            return captured[pulled:]
        # the pull-back was traced from embed, whose arrays are the last of its own
        return captured[pulled - len(part.captured) : pulled]


@dataclass(frozen=True, kw_only=True)
class WholeForward(Passes):
    """One sweep and the head, for evaluation; the mean is over rows."""

    whole: WholePasses

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
        run = _Run(self.whole, cut, captured, arguments, batch)
        embedded = run.sweep(state).embedded
        scale = run.scale if self.whole.scaled else None
        return Sums([], run.outputs(embedded.state, run.head(embedded.leaves, scale)))

    def weigh(self, cut: Cut, **shared: Any) -> PassOutputs:
        raise NotImplementedError("a coupled loss has one term")

    def forward_only(self) -> "WholeForward":
        return self


@dataclass(frozen=True)
class _Run:
    """The parts of one step, on one device's rows."""

    passes: WholePasses
    cut: Cut
    captured: list[Array]
    arguments: Arguments
    batch: Batch

    def sweep(self, state: list[Array]) -> Swept:
        """Embeds all rows of this device; leaves (K, n, ...)."""
        passes = self.passes
        own = passes.captured_by(self.captured, passes.embed)
        back = passes.captured_by(self.captured, passes.pull)
        return sweep(
            lambda inputs: passes.embed(own, inputs),
            lambda inputs: passes.again(own, inputs),
            lambda given: passes.pull(back, given),
            self._inputs,
            state=state,
            passes=self.cut.num_microbatches,
        )

    def head(self, leaves: list[Array], scale: Any) -> HeadOutputs:
        """The head and its gradient at the embeddings of the whole global batch."""
        passes = self.passes
        with jax.named_scope("eqaccum/head"):
            return passes.head(
                passes.captured_by(self.captured, passes.head),
                HeadInputs(
                    self.arguments,
                    [self._gathered(leaf)[None] for leaf in leaves],
                    self._gathered(self.batch.weights)[None],
                    None,
                    split_keys(self.batch)[1],
                    scale,
                ),
            )

    @property
    def scale(self) -> Float[Array, ""]:
        """What makes a pass's cotangent about the size of a mean's over its rows."""
        passes = self.cut.num_microbatches * self.cut.devices
        weight = jnp.sum(self._gathered(self.batch.weights))
        return power_of_two_near(passes / weight)

    def outputs(self, state: list[Array], out: HeadOutputs) -> PassOutputs:
        rows = [self.own(leaf[0]) for leaf in out.aux_rows]
        totals, weights, sums = self.counted_once(
            ([out.total], [out.weight], out.aux_sums)
        )
        return PassOutputs(totals, weights, state, sums, rows)

    def counted_once(self, tree: PyTree) -> PyTree:
        """What every device holds alike, counted once when the devices are summed."""
        if self.cut.axis_name is None:
            return tree
        first = jax.lax.axis_index(self.cut.axis_name) == 0
        return jax.tree.map(lambda x: jnp.where(first, x, jnp.zeros_like(x)), tree)

    def own(self, leaf: Array) -> Array:
        """(N, ...) in the global batch's order -> (K, n, ...) of this device."""
        cut = self.cut
        rest = leaf.shape[1:]
        shares = leaf.reshape(cut.shares, -1, *rest)
        padding = [(0, 0), (0, cut.capacity // cut.shares - shares.shape[1])]
        shares = jnp.pad(shares, padding + [(0, 0)] * len(rest))
        shares = shares.reshape(cut.shares, cut.num_microbatches, -1, *rest)
        shape = (cut.num_microbatches, cut.devices, cut.microbatch, *rest)
        whole = jnp.swapaxes(shares, 0, 1).reshape(shape)
        if cut.axis_name is None:
            return whole[:, 0]
        device = jax.lax.axis_index(cut.axis_name)
        return jax.lax.dynamic_index_in_dim(whole, device, axis=1, keepdims=False)

    def _gathered(self, leaf: Array) -> Array:
        """(K, n, ...) on each device -> (N, ...) in the global batch's order."""
        if self.cut.axis_name is not None:
            leaf = jax.lax.all_gather(leaf, self.cut.axis_name, axis=1)
            leaf = leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])
        rest, shares = leaf.shape[2:], self.cut.shares
        leaf = leaf.reshape(leaf.shape[0], shares, -1, *rest)
        leaf = jnp.swapaxes(leaf, 0, 1).reshape(shares, -1, *rest)
        leaf = leaf[:, : self.passes.rows // shares]
        return leaf.reshape(-1, *rest)

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


def trace_whole(
    spec: LossSpec,
    inputs: PassInputs,
    *,
    rows: int,
    axis_env: list[tuple[str, int]],
    rewrite_convolutions: bool,
    noise: bool = False,
) -> WholePasses:
    """Traces embed, head and pull-back on structs; see `trace_additive`."""
    assert not noise, "refused by `Coupled.check_noise_scale`"
    embedding = Embedding(spec)
    embed, embedded, left = trace(embedding, [], inputs, axis_env=axis_env)
    scale = scale_struct(embed)
    heading = Heading(spec, embedding.structure)
    head, out, last = trace(
        heading,
        [],
        head_structs(inputs, embedded, groups=1, rows=rows, scale=scale),
        axis_env=axis_env,
    )
    moving = [leaf for leaf in embedded.leaves if is_inexact(leaf)]

    again = rematerialised(embed, spec.remat)

    def pull(captured: list[Array], given: PullInputs) -> tuple[Gradients, list[Array]]:
        return pull_back(lambda inputs: again(captured, inputs), given)

    pulled, (gradients, _), more = trace(
        pull,
        list(embed.captured),
        PullInputs(inputs, moving, scale),
        axis_env=axis_env,
    )
    if rewrite_convolutions:
        embed = Traced(channels_last(embed.jaxpr), embed.captured, embed.out_tree)
        pulled = Traced(channels_last(pulled.jaxpr), pulled.captured, pulled.out_tree)
    return WholePasses(
        parameters=inputs.arguments.trainable,
        gradient_structs=gradients,
        outputs=PassOutputs(
            [out.total], [out.weight], embedded.state, out.aux_sums, out.aux_rows
        ),
        aux_spec=heading.aux_spec,
        captured=(*pulled.captured, *head.captured),
        jaxprs=(embed.jaxpr, head.jaxpr, pulled.jaxpr),
        left=left + more + last,
        ends_early=False,
        windowed=False,
        rows=rows,
        embed=embed,
        again=again,
        head=head,
        pull=pulled,
        embeddings=embedded.leaves,
        scaled=scale is not None,
    )
