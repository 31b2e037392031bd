"""`plan`: what `fit` would decide, without training."""

from typing import Any

import optax
from jaxtyping import PyTree

from .. import _errors
from .._accumulate import DefaultLoss, choose_default_loss
from .._data import Source, open_source
from .._mesh import DATA
from .._plan import Plan
from .._step import check_compute_dtype, check_global_batch, choose_optimizer
from ._at_the_door import Own, at_the_door
from ._make_step import make_step

_STEP_OPTIONS = (
    "has_aux",
    "penalty",
    "trainable",
    "microbatch",
    "memory_limit",
    "remat",
    "compute_dtype",
    "mesh",
    "shard_optimizer",
    "nonfinite",
    "grad_metrics",
    "ema",
    "axis_name",
    "cache",
    "compiler_options",
)
_IGNORED_BY_PLAN = (
    "plan",
    "epochs",
    "steps",
    "key",
    "shuffle",
    "drop_remainder",
    "progress",
    "validation",
    "validate_every",
    "callbacks",
    "checkpoint",  # counted below
    "save_every",
    "resume",
)

# A plan does not depend on the length of an optimizer's schedule.
_SOME_STEPS = 1000


@at_the_door
def plan(
    model: PyTree,
    data: Any,
    *,
    global_batch: Own[int, ...],
    loss: Any = None,
    optimizer: Any = None,
    state: Any = None,
    in_axes: PyTree = 0,
    example_weights: Any = None,
    **options: Any,
) -> Plan:
    """The plan that `fit` would make, without training: nothing is allocated.

    **Arguments:**

    Those of `fit`; the ones that do not matter for the plan are ignored. `model`,
    `state` and `data` may hold `jax.ShapeDtypeStruct`s instead of arrays.

    **Returns:**

    A `Plan`: print it, `plan.plot()`, or pass it on as `fit(..., plan=plan)`.

    **Raises:**

    `InputError` where an argument cannot work, `DoesNotFit` where even one example per
    pass is over the limit, `CannotTell` where the backend gives no figures.

    !!! Example

        ```python
        plan = eqaccum.plan(model, (x, y), global_batch=4096, memory_limit="40GiB")
        print(plan)
        ```
    """
    if options.get("microbatch") == "fastest":
        raise _errors.fastest_only_in_training("plan")
    source = open_source(data, in_axes=in_axes, example_weights=example_weights)
    if not source.restartable:
        _errors.warn(
            f"plan took the first batch out of the data, {source.description}: a later "
            "fit will not see it. Plan with shapes, or with a loader that starts afresh"
        )
    known = {name: options[name] for name in _STEP_OPTIONS if name in options}
    unknown = set(options) - set(_STEP_OPTIONS) - set(_IGNORED_BY_PLAN)
    if unknown:
        raise _errors.unknown_argument("plan", sorted(unknown))
    prepared = prepare_loss(
        loss,
        model,
        state,
        source,
        compute_dtype=known.get("compute_dtype"),
        axis_name=known.get("axis_name", "batch"),
    )
    if optimizer is None:
        optimizer = optax.adamw(1e-3)
    step = make_step(
        prepared.fn,
        choose_optimizer(optimizer, _SOME_STEPS),
        global_batch=rows_per_step(global_batch, source),
        in_axes=in_axes,
        **known,
    )
    if options.get("checkpoint") is not None:
        step.count_saves()
    step.describe(model, state)
    return step.prepare(source.layout).plan


def prepare_loss(
    loss: Any,
    model: PyTree,
    state: Any,
    source: Source,
    *,
    compute_dtype: Any,
    axis_name: str,
) -> DefaultLoss:
    """The loss given, or the default one with its labels checked where they can be."""
    if loss is not None:
        return DefaultLoss(loss, _errors.name_of(loss), None)
    check_compute_dtype(compute_dtype)
    layout = source.layout
    example = layout.unflatten(layout.row_structs, layout.whole_structs)
    return choose_default_loss(
        model,
        state,
        example,
        axis_names=(DATA, axis_name),
        compute_dtype=compute_dtype,
    )


def rows_per_step(global_batch: Any, source: Source) -> int:
    """The global batch, or all rows where the data have fewer."""
    check_global_batch(global_batch)
    if source.rows is None:
        return int(global_batch)
    return min(int(global_batch), source.rows)
