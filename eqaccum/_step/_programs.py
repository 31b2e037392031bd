"""The three programs of a step, lowered: accumulate, finish and update.

Each takes and returns flat lists of leaves, which keeps the call on JAX's C++ path.
What the device holds beside a program's own arguments is counted where it is planned.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from .. import _errors
from .._accumulate import (
    Arguments,
    Batch,
    Cut,
    Form,
    LossSpec,
    Noise,
    Options,
    Passes,
    PassInputs,
    PassOutputs,
    Sums,
    common_sum,
    even_cut,
    finish_aux,
    hoist,
    noise_of,
    noise_scale,
    over_devices,
    smoothed,
    squared_norm,
    trace_passes,
)
from .._data import Layout
from .._mesh import DATA, WHOLE, Placement, Spread
from .._plan import Choices, every_number
from .._tree import Partition, Role, record, struct
from .._types import wider
from . import _optimizer
from ._compile import Lowered, lower
from ._settings import Settings, Skeleton, axis_environment

_AVERAGES = jax.ShapeDtypeStruct((2,), jnp.float32)
_BY_ROWS = PartitionSpec(None, DATA)


@record
class Scalars:
    """What finish tells of a step, as device scalars."""

    loss: Any
    penalty: Any
    grad_norm: Any
    weight: Any
    ok: Any
    aux: list[Any]
    grad_metrics: Any
    noise: Noise | None
    noise_scale: Any


@record
class Weighed:
    """The weights so far of a sum of `Mean`s on this device, and their ratios.

    The state goes on to the next window, for the loss may read a weight from it.
    """

    weights: list[Any]
    state: list[Any]
    ratios: list[Any]


@record
class Finished:
    """The finished gradient, the state after the step, and what was measured.

    Or, as a prefix of that tree, how each of them lies on the devices.
    """

    gradient: list[Any]
    state: Any  # a list of arrays
    averages: Any  # of the gradient's noise, a list
    scalars: Any  # `Scalars`


@dataclass(frozen=True)
class Builder:
    """Lowers the programs of one step for one layout of the batch."""

    settings: Settings
    skeleton: Skeleton
    layout: Layout
    optimizer: Any
    opt_partition: Partition
    opt_structs: list[jax.ShapeDtypeStruct]
    batch_norms: list[str]  # names of the model's BatchNorm layers
    remat: Any = None  # as in `LossSpec`
    forward: bool = False  # without a gradient, for evaluation

    def cut(self, num_microbatches: int, *, windows: int = 1) -> Cut:
        """So many passes in each window, of as few rows as that allows."""
        loss, devices = self.settings.loss, self.settings.placement.size
        rows = -(-self.settings.global_batch // windows)
        shares = self.settings.shares
        own = dict(shares=shares, rows=self.settings.global_batch if shares > 1 else 0)
        if isinstance(loss, Form):
            cut = loss.cut(num_microbatches, rows=rows, devices=devices, axis_name=DATA)
            return dataclasses.replace(cut, **own)
        cut = even_cut(num_microbatches, rows, devices, DATA)
        return dataclasses.replace(cut, windows=windows, **own)

    def choices(self, *, windows: int = 1) -> Choices:
        """The numbers of passes to choose from."""
        loss, devices = self.settings.loss, self.settings.placement.size
        rows = -(-self.settings.global_batch // windows)
        passes = None
        if isinstance(loss, Form):
            passes = loss.passes(rows=rows, devices=devices)
        if passes is None:
            passes = every_number(rows, devices).passes
        if self.settings.compares:
            passes = self._compared(passes, windows)
        sizes = [self.cut(k, windows=windows).microbatch for k in passes]
        return Choices(passes, sizes)

    def _compared(self, passes: Sequence[int], windows: int) -> Sequence[int]:
        """The numbers of passes that leave something to compare, if there are any."""
        several = [k for k in passes if self.cut(k, windows=windows).independent > 1]
        return several or passes

    def trace(self, cut: Cut) -> Passes:
        """The pass of one microbatch; the user's loss runs under trace here."""
        settings, skeleton = self.settings, self.skeleton
        spec = LossSpec(
            model=skeleton.model,
            loss=skeleton.loss,
            state=skeleton.state,
            unflatten=self.layout.unflatten,
            options=Options(settings.has_aux, settings.axis_name),
            compute_dtype=settings.compute_dtype,
            remat=self.remat,
        )
        n = cut.microbatch
        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        inputs = PassInputs(
            self.arguments,
            skeleton.state_structs,
            [
                jax.ShapeDtypeStruct((n, *s.shape), s.dtype)
                for s in self.layout.row_structs
            ],
            jax.ShapeDtypeStruct((n,), jnp.float32),
            jax.ShapeDtypeStruct((n,), jnp.int32),
            key,
            key,
            [],
        )
        passes = trace_passes(
            spec,
            settings.loss,
            inputs,
            rows=settings.global_batch,
            axis_env=axis_environment(settings.placement),
            rewrite_convolutions=(
                settings.placement.backend == "cpu" and cut.num_microbatches > 1
            ),
            noise=settings.noise_scale and not self.forward,
        )
        return passes.forward_only() if self.forward else passes

    @property
    def arguments(self) -> Arguments:
        skeleton = self.skeleton
        return Arguments(
            skeleton.trainable,
            skeleton.frozen,
            skeleton.loss_structs,
            list(self.layout.whole_structs),
        )

    # --- accumulate and weigh -----------------------------------------------------

    def batch_structs(self, pass_: Passes, cut: Cut, *, bounded: bool) -> Batch:
        slots = (cut.num_microbatches, cut.devices * cut.microbatch)
        return Batch(
            [
                jax.ShapeDtypeStruct((*slots, *s.shape), s.dtype)
                for s in self.layout.row_structs
            ],
            jax.ShapeDtypeStruct(slots, jnp.float32),
            jax.ShapeDtypeStruct((2,), jnp.uint32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32) if bounded else None,
            jax.ShapeDtypeStruct((), jnp.int32) if cut.windows > 1 else None,
            jax.ShapeDtypeStruct((), jnp.bool_) if cut.windows > 1 else None,
            jax.ShapeDtypeStruct((), jnp.int32) if pass_.bank else None,
        )

    def accumulate(self, pass_: Passes, cut: Cut, *, bounded: bool = False) -> Lowered:
        """(captured, arguments, state, batch, ratios, accumulator, before) -> sums.

        `before` are the other sums of the windows before, None with one window.
        """

        def program(
            captured: list[Array],
            arguments: Arguments,
            state: list[Array],
            batch: Batch,
            ratios: list[Array],
            accumulator: list[Array],
            before: PassOutputs | None,
        ) -> tuple[list[Any], PassOutputs]:  # a gradient may be a constant
            # donated: the sums are written into it
            earlier = None if before is None else Sums(accumulator, before)
            sums = pass_.accumulate(
                cut,
                captured=captured,
                arguments=arguments,
                state=state,
                batch=batch,
                ratios=ratios,
                before=earlier,
            )
            if not self.forward:
                return sums.gradients, sums.outputs
            own = sums.outputs  # no finish comes after it
            totals, weights, aux_sums = _reduced(
                (own.totals, own.weights, own.aux_sums)
            )
            whole = PassOutputs(totals, weights, own.state, aux_sums, own.aux_rows)
            return sums.gradients, whole

        batch = self.batch_structs(pass_, cut, bounded=bounded)
        outputs = _output_specs(pass_.outputs)
        mapped = self._mapped(program, batch, more=3, out=(WHOLE, outputs))
        args = self._placed(
            (
                structs(pass_.captured),
                self.arguments,
                [*self.skeleton.state_structs, *pass_.bank],
                batch,
                [] if self.forward else self.ratios(pass_),
                pass_.gradient_structs,
                self.before(pass_) if cut.windows > 1 else None,
            ),
            (*mapped.specs[:5], self.summed(pass_), WHOLE),
        )
        out = (self.summed(pass_), outputs)
        return self._lower("accumulate", mapped.fn, args, out=out, donate=(5,))

    def weigh(self, pass_: Passes, cut: Cut, *, bounded: bool = False) -> Lowered:
        """(captured, arguments, state, batch, before) -> weights and their ratios."""

        def program(
            captured: list[Array],
            arguments: Arguments,
            state: list[Array],
            batch: Batch,
            before: list[Array] | None,
        ) -> Weighed:
            out = pass_.weigh(
                cut,
                captured=captured,
                arguments=arguments,
                state=state,
                batch=batch,
                before=before,
            )
            first, *rest = _reduced(out.weights)
            wide = [jnp.ones_like(first), *(_ratio(first, other) for other in rest)]
            totals = pass_.outputs.totals
            ratios = [r.astype(t.dtype) for r, t in zip(wide, totals, strict=True)]
            return Weighed(out.weights, out.state if cut.windows > 1 else [], ratios)

        batch = self.batch_structs(pass_, cut, bounded=bounded)
        mapped = self._mapped(program, batch, more=1, out=WHOLE)
        args = self._placed(
            (
                structs(pass_.captured),
                self.arguments,
                self.skeleton.state_structs,
                batch,
                list(pass_.outputs.weights) if cut.windows > 1 else None,
            ),
            mapped.specs,
        )
        return self._lower("weigh", mapped.fn, args, out=WHOLE)

    def summed(self, pass_: Passes) -> list[PartitionSpec]:
        """How the sums of a gradient lie: none are there in evaluation."""
        return [s.summed for s in self.skeleton.spreads][: len(pass_.gradient_structs)]

    def ratios(self, pass_: Passes) -> list[jax.ShapeDtypeStruct]:
        return list(pass_.outputs.totals) if pass_.num_terms > 1 else []

    def before(self, pass_: Passes) -> PassOutputs:
        """What goes from window to window beside gradient and state."""
        return eqx.tree_at(lambda o: (o.state, o.aux_rows), pass_.outputs, ([], []))

    # --- finish -------------------------------------------------------------------

    def finish(self, pass_: Passes) -> Lowered:
        """(captured, parameters, sums to become the gradient, others, ...) -> finished.

        `captured` are the arrays that the penalty captured, `parameters` those that it
        reads (none without a penalty).
        """
        penalty = self.penalty
        same = self.reusable(pass_)

        def program(
            captured: list[Array],
            parameters: Arguments,
            reused: list[Array],
            kept: list[Array],
            outputs: PassOutputs,
            ratios: list[Array],
            averages: list[Array],
        ) -> Finished:
            sums = _interleaved(same, reused, kept)
            extra = penalty and penalty(captured, parameters)
            reduced = self._reduce(sums, outputs)
            return _finish(self, pass_, extra, reduced, ratios, averages)

        out = eqx.tree_at(lambda o: o.aux_rows, pass_.outputs, [])
        if self.settings.placement.size == 1:  # the state goes on as it is
            out = eqx.tree_at(lambda o: o.state, out, [])
        sums = _parted(same, pass_.gradient_structs)
        specs = _parted(same, self.summed(pass_))
        args = (
            structs(penalty.captured) if penalty is not None else [],
            self.penalty_arguments,
            *sums,
            out,
            self.ratios(pass_),
            self.noise_structs,
        )
        read = self._specs_of(self.penalty_arguments)
        placed = self._placed(args, (WHOLE, read, *specs, WHOLE, WHOLE, WHOLE))
        lies = Finished(self.updated, WHOLE, WHOLE, WHOLE)
        return self._lower("finish", program, placed, out=lies, donate=(2,))

    def _reduce(self, sums: list[Array], outputs: PassOutputs) -> "_Reduced":
        """The one reduction over devices; inside finish.

        A device that is alone would copy what it sums: one parameter-size of
        temporaries in finish (measured on CPU), beside those of accumulate.
        """
        reduced = _Reduced(
            sums,
            outputs.totals,
            outputs.weights,
            outputs.aux_sums,
            outputs.state,
            outputs.spread,
        )
        if self.settings.placement.size == 1:
            return reduced
        specs = eqx.tree_at(
            lambda r: r.gradient,
            jax.tree.map(lambda _: WHOLE, reduced),
            [spread.summed for spread in self.skeleton.spreads],
        )
        mapped = jax.shard_map(
            functools.partial(_over_devices, self.skeleton.spreads),
            mesh=self.settings.placement.mesh,
            in_specs=(specs,),
            out_specs=eqx.tree_at(lambda r: r.gradient, specs, self.updated),
            check_vma=False,
        )
        return mapped(reduced)

    @property
    def updated(self) -> list[PartitionSpec]:
        """How the finished gradient lies."""
        return [spread.updated for spread in self.skeleton.spreads]

    @property
    def noise_structs(self) -> list[jax.ShapeDtypeStruct]:
        """The moving averages of the gradient's noise, none where nobody asked."""
        return [_AVERAGES] if self.settings.noise_scale else []

    def reusable(self, pass_: Passes) -> list[bool]:
        """Which sums have the parameter's dtype, and lie so that they can become the
        gradient."""
        return [
            parameter.dtype == total.dtype and spread.axis is None
            for parameter, total, spread in zip(
                self.skeleton.trainable,
                pass_.gradient_structs,
                self.skeleton.spreads,
                strict=True,
            )
        ]

    @property
    def penalty_arguments(self) -> Arguments:
        """What finish reads of the model: nothing without a penalty."""
        if self.penalty is None:
            return Arguments([], [], [], [])
        return eqx.tree_at(lambda a: (a.loss, a.whole), self.arguments, ([], []))

    @functools.cached_property
    def penalty(self) -> "Penalty | None":
        """The penalty's value and gradient, traced once; None where there is none."""
        fn = self.settings.penalty
        if fn is None:
            return None

        def value(trainable: list[Array], frozen: list[Array]) -> Float[Array, ""]:
            out = jnp.asarray(fn(self.skeleton.model.join(trainable, frozen)))
            if out.shape != () or not jnp.issubdtype(out.dtype, jnp.floating):
                raise _errors.penalty_value(out.shape, out.dtype)
            return out

        closed = jax.make_jaxpr(
            jax.value_and_grad(value),
            axis_env=axis_environment(self.settings.placement),
        )(self.skeleton.trainable, self.skeleton.frozen)
        hoisted = hoist(closed)
        return Penalty(hoisted.jaxpr, hoisted.consts)

    def loss_dtype(self, pass_: Passes) -> Any:
        return wider(*[s.dtype for s in pass_.outputs.totals])

    # --- update -------------------------------------------------------------------

    def update(self, pass_: Passes) -> Lowered:
        """(trainable, optimizer state, gradient, loss, penalty) -> the first two.

        Where gradient and optimizer state are cut over devices each device updates its
        part, which is gathered only then. What a transformation sees are whole arrays:
        a norm over all of them is one.
        """
        model, opt = self.skeleton.model, self.opt_partition

        def program(
            trainable: list[Array],
            opt_leaves: list[Array],
            gradient: list[Array],
            loss: Array,
            penalty: Array,
        ) -> tuple[list[Array], list[Array]]:
            parameters, state = _optimizer.apply(
                self.optimizer,
                model.filtered(gradient),
                opt.join([], opt_leaves),
                model.filtered(self._in_parts(trainable)),
                loss + penalty,
            )
            new = self._in_parts(jax.tree.leaves(parameters))
            return new, opt.split(state).frozen

        trainable = self.skeleton.trainable
        scalar = jax.ShapeDtypeStruct((), self.loss_dtype(pass_))
        args = (trainable, self.opt_structs, trainable, scalar, scalar)
        own = (self.skeleton.parameter_specs, self.opt_specs)
        placed = self._placed(args, (*own, self.updated, WHOLE, WHOLE))
        return self._lower("update", program, placed, out=own, donate=(0, 1))

    def _in_parts(self, leaves: list[Array]) -> list[Array]:
        """Each device takes its part of the leaves whose update is cut."""
        sharding = self.settings.placement.sharding
        return [
            jax.lax.with_sharding_constraint(leaf, sharding(spread.updated))
            if spread.axis is not None
            else leaf
            for leaf, spread in zip(leaves, self.skeleton.spreads, strict=True)
        ]

    @functools.cached_property
    def opt_specs(self) -> list[PartitionSpec]:
        """How the optimizer's state lies: as the gradient of the parameter it is for.

        That is told by its place, which ends with the parameter's, and its shape.
        """
        spreads = [
            (path, struct.shape, spread.updated)
            for path, struct, spread in zip(
                self.skeleton.model.paths(Role.TRAINABLE),
                self.skeleton.trainable,
                self.skeleton.spreads,
                strict=True,
            )
        ]
        spreads.sort(key=lambda known: -len(known[0]))  # the longest path is the one
        specs = []
        for place, leaf in zip(
            self.opt_partition.paths(Role.FROZEN), self.opt_structs, strict=True
        ):
            found = (
                spec
                for path, shape, spec in spreads
                if place.endswith(path) and shape == leaf.shape
            )
            specs.append(next(found, WHOLE))
        return specs

    def init(self) -> Lowered:
        """trainable -> the optimizer's state."""

        def program(trainable: list[Array]) -> list[Array]:
            state = self.optimizer.init(self.skeleton.model.filtered(trainable))
            return [jnp.asarray(x) for x in self.opt_partition.split(state).frozen]

        specs = (self.skeleton.parameter_specs,)
        args = self._placed((self.skeleton.trainable,), specs)
        return self._lower("init", program, args, out=self.opt_specs)

    # --- seam ---------------------------------------------------------------------

    def _mapped(self, program: Any, batch: Batch, *, more: int, out: Any) -> "_Mapped":
        rows = Batch(
            [_BY_ROWS] * len(batch.rows),
            _BY_ROWS,
            WHOLE,
            WHOLE,
            *(None if x is None else WHOLE for x in _scalars(batch)),
        )
        fn = jax.shard_map(
            program,
            mesh=self.settings.placement.mesh,
            in_specs=(WHOLE, WHOLE, WHOLE, rows, *(WHOLE,) * more),
            out_specs=out,
            axis_names={DATA},  # what is sharded over other axes stays so
            check_vma=False,
        )
        lie = self._specs_of(self.arguments)
        return _Mapped(fn, (WHOLE, lie, WHOLE, rows, *(WHOLE,) * more))

    def _specs_of(self, arguments: Arguments) -> Arguments:
        """How arguments lie; those cut over `data` are gathered once per program."""
        trainable = self.skeleton.parameter_specs[: len(arguments.trainable)]
        frozen = self.skeleton.frozen_specs[: len(arguments.frozen)]
        loss, whole = ([WHOLE] * len(x) for x in (arguments.loss, arguments.whole))
        return Arguments(trainable, frozen, loss, whole)

    def _placed(self, args: tuple[Any, ...], specs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The structs with the shardings that the arrays will have."""

        def place(spec: PartitionSpec, tree: Any) -> Any:
            sharding = self.settings.placement.sharding(spec)
            return jax.tree.map(
                lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
                tree,
            )

        return jax.tree.map(
            place, specs, args, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

    def _lower(
        self,
        name: str,
        fn: Any,
        args: tuple[Any, ...],
        *,
        out: Any,
        donate: tuple[int, ...] = (),
    ) -> Lowered:
        return lower(
            name,
            fn,
            args,
            placement=self.settings.placement,
            out=_shardings(self.settings.placement, out),
            donate=donate,
            options=self.settings.compiler_options,
        )


@dataclass(frozen=True)
class _Mapped:
    fn: Any
    specs: tuple[Any, ...]


def _shardings(placement: Placement, specs: Any) -> Any:
    return jax.tree.map(
        placement.sharding, specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


class _Reduced(eqx.Module):
    """What is added up over devices, and the state, which is averaged."""

    gradient: list[Any]
    totals: list[Any]
    weights: list[Any]
    aux_sums: list[Any]
    state: list[Any]
    spread: Any  # of the passes' gradients, where the noise scale is asked for


class Counted(eqx.Module):
    """What the penalty adds, once per step: its value and its gradient."""

    value: Any
    gradient: list[Any]


@dataclass(frozen=True)
class Penalty:
    jaxpr: Any
    captured: tuple[Any, ...]

    def __call__(self, captured: list[Array], parameters: Arguments) -> Counted:
        flat = [*captured, *parameters.trainable, *parameters.frozen]
        value, *gradient = eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *flat)
        return Counted(value, gradient)


def _finish(
    builder: Builder,
    pass_: Passes,
    penalty: Counted | None,
    reduced: _Reduced,
    ratios: list[Array],
    averages: list[Array],
) -> Finished:
    """One division, the penalty, the norm, and whether all is finite."""
    sums, totals, weights = reduced.gradient, reduced.totals, reduced.weights
    weight = weights[0]
    factors = ratios or [jnp.ones_like(totals[0])]
    scaled = [t * f for t, f in zip(totals, factors, strict=True)]
    whole = common_sum(scaled)
    loss = whole / weight.astype(whole.dtype)
    penalty = penalty or Counted(jnp.zeros_like(loss), [None] * len(sums))
    value = penalty.value.astype(loss.dtype)
    gradient = [
        _divided(total, weight, more, struct.dtype)
        for total, more, struct in zip(
            sums, penalty.gradient, builder.skeleton.trainable, strict=True
        )
    ]
    noise = None
    if reduced.spread is not None:
        noise, averages = _noise(reduced.spread, sums, weight, averages)
    norm = jnp.sqrt(squared_norm(gradient))
    positive = jnp.all(jnp.stack([w > 0 for w in weights]))
    ok = positive & jnp.isfinite(loss) & jnp.isfinite(value) & _finite(norm, gradient)
    scalars = Scalars(
        loss,
        value,
        norm,
        weight,
        ok,
        finish_aux(pass_.aux_spec, reduced.aux_sums, weight),
        _grad_metrics(builder, gradient),
        noise,
        None if noise is None else noise_scale(averages[0]),
    )
    return Finished(gradient, reduced.state, averages, scalars)


def _noise(
    spread: Array, sums: list[Array], weight: Array, averages: list[Array]
) -> tuple[Noise, list[Array]]:
    """What this step tells of the gradient's noise, and the averages after it."""
    means = [_divided(total, weight, None, total.dtype) for total in sums]
    noise = noise_of(spread, means)
    return noise, [smoothed(averages[0], noise)]


def _grad_metrics(builder: Builder, gradient: list[Array]) -> Any:
    """What the user wants to know of the finished gradient, before any clipping."""
    ask = builder.settings.grad_metrics
    if ask is None:
        return None
    told = ask(builder.skeleton.model.filtered(gradient))
    for path, value in jax.tree_util.tree_leaves_with_path(told):
        if not isinstance(told, dict) or jnp.ndim(value) != 0:
            raise _errors.bad_grad_metrics(jax.tree_util.keystr(path), value)
    return told


def _divided(total: Array, weight: Array, extra: Array | None, dtype: Any) -> Array:
    mean = total / weight.astype(jnp.finfo(total.dtype).dtype)
    if extra is not None:
        mean = mean + extra.astype(mean.dtype)
    return mean.astype(dtype)


def _finite(norm: Array, gradient: list[Array]) -> Bool[Array, ""]:
    """Whether the gradient is finite; its norm overflows before its leaves do."""

    def by_leaf() -> Array:
        finite = [jnp.isfinite(jnp.max(jnp.abs(g))) for g in gradient if g.size]
        return jnp.all(jnp.stack([jnp.array(True), *finite]))

    return jax.lax.cond(jnp.isfinite(norm), lambda: jnp.array(True), by_leaf)


def _ratio(first: Array, other: Array) -> Array:
    """`first / other`; a term whose weight is 0 has no mean, which finish reports."""
    safe = jnp.where(other > 0, other, jnp.ones_like(other))
    ratio = first / safe.astype(first.dtype)
    return jnp.where(other > 0, ratio, jnp.zeros_like(ratio))


def _reduced(tree: Any) -> Any:
    """The sum over devices."""
    if jax.lax.axis_size(DATA) == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.psum(x, DATA), tree)


def _over_devices(spreads: list[Spread], own: _Reduced) -> _Reduced:
    """The reduction of a step, on one device's sums.

    A gradient that is cut is scattered at once: the partitioner would sum all of it on
    every device first.
    """
    gradient = [
        jax.lax.psum(total, DATA)
        if spread.axis is None
        else jax.lax.psum_scatter(
            total, DATA, scatter_dimension=spread.axis, tiled=True
        )
        for total, spread in zip(own.gradient, spreads, strict=True)
    ]
    totals, weights, aux_sums = _reduced((own.totals, own.weights, own.aux_sums))
    spread = None if own.spread is None else over_devices(own.spread, DATA)
    state = _averaged(own.state)
    return _Reduced(gradient, totals, weights, aux_sums, state, spread)


def _averaged(state: list[Array]) -> list[Array]:
    """Floating state is averaged over the devices; other leaves are device 0's."""

    def average(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, DATA)
        first = jax.lax.axis_index(DATA) == 0
        return jax.lax.psum(jnp.where(first, x, jnp.zeros_like(x)), DATA).astype(
            x.dtype
        )

    return [average(x) for x in state]


def _output_specs(outputs: PassOutputs) -> PassOutputs:
    whole = jax.tree.map(lambda _: WHOLE, outputs)
    rows = [_BY_ROWS] * len(outputs.aux_rows)
    return eqx.tree_at(lambda o: o.aux_rows, whole, rows)


def _interleaved(same: list[bool], reused: list[Any], kept: list[Any]) -> list[Any]:
    one, other = iter(reused), iter(kept)
    return [next(one) if reuse else next(other) for reuse in same]


def _parted(same: list[bool], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The leaves that are reused, and those that are kept."""
    pairs = list(zip(leaves, same, strict=True))
    return [x for x, reuse in pairs if reuse], [x for x, reuse in pairs if not reuse]


def _scalars(batch: Batch) -> tuple[Any, ...]:
    return batch.bound, batch.start, batch.fresh, batch.step


def structs(arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [struct(a) for a in arrays]
