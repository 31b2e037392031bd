"""`Step`: the three programs called in order, with one wait before the update."""

from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .. import _errors
from .._accumulate import Arguments, Batch as Slots, run_key
from .._data import Batch, Layout, batch_of, slots
from .._plan import Plan, is_out_of_memory
from .._tree import Partition
from .._types import Metrics, Structure, TrainState
from . import _optimizer
from ._compile import keep
from ._planner import Planner, Ready, tail_programs
from ._programs import Builder, Finished
from ._settings import Settings, Skeleton, batch_norms, skeleton


@dataclass(frozen=True)
class Placed:
    """A batch gathered into slots, ready for the device."""

    batch: Batch
    rows: list[Any]
    weights: Any
    whole: list[Any]
    passes: int
    padded: bool  # whether one of its rows has weight 0
    ready: Ready


@dataclass
class Pending:
    """A step whose accumulate and finish are under way; nothing is updated yet."""

    placed: Placed | None
    finished: Finished
    state: list[Any]
    aux_rows: list[Any]
    kept: list[Any]


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
        settings.check()
        self._settings = settings
        self._optimizer = _optimizer.check_optimizer(settings.optimizer)
        self._skeleton: Skeleton | None = None
        self._opt: tuple[Partition, list[Any]] | None = None
        self._batch_norms: list[str] = []
        self._ready: dict[Layout, Ready] = {}
        self._placed_arrays: dict[int, tuple[Any, Any]] = {}
        self._whole = _Last()
        self._spare: dict[tuple, list[list[Any]]] = {}
        self.plan: Plan | None = None

    # --- before the first step ----------------------------------------------------

    def describe(self, model: PyTree, state: Any = None) -> None:
        """Reads the model's structure (arrays or structs) and checks the optimizer."""
        read = skeleton(self._settings, model, state)
        if read.same(self._skeleton):
            return
        self._skeleton = read
        parameters = self._skeleton.model.filtered(self._skeleton.trainable)
        self._opt = _optimizer.opt_partition(self._optimizer, parameters)
        self._batch_norms = batch_norms(model)
        self._ready.clear()

    def init(
        self, model: PyTree, key: Any = None, *, state: eqx.nn.State | None = None
    ) -> TrainState:
        """A fresh `TrainState`; the model is copied, the user's stays usable.

        **Arguments:**

        - `model`: any pytree with floating or complex array leaves to train.
        - `key`: the run's PRNG key; None is `jax.random.key(0)`.
        - `state`: the model's `eqx.nn.State`, if it has one.

        **Raises:**

        `InputError` if the model, the state or the key cannot work.
        """
        data = run_key(key)
        self.describe(model, state)
        skeleton, (opt_partition, _) = self._described
        place = self._settings.placement.place
        split = skeleton.model.split(model)
        trainable = place([_strong(leaf) for leaf in split.trainable])
        builder = self._builder(Layout(jax.tree.structure(()), ()))
        program = builder.init().compile()
        keep(program)
        opt_leaves = list(program(trainable))
        state_leaves: list[Any] = []
        if skeleton.state is not None:
            state_leaves = place(skeleton.state.split(state).frozen)
        return TrainState(
            trainable,
            place(split.frozen),
            state_leaves,
            _distinct(opt_leaves, trainable, place),
            data,
            np.zeros((), np.int32),
            np.zeros((), np.int32),
            Structure(skeleton.model, skeleton.state, opt_partition),
        )

    def prepare(self, layout: Layout, *, own_bytes: int = 0) -> Ready:
        """The programs for batches of this layout, planned when first seen."""
        if layout not in self._ready:
            builder = self._builder(layout)
            planner = Planner(builder, self._settings.global_batch, own_bytes=own_bytes)
            self._ready[layout] = planner.make()
            self.plan = self.plan or self._ready[layout].plan
        return self._ready[layout]

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
        )

    @property
    def _described(self) -> tuple[Skeleton, tuple[Partition, list[Any]]]:
        if self._skeleton is None or self._opt is None:
            raise _errors.foreign_train_state()
        return self._skeleton, self._opt

    @property
    def may_skip(self) -> bool:
        """Whether a batch can be left out, so that it does not count as a step."""
        return self._settings.nonfinite == "skip"

    # --- one step -----------------------------------------------------------------

    def __call__(
        self, train: TrainState, batch: PyTree, *, weights: Any = None
    ) -> tuple[TrainState, Metrics]:
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
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch)):
            raise _errors.inside_jit()
        self._check_train(train)
        rows = batch_of(batch, in_axes=self._settings.in_axes, weights=weights)
        return self.complete(train, self.launch(train, self.place(rows, train)))

    def place(self, batch: Batch, train: TrainState | None = None) -> Placed:
        """Gathers a batch into slots: the one copy that is made of its rows."""
        if batch.count > self._settings.global_batch:
            raise _errors.batch_too_large(batch.count, self._settings.global_batch)
        ready = self.prepare(batch.layout, own_bytes=_bytes(train))
        cut = ready.cut
        laid = slots(batch.count, batch.weights, capacity=cut.capacity)
        shape = (cut.num_microbatches, cut.devices * cut.microbatch)
        place = self._settings.placement.place_rows
        taken = batch.take(laid.order)
        rows = place([leaf.reshape(*shape, *leaf.shape[1:]) for leaf in taken])
        (weights,) = place([laid.weights.reshape(shape)])
        whole = self._whole.of(batch.whole, self._settings.placement.place)
        padded = not laid.weights[: self._settings.global_batch].all()
        passes = cut.passes(laid.last)
        return Placed(batch, rows, weights, whole, passes, padded, ready)

    def launch(self, train: TrainState, placed: Placed) -> Pending:
        """Starts accumulate and finish; returns before they are done."""
        ready = placed.ready
        cut = ready.cut
        full = placed.passes >= cut.num_microbatches or not ready.traced.ends_early
        programs = ready if full else tail_programs(ready)
        bound = None if full else np.asarray(placed.passes, np.int32)
        captured = [self._on_device(c) for c in ready.traced.captured]
        arguments = self._arguments(train, placed)
        if placed.padded:
            self.check_zero_weights(train, placed)
        batch = Slots(placed.rows, placed.weights, train.key, train.batch_count, bound)
        state = train.state_leaves
        ratios: list[Array] = []
        if programs.weigh is not None:
            ratios = programs.weigh(captured, arguments, state, batch)
        accumulator = self._accumulator(ready)
        assert programs.accumulate is not None
        sums, outputs = programs.accumulate(
            captured, arguments, state, batch, ratios, accumulator
        )
        return self._finish(train, placed, sums, outputs, ratios)

    def check_zero_weights(self, train: TrainState, placed: Placed) -> None:
        """Checks, once, that the loss does not count rows of weight 0."""
        traced = placed.ready.traced
        if placed.ready.tail.checked:
            return
        traced.check_zero_weights(
            captured=[self._on_device(c) for c in traced.captured],
            arguments=self._arguments(train, placed),
        )
        placed.ready.tail.checked = True

    def _arguments(self, train: TrainState, placed: Placed) -> Arguments:
        return Arguments(
            train.trainable_leaves,
            train.frozen_leaves,
            [self._on_device(leaf) for leaf in self._described[0].loss_arrays],
            placed.whole,
        )

    def _finish(
        self,
        train: TrainState,
        placed: Placed,
        sums: list[Array],
        outputs: Any,
        ratios: list[Array],
    ) -> Pending:
        ready = placed.ready
        same = ready.builder.reusable(ready.traced)
        kept = [s for s, reuse in zip(sums, same, strict=True) if not reuse]
        penalty = ready.builder.penalty
        read = Arguments([], [], [], [])
        if penalty is not None:
            read = Arguments(train.trainable_leaves, train.frozen_leaves, [], [])
        aux_rows, state = outputs.aux_rows, outputs.state
        outputs = eqx.tree_at(lambda o: o.aux_rows, outputs, [])
        if ready.cut.devices == 1:
            outputs = eqx.tree_at(lambda o: o.state, outputs, [])
        finished = ready.finish(
            [self._on_device(c) for c in penalty.captured] if penalty else [],
            read,
            [s for s, reuse in zip(sums, same, strict=True) if reuse],
            kept,
            outputs,
            ratios,
        )
        new_state = state if ready.cut.devices == 1 else finished.state
        return Pending(placed, finished, new_state, aux_rows, kept)

    def complete(
        self, train: TrainState, pending: Pending
    ) -> tuple[TrainState, Metrics]:
        """Waits for `ok`, the one wait of a step, and only then updates."""
        placed = pending.placed
        assert placed is not None
        ready, scalars = placed.ready, pending.finished.scalars
        try:
            ok = bool(scalars.ok)
        except Exception as error:
            raise self._failure(train, ready, error) from error
        metrics = self._metrics(placed, pending, skipped=False)
        pending.placed = None
        batch_count = np.asarray(train.batch_count + 1, np.int32)
        if not ok and self._settings.nonfinite != "ignore":
            self._give_back(ready, pending.finished.gradient, pending.kept)
            if self._settings.nonfinite == "raise":
                raise self._not_finite(train, metrics)
            skipped = eqx.tree_at(lambda t: t.batch_count, train, batch_count)
            return skipped, eqx.tree_at(lambda m: m.skipped, metrics, True)
        try:
            trainable, opt_leaves = ready.update(
                train.trainable_leaves,
                train.opt_leaves,
                pending.finished.gradient,
                scalars.loss,
                scalars.penalty,
            )
        except Exception as error:
            raise _errors.device_failed("update", error) from error
        self._give_back(ready, pending.finished.gradient, pending.kept)
        new = TrainState(
            trainable,
            train.frozen_leaves,
            pending.state,
            opt_leaves,
            train.key,
            np.asarray(train.step_count + 1, np.int32),
            batch_count,
            train.structure,
        )
        return new, metrics

    # --- its parts ----------------------------------------------------------------

    def _metrics(self, placed: Placed, pending: Pending, *, skipped: bool) -> Metrics:
        scalars = pending.finished.scalars
        spec = placed.ready.traced.aux_spec
        aux = None
        if self._settings.has_aux:
            count = placed.batch.count
            rows = [
                leaf.reshape(-1, *leaf.shape[2:])[:count] for leaf in pending.aux_rows
            ]
            aux = spec.assemble(scalars.aux, rows)
        return Metrics(
            scalars.loss,
            scalars.penalty,
            scalars.grad_norm,
            scalars.weight,
            placed.batch.count,
            skipped,
            aux,
        )

    def _not_finite(self, train: TrainState, metrics: Metrics) -> Exception:
        step = train.step + 1
        if not float(metrics.weight) > 0:
            return _errors.no_weight(step)
        loss = float(metrics.loss)
        if not np.isfinite(loss):
            return _errors.non_finite(step, f"the loss is {loss}", "")
        if not np.isfinite(float(metrics.penalty)):
            return _errors.non_finite(step, "the penalty is not finite", "")
        what = "the loss is finite but its gradient is not"
        return _errors.non_finite(step, what, "")

    def _failure(self, train: TrainState, ready: Ready, error: Exception) -> Exception:
        """Whose failure it was: the update before shows only at the next wait."""
        self._spare.clear()
        where = "accumulate or finish"
        try:
            jax.block_until_ready(
                (train.trainable_leaves, train.opt_leaves, train.state_leaves)
            )
        except Exception:  # the parameters themselves are lost
            where = "the update before"
        if is_out_of_memory(error):
            return _errors.out_of_memory(where, ready.plan.summary(), error)
        return _errors.device_failed(where, error)

    def _accumulator(self, ready: Ready) -> list[Any]:
        """The buffers of the gradient before, or fresh ones."""
        spare = self._spare.get(_shapes(ready))
        if spare:
            return spare.pop()
        return self._settings.placement.place(
            [np.zeros(s.shape, s.dtype) for s in ready.traced.gradient_structs]
        )

    def _give_back(self, ready: Ready, gradient: list[Any], kept: list[Any]) -> None:
        same = ready.builder.reusable(ready.traced)
        rest = iter(kept)
        buffers = [
            g if reuse else next(rest) for g, reuse in zip(gradient, same, strict=True)
        ]
        self._spare[_shapes(ready)] = [buffers]

    def _on_device(self, array: Any) -> Any:
        """A captured array where the program reads it, placed once."""
        known = self._placed_arrays.get(id(array))
        if known is None or known[0] is not array:
            placed = self._settings.placement.place([array])[0]
            known = self._placed_arrays[id(array)] = (array, placed)
        return known[1]

    def _check_train(self, train: TrainState) -> None:
        if not isinstance(train, TrainState):
            raise _errors.foreign_train_state()
        skeleton, (opt_partition, _) = self._described
        structure = train.structure
        if structure.model != skeleton.model or structure.optimizer != opt_partition:
            raise _errors.foreign_train_state()
        first = train.trainable_leaves[0]
        if isinstance(first, jax.Array) and first.is_deleted():
            raise _errors.consumed()


@dataclass
class _Last:
    """The whole leaves of the last batch, placed once while they stay the same."""

    given: list[Any] = field(default_factory=list)
    placed: list[Any] = field(default_factory=list)

    def of(self, leaves: list[Any], place: Any) -> list[Any]:
        same = len(leaves) == len(self.given) and all(
            new is old for new, old in zip(leaves, self.given, strict=True)
        )
        if not same:
            self.given, self.placed = list(leaves), place(leaves)
        return self.placed


def _shapes(ready: Ready) -> tuple:
    return tuple((s.shape, str(s.dtype)) for s in ready.traced.gradient_structs)


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
    )
    return sum(leaf.nbytes for leaf in leaves)


def _distinct(leaves: list[Any], taken: list[Any], place: Any) -> list[Any]:
    """The leaves with a buffer each: one given twice cannot be donated twice."""
    seen = {_address(leaf) for leaf in taken}
    out = []
    for leaf in leaves:
        address = _address(leaf)
        if address in seen:
            leaf = place([leaf])[0]
        else:
            seen.add(address)
        out.append(leaf)
    return out


def _address(leaf: Any) -> int:
    return leaf.addressable_shards[0].data.unsafe_buffer_pointer()
