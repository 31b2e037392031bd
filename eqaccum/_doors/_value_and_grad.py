"""`value_and_grad`: the accumulated gradient as a plain jitted function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from .. import _errors
from .._accumulate import (
    Arguments,
    Batch as Slots,
    Cut,
    Form,
    LossSpec,
    Options,
    Passes,
    PassInputs,
    Sums,
    check_arguments,
    check_loss,
    even_cut,
    finish_aux,
    run_key,
    trace_passes,
)
from .._data import Layout, batch_weights, read
from .._tree import Partition, Role, Static, is_array, partition, struct
from ._at_the_door import Own, at_the_door


@at_the_door
def value_and_grad(
    loss: Any,
    *,
    microbatch: Own[int, ...],
    has_aux: bool = False,
    in_axes: PyTree = 0,
    trainable: PyTree = True,
    axis_name: str = "batch",
) -> Callable:
    """The loss and its gradient over a batch, computed in passes of `microbatch` rows.

    Stands where `eqx.filter_value_and_grad` stood. It is a plain `jax.jit`, and may be
    called inside another.

    **Arguments:**

    - `loss`: as in `make_step`.
    - `microbatch`: the largest number of rows of one pass; the passes are evened out.
    - `has_aux`, `in_axes`, `trainable`, `axis_name`: as in `make_step`.

    **Returns:**

    `f(model, batch, *, key=None, weights=None, state=None)`, which returns
    `(value, grads)`; with `has_aux` `((value, aux), grads)`, with a state
    `((value, state), grads)`, with both `((value, state, aux), grads)`. `grads` has the
    model's structure, None where nothing is trained; complex gradients follow JAX's
    convention. The example at position i gets `fold_in(split(key)[0], i)`; with
    `key=None` the loss gets None.

    **Raises:**

    `InputError` where an argument, the loss or, when it is called, the batch cannot
    work.

    !!! Example

        ```python
        loss_and_grad = eqaccum.value_and_grad(loss, microbatch=64)
        value, grads = loss_and_grad(model, (x, y), key=key)
        ```
    """
    if isinstance(microbatch, bool) or not isinstance(microbatch, int | np.integer):
        raise _errors.microbatch_is_a_number(microbatch)
    if microbatch < 1:
        raise _errors.microbatch_is_a_number(microbatch)
    check_loss(loss)
    if isinstance(loss, Form) and loss.sequential:
        raise _errors.bank_without_step()
    options = Options(has_aux, axis_name)

    @_errors.short_tracebacks
    def call(
        model: PyTree,
        batch: PyTree,
        *,
        key: Any = None,
        weights: Any = None,
        state: Any = None,
    ) -> Any:
        check_arguments(loss, has_state=state is not None)
        parts = partition(model, trainable)
        if not parts.paths(Role.TRAINABLE):
            leaves = [leaf for leaf in jax.tree.leaves(model) if is_array(leaf)]
            raise _errors.nothing_to_train(sorted({str(x.dtype) for x in leaves}))
        flat = read(batch, in_axes=in_axes, what="the batch")
        if not flat.has_values:
            raise _errors.only_shapes()
        loss_parts = partition(loss)
        state_parts = None if state is None else partition(state)
        split = parts.split(model)
        plan = _GradientPlan(
            model=parts,
            loss=loss_parts,
            state=state_parts,
            layout=flat.layout,
            options=options,
            fn=Static(loss),
            microbatch=int(microbatch),
            with_key=key is not None,
            weighted=weights is not None,
        )
        return _gradient(
            plan,
            Arguments(
                split.trainable,
                split.frozen,
                loss_parts.split(loss).frozen,
                flat.whole,
            ),
            [] if state_parts is None else state_parts.split(state).frozen,
            flat.rows,
            _key_data(key),
            _checked_weights(weights, flat.count),
        )

    return call


@dataclass(frozen=True)
class _GradientPlan:
    """Everything static of one call of a `value_and_grad` function."""

    model: Partition
    loss: Partition
    state: Partition | None
    layout: Layout
    options: Options
    fn: Static
    microbatch: int
    with_key: bool
    weighted: bool


def _key_data(key: Any) -> Any:
    if key is None:
        return None
    if isinstance(key, Tracer):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(key) if typed else key
    return run_key(key)


def _checked_weights(weights: Any, rows: int) -> Any:
    """The rows' weights; traced ones tell no more than their shape."""
    if not isinstance(weights, Tracer):
        return batch_weights(weights, rows)
    if weights.shape != (rows,):
        raise _errors.weights_shape(weights.shape, rows)
    return weights.astype(jnp.float32)


def _gradient_program(
    plan: _GradientPlan,
    arguments: Arguments,
    state: list[Array],
    rows: list[Array],
    key: Any,
    weights: Float[Array, "n"] | None,
) -> Any:
    count = rows[0].shape[0]
    cut = _cut(plan, count)
    order, weights = _slots_on_device(weights, count, cut.capacity)
    if cut.places is not None:
        order, weights = order[cut.places], weights[cut.places]
    shape = (cut.num_microbatches, cut.microbatch)
    batch = Slots(
        [leaf[order].reshape(*shape, *leaf.shape[1:]) for leaf in rows],
        weights.reshape(shape),
        key,
        None,
    )
    pass_ = _trace(plan, arguments, state, batch, count)
    captured = [jnp.asarray(c) for c in pass_.captured]
    shared: dict[str, Any] = {
        "captured": captured,
        "arguments": arguments,
        "state": state,
        "batch": batch,
    }
    ratios: list[Array] = []
    if pass_.num_terms > 1:
        totals = pass_.weigh(cut, **shared).weights
        ratios = [
            (totals[0] / w).astype(t.dtype)
            for w, t in zip(totals, pass_.outputs.totals, strict=True)
        ]
    sums = pass_.accumulate(cut, ratios=ratios, **shared)
    return _returned(plan, pass_, sums, ratios, cut, count)


def _cut(plan: _GradientPlan, count: int) -> Cut:
    """The fewest passes of at most `microbatch` rows, evened out."""
    loss, passes = plan.fn.value, None
    if isinstance(loss, Form):
        passes = loss.passes(rows=count, devices=1)
    if passes is None:
        return even_cut(-(-count // plan.microbatch), count, 1, None)
    cuts = (loss.cut(k, rows=count, devices=1, axis_name=None) for k in passes)
    return next(cut for cut in cuts if cut.microbatch <= plan.microbatch)


_gradient = jax.jit(_gradient_program, static_argnums=0)


def _trace(
    plan: _GradientPlan,
    arguments: Arguments,
    state: list[Array],
    batch: Slots,
    count: int,
) -> Passes:
    spec = LossSpec(
        model=plan.model,
        loss=plan.loss,
        state=plan.state,
        unflatten=plan.layout.unflatten,
        options=plan.options,
        with_key=plan.with_key,
    )
    n = batch.weights.shape[1]
    key = jax.ShapeDtypeStruct((2,), jnp.uint32) if plan.with_key else None
    inputs = PassInputs(
        jax.tree.map(struct, arguments),
        [struct(leaf) for leaf in state],
        [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in batch.rows],
        jax.ShapeDtypeStruct((n,), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        key,
        key,
        [],
    )
    rewrite = jax.default_backend() == "cpu" and batch.weights.shape[0] > 1
    return trace_passes(
        spec,
        plan.fn.value,
        inputs,
        rows=count,
        axis_env=[],
        rewrite_convolutions=rewrite,
    )


def _slots_on_device(
    weights: Float[Array, "n"] | None, count: int, capacity: int
) -> tuple[Int[Array, "m"], Float[Array, "m"]]:
    """Rows of weight 0 become copies of rows of positive weight, cyclically."""
    if weights is None:
        order = jnp.arange(capacity, dtype=jnp.int32) % count
        return order, (jnp.arange(capacity) < count).astype(jnp.float32)
    padded = jnp.pad(weights, (0, capacity - count))
    positive = padded > 0
    first = jnp.argsort(~positive, stable=True)  # positions of the positive rows
    replaced = jnp.cumsum(~positive) - 1
    number = jnp.maximum(jnp.sum(positive), 1)
    order = jnp.where(positive, jnp.arange(capacity), first[replaced % number])
    return jnp.minimum(order, count - 1).astype(jnp.int32), padded


def _returned(
    plan: _GradientPlan,
    pass_: Passes,
    sums: Sums,
    ratios: list[Array],
    cut: Cut,
    count: int,
) -> Any:
    out = sums.outputs
    weight = out.weights[0]
    factors = ratios or [jnp.ones_like(out.totals[0])]
    terms = [t * f for t, f in zip(out.totals, factors, strict=True)]
    value = sum(terms[1:], terms[0]) / weight.astype(terms[0].dtype)
    grads = [
        (g / weight.astype(jnp.finfo(g.dtype).dtype)).astype(p.dtype)
        for g, p in zip(sums.gradients, pass_.parameters, strict=True)
    ]
    grads = plan.model.filtered(grads)
    state = None if plan.state is None else plan.state.join([], out.state)
    aux = None
    if plan.options.has_aux:
        flat = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in out.aux_rows]
        rows = [cut.in_order(leaf, (count,)) for leaf in flat]
        aux = pass_.aux_spec.assemble(
            finish_aux(pass_.aux_spec, out.aux_sums, weight), rows
        )
    if plan.state is not None and plan.options.has_aux:
        return (value, state, aux), grads
    if plan.state is not None:
        return (value, state), grads
    if plan.options.has_aux:
        return (value, aux), grads
    return value, grads
