"""How do the costs of a step and of its plan grow?

    python benchmarks/growth.py [--tiny] [--rounds 7]
    make bench-growth

- time per example against the number of passes (1 to 4096) of one microbatch, in turn,
  and what the plan says of the temporaries;
- seconds to plan, from shapes alone, against the parameters (10^5 to 10^8) and against
  the depth.

Writes `results/growth.json` and `.md`; a quarter of an hour on two cores. `--tiny`
writes nothing.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import _machine
import _models
import equinox as eqx
import jax
import optax

import eqaccum

RESULTS = Path(__file__).with_name("results") / "growth.json"
MICROBATCH = 64
PASSES = (1, 4, 16, 64, 256, 1024, 4096)
SIZES = {"features": 64, "width": 256, "depth": 3, "classes": 10}
WIDTHS = (128, 512, 1600, 5000)  # of four layers: 10^5 to 10^8 parameters
DEPTHS = (2, 8, 32, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.tiny:
        print(passes((1, 4), 2), planned(16, 2))
        return
    told = {
        "machine": _machine.facts(),
        "passes": passes(PASSES, options.rounds),
        "widths": [planned(width, 4) for width in WIDTHS],
        "depths": [planned(256, depth) for depth in DEPTHS],
    }
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(told))
    print(page(told))


def passes(numbers: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Seconds per example, each number of passes in turn."""
    workload = _models.mlp(**SIZES)
    data = workload.rows(max(numbers) * MICROBATCH)
    runs = {}
    for number in numbers:
        rows = number * MICROBATCH
        step = eqaccum.make_step(
            workload.loss,
            optax.adamw(1e-3),
            global_batch=rows,
            microbatch=MICROBATCH,
            cache=False,
        )
        batch = jax.tree.map(lambda leaf, rows=rows: leaf[:rows], data)
        runs[number] = [step, step.init(workload.model), batch]
    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(rounds + 1):
        for number, run in runs.items():
            # as many rows for each: short steps are repeated
            repeats = max(1, 256 // number)
            begin = time.perf_counter()
            for _ in range(repeats):
                run[1], _ = run[0](run[1], run[2])
            jax.block_until_ready(run[1].trainable_leaves)
            taken = time.perf_counter() - begin
            if turn:
                seconds[number].append(taken / (repeats * number * MICROBATCH))
    return [
        {
            "passes": number,
            "seconds": seconds[number],
            "temporaries": run[0].plan.parts.activations,
        }
        for number, run in runs.items()
    ]


def planned(width: int, depth: int) -> dict[str, Any]:
    """The time of a plan, in a process that has compiled nothing of its kind."""
    model = eqx.filter_eval_shape(
        lambda: eqx.nn.MLP(width, 10, width, depth, key=jax.random.key(0))
    )
    rows = jax.ShapeDtypeStruct((4096, width), "float32")
    labels = jax.ShapeDtypeStruct((4096,), "int32")
    begin = time.perf_counter()
    plan = eqaccum.plan(
        model,
        (rows, labels),
        global_batch=4096,
        optimizer=optax.adamw(1e-3),
        memory_limit=_half(model, width, depth),
        cache=False,
    )
    return {
        "parameters": sum(
            leaf.size for leaf in jax.tree.leaves(eqx.filter(model, _is))
        ),
        "depth": depth,
        "seconds": time.perf_counter() - begin,
        "compilations": plan.compilations,
        "passes": plan.num_microbatches,
    }


def _is(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _half(model: Any, width: int, depth: int) -> int:
    """A limit that half of the activations of 4096 rows fit beside the parameters."""
    parameters = sum(4 * leaf.size for leaf in jax.tree.leaves(eqx.filter(model, _is)))
    rows = 4096 * 4 * width
    return 7 * parameters + 2 * rows + depth * rows


def page(told: dict[str, Any]) -> str:
    plateau = next(one for one in told["passes"] if one["passes"] == 16)
    lines = [
        "# How the costs grow",
        "",
        f"{_machine.described(told['machine'])} Made by `make bench-growth`.",
        "",
        f"MLP, microbatch {MICROBATCH}: time per example over that at 16 passes (the "
        "median of the ratios within each round; asked for: flat within 3 % from where "
        "the work of a step outweighs its fixed costs), and the plan's temporaries.",
        "",
        "| passes | rows | time per example | quartiles | temporaries |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in told["passes"]:
        pairs = zip(one["seconds"], plateau["seconds"], strict=True)
        low, middle, high = statistics.quantiles((a / b for a, b in pairs), n=4)
        lines.append(
            f"| {one['passes']} | {one['passes'] * MICROBATCH} | {middle:.3f} | "
            f"{low:.3f}-{high:.3f} | {one['temporaries'] / 1e6:.2f} MB |"
        )
    lines += [
        "",
        "Planning from shapes alone (a search under a limit that makes it cut):",
        "",
        "| parameters | layers | seconds | compilations | passes |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one['parameters']:,} | {one['depth']} | {one['seconds']:.1f} | "
        f"{one['compilations']} | {one['passes']} |"
        for one in told["widths"] + told["depths"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
