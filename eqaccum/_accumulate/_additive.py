"""Losses that are sums over examples: each pass adds its own gradient."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, UInt32

from . import _keys
from ._conv import channels_last
from ._jaxpr import walk
from ._noise import spread_of, spread_struct
from ._records import (
    Arguments,
    Batch,
    Cut,
    Form,
    Passes,
    PassInputs,
    PassOutputs,
    Sums,
)
from ._scan import run
from ._trace import LossSpec, Traced, gradient_of, trace, trace_forward


@dataclass(frozen=True, kw_only=True)
class AdditivePasses(Passes):
    """Passes of an additive loss: its forward jaxpr and its gradient's.

    `gradient` returns (gradients in the accumulator's dtype, `PassOutputs`).
    """

    forward: Traced
    gradient: Traced
    noise: bool = False  # whether to tell how the passes differ

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
        keys = split_keys(batch)

        def one(
            k: Int[Array, ""] | int,
            rows: list[Array],
            weights: Array,
            state: list[Array],
        ) -> Sums:
            inputs = PassInputs(
                arguments,
                state,
                rows,
                weights,
                positions(cut, k, batch.start),
                keys[0],
                keys[1],
                ratios,
            )
            sums = Sums(*self.gradient(captured, inputs))
            return with_spread(sums, ratios, weights) if self.noise else sums

        return run(one, cut, batch, self._start(state, batch, before))

    def weigh(
        self,
        cut: Cut,
        *,
        captured: list[Array],
        arguments: Arguments,
        state: list[Array],
        batch: Batch,
        before: list[Array] | None = None,
    ) -> PassOutputs:
        keys = split_keys(batch)
        first = len(captured) - len(self.forward.captured)

        def one(
            k: Int[Array, ""] | int,
            rows: list[Array],
            weights: Array,
            state: list[Array],
        ) -> Sums:
            at = positions(cut, k, batch.start)
            inputs = PassInputs(
                arguments, state, rows, weights, at, keys[0], keys[1], []
            )
            out = self.forward(captured[first:], inputs)
            return Sums([], PassOutputs([], out.weights, out.state, [], []))

        start = zeros(self.outputs.weights)
        if before is not None:
            start = _cleared(batch, before)
        return run(
            one, cut, batch, Sums([], PassOutputs([], start, state, [], []))
        ).outputs

    def forward_only(self) -> "ForwardPasses":
        return ForwardPasses(
            parameters=self.parameters,
            gradient_structs=[],
            outputs=dataclasses.replace(self.outputs, spread=None),
            aux_spec=self.aux_spec,
            captured=self.forward.captured,
            jaxprs=(self.forward.jaxpr,),
            left=self.left,
            forward=self.forward,
        )

    def _start(self, state: list[Array], batch: Batch, before: Sums | None) -> Sums:
        """Zeros, or the sums of the windows before."""
        out = self.outputs
        if before is not None:
            sums = _cleared(batch, before)
            return eqx.tree_at(lambda s: s.outputs.state, sums, state)
        return Sums(
            zeros(self.gradient_structs),
            PassOutputs(
                zeros(out.totals),
                zeros(out.weights),
                state,
                zeros(out.aux_sums),
                [],
                zeros(out.spread),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ForwardPasses(Passes):
    """The loss alone, for evaluation."""

    forward: Traced

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
        keys = split_keys(batch)

        def one(
            k: Int[Array, ""] | int,
            rows: list[Array],
            weights: Array,
            state: list[Array],
        ) -> Sums:
            at = positions(cut, k, batch.start)
            inputs = PassInputs(
                arguments, state, rows, weights, at, keys[0], keys[1], []
            )
            return Sums([], self.forward(captured, inputs))

        out = self.outputs
        totals, weights = zeros(out.totals), zeros(out.weights)
        start = PassOutputs(totals, weights, state, zeros(out.aux_sums), [])
        return run(one, cut, batch, Sums([], start))

    def weigh(self, cut: Cut, **shared: Any) -> PassOutputs:
        raise NotImplementedError("without a gradient nothing needs the ratios")

    def forward_only(self) -> "ForwardPasses":
        return self


def _cleared(batch: Batch, sums: PyTree) -> PyTree:
    """The sums, or zeros in the first window: one program serves both."""
    return jax.tree.map(lambda x: jnp.where(batch.fresh, jnp.zeros_like(x), x), sums)


def trace_passes(
    spec: LossSpec, loss: Any, inputs: PassInputs, *, rows: int, **options: Any
) -> Passes:
    """Traces the passes of a loss of any form; see `trace_additive`."""
    if isinstance(loss, Form):
        return loss.trace(spec, inputs, rows=rows, **options)
    return trace_additive(spec, loss, inputs, **options)


def trace_additive(
    spec: LossSpec,
    loss: Any,
    inputs: PassInputs,
    *,
    axis_env: list[tuple[str, int]],
    rewrite_convolutions: bool,
    noise: bool = False,
) -> AdditivePasses:
    """Traces a pass on structs.

    **Arguments:**

    - `spec`: the static description of model, loss and data.
    - `loss`: the user's loss; its arrays are replaced by `inputs.arguments.loss`.
    - `inputs`: structs; `ratios` is filled in here.
    - `axis_env`: mesh axes in scope, as `(name, size)`.
    - `rewrite_convolutions`: channels-last convolutions, for loops on CPU.
    - `noise`: tell how the gradients and losses of the passes differ.
    """
    forward, outputs, aux_spec, left = trace_forward(
        spec, loss, inputs, axis_env=axis_env
    )
    ratios = list(outputs.totals) if len(outputs.totals) > 1 else []
    inputs = eqx.tree_at(lambda i: i.ratios, inputs, ratios)
    gradient, shapes, more = trace(
        gradient_of(forward, spec.remat),
        list(forward.captured),
        inputs,
        axis_env=axis_env,
    )
    if rewrite_convolutions:
        rewritten = channels_last(gradient.jaxpr)
        gradient = Traced(rewritten, gradient.captured, gradient.out_tree)
    if noise:
        outputs = dataclasses.replace(outputs, spread=spread_struct(shapes[0], outputs))
    return AdditivePasses(
        parameters=inputs.arguments.trainable,
        gradient_structs=shapes[0],
        outputs=outputs,
        aux_spec=aux_spec,
        captured=gradient.captured,
        jaxprs=(gradient.jaxpr,),
        left=left + more,
        forward=forward,
        gradient=gradient,
        noise=noise,
    )


def wide_products(passes: Passes, dtype: Any) -> list[str]:
    """Products that a narrower `compute_dtype` did not reach, by name."""
    wide = []
    for eqn in (eqn for jaxpr in passes.jaxprs for eqn in walk(jaxpr)):
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            continue
        dtypes = {v.aval.dtype for v in eqn.invars}  # type: ignore[attr-defined]
        if any(jnp.issubdtype(d, jnp.floating) and d != dtype for d in dtypes):
            wide.append(eqn.primitive.name)
    return wide


def with_spread(sums: Sums, ratios: list[Array], row_weights: Array) -> Sums:
    """The sums of one pass, and what it tells of the gradient's noise."""
    spread = spread_of(sums.gradients, sums.outputs, ratios, row_weights)
    outputs = dataclasses.replace(sums.outputs, spread=spread)
    return Sums(sums.gradients, outputs)


def zeros(structs: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), structs)


def split_keys(
    batch: Batch,
) -> tuple[UInt32[Array, "2"] | None, UInt32[Array, "2"] | None]:
    """The batch's rows' key and its shared key, as key data."""
    if batch.key is None:
        return None, None
    rows, shared = _keys.batch_keys(batch.key, batch.batch_index)
    return jax.random.key_data(rows), jax.random.key_data(shared)


def positions(
    cut: Cut, k: Int[Array, ""] | int, start: Int[Array, ""] | None
) -> Int[Array, "n"]:
    """The positions in the global batch of the rows of pass k on this device."""
    device = 0 if cut.axis_name is None else jax.lax.axis_index(cut.axis_name)
    devices, before = cut.devices // cut.shares, 0
    if cut.shares > 1:
        before = device // devices * (cut.rows // cut.shares)
        device = device % devices
    first = before + (k * devices + device) * cut.microbatch
    if start is not None:
        first = first + start // cut.shares
    return first + jnp.arange(cut.microbatch, dtype=jnp.int32)
