"""What `noise_scale=True` costs: a step with it against the same step without.

    python benchmarks/noise_scale.py [--rounds 41] [--clock cpu] [--tiny]

AdamW steps at the same microbatch, interleaved in one process; the median of the ratios
of each round, its quartiles in brackets. The results are in results/noise_scale.md.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import _machine
import _models
import _pairs
import optax

import eqaccum

RESULTS = Path(__file__).parent / "results" / "noise_scale.md"
ROWS = 256
GOAL = 1.02


def workloads(tiny: bool) -> Iterator[tuple[_models.Workload, int]]:
    """Each with a microbatch."""
    width = 32 if tiny else 512
    mlp = _models.mlp(features=64, width=width, depth=3, classes=10)
    yield mlp, 64
    yield mlp, 16
    width = 16 if tiny else 128
    lm = _models.language_model(
        vocabulary=512, length=32, width=width, depth=2, heads=2
    )
    yield lm, 32
    yield lm, 8
    yield _models.cnn(size=16, widths=(16, 32)), 32


def stepping(workload: _models.Workload, microbatch: int, noise: bool) -> Callable:
    """A function that takes one step and waits for it."""
    step = eqaccum.make_step(
        workload.loss,
        optax.adamw(1e-3),
        global_batch=ROWS,
        microbatch=microbatch,
        noise_scale=noise,
        axis_name=workload.axis_name,
    )
    return _pairs.stepping(step, workload.model, workload.rows(ROWS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--tiny", action="store_true", help="small models, no page")
    options = parser.parse_args()
    os.environ["EQACCUM_CACHE"] = "0"
    lines = [
        "# What `noise_scale=True` costs",
        f"{_machine.described(_machine.facts())} Made by "
        f"`make bench-noise ARGS='--rounds {options.rounds} --clock {options.clock}'`.",
        f"AdamW, {ROWS} rows a step. Time with it over time without, the median of "
        f"{options.rounds} interleaved rounds and its quartiles; asked for: at most "
        f"{GOAL}.",
    ]
    table = ["| model | microbatch | ms without | ratio |", "|---|---|---|---|"]
    for workload, microbatch in workloads(options.tiny):
        on, off = (stepping(workload, microbatch, noise) for noise in (True, False))
        ratio = _pairs.compared(on, off, rounds=options.rounds, clock=options.clock)
        milliseconds = f"{1e3 * ratio.seconds[1]:.1f}"
        table.append(f"| {workload.name} | {microbatch} | {milliseconds} | {ratio} |")
        print(table[-1], flush=True)
    if not options.tiny:
        RESULTS.write_text("\n\n".join([*lines, "\n".join(table)]) + "\n")


if __name__ == "__main__":
    main()
