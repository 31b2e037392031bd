"""The step of a plan written by hand in plain JAX: no import of eqaccum."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _models import Workload
from jaxtyping import Array, PyTree


def bytes_by_hand(
    workload: Workload,
    optimizer: optax.GradientTransformation,
    *,
    num_microbatches: int,
    microbatch: int,
) -> int:
    """What XLA says that the step needs, and the rows of the next batch.

    One jitted function that donates what it updates: accumulate by `lax.scan`, divide,
    update. Nothing is allocated.
    """
    trainable, rest = eqx.partition(workload.model, eqx.is_inexact_array)
    step = _Step(workload, optimizer, rest, num_microbatches * microbatch)
    rows = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            (num_microbatches, microbatch, *a.shape[1:]), a.dtype
        ),
        workload.rows(1),
    )
    parameters = _structs(trainable)
    opt_state = jax.eval_shape(optimizer.init, parameters)
    carried = (parameters, opt_state, _structs(workload.state))
    compiled = jax.jit(step.run, donate_argnums=0).lower(carried, rows).compile()
    told: Any = compiled.memory_analysis()
    need = (
        told.argument_size_in_bytes
        + told.output_size_in_bytes
        - told.alias_size_in_bytes
        + told.temp_size_in_bytes
    )
    return need + sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(rows))


def _structs(tree: PyTree) -> PyTree:
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays), rest
    )


@dataclass(frozen=True, eq=False)
class _Step:
    workload: Workload
    optimizer: optax.GradientTransformation
    rest: PyTree
    rows: int

    def run(self, carried: PyTree, batch: PyTree) -> PyTree:
        trainable, opt_state, state = carried
        if jax.tree.leaves(batch)[0].shape[0] == 1:
            first = jax.tree.map(lambda leaf: leaf[0], batch)
            sums, state = self._gradient(trainable, state, first)
        else:
            sums, state = self._scanned(trainable, state, batch)
        mean = jax.tree.map(lambda total: total / self.rows, sums)
        updates, opt_state = self.optimizer.update(mean, opt_state, trainable)
        return eqx.apply_updates(trainable, updates), opt_state, state

    def _scanned(self, trainable: PyTree, state: Any, batch: PyTree):
        def body(carry: tuple[PyTree, Any], rows: PyTree):
            sums, state = carry
            more, state = self._gradient(trainable, state, rows)
            return (jax.tree.map(jnp.add, sums, more), state), None

        zeros = jax.tree.map(jnp.zeros_like, trainable)
        return jax.lax.scan(body, (zeros, state), batch)[0]

    def _gradient(self, trainable: PyTree, state: Any, rows: PyTree):
        def total(trainable: PyTree) -> tuple[Array, Any]:
            model = eqx.combine(trainable, self.rest)
            loss, axis = self.workload.loss, self.workload.axis_name
            if state is None:
                one = jax.vmap(lambda example: loss(model, example, None))
                return jnp.sum(one(rows)), None
            stateful = jax.vmap(
                lambda example: loss(model, state, example, None),
                axis_name=axis,
                out_axes=(0, None),
            )
            losses, new = stateful(rows)
            return jnp.sum(losses), new

        return jax.grad(total, has_aux=True)(trainable)
