"""Convolutions in a loop on CPU: one AdamW step of a CNN, written in five ways.

    python benchmarks/conv_in_loop.py [--tiny] [--models mnist cifar] [--rounds 9]

Takes about ten minutes on two cores (`--tiny`: half a minute) and prints a Markdown
table. All ways take the same step, over N rows in microbatches of n:

- rewritten: `lax.scan` over the gradient's jaxpr after `channels_last`, one program;
- scan: the same without `channels_last`;
- loop: a Python loop over a jitted gradient, a jitted add and a jitted update;
- MultiSteps: a Python loop over a jitted step with `optax.MultiSteps`;
- unroll: as rewritten, with `unroll=2` and `unroll=4`.

They are timed side by side, interleaved, in one process, on host arrays and until the
new parameters are there. A ratio is taken within each round; the table has medians, and
in brackets the quartiles. Memory is what `memory_analysis` says of temporaries.
`--clock cpu` counts the process's own CPU time, on a machine that does other work too.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from eqaccum._accumulate._conv import channels_last

ROWS = 256
MICROBATCHES = (1, 4, 8, 16, 64)
UNROLLS = (2, 4)
OPTIMIZER = optax.adamw(1e-3)


class CNN(eqx.Module):
    """3x3 convolutions, the mean over the image, a linear layer."""

    convolutions: list[eqx.nn.Conv]
    head: eqx.nn.Linear

    def __init__(self, channels: list[int], *, dims: int = 2, depthwise: bool = False):
        keys = iter(jax.random.split(jax.random.key(0), 2 * len(channels)))
        self.convolutions = []
        for inputs, outputs in zip(channels[:-1], channels[1:], strict=True):
            if depthwise and self.convolutions:
                self.convolutions.append(
                    eqx.nn.Conv(
                        dims, inputs, inputs, 3, 1, 1, groups=inputs, key=next(keys)
                    )
                )
                self.convolutions.append(
                    eqx.nn.Conv(dims, inputs, outputs, 1, key=next(keys))
                )
            else:
                self.convolutions.append(
                    eqx.nn.Conv(dims, inputs, outputs, 3, 1, 1, key=next(keys))
                )
        self.head = eqx.nn.Linear(channels[-1], 10, key=next(keys))

    def __call__(self, x):
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        return self.head(jnp.mean(x, tuple(range(1, x.ndim))))


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    make: Callable[[], CNN]


CASES = {
    "mnist": Case((1, 28, 28), lambda: CNN([1, 16, 32])),
    "cifar": Case((3, 32, 32), lambda: CNN([3, 16, 32, 32])),
    "depthwise": Case((3, 32, 32), lambda: CNN([3, 16, 32, 32], depthwise=True)),
    "volume": Case((1, 12, 16, 16), lambda: CNN([1, 8, 16], dims=3)),
}


class Step:
    """The ways of taking one step over all rows."""

    def __init__(self, case: Case, rows: int, microbatch: int):
        random = np.random.default_rng(0)
        self.x = random.normal(size=(rows, *case.shape)).astype(np.float32)
        self.y = random.integers(0, 10, rows).astype(np.int32)
        self.microbatch, self.passes = microbatch, rows // microbatch
        parameters, static = eqx.partition(case.make(), eqx.is_inexact_array)
        self.parameters, tree = jax.tree.flatten(parameters)

        def loss(parameters, x, y):
            model = eqx.combine(jax.tree.unflatten(tree, parameters), static)
            logits = jax.vmap(model)(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return jnp.sum(losses) / rows

        self.gradient = jax.grad(loss)
        first = self.x[:microbatch], self.y[:microbatch]
        closed = channels_last(jax.make_jaxpr(self.gradient)(self.parameters, *first))

        def rewritten(*args):
            leaves = jax.tree.leaves(args)
            return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)

        self.rewritten = rewritten

    def _runner(self, state: Any, step: Callable[[Any], Any]) -> Callable[[], None]:
        def run() -> None:
            nonlocal state
            state = step(state)
            jax.block_until_ready(state)

        return run

    def _fresh(self, optimizer: Any) -> Any:
        parameters = jax.tree.map(jnp.array, self.parameters)
        return parameters, optimizer.init(parameters)

    def scan(self, gradient: Callable[..., Any], unroll: int = 1) -> "Program":
        passes, microbatch = self.passes, self.microbatch

        def step(state, x, y):
            parameters, opt_state = state
            rows = [a.reshape(passes, microbatch, *a.shape[1:]) for a in (x, y)]

            def body(total, row):
                grads = gradient(parameters, *row)
                return jax.tree.map(jnp.add, total, grads), None

            zeros = jax.tree.map(jnp.zeros_like, parameters)
            grads, _ = jax.lax.scan(body, zeros, rows, unroll=unroll)
            return _updated(parameters, opt_state, grads)

        state = self._fresh(OPTIMIZER)
        jitted = jax.jit(step, donate_argnums=0)
        compiled = jitted.lower(state, self.x, self.y).compile()
        analysis = compiled.memory_analysis()
        run = self._runner(state, lambda state: compiled(state, self.x, self.y))
        return Program(run, getattr(analysis, "temp_size_in_bytes", None))

    def loop(self) -> "Program":
        gradient = jax.jit(self.gradient)
        add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
        update = jax.jit(_updated, donate_argnums=(0, 1))

        def step(state):
            total = None
            for x, y in self._microbatches():
                grads = gradient(state[0], x, y)
                total = grads if total is None else add(total, grads)
            return update(*state, total)

        return Program(self._runner(self._fresh(OPTIMIZER), step))

    def multi_steps(self) -> "Program":
        optimizer = optax.MultiSteps(OPTIMIZER, self.passes)

        @partial(jax.jit, donate_argnums=0)
        def one(state, x, y):
            parameters, opt_state = state
            grads = self.gradient(parameters, x, y)
            updates, opt_state = optimizer.update(grads, opt_state, parameters)
            return optax.apply_updates(parameters, updates), opt_state

        def step(state):
            for x, y in self._microbatches():
                state = one(state, x, y)
            return state

        return Program(self._runner(self._fresh(optimizer), step))

    def _microbatches(self):
        for start in range(0, len(self.x), self.microbatch):
            stop = start + self.microbatch
            yield self.x[start:stop], self.y[start:stop]


def _updated(parameters, opt_state, grads):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, parameters)
    return optax.apply_updates(parameters, updates), opt_state


@dataclass
class Program:
    run: Callable[[], None]
    temporaries: int | None = None
    seconds: list[float] = field(default_factory=list)

    def time(self, clock: Callable[[], float]) -> None:
        start = clock()
        self.run()
        self.seconds.append(clock() - start)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(
    programs: dict[str, Program], rounds: int, clock: Callable[[], float]
) -> None:
    for program in programs.values():
        program.run()
    for i in range(rounds):
        # Each way is first and last equally often.
        order = list(programs) if i % 2 else list(reversed(programs))
        for name in order:
            programs[name].time(clock)


def ratio(numerator: list[float], denominator: list[float]) -> str:
    rounds = np.asarray(numerator) / np.asarray(denominator)
    low, middle, high = np.quantile(rounds, (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def row(name: str, microbatch: int, programs: dict[str, Program]) -> list[str]:
    times = {way: program.seconds for way, program in programs.items()}
    ours = times["rewritten"]
    by_hand = min(("loop", "MultiSteps"), key=lambda way: np.median(times[way]))
    cells = [
        name,
        str(microbatch),
        f"{1e3 * np.median(ours):.1f}",
        ratio(ours, times["loop"]),
        ratio(ours, times["MultiSteps"]),
        f"{ratio(ours, times[by_hand])} {by_hand}",
        ratio(times["scan"], ours),
    ]
    temporaries = []
    for unroll in UNROLLS:
        way = f"unroll={unroll}"
        cells.append(ratio(times[way], ours) if way in times else "-")
    for way in ("scan", "rewritten", *(f"unroll={u}" for u in UNROLLS)):
        size = programs[way].temporaries if way in programs else None
        temporaries.append("-" if size is None else f"{size / 1e6:.1f}")
    return [*cells, " / ".join(temporaries)]


HEADER = [
    "model",
    "n",
    "rewritten, ms",
    "/ loop",
    "/ MultiSteps",
    "/ faster of the two",
    "scan / rewritten",
    "unroll=2 / rewritten",
    "unroll=4 / rewritten",
    "temporaries, MB: scan / rewritten / unroll=2 / 4",
]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    versions = [f"{m.__name__} {m.__version__}" for m in (jax, eqx, optax, np)]
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, "
        f"Python {platform.python_version()}, {', '.join(versions)}; "
        f"load average at the start {load:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--microbatches", nargs="+", type=int, default=MICROBATCHES)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    if options.tiny:
        options.models, options.microbatches = ["mnist"], [4]
        options.rows, options.rounds = 16, 2
    print(f"N = {options.rows}, {options.rounds} rounds, {options.clock} time.")
    print(f"{machine()}\n")
    print(line(HEADER))
    print(line(["---"] * len(HEADER)))
    for name in options.models:
        for microbatch in options.microbatches:
            step = Step(CASES[name], options.rows, microbatch)
            programs = {
                "rewritten": step.scan(step.rewritten),
                "loop": step.loop(),
                "MultiSteps": step.multi_steps(),
                "scan": step.scan(step.gradient),
            }
            for unroll in UNROLLS:
                if unroll <= step.passes:
                    program = step.scan(step.rewritten, unroll)
                    programs[f"unroll={unroll}"] = program
            measure(programs, options.rounds, CLOCKS[options.clock])
            print(line(row(name, microbatch, programs)), flush=True)


if __name__ == "__main__":
    main()
