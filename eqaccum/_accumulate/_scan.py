"""The passes of a global batch added up: no loop, `lax.scan`, or a bounded loop."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._noise import both
from ._records import Batch, Cut, PassOutputs, Sums


def run(one: Callable, cut: Cut, batch: Batch, start: Sums) -> Sums:
    if cut.num_microbatches == 1:
        rows = [leaf[0] for leaf in batch.rows]
        sums = one(0, rows, batch.weights[0], start.outputs.state)
        laid = [leaf[None] for leaf in sums.outputs.aux_rows]
        if cut.windows > 1:
            sums = _added(start, sums)
        return eqx.tree_at(lambda s: s.outputs.aux_rows, sums, laid)
    if batch.bound is None:
        return _scan(one, cut, batch, start)
    return _bounded(one, cut, batch, start)


def _scan(one: Callable, cut: Cut, batch: Batch, start: Sums) -> Sums:
    def body(sums: Sums, xs: tuple[Array, list[Array], Array]) -> tuple[Sums, list]:
        with jax.named_scope("eqaccum/microbatch"):
            out = one(*xs, sums.outputs.state)
        return _added(sums, out), out.outputs.aux_rows

    steps = jnp.arange(cut.num_microbatches, dtype=jnp.int32)
    sums, rows = jax.lax.scan(body, start, (steps, batch.rows, batch.weights))
    return eqx.tree_at(lambda s: s.outputs.aux_rows, sums, rows)


def _bounded(one: Callable, cut: Cut, batch: Batch, start: Sums) -> Sums:
    """The same passes, ended by a bound from the host: trailing padding is not run.

    A flag read on the device would cost a copy of the largest leaf; devices that
    disagreed on it would hang where the loss holds a collective.
    """

    def body(k: Array, carry: tuple[Sums, list[Array]]) -> tuple[Sums, list[Array]]:
        sums, laid = carry
        rows = [jax.lax.dynamic_index_in_dim(x, k, keepdims=False) for x in batch.rows]
        weights = jax.lax.dynamic_index_in_dim(batch.weights, k, keepdims=False)
        with jax.named_scope("eqaccum/microbatch"):
            out = one(k, rows, weights, sums.outputs.state)
        laid = [
            jax.lax.dynamic_update_index_in_dim(whole, part, k, 0)
            for whole, part in zip(laid, out.outputs.aux_rows, strict=True)
        ]
        return _added(sums, out), laid

    laid = _laid(one, cut, batch, start)
    sums, laid = jax.lax.fori_loop(0, batch.bound, body, (start, laid))
    return eqx.tree_at(lambda s: s.outputs.aux_rows, sums, laid)


def _laid(one: Callable, cut: Cut, batch: Batch, start: Sums) -> list[Array]:
    """Zeros for the auxiliary rows of all passes."""
    shapes = jax.eval_shape(
        one,
        jax.ShapeDtypeStruct((), jnp.int32),
        [leaf[0] for leaf in batch.rows],
        batch.weights[0],
        start.outputs.state,
    ).outputs.aux_rows
    return [jnp.zeros((cut.num_microbatches, *s.shape), s.dtype) for s in shapes]


def _added(sums: Sums, out: Sums) -> Sums:
    """`sums + out`; the state is the newest one, rows are laid elsewhere."""

    def add(xs: list[Array], ys: list[Array]) -> list[Array]:
        return [x + y for x, y in zip(xs, ys, strict=True)]

    old, new = sums.outputs, out.outputs
    return Sums(
        add(sums.gradients, out.gradients),
        PassOutputs(
            add(old.totals, new.totals),
            add(old.weights, new.weights),
            new.state,
            add(old.aux_sums, new.aux_sums),
            [],
            both(old.spread, new.spread),
        ),
    )
