"""The passes of a global batch added up: no loop, `lax.scan`, or a bounded loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from . import _keys
from ._trace import Arguments, Pass, PassInputs, PassOutputs


class Batch(eqx.Module):
    """A global batch as the program takes it: slot (k D + d) n + j on device d.

    `rows` have shape (K, n, ...) on each device and `weights` (K, n). `key` and
    `batch_index` give the keys; `bound` is the number of passes to run, None for all.
    """

    rows: list[Any]
    weights: Any
    key: Any
    batch_index: Any
    bound: Any


class Sums(eqx.Module):
    """What the passes of a global batch add up to."""

    gradients: list[Any]
    outputs: PassOutputs


@dataclass(frozen=True)
class Cut:
    """How the global batch is cut: K passes of n rows on each of D devices."""

    num_microbatches: int
    microbatch: int
    devices: int
    axis_name: str | None  # of the devices; None outside of a mesh

    @property
    def capacity(self) -> int:
        """Slots for rows, those of padding included."""
        return self.num_microbatches * self.devices * self.microbatch

    def passes(self, last: int) -> int:
        """Passes to run so that the slots below `last` are covered."""
        return -(-last // (self.devices * self.microbatch))


def accumulate(
    pass_: Pass,
    cut: Cut,
    *,
    captured: list[Array],
    arguments: Arguments,
    state: list[Array],
    batch: Batch,
    ratios: list[Array],
) -> Sums:
    """Runs all passes and adds up; the state goes from one pass to the next."""
    keys = _batch_keys(pass_, batch)

    def one(
        k: Int[Array, ""] | int, rows: list[Array], weights: Array, state: list[Array]
    ) -> Sums:
        inputs = PassInputs(
            arguments,
            state,
            rows,
            weights,
            _positions(cut, k),
            keys[0],
            keys[1],
            ratios,
        )
        return Sums(*pass_.gradient(captured, inputs))

    return _run(one, cut, batch, _zeros(pass_, state))


def weigh(
    pass_: Pass,
    cut: Cut,
    *,
    captured: list[Array],
    arguments: Arguments,
    state: list[Array],
    batch: Batch,
) -> list[Array]:
    """The weights of a sum of `Mean`s over the global batch, and nothing else."""
    keys = _batch_keys(pass_, batch)

    def one(
        k: Int[Array, ""] | int, rows: list[Array], weights: Array, state: list[Array]
    ) -> Sums:
        inputs = PassInputs(
            arguments, state, rows, weights, _positions(cut, k), keys[0], keys[1], []
        )
        out = pass_.forward(
            captured[len(captured) - len(pass_.forward.captured) :], inputs
        )
        return Sums([], PassOutputs([], out.weights, [], [], []))

    weights = [jnp.zeros(s.shape, s.dtype) for s in pass_.outputs.weights]
    start = Sums([], PassOutputs([], weights, [], [], []))
    return _run(one, cut, batch, start).outputs.weights


def _run(one: Callable, cut: Cut, batch: Batch, start: Sums) -> Sums:
    if cut.num_microbatches == 1:
        rows = [leaf[0] for leaf in batch.rows]
        sums = one(0, rows, batch.weights[0], start.outputs.state)
        laid = [leaf[None] for leaf in sums.outputs.aux_rows]
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
        ),
    )


def _zeros(pass_: Pass, state: list[Array]) -> Sums:
    def zeros(structs: list[Any]) -> list[Array]:
        return [jnp.zeros(s.shape, s.dtype) for s in structs]

    out = pass_.outputs
    return Sums(
        zeros(pass_.gradient_structs),
        PassOutputs(
            zeros(out.totals), zeros(out.weights), state, zeros(out.aux_sums), []
        ),
    )


def _batch_keys(
    pass_: Pass, batch: Batch
) -> tuple[UInt32[Array, "2"] | None, UInt32[Array, "2"] | None]:
    if batch.key is None:
        return None, None
    rows, shared = _keys.batch_keys(batch.key, batch.batch_index)
    return jax.random.key_data(rows), jax.random.key_data(shared)


def _positions(cut: Cut, k: Int[Array, ""] | int) -> Int[Array, "n"]:
    """The positions in the global batch of the rows of pass k on this device."""
    device = 0 if cut.axis_name is None else jax.lax.axis_index(cut.axis_name)
    first = (k * cut.devices + device) * cut.microbatch
    return first + jnp.arange(cut.microbatch, dtype=jnp.int32)
