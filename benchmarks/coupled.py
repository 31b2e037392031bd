"""What the second sweep of a coupled loss costs: InfoNCE beside plain accumulation.

    python benchmarks/coupled.py [--rounds 21] [--clock cpu] [--tiny]

A step of `coupled(embed, head)` against one of a loss of single pairs with the same
encoders, rows and microbatch: it embeds once and never sees another pair. Interleaved
in one process; the median of the ratios of each round, its quartiles in brackets. One
more forward pass is a third more work (4 / 3); the head comes on top, and its matrix of
scores grows with the square of the batch. Five minutes on two cores; the results are in
results/coupled.md.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _machine
import _models
import _pairs
import jax
import jax.numpy as jnp
import optax

import eqaccum

RESULTS = Path(__file__).parent / "results" / "coupled.md"
GOAL = 1.40


@dataclass(frozen=True)
class Case:
    workload: _models.CoupledWorkload
    rows: int
    microbatch: int


def cases(tiny: bool) -> Iterator[Case]:
    transformer = _models.transformer_dual_encoder(
        length=16, width=32 if tiny else 128, depth=2, heads=2
    )
    for microbatch in (64, 16):
        yield Case(transformer, 128 if tiny else 256, microbatch)
    mlp = _models.dual_encoder(
        features=64, width=64 if tiny else 512, depth=2, size=32 if tiny else 128
    )
    for microbatch in (256, 64):
        yield Case(mlp, 512 if tiny else 2048, microbatch)


def losses(workload: _models.CoupledWorkload) -> dict[str, Any]:
    def plain(model: Any, example: Any, key: Any) -> jax.Array:
        query, passage = workload.embed(model, example, key)
        return -jnp.vdot(query, passage) / jnp.exp(model.log_temperature)

    coupled = eqaccum.coupled(workload.embed, workload.head)
    return {"coupled": coupled, "plain": plain}


def stepping(case: Case, loss: Any) -> Callable[[], None]:
    """A function that takes one step and waits for it."""
    step = eqaccum.make_step(
        loss, optax.adamw(1e-3), global_batch=case.rows, microbatch=case.microbatch
    )
    workload = case.workload
    return _pairs.stepping(step, workload.model, workload.rows(case.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--tiny", action="store_true", help="small models, no page")
    options = parser.parse_args()
    os.environ["EQACCUM_CACHE"] = "0"
    table = [
        "| encoders | N | microbatch | ms plain | ratio |",
        "|---|---|---|---|---|",
    ]
    for case in cases(options.tiny):
        made = {name: stepping(case, fn) for name, fn in losses(case.workload).items()}
        ratio = _pairs.compared(
            made["coupled"], made["plain"], rounds=options.rounds, clock=options.clock
        )
        table.append(
            f"| {case.workload.name} | {case.rows} | {case.microbatch} | "
            f"{1e3 * ratio.seconds[1]:.0f} | {ratio} |"
        )
        print(table[-1], flush=True)
    blocks = [
        "# What a coupled loss costs",
        f"{_machine.described(_machine.facts())} Made by "
        f"`make bench-coupled ARGS='--rounds {options.rounds} "
        f"--clock {options.clock}'`.",
        "AdamW. The time of an InfoNCE step, exact over all N rows, to that of a step "
        "that accumulates a loss of single pairs with the same encoders at the same "
        f"microbatch: the median of {options.rounds} interleaved rounds and its "
        f"quartiles. Asked for on the transformer: at most {GOAL}.",
        "\n".join(table),
        "One more forward pass alone is 1.33. With the MLP the matrix of scores, "
        "N x N, is a large part of the work.",
    ]
    if not options.tiny:
        RESULTS.write_text("\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
