"""`make_step`: the step of a loop of one's own."""

from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .. import _errors
from .._accumulate import Form
from .._mesh import Placement, placement_on
from .._plan import Plan
from .._step import Settings, Step, check_settings, refuse_uncalled
from ._at_the_door import Own, at_the_door

DEFAULT_OPTIMIZER = "adamw(1e-3)"


@at_the_door
def make_step(
    loss: Any,
    optimizer: Own[optax.GradientTransformation, ...],
    *,
    global_batch: Own[int, ...],
    in_axes: PyTree = 0,
    has_aux: bool = False,
    penalty: Own[Callable | None, ...] = None,
    trainable: PyTree = True,
    microbatch: Own[int | str, ...] = "largest",
    memory_limit: Own[int | str | None, ...] = None,
    plan: Plan | None = None,
    remat: Any = None,
    compute_dtype: Any = None,
    mesh: Mesh | None = None,
    shard_optimizer: bool = False,
    nonfinite: Own[str, ...] = "raise",
    noise_scale: bool = False,
    grad_metrics: Own[Callable | None, ...] = None,
    ema: Own[float | None, ...] = None,
    axis_name: str = "batch",
    cache: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Step:
    """The step of a loop of one's own: one optimizer update per call.

    **Arguments:**

    - `loss`: a function `loss(model, example, key)` of one example that returns a float
        scalar or a `Mean`; or `batched(...)`, `shared_key(...)`.
    - `optimizer`: an Optax transformation; it is called once per step, on the finished
        gradient.
    - `global_batch`: examples per update; a batch may have fewer rows.
    - `in_axes`: 0 or None per leaf of a batch, as in `jax.vmap`; None for leaves that
        every pass gets whole.
    - `has_aux`: whether the loss returns auxiliary outputs beside its value.
    - `penalty`: a function of the model alone, added once per step.
    - `trainable`: True, a pytree of bools that is a prefix of the model, or a predicate
        on leaves.
    - `microbatch`: `"largest"` that fits; `"fastest"`, tried on the first steps; or an
        int: an upper bound on the examples of a pass.
    - `memory_limit`: bytes or text such as `"10GiB"` that the step's programs may take
        on each device; None asks the device.
    - `plan`: a `Plan` to use instead of searching.
    - `remat`: `"auto"` recomputes the loss in the backward pass where not even one
        example per pass fits; True always does, in segments; or a `jax.checkpoint`
        policy. The gradient is the same.
    - `compute_dtype`: the floating leaves of the model are cast to it inside the loss.
    - `mesh`: a mesh with an axis `"data"`; None: all devices of the job.
    - `shard_optimizer`: True cuts the optimizer's state and the reduced gradient over
        the devices of the axis `"data"`; each updates its part, and the parameters are
        gathered after that (ZeRO-2). The result is the same. Leaves with no axis that
        divides stay whole, and the plan names them.
    - `nonfinite`: `"raise"`, `"skip"` (nothing is updated) or `"ignore"`.
    - `noise_scale`: estimate the gradient noise scale (McCandlish et al. 2018,
        arXiv:1812.06162) from the passes of each step, which are at least two then;
        see `Metrics`.
    - `grad_metrics`: a function of the finished gradient (the model's structure, None
        where nothing is trained), before any clipping, that returns a dict of scalars.
    - `ema`: the decay of a moving average of the parameters, on the step's clock:
        `.ema` of the result and of the `TrainState` is the model with them.
    - `axis_name`: the name of the axis over the examples of a microbatch.
    - `cache`: remember on disk what programs need (`EQACCUM_CACHE=0` switches it off,
        `EQACCUM_CACHE_DIR` moves it); False: in this process only.
    - `compiler_options`: passed to every compilation.

    **Returns:**

    A `Step`: `train = step.init(model, key)`, then
    `train, metrics = step(train, batch)`.

    **Raises:**

    `InputError` where an argument cannot work.

    !!! Example

        ```python
        step = eqaccum.make_step(loss, optax.adamw(1e-3), global_batch=4096)
        train = step.init(model, jax.random.key(0))
        for batch in batches:
            train, metrics = step(train, batch)
        ```
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        refuse_uncalled(optimizer)
        if callable(optimizer):
            raise _errors.optimizer_of_steps()
    placement = placement_for(loss, mesh)
    check_settings(
        loss=loss,
        global_batch=global_batch,
        placement=placement,
        penalty=penalty,
        microbatch=microbatch,
        memory_limit=memory_limit,
        plan=plan,
        remat=remat,
        compute_dtype=compute_dtype,
        nonfinite=nonfinite,
        grad_metrics=grad_metrics,
        ema=ema,
        noise_scale=noise_scale,
    )
    if isinstance(loss, Form):
        loss.check_batch(rows=int(global_batch), devices=placement.size)
        if mesh is None and placement.size < (devices := placement_on(mesh).size):
            _errors.say(_errors.one_device_of(devices))
    return Step(
        Settings(
            loss=loss,
            optimizer=optimizer,
            global_batch=global_batch,
            placement=placement,
            in_axes=in_axes,
            has_aux=has_aux,
            penalty=penalty,
            trainable=trainable,
            microbatch=microbatch,
            memory_limit=memory_limit,
            plan=plan,
            remat=remat,
            compute_dtype=compute_dtype,
            nonfinite=nonfinite,  # type: ignore[arg-type]
            grad_metrics=grad_metrics,
            ema=ema,
            noise_scale=noise_scale,
            shard_optimizer=shard_optimizer,
            axis_name=axis_name,
            cache=cache,
            compiler_options=compiler_options,
        )
    )


def placement_for(loss: Any, mesh: Mesh | None) -> Placement:
    """Where a loss is trained: on all devices, or on one if its passes go in order."""
    placement = placement_on(mesh)
    if mesh is None and isinstance(loss, Form) and loss.sequential:
        if placement.is_shared:
            raise _errors.bank_on_processes()
        return placement.first_device
    return placement
