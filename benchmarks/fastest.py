"""Does `microbatch="fastest"` find the fastest microbatch?

    python benchmarks/fastest.py [--tiny] [--rounds 9]
    make bench-fastest

For each model `fit` settles on a size during its first steps; then every size that it
could have chosen is timed alone, one step of each in turn, in one process. Writes
`results/fastest.json` and `.md`; ten minutes on two cores. `--tiny` writes nothing.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import _machine
import _models
import jax
import optax
import steps

import eqaccum

RESULTS = Path(__file__).with_name("results") / "fastest.json"
CASES = {name: case for name, case in steps.CASES.items() if name != "dual encoder"} | {
    "small CNN": (_models.cnn, {"size": 28, "widths": (16, 32), "blocks": 1}, 256),
}
TRIAL_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    cases = {"MLP": steps.TINY["MLP"]} if options.tiny else CASES
    found = []
    for name, (build, sizes, rows) in cases.items():
        found.append(measured(name, build(**sizes), rows, options.rounds))
        print(json.dumps(found[-1]), flush=True)
    told = {"machine": _machine.facts(), "models": found}
    if not options.tiny:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(told))
        print(page(told))


def measured(
    name: str, workload: _models.Workload, rows: int, rounds: int
) -> dict[str, Any]:
    data = workload.rows(rows)
    result = eqaccum.fit(
        workload.model,
        data,
        loss=workload.loss,
        optimizer=optax.adamw(1e-3),
        global_batch=rows,
        microbatch="fastest",
        steps=TRIAL_STEPS,
        progress=False,
        cache=False,
    )
    sizes = candidates(rows, result.plan.microbatch)
    runs = {size: Alone(workload, data, rows, size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):
        for size in sizes[number % len(sizes) :] + sizes[: number % len(sizes)]:
            taken = runs[size].step_seconds()
            if number:
                seconds[size].append(taken)
    return {
        "model": name,
        "rows": rows,
        "chosen": result.plan.microbatch,
        "seconds": {str(size): times for size, times in seconds.items()},
        "notes": result.plan.notes,
    }


def candidates(rows: int, chosen: int) -> list[int]:
    """Halves of the whole batch, as long as they are not the single example."""
    sizes, size = {chosen}, rows
    while size > 1:
        sizes.add(size)
        size = -(-size // 2)
    return sorted(sizes, reverse=True)


class Alone:
    """A step of one microbatch."""

    def __init__(self, workload: _models.Workload, data: Any, rows: int, size: int):
        self.step = eqaccum.make_step(
            workload.loss,
            optax.adamw(1e-3),
            global_batch=rows,
            microbatch=size,
            cache=False,
        )
        self.train, self.data = self.step.init(workload.model), data

    def step_seconds(self) -> float:
        begin = steps.CLOCKS["wall"]()
        self.train, _ = self.step(self.train, self.data)
        jax.block_until_ready(self.train.trainable_leaves)
        return steps.CLOCKS["wall"]() - begin


def page(told: dict[str, Any]) -> str:
    lines = [
        "# The fastest microbatch",
        "",
        f"{_machine.described(told['machine'])} Made by `make bench-fastest`.",
        "",
        'Chosen by `microbatch="fastest"` during the first steps of a run, against the '
        "best of all sizes timed alone afterwards: medians of their ratio within each "
        "round (asked for: at most 1.03).",
        "",
        "| model | rows | chosen | best alone | chosen / best | whole batch / chosen |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in told["models"]:
        seconds = {int(size): times for size, times in one["seconds"].items()}
        best = min(seconds, key=lambda size: statistics.median(seconds[size]))
        chosen, whole = one["chosen"], max(seconds)
        lines.append(
            f"| {one['model']} | {one['rows']} | {chosen} | {best} | "
            f"{_ratio(seconds[chosen], seconds[best]):.2f} | "
            f"{_ratio(seconds[whole], seconds[chosen]):.2f} |"
        )
    return "\n".join(lines) + "\n"


def _ratio(some: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    main()
