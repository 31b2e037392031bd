"""One optimizer step over N rows, in all the ways that people write it.

Every way takes the same AdamW step on host arrays, in microbatches of n, and is ready
when the new parameters are there. No import of eqaccum but in `eqaccum_step`.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _models import CoupledWorkload, Workload
from jaxtyping import PyTree

# decay of weights is left out of the comparison with other libraries
OPTIMIZER = optax.adamw(1e-4, weight_decay=0.0)


@dataclass
class Rival:
    """A way of taking the step.

    - `run`: one step; returns when it is done.
    - `seconds_to_first`: tracing, compiling, and the first step.
    - `bytes`: what the compiler says that the step holds at once; None where it is not
        asked.
    """

    run: Callable[[], None]
    seconds_to_first: float
    bytes: int | None


@dataclass(frozen=True)
class Setting:
    """What all ways share: the rows, and how they are cut."""

    workload: Workload
    rows: int
    microbatch: int

    @property
    def passes(self) -> int:
        return self.rows // self.microbatch

    @functools.cached_property
    def batch(self) -> PyTree:
        return self.workload.rows(self.rows)

    def slices(self) -> Iterator[PyTree]:
        for start in range(0, self.rows, self.microbatch):
            stop = start + self.microbatch
            yield jax.tree.map(lambda a, s=start, e=stop: a[s:e], self.batch)

    @functools.cached_property
    def gradient(self) -> Callable[[PyTree, PyTree], PyTree]:
        """The share of some rows in the gradient of the mean."""
        _, rest = eqx.partition(self.workload.model, eqx.is_inexact_array)

        def share(trainable: PyTree, rows: PyTree):
            model = eqx.combine(trainable, rest)
            losses = jax.vmap(lambda row: self.workload.loss(model, row, None))(rows)
            return jnp.sum(losses) / self.rows

        return jax.grad(share)

    def fresh(self, optimizer: Any = OPTIMIZER) -> tuple[PyTree, PyTree]:
        """Parameters of its own and their optimizer state."""
        trainable = eqx.filter(self.workload.model, eqx.is_inexact_array)
        trainable = jax.tree.map(jnp.array, trainable)
        return trainable, optimizer.init(trainable)


def _updated(trainable: Any, opt_state: Any, gradient: Any) -> tuple[Any, Any]:
    updates, opt_state = OPTIMIZER.update(gradient, opt_state, trainable)
    return optax.apply_updates(trainable, updates), opt_state


def started(
    state: Any, step: Callable[[Any], Any], size: Callable[[Any], int] | None = None
) -> Rival:
    """Runs the first step, which compiles; then asks what it holds.

    - `size`: tells the bytes, given the shapes of the state.
    """
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)

    def run() -> None:
        nonlocal state
        state = step(state)
        jax.block_until_ready(state)

    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return Rival(run, seconds, None if size is None else size(shapes))


def eqaccum_step(setting: Setting) -> Rival:
    return _by_eqaccum(setting, setting.workload.loss)


def _by_eqaccum(setting: "Setting | CoupledSetting", loss: Any) -> Rival:
    import eqaccum

    step = eqaccum.make_step(
        loss,
        OPTIMIZER,
        global_batch=setting.rows,
        microbatch=setting.microbatch,
        cache=False,
    )
    rival = started(
        step.init(setting.workload.model), lambda train: step(train, setting.batch)[0]
    )
    rival.bytes = eqaccum_bytes(step.plan)
    return rival


def eqaccum_bytes(plan: Any) -> int:
    """The prediction without what the others' figures leave out.

    That is the next batch, which only `fit` places ahead, and the scratch of
    convolutions, of which the compiler says nothing.
    """
    scratch = dict(plan.parts.extra).get("convolutions", 0)
    return plan.predicted_bytes - plan.parts.batch // 2 - scratch


def by_scan(setting: Setting) -> Rival:
    """One program with `lax.scan`, its state donated."""
    return _one_program(setting, scan_program(setting))


def scan_program(setting: Setting) -> Any:
    """The jitted step, of (parameters, optimizer state) and all rows."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: PyTree, batch: PyTree) -> PyTree:
        trainable, opt_state = state
        cut = jax.tree.map(
            lambda a: a.reshape(setting.passes, setting.microbatch, *a.shape[1:]),
            batch,
        )

        def body(sums: PyTree, rows: PyTree):
            return jax.tree.map(jnp.add, sums, setting.gradient(trainable, rows)), None

        zeros = jax.tree.map(jnp.zeros_like, trainable)
        return _updated(trainable, opt_state, jax.lax.scan(body, zeros, cut)[0])

    return step


def whole(setting: Setting) -> Rival:
    """All rows at once."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: PyTree, batch: PyTree) -> PyTree:
        return _updated(state[0], state[1], setting.gradient(state[0], batch))

    return _one_program(setting, step)


def microbatch(setting: Setting) -> Rival:
    """`optax.microbatch` around the gradient."""
    gradient = optax.microbatching.microbatch(
        setting.gradient, argnums=1, microbatch_size=setting.microbatch
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: PyTree, batch: PyTree) -> PyTree:
        return _updated(state[0], state[1], gradient(state[0], batch))

    return _one_program(setting, step)


def _one_program(setting: Setting, step: Any) -> Rival:
    return started(
        setting.fresh(),
        lambda state: step(state, setting.batch),
        lambda state: program_bytes(step, state, setting.batch),
    )


def loop(setting: Setting) -> Rival:
    """A Python loop over a jitted gradient, a jitted sum and a jitted update."""
    gradient = jax.jit(setting.gradient)
    add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)
    update = jax.jit(_updated, donate_argnums=(0, 1))

    def step(state: PyTree) -> PyTree:
        total = None
        for rows in setting.slices():
            one = gradient(state[0], rows)
            total = one if total is None else add(total, one)
        return update(state[0], state[1], total)

    def size(state: PyTree) -> int:
        beside = nbytes(state[1]) + nbytes(state[0])  # moments, and the sum so far
        return program_bytes(gradient, state[0], next(setting.slices())) + beside

    return started(setting.fresh(), step, size)


def multi_steps(setting: Setting) -> Rival:
    """A Python loop over a jitted step of `optax.MultiSteps`."""
    optimizer = optax.MultiSteps(OPTIMIZER, setting.passes)

    @functools.partial(jax.jit, donate_argnums=0)
    def one(state: PyTree, rows: PyTree) -> PyTree:
        trainable, opt_state = state
        # MultiSteps takes the mean over the passes
        gradient = jax.tree.map(
            lambda g: g * setting.passes, setting.gradient(trainable, rows)
        )
        updates, opt_state = optimizer.update(gradient, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state

    def step(state: PyTree) -> PyTree:
        for rows in setting.slices():
            state = one(state, rows)
        return state

    return started(
        setting.fresh(optimizer),
        step,
        lambda state: program_bytes(one, state, next(setting.slices())),
    )


def program_bytes(jitted: Any, *args: Any) -> int:
    """Arguments and outputs less what they share, and temporaries."""
    told = jitted.lower(*args).compile().memory_analysis()
    return (
        told.argument_size_in_bytes
        + told.output_size_in_bytes
        - told.alias_size_in_bytes
        + told.temp_size_in_bytes
    )


def nbytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


RIVALS: Mapping[str, Callable[[Setting], Rival]] = {
    "eqaccum": eqaccum_step,
    "scan by hand": by_scan,
    "Python loop": loop,
    "optax.MultiSteps": multi_steps,
    "optax.microbatch": microbatch,
    "whole batch": whole,
}


# Losses that couple the rows: accumulation by itself is another loss


@dataclass(frozen=True)
class CoupledSetting:
    """The same for a loss of all rows' embeddings."""

    workload: CoupledWorkload
    rows: int
    microbatch: int

    @functools.cached_property
    def batch(self) -> PyTree:
        return self.workload.rows(self.rows)

    def embedded(self, model: PyTree, rows: PyTree) -> PyTree:
        return jax.vmap(lambda row: self.workload.embed(model, row, None))(rows)

    def split(self) -> tuple[PyTree, PyTree]:
        trainable, rest = eqx.partition(self.workload.model, eqx.is_inexact_array)
        return jax.tree.map(jnp.array, trainable), rest


def coupled_eqaccum(setting: CoupledSetting) -> Rival:
    import eqaccum

    workload = setting.workload
    return _by_eqaccum(setting, eqaccum.coupled(workload.embed, workload.head))


def coupled_whole(setting: CoupledSetting) -> Rival:
    """All rows at once."""
    trainable, rest = setting.split()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: PyTree, batch: PyTree) -> PyTree:
        def loss(trainable: PyTree):
            model = eqx.combine(trainable, rest)
            embeddings = setting.embedded(model, batch)
            return setting.workload.head(model, embeddings, jnp.ones(setting.rows))

        return _updated(state[0], state[1], jax.grad(loss)(state[0]))

    return started(
        (trainable, OPTIMIZER.init(trainable)),
        lambda state: step(state, setting.batch),
        lambda state: program_bytes(step, state, setting.batch),
    )


def coupled_two_passes(setting: CoupledSetting) -> Rival:
    """Embed in a scan, the loss's gradient, pull it back in a second scan."""
    trainable, rest = setting.split()
    n = setting.microbatch

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: PyTree, batch: PyTree) -> PyTree:
        trainable, opt_state = state
        cut = jax.tree.map(lambda a: a.reshape(-1, n, *a.shape[1:]), batch)

        def embed(trainable: PyTree, rows: PyTree) -> PyTree:
            return setting.embedded(eqx.combine(trainable, rest), rows)

        def head(trainable: PyTree, embeddings: PyTree):
            model = eqx.combine(trainable, rest)
            return setting.workload.head(model, embeddings, jnp.ones(setting.rows))

        passes = jax.lax.map(lambda rows: embed(trainable, rows), cut)
        joined = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), passes)
        direct, wanted = jax.grad(head, argnums=(0, 1))(trainable, joined)
        wanted = jax.tree.map(lambda g, e: g.reshape(e.shape), wanted, passes)

        def body(sums: PyTree, each: tuple[PyTree, PyTree]):
            _, pull = jax.vjp(lambda t: embed(t, each[0]), trainable)
            return jax.tree.map(jnp.add, sums, pull(each[1])[0]), None

        gradient = jax.lax.scan(body, direct, (cut, wanted))[0]
        return _updated(trainable, opt_state, gradient)

    return started(
        (trainable, OPTIMIZER.init(trainable)),
        lambda state: step(state, setting.batch),
        lambda state: program_bytes(step, state, setting.batch),
    )


COUPLED_RIVALS: Mapping[str, Callable[[CoupledSetting], Rival]] = {
    "eqaccum": coupled_eqaccum,
    "two passes by hand": coupled_two_passes,
    "whole batch": coupled_whole,
}
