"""`fit`: the door of the main job, written with the step and the plan."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .. import _errors
from .._accumulate import Options, check_labels, check_not_one_hot, run_key
from .._data import Shares, Source, open_source
from .._doors import (
    DEFAULT_OPTIMIZER,
    Evaluation,
    Own,
    at_the_door,
    make_step,
    placement_for,
    prepare_loss,
    rows_per_step,
    self_test,
)
from .._plan import Plan
from .._step import Step, check_values, choose_optimizer, refuse_uncalled
from .._types import Model
from ._length import Length, count, run_length
from ._record import Cutting
from ._result import FitResult
from ._resume import Start, starting_point
from ._run import Run, check_callbacks
from ._together import Together


@at_the_door
def fit(
    model: Model,
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
    validation: Any = None,
    validate_every: Own[int | None, ...] = None,
    microbatch: Own[int | str, ...] = "largest",
    memory_limit: Own[int | str | None, ...] = None,
    plan: Plan | None = None,
    remat: Any = None,
    compute_dtype: Any = None,
    mesh: Mesh | None = None,
    shard_optimizer: bool = False,
    checkpoint: Own[str | os.PathLike | None, ...] = None,
    save_every: Own[int | None, ...] = None,
    resume: Own[bool | FitResult, ...] = False,
    nonfinite: Own[str, ...] = "raise",
    noise_scale: bool = False,
    grad_metrics: Own[Callable | None, ...] = None,
    ema: Own[float | None, ...] = None,
    axis_name: str = "batch",
    callbacks: Own[Sequence[Callable], ...] = (),
    progress: bool | None = None,
    cache: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> FitResult[Model]:
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
        given. `steps` counts updates in all, resumed ones included.
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
    - `validation`: data like `data`, evaluated in inference mode; its metrics are in
        `history` under `validation_...`. `validate_every` counts steps; None: at the
        end of each epoch.
    - `microbatch`: `"largest"` that fits; `"fastest"`: sizes that fit are tried on the
        first steps of the run, none of which is wasted; or an int: an upper bound.
    - `memory_limit`: bytes, or text such as `"10GiB"`, that the step may take; None
        asks the device.
    - `plan`: a `Plan` to use instead of searching.
    - `remat`: `"auto"` recomputes the loss in the backward pass where not even one
        example per pass fits; True always does, in segments; or a `jax.checkpoint`
        policy. The gradient is the same.
    - `compute_dtype`: the model's floating leaves are cast to it inside the loss.
    - `mesh`: a mesh with an axis `"data"`; None: all devices of the job.
    - `shard_optimizer`: True cuts the optimizer's state and the reduced gradient over
        the devices of the axis `"data"`; each updates its part, and the parameters are
        gathered after that (ZeRO-2). The result is the same. Leaves with no axis that
        divides stay whole, and the plan names them.
    - `checkpoint`: a directory for checkpoints, written in the background after every
        `save_every` steps (None: at the end of each epoch) and at the end; the newest
        two are kept. SIGTERM then saves the step under way and exits with 143. Needs
        `pip install "eqaccum[checkpoint]"`.
    - `resume`: True goes on from the newest checkpoint, or starts if there is none; a
        `FitResult` continues that fit, from a copy. The examples, their order and their
        keys are those of a run that was never stopped, on any devices; with the same
        plan, which is kept where it fits, so is every bit. `steps` and `epochs` count
        from the very start. False refuses a directory that holds a run.
    - `nonfinite`: `"raise"` at a loss or gradient that is not finite, `"skip"` that
        batch, or `"ignore"`.
    - `noise_scale`: estimate the gradient noise scale (McCandlish et al. 2018,
        arXiv:1812.06162) from the passes of each step, which are at least two then;
        see `Metrics`.
    - `grad_metrics`: a function of the finished gradient (the model's structure, None
        where nothing is trained), before any clipping, that returns a dict of scalars.
    - `ema`: the decay of a moving average of the parameters, on the step's clock:
        `.ema` of the result and of the `TrainState` is the model with them.
    - `axis_name`: the name of the axis over a microbatch's examples (BatchNorm).
    - `callbacks`: functions of one record, `callback(info)`, called after each step, or
        every so many with an attribute `every`; returning True stops the run.
    - `progress`: a progress bar; None: in a terminal.
    - `cache`: remember on disk what programs need (`EQACCUM_CACHE=0` switches it off,
        `EQACCUM_CACHE_DIR` moves it); False: in this process only.
    - `compiler_options`: passed to every compilation.

    **Returns:**

    A `FitResult`: `.model`, `.state`, `.opt_state`, `.train`, `.history`, `.plan`.

    **Raises:**

    `InputError` before anything is computed, `DoesNotFit` or `CannotTell` where no plan
    can be made, `NonFiniteError`, `StepError`, `CheckpointError` for a checkpoint that
    cannot be read or written. After the first update an exception carries what was
    trained as `.result`, and it is saved where there is `checkpoint=`.

    !!! Example

        ```python
        result = eqaccum.fit(model, (x, y), global_batch=4096)
        print(result.plan)
        model = result.model
        ```
    """
    run_key(key)  # refused before anything is computed
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
    validation_steps = count("validate_every", validate_every)
    if validation is None and validation_steps is not None:
        raise _errors.validate_nothing(validation_steps)
    validation_source = None
    if validation is not None:
        validation_source = open_source(validation, in_axes=in_axes)
        if not validation_source.has_values:
            raise _errors.only_shapes()
    check_callbacks(callbacks, validates=validation is not None)
    length = run_length(
        source,
        rows,
        epochs=epochs,
        steps=steps,
        drop_remainder=drop_remainder,
        shuffle=shuffle,
    )
    placement = placement_for(chosen.fn, mesh)
    cutting = Cutting(rows, source.rows, length.shuffle, length.drop_remainder)
    start = starting_point(checkpoint=checkpoint, save_every=save_every, resume=resume)
    if placement.is_shared and source.kind == "iterable":
        processes = len(placement.processes)
        source = Shares(source, processes, placement.exchange)
    start.check_seen_by_all(placement)
    start.check_model(model)
    start.check_data(cutting, length, source)
    with_plan = functools.partial(
        make_step,
        chosen.fn,
        _optimizer(optimizer, length.steps),
        global_batch=rows,
        in_axes=in_axes,
        has_aux=has_aux,
        penalty=penalty,
        trainable=trainable,
        microbatch=microbatch,
        memory_limit=memory_limit,
        remat=remat,
        compute_dtype=compute_dtype,
        mesh=mesh,
        shard_optimizer=shard_optimizer,
        nonfinite=nonfinite,
        grad_metrics=grad_metrics,
        ema=ema,
        noise_scale=noise_scale,
        axis_name=axis_name,
        cache=cache,
        compiler_options=compiler_options,
    )
    kept = None
    if plan is None:
        kept = start.plan(placement, microbatch, memory_limit)
    step = _prepared(with_plan, plan, kept, start, model, state, source)
    made = step.plan
    assert made is not None
    labels = chosen.classes if source.kind != "columns" else None
    evaluation = None
    if validation_source is not None:
        evaluation = Evaluation(
            model,
            state,
            validation_source,
            loss=loss,
            global_batch=rows,
            has_aux=has_aux,
            microbatch=made.microbatch,
            memory_limit=memory_limit,
            compute_dtype=compute_dtype,
            axis_name=axis_name,
            mesh=mesh,
        )
        evaluation.prepare(model, state)
    _say_start(source, global_batch, length, chosen.name, optimizer is None, made)
    begun = start.begin(step.init(model, key, state=state), length)
    run = Run(
        step=step,
        source=source,
        rows=rows,
        length=length,
        classes=labels,
        train=begun.train,
        order_key=begun.train.key,
        together=Together(placement),
        validation=evaluation,
        validate_every=validation_steps,
        callbacks=tuple(callbacks),
        progress=progress,
        history=begun.history,
        position=begun.position,
        checkpoints=start.checkpoints(cutting, placement),
        self_test=self_test(
            chosen.fn,
            model,
            state,
            options=Options(has_aux, axis_name),
            trainable=trainable,
            compute_dtype=compute_dtype,
            plan=made,
        ),
    )
    return run.go()


def _prepared(
    with_plan: Callable[..., Step],
    given: Plan | None,
    kept: Plan | None,
    start: Start,
    model: PyTree,
    state: Any,
    source: Source,
) -> Step:
    """The step with its programs: for the plan given, the one kept, or a new one."""
    step = with_plan(plan=given or kept)
    if isinstance(source, Shares):
        step.share_rows()
    if start.path is not None:
        step.count_saves()
    step.describe(model, state)
    try:
        step.prepare(source.layout)
    except _errors.DoesNotFit:
        if kept is None:
            raise
        start.say_too_large(None)
        return _prepared(with_plan, None, None, start, model, state, source)
    return step


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
    length: Length,
    loss_name: str,
    default_optimizer: bool,
    plan: Plan,
) -> None:
    chosen = loss_name + (f", {DEFAULT_OPTIMIZER}" if default_optimizer else "")
    fewer = ""
    if source.rows is not None and asked > source.rows:
        fewer = f"; global_batch={asked:,} is above the {source.rows:,} rows"
    _errors.say(f"{source.description}, {length}; {chosen}{fewer}; {plan.summary()}")
