"""Measures the programs of a step and chooses the passes: the programs that run."""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _errors
from .._accumulate import Cut, Passes, wide_products
from .._plan import (
    COMPILED,
    NO_FIGURES,
    OUT_OF_MEMORY,
    REMEMBERED,
    Found,
    Key,
    Limit,
    Measurement,
    Parts,
    Plan,
    Probe,
    conv_scratch,
    open_cache,
    pinned,
    program_key,
    search,
)
from .._tree import Role, nbytes
from ._agree import common_limit
from ._compile import CompileOutOfMemory, Lowered, Program, keep
from ._programs import Builder

# Programs that ran out of memory while they ran, though they seemed to fit. In this
# process only: next time the memory that others took may be free again.
_ran_out: set[str] = set()
_REMATERIALISED = (
    'remat="auto": not even one example per pass fits as it is, so the loss is '
    "recomputed in segments in the backward pass; the gradient is the same"
)
_RAN_OUT = f"{REMEMBERED}: out of memory while running"
# Programs with more temporaries are waited for; they take tens of ms, the wait one.
_WORTH_A_WAIT = 64 * 2**20


@dataclass(frozen=True)
class Ready:
    """The compiled programs of a step for one layout, and what they were made from."""

    plan: Plan
    cut: Cut
    traced: Passes
    builder: Builder
    accumulate: Program
    weigh: Program | None
    finish: Program | None  # none in evaluation
    update: Program | None
    tail: "Tail" = field(default_factory=lambda: Tail())

    @property
    def must_wait(self) -> bool:
        """Whether accumulate may be called only when the update before it is done.

        Otherwise both would hold their temporaries at once on CPU (measured with
        adafactor: 674 MB for 610).
        """
        return self.update is not None and self._is_large(self.update)

    @property
    def must_let_go(self) -> bool:
        """Whether accumulate is better called a little later than that."""
        return self.must_wait or self._is_large(self.accumulate)

    def _is_large(self, program: Program) -> bool:
        on_cpu = self.builder.settings.placement.backend == "cpu"
        return on_cpu and program.fresh > _WORTH_A_WAIT


@dataclass
class Tail:
    """What only batches with rows of weight 0 need, made or checked when first seen.

    The bounded programs serve batches that leave whole passes empty.
    """

    checked: bool = False
    row_by_row: tuple[Passes, Program] | None = None
    coming: list[Future[Program]] = field(default_factory=list)
    accumulate: Program | None = None
    weigh: Program | None = None


@dataclass(frozen=True)
class Sizes:
    """Bytes on one device that do not depend on the number of passes."""

    parameters: int
    frozen: int
    state: int
    optimizer: int
    accumulator: int
    row: int  # one row of the batch


class Planner:
    """Lowers, measures and chooses; keeps what was compiled for the chosen passes."""

    def __init__(self, builder: Builder, *, own_bytes: int = 0) -> None:
        self._builder = builder
        self._rows = builder.settings.global_batch
        self._windows = 1
        self._own_bytes = own_bytes
        self._cache = open_cache(builder.settings.cache)
        self._told_miss = False
        self._traced: dict[int, Passes] = {}
        self._others: dict[str, Future[Program]] = {}

    def make(self) -> Ready:
        """Plans, and returns the programs of the chosen number of passes."""
        limit = self._limit()
        return self._finished(lambda: self._choose(limit), limit)

    def more_passes(self, failed: Ready) -> Ready | None:
        """The next smaller microbatch after one that ran out of memory, None at 1."""
        _ran_out.add(failed.accumulate.key)
        limit = _same_limit(failed)
        self._windows = failed.cut.windows
        choices = self._builder.choices(windows=self._windows)
        for k in choices.passes:
            if k <= failed.cut.num_microbatches:
                continue
            n = choices.microbatch(k)
            try:
                return self._finished(lambda n=n: self._pin(n, limit), limit)
            except _errors.DoesNotFit:
                continue
        return None

    def with_passes(self, num_microbatches: int, *, like: Ready) -> Ready | None:
        """The programs of so many passes in each window; None where they do not fit."""
        limit = _same_limit(like)
        if limit is not None:
            limit = replace(limit, given=True)  # over it: refused, not warned of
        self._windows = like.cut.windows
        n = self._builder.choices(windows=self._windows).microbatch(num_microbatches)
        try:
            ready = self._finished(lambda: self._pin(n, limit), limit)
        except _errors.DoesNotFit:
            return None
        return None if ready.plan.predicted_bytes is None else ready

    def remember_seconds(self, largest: Ready, seconds: dict[int, float]) -> None:
        """Keeps what a trial measured, under the largest size that fitted."""
        for passes, measured in seconds.items():
            key = self._seconds_key(largest, passes)
            self._cache.remember(key, step_seconds=measured)

    def remembered_seconds(
        self, largest: Ready, candidates: Sequence[int]
    ) -> dict[int, float] | None:
        """What an earlier trial measured, None where there was none."""
        found = {}
        for passes in (largest.cut.num_microbatches, *candidates):
            known = self._cache.recall(self._seconds_key(largest, passes))
            if known is not None and known.step_seconds is not None:
                found[passes] = known.step_seconds
        return found if largest.cut.num_microbatches in found else None

    def _seconds_key(self, largest: Ready, passes: int) -> Key:
        return program_key(
            f"fastest {largest.cut} {passes}",
            largest.accumulate.key,
            device=self._builder.settings.placement.devices[0],
            options=self._builder.settings.compiler_options,
        )

    def _finished(self, choose: Callable[[], Found], limit: Limit | None) -> Ready:
        self._others = {}
        # finish and update compile beside the probes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="eqaccum-compile")
        try:
            ready = self._ready(self._agreed(choose, limit), limit)
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for program in (ready.accumulate, ready.weigh, ready.finish, ready.update):
            if program is not None:
                keep(program)
        for note in self._warnings(ready.traced, ready.cut):
            _errors.warn(note)
        if self._builder.remat is True and self._builder.settings.remat == "auto":
            _errors.say(_REMATERIALISED)
        return ready

    def _agreed(self, choose: Callable[[], Found], limit: Limit | None) -> Found:
        """What this process chose, if the others did; else the most passes of all."""
        placement = self._builder.settings.placement
        if not placement.is_shared:
            return choose()
        found, failure = None, None
        try:
            found = choose()
        except Exception as error:
            failure = error
        here = (0, 0) if found is None else (found.num_microbatches, self._windows)
        told = placement.exchange(*here)
        if failure is not None:
            raise failure
        assert found is not None
        failed = [process for process, chosen in enumerate(told) if chosen == (0, 0)]
        if failed:
            raise _errors.does_not_fit_elsewhere(failed)
        if any(windows != self._windows for _, windows in told):
            raise _errors.plans_differ([(p * w, w) for p, w in told])
        most = max(passes for passes, _ in told)
        if most == found.num_microbatches:
            return found
        choices = self._builder.choices(windows=self._windows)
        return self._pin(choices.microbatch(most), limit)

    @property
    def _pinned(self) -> int | None:
        """The microbatch that was asked for, None where the largest is searched."""
        settings = self._builder.settings
        if settings.plan is not None:
            return settings.plan.microbatch
        if isinstance(settings.microbatch, str):
            return None
        return int(settings.microbatch)

    def _limit(self) -> Limit | None:
        settings = self._builder.settings
        try:
            return common_limit(
                settings.memory_limit,
                settings.placement,
                own_bytes=self._own_bytes,
            )
        except _errors.CannotTell:
            if self._pinned is None:
                raise
            return None  # nothing to compare a pinned size with

    def _choose(self, limit: Limit | None) -> Found:
        given = self._builder.settings.plan
        if given is not None:
            self._windows = given.windows
            if given.rematerialised:
                self._builder = replace(self._builder, remat=True)
        if self._pinned is not None:
            return self._pin(self._pinned, limit)
        assert limit is not None
        try:
            return self._in_windows(limit)
        except _errors.DoesNotFit:
            if self._builder.settings.remat != "auto" or self._builder.remat:
                raise
        self._builder = replace(self._builder, remat=True)
        self._windows = 1
        return self._in_windows(limit)

    def _in_windows(self, limit: Limit) -> Found:
        """The fewest passes in one window, else in the fewest windows."""
        try:
            return self._search(limit)
        except _errors.DoesNotFit as error:
            traced = next(iter(self._traced.values()))
            windows = self._fewest_windows(limit.bytes, traced)
            if windows is None:
                raise
            if not traced.windowed:
                rows = -(-self._rows // self._builder.settings.placement.size)
                raise _errors.not_in_windows(
                    str(error), rows=2 * rows * self._sizes(traced).row
                ) from error
        self._windows = windows
        return self._search(limit)

    def _search(self, limit: Limit) -> Found:
        return search(
            self._measure,
            rows=-(-self._rows // self._windows),
            devices=self._builder.settings.placement.size,
            limit=limit.bytes,
            limit_source=limit.source,
            divisor=bool(self._batch_norms),
            choices=self._builder.choices(windows=self._windows),
        )

    def _pin(self, microbatch: int, limit: Limit | None) -> Found:
        return pinned(
            self._measure,
            rows=-(-self._rows // self._windows),
            devices=self._builder.settings.placement.size,
            microbatch=microbatch,
            limit=limit,
            choices=self._builder.choices(windows=self._windows),
        )

    def _fewest_windows(self, limit: int, traced: Passes) -> int | None:
        """The fewest windows of which two take at most a quarter of the limit."""
        devices = self._builder.settings.placement.size
        on_device = -(-self._rows // devices)
        most = limit // (8 * self._sizes(traced).row)  # rows of one window
        if most < 1:
            return None
        windows = -(-on_device // most)
        return windows if windows > 1 else None

    # --- one measurement ----------------------------------------------------------

    def _measure(self, num_microbatches: int) -> Measurement:
        cut = self._builder.cut(num_microbatches, windows=self._windows)
        traced = self._builder.trace(cut)
        self._traced[num_microbatches] = traced
        lowered = self._builder.accumulate(traced, cut)
        self._start_others(traced)
        sizes = self._sizes(traced)
        parts = self._parts(sizes, 2 * self._batch_bytes(sizes, cut))
        fixed = parts.total
        if lowered.key in _ran_out and self._pinned is None:
            return Measurement(None, fixed, 0.0, _RAN_OUT, fits=False, parts=parts)
        key = self._cache_key(lowered, cut)
        known = self._cache.recall(key)
        if known is not None and known.bytes is not None and not lowered.kept:
            need = self._with_others(known.bytes, traced, sizes, cut)
            full = self._told(parts, need, traced)
            return Measurement(need, fixed, 0.0, REMEMBERED, lowered, parts=full)
        try:
            program = lowered.compile()
        except CompileOutOfMemory:
            return Measurement(None, fixed, 0.0, OUT_OF_MEMORY, fits=False, parts=parts)
        note = REMEMBERED if lowered.kept else COMPILED
        if known is None and not lowered.kept:
            self._tell_miss(key)
        self._cache.remember(key, bytes=program.bytes)
        need = self._with_others(program.bytes, traced, sizes, cut)
        full = self._told(parts, need, traced)
        if need is None:
            note = NO_FIGURES
        seconds = 0.0 if lowered.kept else program.seconds
        return Measurement(need, fixed, seconds, note, program, parts=full)

    def _cache_key(self, lowered: Lowered, cut: Cut) -> Key:
        """The program under a name that survives a change of jax, flags or the loss."""
        skeleton, layout = self._builder.skeleton, self._builder.layout
        shapes = repr((skeleton.trainable, layout.row_structs, self._rows))
        signature = hashlib.sha256(shapes.encode()).hexdigest()[:16]
        return program_key(
            f"{lowered.name} {signature} {cut}",
            lowered.text_digest,
            device=self._builder.settings.placement.devices[0],
            options=self._builder.settings.compiler_options,
        )

    def _tell_miss(self, key: Key) -> None:
        """Says, once a plan, which part changed since this step was last measured."""
        reason = self._cache.why_missed(key)
        if reason.startswith("nothing") or self._told_miss:
            return
        self._told_miss = True
        _errors.say(f"planning anew, not from memory: {reason}")

    def _start_others(self, traced: Passes) -> None:
        """Finish and update compile in a thread while probes trace and compile."""
        if self._others:
            return
        for lowered in (self._builder.finish(traced), self._builder.update(traced)):
            self._others[lowered.name] = self._pool.submit(lowered.compile)

    def _with_others(
        self, accumulate: int | None, traced: Passes, sizes: Sizes, cut: Cut
    ) -> int | None:
        """The largest of the three programs with what is resident beside each.

        XLA:CPU takes a program's memory when it is called, not when the one before it
        is done: finish's is there while accumulate runs (measured: 201 of 674 MB), and
        accumulate's while update runs where that is not waited for.
        """
        finish = self._others["finish"].result()
        update = self._others["update"].result()
        if accumulate is None or finish.bytes is None or update.bytes is None:
            return None
        rows = 2 * self._batch_bytes(sizes, cut)
        model = sizes.parameters + sizes.frozen + sizes.state
        read = 0
        if self._builder.penalty is not None:
            read = sizes.parameters + self._own_frozen
        called = 0
        if self._on_cpu:
            waited = update.fresh > _WORTH_A_WAIT
            called = finish.fresh + (0 if waited else update.fresh)
        saved = self._held_by_a_save(sizes)
        return saved + max(
            accumulate + called + self._scratch(traced) + sizes.optimizer + rows // 2,
            finish.bytes + sizes.optimizer + model - read + rows,
            update.bytes + sizes.frozen + 2 * sizes.state + rows + self._kept(traced),
        )

    def _held_by_a_save(self, sizes: Sizes) -> int:
        """What a checkpoint that is being written keeps from being replaced.

        On CPU it is written from where it lies, so the update that would have taken
        the place of parameters and optimizer state takes more (measured: 147 MB beside
        151 of them). Other devices' arrays are copied to the host first.
        """
        if not (self._builder.settings.saves and self._on_cpu):
            return 0
        return sizes.parameters + sizes.optimizer + sizes.state

    def _kept(self, traced: Passes) -> int:
        """The sums that could not become the gradient: they wait for the next step."""
        same = self._builder.reusable(traced)
        structs, specs = traced.gradient_structs, self._builder.summed(traced)
        return self._builder.settings.placement.bytes_of(
            [s for s, reuse in zip(structs, same, strict=True) if not reuse],
            [s for s, reuse in zip(specs, same, strict=True) if not reuse],
        )

    @property
    def _own_frozen(self) -> int:
        """Bytes of the model's frozen leaves on one device."""
        skeleton = self._builder.skeleton
        bytes_of = self._builder.settings.placement.bytes_of
        return bytes_of(skeleton.frozen, skeleton.frozen_specs)

    @property
    def _on_cpu(self) -> bool:
        return self._builder.settings.placement.backend == "cpu"

    def _scratch(self, traced: Passes) -> int:
        """What XLA:CPU's convolutions allocate beside the analysis."""
        if not self._on_cpu:
            return 0
        return max(conv_scratch(jaxpr) for jaxpr in traced.jaxprs)

    def _sizes(self, traced: Passes) -> Sizes:
        skeleton = self._builder.skeleton
        captured = [*traced.captured, *skeleton.loss_arrays]
        penalty = self._builder.penalty
        if penalty is not None:
            captured += penalty.captured
        whole = list(self._builder.layout.whole_structs)
        row = sum(
            math.prod(s.shape) * s.dtype.itemsize
            for s in self._builder.layout.row_structs
        )
        bytes_of = self._builder.settings.placement.bytes_of
        return Sizes(
            parameters=bytes_of(skeleton.trainable, skeleton.parameter_specs),
            frozen=self._own_frozen + _bytes_of(captured) + nbytes(whole),
            state=nbytes([*skeleton.state_structs, *traced.bank]),
            optimizer=bytes_of(self._builder.opt_structs, self._builder.opt_specs),
            accumulator=bytes_of(traced.gradient_structs, self._builder.summed(traced)),
            row=row + 4,  # and its weight
        )

    def _batch_bytes(self, sizes: Sizes, cut: Cut) -> int:
        """The rows of one window on one device."""
        return sizes.row * cut.window // cut.devices

    def _parts(self, sizes: Sizes, batch: int) -> Parts:
        return Parts(
            parameters=sizes.parameters,
            frozen=sizes.frozen,
            state=2 * sizes.state,
            optimizer=sizes.optimizer,
            accumulator=sizes.accumulator,
            batch=batch,
        )

    def _told(self, parts: Parts, need: int | None, traced: Passes) -> Parts:
        """The parts that add up to the bytes needed."""
        if need is None:
            return parts
        extra = []
        if saved := self._held_by_a_save(self._sizes(traced)):
            extra.append(("checkpoint being written", saved))
        left = need - parts.total - saved
        if scratch := min(self._scratch(traced), max(0, left)):
            extra.append(("convolutions", scratch))
        return replace(parts, extra=tuple(extra)).with_total(need)

    # --- the chosen one -----------------------------------------------------------

    def _ready(self, found: Found, limit: Limit | None) -> Ready:
        k = found.num_microbatches
        cut = self._builder.cut(k, windows=self._windows)
        traced = self._traced[k]
        program = found.measurement.program
        if isinstance(program, Lowered):
            program = program.compile()
        weigh = None
        if traced.num_terms > 1 and not self._builder.forward:
            weigh = self._builder.weigh(traced, cut).compile()
        return Ready(
            self._plan(found, limit, cut, traced, program),
            cut,
            traced,
            self._builder,
            program,
            weigh,
            *self._other_programs(),
        )

    def _other_programs(self) -> tuple[Program | None, Program | None]:
        return self._others["finish"].result(), self._others["update"].result()

    def _plan(
        self,
        found: Found,
        limit: Limit | None,
        cut: Cut,
        traced: Passes,
        program: Program,
    ) -> Plan:
        settings = self._builder.settings
        parts = found.measurement.parts
        assert parts is not None
        backend = settings.placement.backend
        device = settings.placement.devices[0].device_kind
        return Plan(
            global_batch=self._rows,
            devices=cut.devices,
            num_microbatches=cut.windows * cut.num_microbatches,
            windows=cut.windows,
            rematerialised=self._builder.remat is True,
            microbatch=cut.microbatch,
            predicted_bytes=found.measurement.bytes,
            limit_bytes=None if limit is None else limit.bytes,
            limit_source="unknown" if limit is None else limit.source,
            parts=parts,
            arrays=program.arrays,
            probes=tuple(_of_all_windows(p, cut.windows) for p in found.probes),
            source=(
                f"memory_analysis() of the compiled programs on {backend} ({device}); "
                "another backend needs a plan of its own"
            ),
            notes=(*self._warnings(traced, cut), *self._sharding_notes()),
        )

    @property
    def _batch_norms(self) -> list[str]:
        return self._builder.batch_norms

    def _sharding_notes(self) -> list[str]:
        """Which leaves `shard_optimizer=True` had to leave whole."""
        settings, skeleton = self._builder.settings, self._builder.skeleton
        devices = settings.placement.size
        if not settings.shard_optimizer or devices == 1:
            return []
        paths = skeleton.model.paths(Role.TRAINABLE)
        whole = [
            path
            for path, spread in zip(paths, skeleton.spreads, strict=True)
            if spread.axis is None
        ]
        cut = len(paths) - len(whole)
        note = f"shard_optimizer: {cut} of {len(paths)} leaves over {devices} devices"
        if whole:
            note += (
                f"; whole on each, since no axis divides by {devices}: "
                f"{', '.join(path.lstrip('.') or 'the model' for path in whole)}"
            )
        return [note]

    def _warnings(self, traced: Passes, cut: Cut) -> list[str]:
        notes = []
        passes = cut.windows * cut.num_microbatches
        if self._batch_norms and passes > 1:
            notes.append(
                f"BatchNorm ({', '.join(self._batch_norms)}) sees microbatches of "
                f"{cut.microbatch} rows and moves its statistics "
                f"{passes} times per step: not the whole batch's "
                "statistics. eqx.nn.GroupNorm or LayerNorm do not depend on the batch; "
                "microbatch= pins the size"
            )
        for left in traced.left:
            notes.append(
                f"an array of {left.nbytes:,} bytes could not be made an argument "
                f"({left.description}); it is part of the program"
            )
        dtype = self._builder.settings.compute_dtype
        if dtype is not None:
            wide = wide_products(traced, jnp.dtype(dtype))
            if wide:
                notes.append(
                    f"{len(wide)} products ({', '.join(sorted(set(wide)))}) are not in "
                    f"{jnp.dtype(dtype)}: a wider input promotes them. Cast the inputs "
                    "in the loss"
                )
        return notes


class ForwardPlanner(Planner):
    """Plans an evaluation: one program, no optimizer."""

    def _start_others(self, traced: Passes) -> None:
        return None

    def _other_programs(self) -> tuple[Program | None, Program | None]:
        return None, None

    def _with_others(
        self, accumulate: int | None, traced: Passes, sizes: Sizes, cut: Cut
    ) -> int | None:
        if accumulate is None:
            return None
        return accumulate + self._scratch(traced) + self._batch_bytes(sizes, cut)


def _same_limit(ready: Ready) -> Limit | None:
    """The limit of an earlier plan of the same step."""
    most = ready.plan.limit_bytes
    if most is None:
        return None
    return Limit(most, ready.plan.limit_source, given=False)


def _of_all_windows(probe: Probe, windows: int) -> Probe:
    return replace(probe, num_microbatches=windows * probe.num_microbatches)


def _bytes_of(arrays: Sequence[Any]) -> int:
    return sum(
        int(np.prod(np.shape(a))) * jax.dtypes.canonicalize_dtype(a.dtype).itemsize
        for a in arrays
    )


def start_tail(ready: Ready) -> None:
    """Compiles the programs of short batches in a thread, while full ones run."""
    tail = ready.tail
    if tail.accumulate is not None or tail.coming:
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="eqaccum-tail")
    tail.coming = [pool.submit(lowered.compile) for lowered in _lowered_tail(ready)]
    pool.shutdown(wait=False)


def tail_programs(ready: Ready) -> Tail:
    """The programs for a batch that leaves passes empty, compiled when first needed."""
    tail = ready.tail
    if tail.accumulate is None:
        start_tail(ready)
        programs = [coming.result() for coming in tail.coming]
        tail.coming = []
        tail.accumulate = programs[0]
        tail.weigh = programs[1] if len(programs) > 1 else None
        for program in programs:
            keep(program)
    return tail


def _lowered_tail(ready: Ready) -> list[Lowered]:
    builder, traced, cut = ready.builder, ready.traced, ready.cut
    lowered = [builder.accumulate(traced, cut, bounded=True)]
    if ready.weigh is not None:
        lowered.append(builder.weigh(traced, cut, bounded=True))
    return lowered
