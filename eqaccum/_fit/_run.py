"""One call of `fit` under way: the loop over global batches."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _errors
from .._accumulate import check_labels
from .._data import Batch, Place, Source, epoch_order
from .._doors import Evaluation, SelfTest
from .._mesh import parts_here
from .._plan import Plan
from .._step import Pending, Placed, Step, region
from .._types import Metrics, TrainState
from ._checkpoint import Checkpoints
from ._history import VALIDATION, History
from ._info import Info
from ._interrupt import TERMINATED, Interrupt
from ._length import Length
from ._progress import Progress
from ._record import Position
from ._result import FitResult
from ._together import Together

_MAX_SKIPPED = 20


@dataclass
class Run:
    """One call of `fit` under way."""

    step: Step
    source: Source
    rows: int
    length: Length
    classes: int | None
    train: TrainState
    order_key: np.ndarray
    together: Together
    validation: Evaluation | None
    validate_every: int | None
    callbacks: Sequence[Callable]
    progress: bool | None
    history: History = field(default_factory=History)
    position: Position = Position()  # where it starts
    checkpoints: Checkpoints | None = None
    self_test: SelfTest | None = None
    _skipped: int = field(init=False)
    _place_now: Place | None = None  # after the newest batch

    def __post_init__(self) -> None:
        self._skipped = _skipped_last(self.history) % _MAX_SKIPPED

    def go(self) -> FitResult:
        bar = Progress(
            show=self.progress if self.together.is_first else False,
            total=self.length.steps,
            done=self.train.step,
            passes=self._plan.num_microbatches,
        )
        try:
            with Interrupt(terminate=self.checkpoints is not None) as interrupt:
                self._loop(bar, interrupt)
                self.step.wait(self.train)
                if self.checkpoints is not None:
                    self._save(self.checkpoints)
                    self.checkpoints.close()
        except BaseException as error:  # a second Ctrl-C, too
            self._attach(error)
            raise
        finally:
            bar.close()
        if self.together.terminated(interrupt):
            raise SystemExit(TERMINATED)
        return self.result

    @property
    def _plan(self) -> Plan:
        assert self.step.plan is not None
        return self.step.plan

    @property
    def _target(self) -> int:
        """The position of y, the last row leaf of data `(x, y)`."""
        return len(self.source.layout.row_structs) - 1

    @property
    def result(self) -> FitResult:
        return FitResult(self.train, self.history, self._plan)

    def _attach(self, error: BaseException) -> None:
        """Nothing that was trained is lost to an exception, whoever raised it."""
        steps, lost = self.train.step, self._lost
        if steps > 0 and not lost and getattr(error, "result", None) is None:
            try:
                error.result = self.result  # type: ignore[attr-defined]
                error.add_note(
                    f"eqaccum: what was trained in {steps} step{'s' * (steps > 1)} is "
                    "in this exception's .result"
                )
            except AttributeError:  # an exception with slots
                pass
        if self.checkpoints is not None:
            self._rescue(error, self.checkpoints, lost=lost)

    def _rescue(
        self, error: BaseException, checkpoints: Checkpoints, *, lost: bool
    ) -> None:
        """Saves the last good step, and says in the exception where to go on.

        Several processes save together or not at all: one alone would wait for ever.
        """
        try:
            quiet = KeyboardInterrupt | _errors.CheckpointError
            if self.together.knows(error) and not isinstance(error, quiet):
                # An exception may have come between an update and its entry.
                whole = len(self.history.get("loss", ())) == self.train.batch_index
                if whole and not lost and self.train.step > 0:
                    self._save(checkpoints)
                checkpoints.close()
        except Exception as second:
            error.add_note(f"eqaccum: the last step was not saved: {second}")
        newest = checkpoints.newest
        if newest is not None:
            error.add_note(
                f"eqaccum: the newest checkpoint is {newest}; fit(..., resume=True) "
                "goes on from there"
            )

    def _save(self, checkpoints: Checkpoints) -> None:
        self.step.wait(self.train)  # an update that failed shows here, by name
        with region("checkpoint"):
            checkpoints.save(
                self.train, self.history, self._plan, self.step.trial, self._place_now
            )

    def _save_due(self, metrics: Metrics, *, epoch_ended: bool) -> None:
        """A checkpoint where one is due; what the one before met is raised."""
        if self.checkpoints is None:
            return
        self.checkpoints.check()
        if self.checkpoints.is_due(
            self.train.step, skipped=bool(metrics.skipped), epoch_ended=epoch_ended
        ):
            self._save(self.checkpoints)

    @property
    def _lost(self) -> bool:
        """Whether the last update failed, which may show only now."""
        try:
            self.step.wait(self.train)
        except _errors.StepError:
            return True
        return False

    def _loop(self, bar: Progress, interrupt: Interrupt) -> None:
        if self._is_over:
            return
        batches = self._batches()
        batch = next(batches, None)
        placed = None if batch is None else self._place(batch)
        if placed is not None and self._may_pad:
            self.step.check_zero_weights(self.train, placed)
        if batch is not None and self.self_test is not None and self.train.step == 0:
            train = self.train
            self.self_test(train.model, train.state, train.key, batch)
        if placed is not None and self._short:
            self.step.expect(self._short, placed)
        last = time.perf_counter()
        while placed is not None:
            epoch = placed.batch.epoch
            pending = self._launch(placed)
            following = self._following(batches, interrupt)
            self.train, metrics = self.step.complete(self.train, pending)
            now = time.perf_counter()
            self.history.add(
                metrics, seconds=now - last, step=self.train.step, epoch=epoch
            )
            self._place_now = placed.batch.after
            last = now
            bar.step(loss=metrics.loss, examples=metrics.examples)
            self._count_skips(metrics)
            following = self._heard(following, interrupt)
            ended = self._ends_epoch(placed.batch, following)
            validation = self._validate(epoch_ended=ended)
            stop = self._call_back(metrics, epoch, validation)
            self._save_due(metrics, epoch_ended=ended)
            last += self._paused(now)
            if following.failure is not None:
                raise following.failure
            if stop or self.together.asked(interrupt):
                _errors.say(f"stopped after step {self.train.step}")
                return
            if self._is_over:
                return
            placed = following.placed

    @property
    def _is_over(self) -> bool:
        return self.length.steps is not None and self.train.step >= self.length.steps

    def _ends_epoch(self, batch: Batch, following: "_Following") -> bool:
        """Whether this was its epoch's last batch, or the last of the run."""
        if following.placed is not None:
            return following.placed.batch.epoch != batch.epoch
        return following.is_last or batch.index + 1 == self.length.per_epoch

    def _validate(self, *, epoch_ended: bool) -> dict[str, float] | None:
        """The validation metrics, where one is due after this step."""
        if self.validation is None:
            return None
        due = epoch_ended
        if self.validate_every is not None:
            due = self.train.step % self.validate_every == 0
        if not due:
            return None
        with region("validate"):
            values = self.validation(self.train.model, self.train.state)
        self.history.add_validation(self.train.step, values)
        return values

    def _call_back(
        self, metrics: Metrics, epoch: int, validation: dict[str, float] | None
    ) -> bool:
        """Calls those that are due; whether one of them asks to stop."""
        if not self.callbacks:
            return False
        step, stop, failure = self.train.step, False, None
        info = Info(step, epoch, metrics, validation, self.history, self.train)
        try:
            for callback in self.callbacks:
                if step % getattr(callback, "every", 1) == 0:
                    with region("callback"):
                        stop = callback(info) is True or stop
        except Exception as error:
            failure = error
        return self.together.agree(stop, failure)

    @staticmethod
    def _paused(since: float) -> float:
        """Time that is not a step's: validation, callbacks and checkpoints."""
        return time.perf_counter() - since

    @property
    def _short(self) -> int:
        """Rows of the last batch of an epoch where it is short, else 0."""
        rows = self.source.rows
        if rows is None or self.length.drop_remainder:
            return 0
        return rows % self.rows

    @property
    def _may_pad(self) -> bool:
        """Whether some batch of the run can have a row of weight 0."""
        rows, weights = self.source.rows, self.source.weights
        if weights is not None and not np.all(weights):
            return True
        if self.length.drop_remainder:
            return False
        return rows is None or rows % self.rows != 0

    def _following(
        self, batches: Iterator[Batch], interrupt: Interrupt
    ) -> "_Following":
        """The next batch, gathered while the device works on this one.

        What the user's data raise waits until the step under way is completed.
        """
        steps = self.length.steps
        last = steps is not None and self.train.step + 1 >= steps
        if last and not self.step.may_skip:
            return _Following(is_last=True)
        if interrupt.asked and not self.together.several:
            return _Following()
        try:
            batch = next(batches, None)
            if batch is None:
                return _Following(is_last=True)
            return _Following(self._place(batch))
        except Exception as error:
            return _Following(failure=error)

    def _launch(self, placed: Placed) -> Pending:
        try:
            return self.step.launch(self.train, placed)
        except _errors.StepError as error:
            self.together.known = error  # accumulate: all processes told each other
            raise

    def _heard(self, following: "_Following", interrupt: Interrupt) -> "_Following":
        """What follows in all processes: nothing where one of them failed."""
        failure = following.failure
        if failure is None and self.checkpoints is not None and self.together.several:
            try:
                self.checkpoints.check()
            except _errors.CheckpointError as error:
                failure = error
        failure = self.together.hear(interrupt, failure)
        return following if failure is None else _Following(failure=failure)

    def _place(self, batch: Batch) -> Placed:
        placed = self.step.place(batch, self.train)
        if self.classes is not None:
            check_labels(parts_here(placed.rows[self._target]), self.classes)
        return placed

    def _batches(self) -> Iterator[Batch]:
        epoch, start = self.position.epoch, self.position.batch
        while self.length.epochs is None or epoch < self.length.epochs:
            order = None
            if self.length.shuffle and self.source.rows is not None:
                order = epoch_order(self.order_key, epoch, self.source.rows)
            yield from self.source.epoch(
                epoch,
                global_batch=self.rows,
                order=order,
                drop_remainder=self.length.drop_remainder,
                start=start,
            )
            epoch, start = epoch + 1, 0

    def _count_skips(self, metrics: Metrics) -> None:
        self._skipped = self._skipped + 1 if metrics.skipped else 0
        if self._skipped >= _MAX_SKIPPED:
            error = _errors.too_many_skips(self._skipped)
            self.together.known = error
            raise error


@dataclass(frozen=True)
class _Following:
    """The batch after this one; none because this `is_last`, or nobody looked."""

    placed: Placed | None = None
    is_last: bool = False
    failure: Exception | None = None


def _skipped_last(history: History) -> int:
    """How many batches at the end of a history were skipped, in a row."""
    skipped = np.asarray(history.get("skipped", ()), bool)
    kept = np.flatnonzero(~skipped)
    return len(skipped) - (int(kept[-1]) + 1 if len(kept) else 0)


def check_callbacks(callbacks: Any, *, validates: bool) -> None:
    """Refuses what cannot be called, or has no whole number of steps as `every`.

    What `watches` a name of the validation needs one.
    """
    if not isinstance(callbacks, Sequence):
        raise _errors.not_callbacks(callbacks)
    for callback in callbacks:
        if isinstance(callback, type):
            raise _errors.callback_not_made(callback)
        every = getattr(callback, "every", 1)
        whole = isinstance(every, int) and not isinstance(every, bool)
        if not callable(callback) or not whole or every < 1:
            raise _errors.bad_callback(callback)
        watched = getattr(callback, "watches", "")
        if str(watched).startswith(VALIDATION) and not validates:
            raise _errors.watches_no_validation(callback)
