"""`Step`: the three programs called in order, with one wait before the update."""

import time
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .. import _errors
from .._accumulate import Form, run_key
from .._data import Batch, Layout, batch_of
from .._plan import Plan, format_bytes, is_out_of_memory
from .._tree import Partition
from .._types import Metrics, Model, Own, Structure, TrainState
from . import _optimizer
from ._buffers import Buffers
from ._compile import keep, region
from ._culprits import find_culprits
from ._ema import with_ema
from ._fastest import Trial, start_trial
from ._launch import Launcher, Pending, Placed
from ._measured import Watch, watch
from ._planner import Planner, Ready, start_tail
from ._programs import Builder
from ._settings import (
    Settings,
    Skeleton,
    batch_norms,
    check_values,
    in_inference_mode,
    skeleton,
)

# XLA:CPU frees a program's temporaries just after it says that the program is done. On
# two busy cores a fifth of this was enough; without, the next step's were there as well
# in 3 runs of 16 (848 MB for 416).
_LET_GO = 5e-4  # seconds


class Step:
    """One optimizer update per call, over a global batch of any pytree of arrays.

    Made by `make_step`. It plans at the first call (or takes `plan=`), compiles then,
    and from there on only runs compiled programs.

    **Attributes:**

    - `plan`: the `Plan` in use, None before the first call.

    !!! Example

        ```python
        step = eqaccum.make_step(loss, optax.adamw(1e-3), global_batch=4096)
        train = step.init(model, jax.random.key(0))
        for batch in batches:
            train, metrics = step(train, batch)
        model = train.model
        ```
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._optimizer = _optimizer.check_optimizer(settings.optimizer)
        if settings.ema is not None:
            self._optimizer = with_ema(self._optimizer, settings.ema)
        self._skeleton: Skeleton | None = None
        self._opt: tuple[Partition, list[Any]] | None = None
        self._batch_norms: list[str] = []
        self._ready: dict[Layout, Ready] = {}
        self._trials: dict[Layout, Trial] = {}
        self._watches: dict[Layout, Watch | None] = {}
        self._buffers = Buffers(settings.placement)
        self._launcher = Launcher(settings.placement, self._buffers)
        self._told_alone = False
        self.plan: Plan | None = None

    def count_saves(self) -> None:
        """From now on the plan counts what a save in the background holds on to."""
        self._settings = replace(self._settings, saves=True)

    def share_rows(self) -> None:
        """From now on each process passes rows of its own, its share of a batch.

        **Raises:**

        `InputError` where the rows or the devices cannot be shared evenly.
        """
        settings, placement = self._settings, self._settings.placement
        processes = len(placement.processes)
        if settings.global_batch % processes:
            raise _errors.share_of_global_batch(settings.global_batch, processes)
        placement.check_equal_shares()
        if isinstance(settings.loss, Form) and not settings.loss.shares_rows:
            raise _errors.groups_of_shares()
        self._settings = replace(settings, shares=processes)

    # --- before the first step ----------------------------------------------------

    def describe(self, model: PyTree, state: Any = None) -> None:
        """Reads the model's structure (arrays or structs) and checks the optimizer."""
        before, read = self._skeleton, skeleton(self._settings, model, state)
        self._skeleton = read  # of this model, even where the same programs serve it
        if read.same(before):
            return
        parameters = self._skeleton.model.filtered(self._skeleton.trainable)
        self._opt = _optimizer.opt_partition(self._optimizer, parameters)
        self._batch_norms = batch_norms(model)
        if self._tries and self._batch_norms:
            raise _errors.fastest_with_batch_norm(self._batch_norms)
        fixed = in_inference_mode(model)
        if fixed:
            _errors.say(f"in inference mode and left so: {', '.join(fixed)}")
        self._ready.clear()
        self._trials.clear()
        self._watches.clear()

    @_errors.short_tracebacks
    def init(
        self,
        model: Model,
        key: Any = None,
        *,
        state: Own[eqx.nn.State | None, ...] = None,
    ) -> TrainState[Model]:
        """A fresh `TrainState`; the model is copied, the user's stays usable.

        **Arguments:**

        - `model`: any pytree with floating or complex array leaves to train.
        - `key`: the run's PRNG key; None is `jax.random.key(0)`.
        - `state`: the model's `eqx.nn.State`, if it has one.

        **Raises:**

        `InputError` if the model, the state or the key cannot work.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, key))):
            raise _errors.inside_jit("step.init")
        check_values(model, state)
        data = run_key(key)
        self.describe(model, state)
        skeleton, (opt_partition, _) = self._described
        place = self._settings.placement.place
        split = skeleton.model.split(model)
        specs = skeleton.parameter_specs
        trainable = place([_strong(leaf) for leaf in split.trainable], specs)
        if isinstance(trainable[0], Tracer):  # inside jit everything is traced
            raise _errors.inside_jit("step.init")
        builder = self._builder(Layout(jax.tree.structure(()), ()))
        program = builder.init().compile()
        keep(program)
        opt_leaves = list(program(trainable))
        state_leaves: list[Any] = []
        if skeleton.state is not None:
            state_leaves = place(skeleton.state.split(state).frozen)
        return TrainState(
            trainable,
            place(split.frozen, skeleton.frozen_specs),
            state_leaves,
            _distinct(opt_leaves, trainable, place),
            self._empty_bank,
            data,
            np.zeros((), np.int32),
            np.zeros((), np.int32),
            self._buffers.empty(builder.noise_structs),
            Structure(skeleton.model, skeleton.state, opt_partition),
        )

    @property
    def _empty_bank(self) -> list[Any]:
        """The rows of a memory bank; none before a plan tells what they are."""
        for ready in self._ready.values():
            return self._buffers.empty(ready.traced.bank)
        return []

    def prepare(self, layout: Layout, *, own_bytes: int = 0) -> Ready:
        """The programs for batches of this layout, planned when first seen."""
        if layout not in self._ready:
            builder = self._builder(layout)
            ready = Planner(builder, own_bytes=own_bytes).make()
            if self._tries:
                self._trials[layout] = start_trial(ready)
                ready = self._trials[layout].current
            if self._settings.noise_scale and ready.cut.independent == 1:
                self._say_alone()
            self._ready[layout] = ready
            self.plan = self.plan or ready.plan
        return self._ready[layout]

    def _say_alone(self) -> None:
        if not self._told_alone:
            self._told_alone = True
            _errors.say(_errors.nothing_to_compare(self._settings.global_batch))

    @property
    def _tries(self) -> bool:
        """Whether sizes are tried on the first steps."""
        return self._settings.microbatch == "fastest" and self._settings.plan is None

    def _builder(self, layout: Layout) -> Builder:
        skeleton, (opt_partition, opt_structs) = self._described
        return Builder(
            self._settings,
            skeleton,
            layout,
            self._optimizer,
            opt_partition,
            opt_structs,
            self._batch_norms,
            None if self._settings.remat == "auto" else self._settings.remat,
        )

    @property
    def _described(self) -> tuple[Skeleton, tuple[Partition, list[Any]]]:
        if self._skeleton is None or self._opt is None:
            raise _errors.foreign_train_state()
        return self._skeleton, self._opt

    @property
    def trial(self) -> str:
        """How far a trial of `microbatch="fastest"` is; a plan of one is its end."""
        if self._settings.microbatch != "fastest":
            return "none"
        settled = all(trial.settled for trial in self._trials.values())
        return "settled" if settled else "under way"

    @property
    def may_skip(self) -> bool:
        """Whether a batch can be left out, so that it does not count as a step."""
        return self._settings.nonfinite == "skip"

    # --- one step -----------------------------------------------------------------

    @_errors.short_tracebacks
    def __call__(
        self, train: Own[TrainState[Model], ...], batch: PyTree, *, weights: Any = None
    ) -> tuple[TrainState[Model], Metrics]:
        """One update.

        **Arguments:**

        - `train`: the newest `TrainState`; it is consumed.
        - `batch`: a pytree of arrays with up to `global_batch` leading rows.
        - `weights`: one non-negative weight for each row, shape (rows,), or None.

        **Returns:**

        The new `TrainState` and the step's `Metrics`. Where the step raises before its
        update, the `train` passed in is still valid.

        **Raises:**

        `InputError` for a batch that cannot work, `NonFiniteError` for a loss or
        gradient that is not finite, `StepError` where the device fails.
        """
        self._check_train(train)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch)):
            raise _errors.inside_jit("step")
        rows = batch_of(batch, in_axes=self._settings.in_axes, weights=weights)
        return self.complete(train, self.launch(train, self.place(rows, train)))

    def place(self, batch: Batch, train: TrainState | None = None) -> Placed:
        """Gathers a batch into slots: the one copy that is made of its rows."""
        if batch.count > self._settings.global_batch:
            raise _errors.batch_too_large(batch.count, self._settings.global_batch)
        # a plan and a watch begin with it; the steps after have no use for it
        own_bytes = 0 if batch.layout in self._watches else _bytes(train)
        ready = self.prepare(batch.layout, own_bytes=own_bytes)
        trial = self._trials.get(batch.layout)
        settled = trial is None or trial.settled
        if settled and batch.layout not in self._watches:
            devices = self._settings.placement.devices
            self._watches[batch.layout] = watch(devices, own_bytes=own_bytes)
        return self._launcher.place(batch, ready)

    def launch(self, train: TrainState, placed: Placed) -> Pending:
        """Starts accumulate and finish; returns before they are done."""
        placed = self._up_to_date(placed)
        if placed.ready.must_wait:
            self.wait(train, placed.ready)
        if placed.ready.must_let_go:
            time.sleep(_LET_GO)
        self._launcher.check_bank(train, placed.ready)
        if placed.padded or placed.ready.traced.fills_up:
            self.check_zero_weights(train, placed)
        while True:
            try:
                return self._launcher.launch(train, placed)
            except Exception as error:
                placed = self._smaller(train, placed, error)

    def expect(self, rows: int, placed: Placed) -> None:
        """Prepares for a batch of fewer rows: its programs compile while others run."""
        ready = placed.ready
        all_passes = ready.cut.windows * ready.cut.num_microbatches
        if ready.traced.ends_early and ready.cut.passes(rows) < all_passes:
            start_tail(ready)

    def check_zero_weights(self, train: TrainState, placed: Placed) -> None:
        """Checks, once, that the loss does not count rows of weight 0."""
        traced = placed.ready.traced
        if placed.ready.tail.checked:
            return
        traced.check_zero_weights(
            captured=self._buffers.captured(traced.captured),
            arguments=self._launcher.arguments(train, placed),
        )
        placed.ready.tail.checked = True

    def complete(
        self, train: TrainState, pending: Pending
    ) -> tuple[TrainState, Metrics]:
        """Waits for `ok`, the one wait of a step, and only then updates."""
        while True:
            placed = pending.placed
            assert placed is not None
            ready, scalars = placed.ready, pending.finished.scalars
            try:
                with region("wait"):
                    ok = bool(scalars.ok)
                break
            except Exception as error:
                if self._settings.placement.is_shared:  # others wait for this one
                    raise self._failure("finish", ready, error, lost=False) from error
                smaller = self._smaller(train, placed, error)
            pending = self.launch(train, smaller)
        self._note_time(placed, pending)
        metrics = self._metrics(placed, pending, skipped=False)
        batch_count = np.asarray(train.batch_count + 1, np.int32)
        if not ok and self._settings.nonfinite != "ignore":
            self._buffers.give_back(ready, pending.finished.gradient, pending.kept)
            error = self._not_finite(train, placed, metrics)
            if self._settings.nonfinite == "raise":
                raise error
            _errors.say(f"skipped: {error}")
            skipped = eqx.tree_at(lambda t: t.batch_count, train, batch_count)
            return skipped, eqx.tree_at(lambda m: m.skipped, metrics, True)
        layout = placed.batch.layout
        pending.placed = placed = None  # their memory is the update's
        assert ready.update is not None
        try:
            trainable, opt_leaves = ready.update(
                train.trainable_leaves,
                train.opt_leaves,
                pending.finished.gradient,
                scalars.loss,
                scalars.penalty,
            )
        except Exception as error:
            lost = any(leaf.is_deleted() for leaf in train.trainable_leaves)
            raise self._failure("update", ready, error, lost=lost) from error
        self._buffers.give_back(ready, pending.finished.gradient, pending.kept)
        self._compare(layout, trainable)
        # the caller may hold on to it while the next step runs
        pending.finished = replace(pending.finished, gradient=[])
        states = len(train.state_leaves)
        new = TrainState(
            trainable,
            train.frozen_leaves,
            pending.state[:states],
            opt_leaves,
            pending.state[states:],
            train.key,
            np.asarray(train.step_count + 1, np.int32),
            batch_count,
            pending.finished.averages,
            train.structure,
        )
        return new, metrics

    def _compare(self, layout: Layout, updated: list[Any]) -> None:
        """Puts what the device measured of a plan's first step beside the prediction.

        Waits for the update, once, and only where the device keeps count.
        """
        started, self._watches[layout] = self._watches.get(layout), None
        if started is None:
            return
        jax.block_until_ready(updated)
        ready, measured = self._ready[layout], started.measured()
        if measured is None:
            return
        plan = replace(ready.plan, measured_bytes=measured)
        predicted = plan.predicted_bytes
        if predicted is not None and measured > predicted:
            _errors.warn(
                f"the step took {format_bytes(measured)}, by the device's own count, "
                f"but {format_bytes(predicted)} were predicted: leave more room "
                "(memory_limit=) where other programs share the device"
            )
        self._adopt(layout, replace(ready, plan=plan))

    def _adopt(self, layout: Layout, ready: Ready) -> None:
        """Programs or a plan in the place of others."""
        before, self._ready[layout] = self._ready[layout], ready
        if self.plan is before.plan:
            self.plan = ready.plan

    def _note_time(self, placed: Placed, pending: Pending) -> None:
        """Tells a trial how long a full batch took; it may change the programs."""
        layout = placed.batch.layout
        trial = self._trials.get(layout)
        full = placed.batch.examples == self._settings.global_batch
        if trial is None or trial.settled or not full:
            return
        if placed.ready is not trial.current:  # placed before the last change
            return
        seconds = time.perf_counter() - pending.started
        told = self._settings.placement.exchange(int(1e9 * seconds))
        after = trial.note(max(nanoseconds for (nanoseconds,) in told) / 1e9)
        if after is not self._ready[layout]:
            self._adopt(layout, after)

    def wait(self, train: TrainState, ready: Ready | None = None) -> None:
        """Waits for the update that made `train`: until then its failure is silent.

        **Raises:**

        `StepError` where it failed: the parameters are lost.
        """
        try:
            jax.block_until_ready(
                (train.trainable_leaves, train.opt_leaves, train.state_leaves)
            )
        except Exception as error:
            raise self._failure("the update before", ready, error, lost=True) from error

    # --- its parts ----------------------------------------------------------------

    def _metrics(self, placed: Placed, pending: Pending, *, skipped: bool) -> Metrics:
        scalars, noise = pending.finished.scalars, pending.finished.scalars.noise
        spec = placed.ready.traced.aux_spec
        aux = None
        if self._settings.has_aux:
            batch = placed.batch
            counts = batch.counts or (batch.count,)
            whole = self._settings.placement.whole
            rows = [
                placed.ready.cut.in_order(_joined(tuple(map(whole, parts))), counts)
                for parts in zip(*pending.aux_rows, strict=True)
            ]
            aux = spec.assemble(scalars.aux, rows)
        return Metrics(
            scalars.loss,
            scalars.penalty,
            scalars.grad_norm,
            scalars.weight,
            placed.batch.examples,
            skipped,
            aux,
            scalars.grad_metrics,
            scalars.noise_scale,
            noise and noise.grad_variance,
            noise and noise.grad_square,
            noise and noise.loss_spread,
        )

    def _not_finite(
        self, train: TrainState, placed: Placed, metrics: Metrics
    ) -> _errors.NonFiniteError:
        """What is not finite, and the rows of the global batch that cause it."""
        step = train.step + 1
        if not float(metrics.weight) > 0:
            return _errors.no_weight(step)
        loss = float(metrics.loss)
        if np.isfinite(loss) and not np.isfinite(float(metrics.penalty)):
            return _errors.non_finite(step, "the penalty is not finite", "")
        if np.isfinite(loss) and np.isfinite(float(metrics.grad_norm)):
            return _errors.no_weight_of_a_mean(step)  # nothing else is left
        what = f"the loss is {loss}"
        if np.isfinite(loss):
            what = "the loss is finite but its gradient is not"
        culprits = find_culprits(self._launcher, train, placed)
        return _errors.non_finite(step, what, "" if culprits is None else str(culprits))

    def _up_to_date(self, placed: Placed) -> Placed:
        """A batch that was placed before its programs were given up, placed anew."""
        ready = self._ready[placed.batch.layout]
        if placed.ready.accumulate is ready.accumulate:
            return placed
        return self._launcher.place(placed.batch, ready)

    def _smaller(self, train: TrainState, placed: Placed, error: Exception) -> Placed:
        """The same batch cut into more passes, after one that ran out of memory.

        **Raises:**

        `StepError` where that cannot help: another failure, one example per pass, or
        parameters that were lost.
        """
        self._buffers.drop()
        ready = placed.ready
        self.wait(train, ready)
        where = "accumulate or finish"
        if isinstance(error, _errors.StepError):  # another process's
            raise error
        if not is_out_of_memory(error):
            raise self._failure(where, ready, error, lost=False) from error
        smaller = Planner(ready.builder).more_passes(ready)
        if smaller is None:
            raise self._failure(where, ready, error, lost=False) from error
        changes = ""
        if self._batch_norms:
            changes = (
                "; the batch statistics are now those of another microbatch, so the "
                "experiment changed"
            )
        _errors.warn(
            f"out of memory with {ready.plan.summary()}; the same global batch goes on "
            f"as {smaller.plan.summary()}{changes}"
        )
        self._adopt(placed.batch.layout, smaller)
        return self._launcher.place(placed.batch, smaller)

    def _failure(
        self, where: str, ready: Ready | None, error: Exception, *, lost: bool
    ) -> Exception:
        plan = self.plan if ready is None else ready.plan
        if is_out_of_memory(error) and plan is not None:
            return _errors.out_of_memory(where, plan.summary(), error, lost=lost)
        return _errors.device_failed(where, error, lost=lost)

    def _check_train(self, train: Any) -> None:
        if not isinstance(train, TrainState):
            raise _errors.not_a_train_state(train)
        skeleton, (opt_partition, _) = self._described
        structure = train.structure
        if structure.model != skeleton.model or structure.optimizer != opt_partition:
            raise _errors.foreign_train_state()
        first = train.trainable_leaves[0]
        if isinstance(first, Tracer):
            raise _errors.inside_jit("step")
        if isinstance(first, jax.Array) and first.is_deleted():
            raise _errors.consumed()


def _joined(parts: tuple[Any, ...]) -> Any:
    """Auxiliary rows (passes, rows of a pass, ...) of all windows, slot by slot."""
    flat = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def _strong(leaf: Any) -> Any:
    """The leaf without a weak type, which would be another program at step two."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if isinstance(leaf, jax.Array) and not leaf.weak_type:
        return leaf
    return np.asarray(leaf, dtype)


def _bytes(train: TrainState | None) -> int:
    """What the run's own state takes on a device already."""
    if train is None:
        return 0
    leaves = (
        *train.trainable_leaves,
        *train.frozen_leaves,
        *train.state_leaves,
        *train.opt_leaves,
        *train.bank_leaves,
    )
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def _distinct(leaves: list[Any], taken: list[Any], place: Any) -> list[Any]:
    """The leaves with a buffer each: one given twice cannot be donated twice."""
    seen = {_address(leaf) for leaf in taken}
    out = []
    for leaf in leaves:
        address = _address(leaf)
        if address in seen:
            leaf = place([leaf], [leaf.sharding.spec])[0]
        else:
            seen.add(address)
        out.append(leaf)
    return out


def _address(leaf: Any) -> int:
    return leaf.addressable_shards[0].data.unsafe_buffer_pointer()
