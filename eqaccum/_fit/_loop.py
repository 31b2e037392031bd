"""`fit`: the loop over global batches, written with the step and the plan."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optax
from jaxtyping import PyTree

from .. import _errors
from .._accumulate import check_labels, check_not_one_hot, run_key
from .._data import Batch, Source, epoch_order, open_source
from .._doors import (
    DEFAULT_OPTIMIZER,
    Own,
    at_the_door,
    make_step,
    prepare_loss,
    rows_per_step,
)
from .._plan import Plan
from .._step import Placed, Step, check_values, choose_optimizer, refuse_uncalled
from .._types import Metrics, TrainState
from ._history import History
from ._interrupt import Interrupt
from ._progress import Progress
from ._result import FitResult

_MAX_SKIPPED = 20


@at_the_door
def fit(
    model: PyTree,
    data: Any,
    *,
    global_batch: Own[int, ...],
    loss: Any = None,
    optimizer: Any = None,
    epochs: Own[int | None, ...] = None,
    steps: Own[int | None, ...] = None,
    key: Any = None,
    shuffle: bool | None = None,
    drop_remainder: bool = False,
    example_weights: Any = None,
    in_axes: PyTree = 0,
    state: Any = None,
    has_aux: bool = False,
    penalty: Own[Callable | None, ...] = None,
    trainable: PyTree = True,
    microbatch: Own[int | str, ...] = "largest",
    memory_limit: Own[int | str | None, ...] = None,
    plan: Plan | None = None,
    compute_dtype: Any = None,
    nonfinite: Own[str, ...] = "raise",
    axis_name: str = "batch",
    progress: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> FitResult:
    """Trains a model with one optimizer update per global batch, on whatever fits.

    **Main arguments:**

    - `model`: any pytree with floating or complex arrays, such as an `eqx.Module`. It
        is copied: the one passed in stays as it is.
    - `data`: a pytree of arrays whose axis 0 counts examples; or a data set with
        `__len__` and `__getitem__`, one index one example; or an iterable of batches
        of any size.
    - `global_batch`: examples per update. The last batch of an epoch is short and
        averaged over its own rows.
    - `loss`: a function `loss(model, example, key)` of one example that returns a float
        scalar or an `eqaccum.Mean`; also `batched(...)`, `shared_key(...)`. With
        `loss=None` the data are `(x, y)`: cross-entropy for integer `y`, mean squared
        error for floating `y`.
    - `optimizer`: an Optax transformation (default `optax.adamw(1e-3)`), or a function
        of the total number of steps that returns one.
    - `epochs`, `steps`: when to stop; whichever comes first, one epoch if neither is
        given. `steps` counts updates.
    - `key`: a PRNG key for the order and for the loss; None is `jax.random.key(0)`.

    **Other arguments:**

    - `shuffle`: a fresh order for each epoch; None: where rows can be indexed.
    - `drop_remainder`: leave out the short last batch of an epoch.
    - `example_weights`: one non-negative weight per row, shape (rows,).
    - `in_axes`: 0 or None per leaf of the data, as in `jax.vmap`.
    - `state`: the model's `eqx.nn.State`; the loss is then
        `loss(model, state, example, key)` and returns `(value, state)`.
    - `has_aux`: the loss returns auxiliary outputs last. Float and bool scalars are
        averaged, `Mean` and `Sum` combined, arrays kept per example.
    - `penalty`: a function of the model alone, added once per step.
    - `trainable`: True, a pytree of bools that is a prefix of the model, or a predicate
        on leaves.
    - `microbatch`: `"largest"` that fits, or an int: an upper bound for one pass.
    - `memory_limit`: bytes, or text such as `"10GiB"`, that the step may take; None
        asks the device.
    - `plan`: a `Plan` to use instead of searching.
    - `compute_dtype`: the model's floating leaves are cast to it inside the loss.
    - `nonfinite`: `"raise"` at a loss or gradient that is not finite, `"skip"` that
        batch, or `"ignore"`.
    - `axis_name`: the name of the axis over a microbatch's examples (BatchNorm).
    - `progress`: a progress bar; None: in a terminal.
    - `compiler_options`: passed to every compilation.

    **Returns:**

    A `FitResult`: `.model`, `.state`, `.opt_state`, `.train`, `.history`, `.plan`.

    **Raises:**

    `InputError` before anything is computed, `DoesNotFit` or `CannotTell` where no plan
    can be made, `NonFiniteError`, `StepError`. After the first update an exception
    carries what was trained as `.result`.

    !!! Example

        ```python
        result = eqaccum.fit(model, (x, y), global_batch=4096)
        print(result.plan)
        model = result.model
        ```
    """
    key_data = run_key(key)
    check_values(model, state)
    source = open_source(data, in_axes=in_axes, example_weights=example_weights)
    if not source.has_values:
        raise _errors.only_shapes()
    rows = rows_per_step(global_batch, source)
    chosen = prepare_loss(
        loss, model, state, source, compute_dtype=compute_dtype, axis_name=axis_name
    )
    if chosen.classes is not None:
        check_labels(_targets(source), chosen.classes)
    elif loss is None:
        for chunk in source.column_chunks(_target(source)):
            check_not_one_hot(chunk)
            break
    length = _length(
        source,
        rows,
        epochs=epochs,
        steps=steps,
        drop_remainder=drop_remainder,
        shuffle=shuffle,
    )
    step = make_step(
        chosen.fn,
        _optimizer(optimizer, length.steps),
        global_batch=rows,
        in_axes=in_axes,
        has_aux=has_aux,
        penalty=penalty,
        trainable=trainable,
        microbatch=microbatch,
        memory_limit=memory_limit,
        plan=plan,
        compute_dtype=compute_dtype,
        nonfinite=nonfinite,
        axis_name=axis_name,
        compiler_options=compiler_options,
    )
    step.describe(model, state)
    made = step.prepare(source.layout).plan
    labels = chosen.classes if source.kind != "columns" else None
    _say_start(source, global_batch, length, chosen.name, optimizer is None, made)
    run = _Run(
        step=step,
        source=source,
        rows=rows,
        length=length,
        plan=made,
        classes=labels,
        train=step.init(model, key, state=state),
        order_key=key_data,
        progress=progress,
    )
    return run.go()


@dataclass(frozen=True)
class _Length:
    """How long a run is: `steps` is the number of updates in all, None if unknown."""

    epochs: int | None
    steps: int | None
    per_epoch: int | None
    shuffle: bool
    drop_remainder: bool

    def __str__(self) -> str:
        epochs = _counted(self.epochs, "epoch")
        steps = _counted(self.steps, "step")
        if self.epochs is None or self.steps is None:
            return epochs or steps
        return epochs + (" = " if self.per_epoch else ", at most ") + steps


def _counted(count: int | None, what: str) -> str:
    if count is None:
        return ""
    return f"{count:,} {what}" + ("s" if count > 1 else "")


def _length(
    source: Source,
    global_batch: int,
    *,
    epochs: Any,
    steps: Any,
    drop_remainder: bool,
    shuffle: bool | None,
) -> _Length:
    epochs, steps = _count("epochs", epochs), _count("steps", steps)
    if shuffle and not source.can_shuffle:
        raise _errors.cannot_shuffle(source.description)
    if epochs is None and steps is None:
        epochs = 1
    if epochs is not None and epochs > 1 and not source.restartable:
        raise _errors.one_epoch(epochs, source.description)
    per_epoch = source.batches_per_epoch(global_batch, drop_remainder)
    total = steps
    if epochs is not None and per_epoch is not None:
        total = min(epochs * per_epoch, steps or epochs * per_epoch)
    mixed = source.can_shuffle if shuffle is None else shuffle
    return _Length(epochs, total, per_epoch, mixed, drop_remainder)


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < 1:
        raise _errors.bad_count(name, value)
    return int(value)


def _optimizer(optimizer: Any, total: int | None) -> optax.GradientTransformation:
    if optimizer is None:
        return optax.adamw(1e-3)
    given = isinstance(optimizer, optax.GradientTransformation | optax.MultiSteps)
    if total is None and callable(optimizer) and not given:
        refuse_uncalled(optimizer)
        raise _errors.total_unknown()
    return choose_optimizer(optimizer, total or 0)


def _target(source: Source) -> int:
    """The position of y, the last row leaf of data `(x, y)`."""
    return len(source.layout.row_structs) - 1


def _targets(source: Source) -> Iterator[np.ndarray]:
    """All targets that count, in pieces: those of rows of weight 0 do not."""
    start = 0
    for chunk in source.column_chunks(_target(source)):
        stop = start + len(chunk)
        yield chunk if source.weights is None else chunk[source.weights[start:stop] > 0]
        start = stop


def _say_start(
    source: Source,
    asked: int,
    length: _Length,
    loss_name: str,
    default_optimizer: bool,
    plan: Plan,
) -> None:
    chosen = loss_name + (f", {DEFAULT_OPTIMIZER}" if default_optimizer else "")
    fewer = ""
    if source.rows is not None and asked > source.rows:
        fewer = f"; global_batch={asked:,} is above the {source.rows:,} rows"
    _errors.say(f"{source.description}, {length}; {chosen}{fewer}; {plan.summary()}")


@dataclass
class _Run:
    """One call of `fit` under way."""

    step: Step
    source: Source
    rows: int
    length: _Length
    plan: Plan
    classes: int | None
    train: TrainState
    order_key: np.ndarray
    progress: bool | None
    history: History = field(default_factory=History)
    _skipped: int = 0

    def go(self) -> FitResult:
        bar = Progress(
            show=self.progress,
            total=self.length.steps,
            passes=self.plan.num_microbatches,
        )
        try:
            with Interrupt() as interrupt:
                self._loop(bar, interrupt)
        except Exception as error:
            self._attach(error)
            raise
        finally:
            bar.close()
        return self.result

    @property
    def result(self) -> FitResult:
        return FitResult(self.train, self.history, self.plan)

    def _attach(self, error: Exception) -> None:
        """Nothing that was trained is lost to an exception, whoever raised it."""
        if self.train.step == 0 or self._lost:
            return
        try:
            error.result = self.result  # type: ignore[attr-defined]
            error.add_note(
                f"eqaccum: the {self.train.step} steps trained so far are in this "
                "exception's .result"
            )
        except AttributeError:  # an exception with slots
            pass

    @property
    def _lost(self) -> bool:
        return any(leaf.is_deleted() for leaf in self.train.trainable_leaves)

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
            if failure is not None:
                raise failure
            if interrupt.asked:
                _errors.say(f"stopped after step {self.train.step}")
                return
            if self.length.steps is not None and self.train.step >= self.length.steps:
                return
            placed = following

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
            check_labels([np.asarray(placed.rows[_target(self.source)])], self.classes)
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
