"""What does the loop around the programs cost?

    python benchmarks/loop.py [--tiny] [--rounds 10] [--steps 1000]
    make bench-loop

- *loop*: `fit` against bare calls of its own three compiled programs on rows that are
  on the device already, with the same one wait per step: microseconds more per step of
  a tiny model, and the ratio for a step above 20 ms.
- *check*: the same steps by `fit` against the programs called without any wait and
  without looking at whether loss and gradient are finite.
- *first step*: a process that trains one step, against the sum of its compilations.
- *import*: `import eqaccum` against `import jax, equinox, optax`.

Sides take turns in one process (processes, for the last two). Writes
`results/loop.json` and `.md`; ten minutes on two cores. `--tiny` writes nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _machine
import _models
import equinox as eqx
import jax
import numpy as np
import optax

import eqaccum
from eqaccum._data import batch_of

RESULTS = Path(__file__).with_name("results") / "loop.json"
TINY = {"features": 8, "width": 8, "depth": 1, "classes": 4}
LARGE = {"features": 256, "width": 512, "depth": 4, "classes": 10}
TINY_ROWS, LARGE_ROWS, PASSES = 32, 2048, 4


class Bare:
    """The programs of a step, called again and again with one batch."""

    def __init__(self, workload: _models.Workload, rows: int):
        self.step = eqaccum.make_step(
            workload.loss,
            optax.adamw(1e-3),
            global_batch=rows,
            microbatch=rows // PASSES,
            cache=False,
        )
        self.train = self.step.init(workload.model)
        batch = batch_of(workload.rows(rows), in_axes=0, weights=None)
        self.placed = self.step.place(batch, self.train)

    def run(self, steps: int, *, waits: bool) -> float:
        """Seconds per step."""
        ready, buffers = self.placed.ready, self.step._buffers
        launcher, train = self.step._launcher, self.train
        captured = buffers.captured(ready.traced.captured)
        _, slots = launcher._call(train, ready, self.placed.first, 0)
        reused = ready.builder.reusable(ready.traced)
        assert all(reused) and ready.finish and ready.update
        state, empty = [], []
        trainable, moments = train.trainable_leaves, train.opt_leaves
        begin = time.perf_counter()
        for _ in range(steps):
            arguments = eqaccum._accumulate.Arguments(
                trainable, train.frozen_leaves, empty, self.placed.whole
            )
            sums, outputs = ready.accumulate(
                captured, arguments, state, slots, empty,
                buffers.accumulator(ready), None,
            )  # fmt: skip
            nothing = eqaccum._accumulate.Arguments(empty, empty, empty, empty)
            finished = ready.finish(empty, nothing, sums, empty, outputs, empty, empty)
            scalars = finished.scalars
            if waits and not bool(scalars.ok):
                raise RuntimeError("not finite")
            trainable, moments = ready.update(
                trainable, moments, finished.gradient, scalars.loss, scalars.penalty
            )
            buffers.give_back(ready, finished.gradient, empty)
        jax.block_until_ready(trainable)
        seconds = (time.perf_counter() - begin) / steps
        self.train = eqx.tree_at(
            lambda t: (t.trainable_leaves, t.opt_leaves), train, (trainable, moments)
        )
        return seconds


def fitted(
    workload: _models.Workload, rows: int, **more: Any
) -> Callable[[int], float]:
    """Seconds per step of `fit`, by its own history."""
    data = workload.rows(4 * rows)

    def run(steps: int) -> float:
        result = eqaccum.fit(
            workload.model,
            data,
            loss=workload.loss,
            optimizer=optax.adamw(1e-3),
            global_batch=rows,
            microbatch=rows // PASSES,
            steps=steps + 1,
            cache=False,
            **more,
        )
        return float(np.mean(result.history["seconds"][1:]))

    return run


def taking_turns(
    sides: dict[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = sides[name]()
            if number:  # the first round warms up
                found[name].append(seconds)
    return found


def loops(sizes: dict[str, int], rows: int, steps: int, rounds: int) -> dict[str, Any]:
    workload = _models.mlp(**sizes)
    bare = Bare(workload, rows)
    fit = fitted(workload, rows, progress=False)
    watched = fitted(workload, rows, progress=True, callbacks=[lambda info: None])
    return taking_turns(
        {
            "programs, one wait": lambda: bare.run(steps, waits=True),
            "programs, no wait": lambda: bare.run(steps, waits=False),
            "fit": lambda: fit(steps),
            "fit, progress and a callback": lambda: watched(steps),
        },
        rounds,
    )


# Processes of their own

FIRST = """
import json, sys, time
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **more: compiled.append(seconds)
    if event == "/jax/core/compile/backend_compile_duration" else None
)
import _models, eqaccum, optax
workload = _models.language_model(
    vocabulary=512, length=64, width=128, depth=4, heads=4
)
data = workload.rows(64)
jax.block_until_ready(jax.numpy.ones(3) + 1)
compiled.clear()
begin = time.perf_counter()
eqaccum.fit(workload.model, data, loss=workload.loss, optimizer=optax.adamw(1e-3),
            global_batch=64, microbatch=16, steps=1, progress=False, cache=False)
print(json.dumps([time.perf_counter() - begin, sum(compiled)]))
"""
IMPORT = (
    "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
)


def in_a_process(code: str) -> Any:
    here = str(Path(__file__).parent)
    paths = f"import sys; sys.path[:0] = [{here!r}, {str(Path(here).parent)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", paths + code], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def imports(rounds: int) -> dict[str, list[float]]:
    return taking_turns(
        {
            name: lambda name=name: in_a_process(IMPORT.format(name))
            for name in ("jax, equinox, optax", "eqaccum")
        },
        rounds,
    )


# The page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    if options.tiny:
        print(loops(TINY, TINY_ROWS, 20, 2))
        return
    rounds = options.rounds
    told = {
        "machine": _machine.facts(),
        "steps": options.steps,
        "tiny": loops(TINY, TINY_ROWS, options.steps, rounds),
        "large": loops(LARGE, LARGE_ROWS, max(options.steps // 50, 2), rounds),
        "first": [in_a_process(FIRST) for _ in range(min(rounds, 5))],
        "import": imports(min(rounds, 7)),
    }
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(told))
    print(page(told))


def page(told: dict[str, Any]) -> str:
    tiny, large, first = told["tiny"], told["large"], told["first"]
    more = [
        1e6 * (a - b)
        for a, b in zip(tiny["fit"], tiny["programs, one wait"], strict=True)
    ]
    watched = [
        1e6 * (a - b)
        for a, b in zip(
            tiny["fit, progress and a callback"],
            tiny["programs, one wait"],
            strict=True,
        )
    ]
    rounds = len(more)
    lines = [
        "# What the loop costs",
        "",
        f"{_machine.described(told['machine'])} Made by `make bench-loop`.",
        "",
        f"| {rounds} rounds, sides in turn | median | quartiles | asked for |",
        "| --- | --- | --- | --- |",
        _row("`fit` more than its bare programs, tiny step", more, "{:.0f} us", "300"),
        _row("the same with progress bar and callback", watched, "{:.0f} us", "300"),
        _row(
            "`fit` / bare programs, "
            f"{1e3 * statistics.median(large['fit']):.0f} ms step",
            _ratio(large, "fit", "programs, one wait"),
            "{:.3f}",
            "1.02",
        ),
        _row(
            "programs with the wait and the look at `ok` / without",
            _ratio(large, "programs, one wait", "programs, no wait"),
            "{:.3f}",
            "1.01",
        ),
        _row(
            "first step / the sum of its compilations",
            [wall / compiled for wall, compiled in first],
            "{:.2f}",
            "1.2",
        ),
        _row(
            "`import eqaccum` / `import jax, equinox, optax`",
            _ratio(told["import"], "eqaccum", "jax, equinox, optax"),
            "{:.2f}",
            "1.15",
        ),
    ]
    return "\n".join(lines) + "\n"


def _ratio(found: dict[str, list[float]], one: str, other: str) -> list[float]:
    return [a / b for a, b in zip(found[one], found[other], strict=True)]


def _row(what: str, values: list[float], form: str, asked: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    spread = f"{form.format(low)} to {form.format(high)}"
    return f"| {what} | {form.format(middle)} | {spread} | at most {asked} |"


if __name__ == "__main__":
    main()
