"""One step on the device: rows gathered into slots, accumulate, finish."""

import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from .. import _errors
from .._accumulate import Arguments, Batch as Slots, PassOutputs
from .._data import Batch, Slots as Laid, slots
from .._mesh import Placement
from .._plan import is_out_of_memory
from .._types import TrainState
from ._buffers import Buffers
from ._compile import region
from ._planner import Ready, tail_programs
from ._programs import Finished


@dataclass(frozen=True)
class Window:
    """Some rows of a global batch, ready for the device."""

    rows: list[Any]
    weights: Any
    passes: int  # that hold a row of positive weight


@dataclass(frozen=True)
class Placed:
    """A batch laid into slots; the rows of its first window are gathered."""

    batch: Batch
    laid: Laid
    first: Window
    whole: list[Any]
    ready: Ready

    @property
    def rows(self) -> list[Any]:
        """The rows of the first window: all of them where there is only one."""
        return self.first.rows

    @property
    def padded(self) -> bool:
        """Whether one of the rows of the global batch has weight 0."""
        settings = self.ready.builder.settings
        if self.batch.counts:
            return sum(self.batch.counts) < settings.global_batch
        return not self.laid.weights[: settings.global_batch].all()


@dataclass
class Pending:
    """A step whose accumulate and finish are under way; nothing is updated yet."""

    placed: Placed | None
    finished: Finished
    state: list[Any]
    aux_rows: list[list[Any]]  # of each window
    kept: list[Any]
    started: float  # by `time.perf_counter`


@dataclass(frozen=True)
class _Summed:
    """What accumulate left, over all windows."""

    gradients: list[Array]
    outputs: PassOutputs
    ratios: list[Array]
    aux_rows: list[list[Array]]


@dataclass(frozen=True)
class Launcher:
    """Places batches and starts steps."""

    placement: Placement
    buffers: Buffers

    def place(self, batch: Batch, ready: Ready) -> Placed:
        """Lays a batch into slots and gathers its first window: the one copy of it."""
        capacity = ready.cut.capacity // ready.cut.shares
        laid = slots(batch.count, batch.weights, capacity=capacity)
        if batch.counts:  # all processes run as many passes
            laid = replace(laid, last=max(batch.counts))
        first = self._window(batch, laid, ready, 0)
        return Placed(batch, laid, first, self.buffers.whole(batch.whole), ready)

    def launch(self, train: TrainState, placed: Placed) -> Pending:
        """Starts accumulate and finish; returns before they are done."""
        started = time.perf_counter()
        if self.placement.is_shared:
            summed = self._accumulate_together(train, placed)
        else:
            summed = self._accumulate(train, placed)
        return self._finish(train, placed, summed, started)

    def _accumulate_together(self, train: TrainState, placed: Placed) -> _Summed:
        """Accumulate, and whether it worked in every process: finish waits for all.

        **Raises:**

        What went wrong here, `RanOutElsewhere` where another process ran out of memory,
        `StepError` where it failed in another way.
        """
        summed, failure = None, None
        try:
            summed = self._accumulate(train, placed)
            jax.block_until_ready((summed.gradients, summed.outputs))
        except Exception as error:
            failure = error
        ran_out = failure is not None and is_out_of_memory(failure)
        told = self.placement.exchange(int(failure is not None), int(ran_out))
        lost = [p for p, (failed, memory) in enumerate(told) if failed and not memory]
        if lost and (failure is None or ran_out):
            raise _errors.failed_elsewhere(lost) from failure
        if failure is not None:
            raise failure
        if any(failed for failed, _ in told):
            raise _errors.ran_out_elsewhere([p for p, (f, _) in enumerate(told) if f])
        assert summed is not None
        return summed

    def check_bank(self, train: TrainState, ready: Ready) -> None:
        """Refuses a memory bank that another loss filled."""
        wanted = [f"{s.dtype}{list(s.shape)}" for s in ready.traced.bank]
        held = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in train.bank_leaves]
        if held and held != wanted:
            raise _errors.bank_of_other_rows(", ".join(wanted), ", ".join(held))

    def arguments(self, train: TrainState, placed: Placed) -> Arguments:
        return Arguments(
            train.trainable_leaves,
            train.frozen_leaves,
            self.buffers.captured(placed.ready.builder.skeleton.loss_arrays),
            placed.whole,
        )

    # --- accumulate ---------------------------------------------------------------

    def _window(self, batch: Batch, laid: Laid, ready: Ready, number: int) -> Window:
        cut = ready.cut
        passes, window = cut.num_microbatches, cut.window // cut.shares
        slots = np.arange(number * window, (number + 1) * window)
        if cut.places is not None:
            slots = cut.places
        if cut.shares == 1:
            slots = self.placement.slots_here(slots, passes)
        with region("gather"):
            taken = batch.take(laid.order[slots])
        place = self.placement.place_rows
        with region("place"):
            rows = place([leaf.reshape(passes, -1, *leaf.shape[1:]) for leaf in taken])
            (weights,) = place([laid.weights[slots].reshape(passes, -1)])
        left = cut.passes(laid.last) - number * cut.num_microbatches
        return Window(rows, weights, min(left, cut.num_microbatches))

    def _accumulate(self, train: TrainState, placed: Placed) -> _Summed:
        ready = placed.ready
        shared = (
            self.buffers.captured(ready.traced.captured),
            self.arguments(train, placed),
        )
        ratios = self._weigh(train, placed, shared)
        state = [*train.state_leaves, *self._bank(train, ready)]
        gradients = self.buffers.accumulator(ready)
        before = None if ready.cut.windows == 1 else _zeros(ready)
        aux_rows, outputs = [], None
        for number, window in self._windows(placed):
            program, batch = self._call(train, ready, window, number)
            gradients, outputs = program.accumulate(
                *shared, state, batch, ratios, gradients, before
            )
            aux_rows.append(outputs.aux_rows)
            outputs = replace(outputs, aux_rows=[])
            state = outputs.state
            if before is not None:
                # No more than two windows on the device: the one under way and the next
                jax.block_until_ready(before)
                before = replace(outputs, state=[])
        assert outputs is not None
        return _Summed(gradients, outputs, ratios, aux_rows)

    def _bank(self, train: TrainState, ready: Ready) -> list[Any]:
        """The rows of the memory bank, which begins empty."""
        return train.bank_leaves or self.buffers.empty(ready.traced.bank)

    def _windows(self, placed: Placed) -> Any:
        """The windows that hold rows, each gathered while the one before runs."""
        cut = placed.ready.cut
        passes = cut.passes(placed.laid.last)
        if not placed.ready.traced.ends_early:
            passes = cut.windows * cut.num_microbatches
        yield 0, placed.first
        for number in range(1, -(-passes // cut.num_microbatches)):
            yield number, self._window(placed.batch, placed.laid, placed.ready, number)

    def _call(
        self, train: TrainState, ready: Ready, window: Window, number: int
    ) -> tuple[Any, Slots]:
        """The programs that serve a window, and the window as they take it."""
        cut, passes = ready.cut, max(window.passes, 0)
        full = passes >= cut.num_microbatches or not ready.traced.ends_early
        several = cut.windows > 1
        batch = Slots(
            window.rows,
            window.weights,
            train.key,
            train.batch_count,
            None if full else np.asarray(passes, np.int32),
            np.asarray(number * cut.window, np.int32) if several else None,
            np.asarray(number == 0) if several else None,
            train.step_count if ready.traced.bank else None,
        )
        return (ready if full else tail_programs(ready)), batch

    def _weigh(self, train: TrainState, placed: Placed, shared: Any) -> list[Array]:
        """The ratios of a sum of `Mean`s, by a sweep over the windows of its own."""
        ready = placed.ready
        if ready.weigh is None:
            return []
        before = None
        if ready.cut.windows > 1:
            before = [np.zeros(s.shape, s.dtype) for s in ready.traced.outputs.weights]
        out, state = None, train.state_leaves
        for number, window in self._windows(placed):
            program, batch = self._call(train, ready, window, number)
            out = program.weigh(*shared, state, batch, before)
            if before is not None:
                jax.block_until_ready(before)
                before, state = out.weights, out.state
        assert out is not None
        return out.ratios

    # --- finish -------------------------------------------------------------------

    def _finish(
        self, train: TrainState, placed: Placed, summed: _Summed, started: float
    ) -> Pending:
        ready = placed.ready
        same = ready.builder.reusable(ready.traced)
        sums = list(zip(summed.gradients, same, strict=True))
        kept = [s for s, reuse in sums if not reuse]
        penalty = ready.builder.penalty
        read = Arguments([], [], [], [])
        if penalty is not None:
            read = Arguments(train.trainable_leaves, train.frozen_leaves, [], [])
        outputs, state = summed.outputs, summed.outputs.state
        if ready.cut.devices == 1:  # the state goes on as it is
            outputs = replace(outputs, state=[])
        assert ready.finish is not None
        finished = ready.finish(
            self.buffers.captured(penalty.captured) if penalty else [],
            read,
            [s for s, reuse in sums if reuse],
            kept,
            outputs,
            summed.ratios,
            self._averages(train, ready),
        )
        new_state = state if ready.cut.devices == 1 else finished.state
        return Pending(placed, finished, new_state, summed.aux_rows, kept, started)

    def _averages(self, train: TrainState, ready: Ready) -> list[Array]:
        """Those of the gradient's noise; they begin at 0 where it was not asked for."""
        wanted = ready.builder.noise_structs
        if len(train.noise_leaves) == len(wanted):
            return train.noise_leaves
        return self.buffers.empty(wanted)


def _zeros(ready: Ready) -> PassOutputs:
    """What the first window is given for the sums before it."""
    before = ready.builder.before(ready.traced)
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), before)
