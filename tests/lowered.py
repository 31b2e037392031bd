"""Takes a training run's memory away while it runs, and looks at what it makes of that.

    python tests/lowered.py [--runs 100] [--seed 0]             (make test-lowered)

Each child trains a convolution-free network whose step needs some 600 MB more than its
parameters, and at a random moment (one in four: at any time; else between two
steps) lowers its own RLIMIT_AS to what it has mapped just then and 300 to 500 MB. It
must finish by taking more passes, with the losses, bit for bit, of a run that was
stopped at that step and resumed with the new microbatch; or stop at one example, with
the last good state in the error's `.result`. Anything else (an abort, another
exception, other losses) fails. Takes half an hour on two cores; needs Linux.
"""

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum

ROWS, STEPS = 150_000, 6
MEGABYTE = 10**6
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "lowered.md"


@dataclass
class Lowering:
    """When the limit is lowered, and by how much it stays above what is in use."""

    spare: int
    after_step: int | None = None
    after_seconds: float | None = None


@dataclass
class Told:
    """What a child says of its run."""

    losses: list[str] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)  # step, microbatch
    error: str = ""
    states_kept: int | None = None


def loss(model: eqx.nn.MLP, x: jax.Array, key: Any) -> jax.Array:
    return jnp.mean((model(x) - jnp.sin(x[:1])) ** 2)


def arguments(**more: Any) -> dict[str, Any]:
    """Two epochs of three steps, each of them another third of the rows."""
    data = np.random.default_rng(0).standard_normal((3 * ROWS, 16), np.float32)
    model = eqx.nn.MLP(16, 1, 64, 16, jnp.tanh, key=jax.random.key(0))
    given = {
        "loss": loss,
        "optimizer": optax.adamw(1e-3),
        "global_batch": ROWS,
        "memory_limit": 2**40,
        "progress": False,
        "cache": False,
        "steps": STEPS,
    }
    return {"model": model, "data": data} | given | more


# The child


def run(lowering: Lowering) -> Told:
    told, done = Told(), []

    def lower() -> None:
        most = mapped() + lowering.spare
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def note(info: Any) -> None:
        done.append(info.step)
        if info.step == 1 and lowering.after_seconds is not None:
            threading.Timer(lowering.after_seconds, lower).start()
        if info.step == lowering.after_step:
            time.sleep(0.3)  # temporaries are freed in another thread
            lower()

    def changed(message: Any, *rest: Any, **more: Any) -> None:
        size = re.search(r"goes on as \d+ = \d+ pass(?:es)? of (\d+)", str(message))
        if size is None:
            raise RuntimeError(f"an unexpected warning: {message}")
        told.changes.append((len(done), int(size[1])))

    warnings.showwarning = changed
    warnings.simplefilter("always")
    try:
        result = eqaccum.fit(**arguments(callbacks=[note]))
    except eqaccum.EqaccumError as error:
        told.error = f"{type(error).__name__}: {error}"
        result = getattr(error, "result", None)
        told.states_kept = None if result is None else int(result.train.step)
    told.losses = [] if result is None else losses(result)
    return told


def losses(result: eqaccum.FitResult) -> list[str]:
    return [float(value).hex() for value in result.history["loss"]]


def mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


# The parent


def expected(changes: list[tuple[int, int]], steps: int) -> list[str]:
    """The losses of a run that is stopped at each change and resumed with that size."""
    result = None
    sizes = [(0, ROWS), *changes]
    ends = [step for step, _ in changes] + [steps]
    for (_, size), end in zip(sizes, ends, strict=True):
        if end > (0 if result is None else int(result.train.step)):
            more = {} if result is None else {"resume": result}
            result = eqaccum.fit(**arguments(steps=end, microbatch=size, **more))
    return [] if result is None else losses(result)


def verdict(child: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """What became of a run, and why it is wrong where it is."""
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:] or [""]
        return "died", f"exit {child.returncode}: {last[0][:300]}"
    told = Told(**json.loads(child.stdout.splitlines()[-1]))
    changes = [(step, size) for step, size in told.changes]
    if told.error:
        size = changes[-1][1] if changes else ROWS
        if "out of memory" not in told.error or told.states_kept != len(told.losses):
            return "wrong error", told.error[:400]
        if size > 1:
            return "stopped too soon", f"at microbatch {size}: {told.error[:400]}"
    if expected(changes, len(told.losses)) != told.losses:
        return "other losses", f"changes {changes}, losses {told.losses}"
    if told.error:
        return "stopped at one example, its state kept", ""
    if len(told.losses) != STEPS:
        return "too few steps", str(told.losses)
    return ("went on with more passes" if changes else "was not short of memory"), ""


GOOD = (
    "went on with more passes",
    "was not short of memory",
    "stopped at one example, its state kept",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the results' page")
    options = parser.parse_args()
    draw, seen, bad = random.Random(options.seed), Counter(), []
    for number in range(options.runs):
        spare = draw.randint(300, 500) * MEGABYTE
        lowering = Lowering(spare, after_step=draw.randint(1, STEPS - 1))
        if draw.random() < 0.25:
            lowering = Lowering(spare, after_seconds=draw.uniform(0, 3))
        child = subprocess.run(
            [sys.executable, __file__, "child", json.dumps(asdict(lowering))],
            capture_output=True,
            text=True,
        )
        what, why = verdict(child)
        seen[what] += 1
        if what not in GOOD:
            bad.append(f"{lowering}: {what}: {why}")
        print(f"{number + 1}: {lowering}: {what} {why}", flush=True)
    page = report(seen, options)
    print(page)
    if options.write:
        RESULTS.write_text(page)
    if bad:
        raise SystemExit("\n".join(["wrong:", *bad]))


def report(seen: Counter[str], options: argparse.Namespace) -> str:
    rows = "\n".join(f"| {what} | {count} |" for what, count in sorted(seen.items()))
    return (
        "# Memory taken away while a run goes on\n\n"
        f"Made by `make test-lowered` (`--runs {options.runs} --seed {options.seed}`); "
        f"jax {jax.__version__}, glibc's allocator as it comes. The losses of each run "
        "that took more passes are, bit for bit, those of one that was stopped there "
        "and resumed with that microbatch.\n\n"
        f"| what became of {options.runs} runs | runs |\n| --- | --- |\n{rows}\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(asdict(run(Lowering(**json.loads(sys.argv[2]))))))
    else:
        main()
