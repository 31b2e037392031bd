"""One call of `fit` under way: the loop over global batches."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _errors
from .._accumulate import check_labels
from .._data import Batch, Source, epoch_order
from .._doors import Evaluation
from .._plan import Plan
from .._step import Placed, Step
from .._types import Metrics, TrainState
from ._history import History
from ._info import Info
from ._interrupt import Interrupt
from ._length import Length
from ._progress import Progress
from ._result import FitResult

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
    validation: Evaluation | None
    validate_every: int | None
    callbacks: Sequence[Callable]
    progress: bool | None
    history: History = field(default_factory=History)
    _skipped: int = 0

    def go(self) -> FitResult:
        bar = Progress(
            show=self.progress,
            total=self.length.steps,
            passes=self._plan.num_microbatches,
        )
        try:
            with Interrupt() as interrupt:
                self._loop(bar, interrupt)
                self.step.wait(self.train)
        except BaseException as error:  # a second Ctrl-C, too
            self._attach(error)
            raise
        finally:
            bar.close()
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
        steps = self.train.step
        if steps == 0 or getattr(error, "result", None) is not None or self._lost:
            return
        try:
            error.result = self.result  # type: ignore[attr-defined]
            error.add_note(
                f"eqaccum: what was trained in {steps} step{'s' * (steps > 1)} is in "
                "this exception's .result"
            )
        except AttributeError:  # an exception with slots
            pass

    @property
    def _lost(self) -> bool:
        """Whether the last update failed, which may show only now."""
        try:
            self.step.wait(self.train)
        except _errors.StepError:
            return True
        return False

    def _loop(self, bar: Progress, interrupt: Interrupt) -> None:
        batches = self._batches()
        batch = next(batches, None)
        placed = None if batch is None else self._place(batch)
        if placed is not None and self._may_pad:
            self.step.check_zero_weights(self.train, placed)
        last = time.perf_counter()
        while placed is not None:
            epoch = placed.batch.epoch
            pending = self.step.launch(self.train, placed)
            following, failure = self._following(batches, interrupt)
            self.train, metrics = self.step.complete(self.train, pending)
            now = time.perf_counter()
            self.history.add(
                metrics, seconds=now - last, step=self.train.step, epoch=epoch
            )
            last = now
            bar.step(loss=metrics.loss, examples=metrics.examples)
            self._count_skips(metrics)
            ended = following is None or following.batch.epoch != epoch
            validation = self._validate(epoch_ended=ended)
            stop = self._call_back(metrics, epoch, validation)
            last += self._paused(now)
            if failure is not None:
                raise failure
            if stop or interrupt.asked:
                _errors.say(f"stopped after step {self.train.step}")
                return
            if self.length.steps is not None and self.train.step >= self.length.steps:
                return
            placed = following

    def _validate(self, *, epoch_ended: bool) -> dict[str, float] | None:
        """The validation metrics, where one is due after this step."""
        if self.validation is None:
            return None
        due = epoch_ended
        if self.validate_every is not None:
            due = self.train.step % self.validate_every == 0
        if not due:
            return None
        values = self.validation(self.train.model, self.train.state)
        self.history.add_validation(self.train.step, values)
        return values

    def _call_back(
        self, metrics: Metrics, epoch: int, validation: dict[str, float] | None
    ) -> bool:
        """Calls those that are due; whether one of them asks to stop."""
        step, stop = self.train.step, False
        info = Info(step, epoch, metrics, validation, self.history, self.train)
        for callback in self.callbacks:
            if step % getattr(callback, "every", 1) == 0:
                stop = callback(info) is True or stop
        return stop

    @staticmethod
    def _paused(since: float) -> float:
        """Time that is not a step's: validation and callbacks."""
        return time.perf_counter() - since

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
    ) -> tuple[Placed | None, Exception | None]:
        """The next batch, gathered while the device works on this one.

        What the user's data raise waits until the step under way is completed.
        """
        steps = self.length.steps
        last = steps is not None and self.train.step + 1 >= steps
        if interrupt.asked or (last and not self.step.may_skip):
            return None, None
        try:
            batch = next(batches, None)
            return (None if batch is None else self._place(batch)), None
        except Exception as error:
            return None, error

    def _place(self, batch: Batch) -> Placed:
        placed = self.step.place(batch, self.train)
        if self.classes is not None:
            check_labels([np.asarray(placed.rows[self._target])], self.classes)
        return placed

    def _batches(self) -> Iterator[Batch]:
        epoch = 0
        while self.length.epochs is None or epoch < self.length.epochs:
            order = None
            if self.length.shuffle and self.source.rows is not None:
                order = epoch_order(self.order_key, epoch, self.source.rows)
            yield from self.source.epoch(
                epoch,
                global_batch=self.rows,
                order=order,
                drop_remainder=self.length.drop_remainder,
            )
            epoch += 1

    def _count_skips(self, metrics: Metrics) -> None:
        self._skipped = self._skipped + 1 if metrics.skipped else 0
        if self._skipped >= _MAX_SKIPPED:
            raise _errors.too_many_skips(self._skipped)


def check_callbacks(callbacks: Any) -> None:
    """Refuses what cannot be called, or has no whole number of steps as `every`."""
    if not isinstance(callbacks, Sequence):
        raise _errors.not_callbacks(callbacks)
    for callback in callbacks:
        every = getattr(callback, "every", 1)
        whole = isinstance(every, int) and not isinstance(every, bool)
        if not callable(callback) or not whole or every < 1:
            raise _errors.bad_callback(callback)
