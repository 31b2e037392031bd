"""How fast is a step? eqaccum beside the other ways of writing it.

    python benchmarks/steps.py [--tiny] [--rounds 15] [--models MLP CNN] [--clock cpu]
    make bench

All ways of a model run in one process, one step of each in turn, in an order that
changes from round to round; a ratio is taken within each round. Writes
`results/steps.json`, `.md` and `.png`. A quarter of an hour on two cores; `--tiny`
(nothing is written) half a minute. PyTorch is timed where it is installed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _machine
import _models
from _rivals import COUPLED_RIVALS, RIVALS, CoupledSetting, Rival, Setting

RESULTS = Path(__file__).with_name("results") / "steps.json"
PASSES = 8
OURS = "eqaccum"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

# (model, sizes, rows); sizes of the tiny form
CASES: Mapping[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "MLP": (
        _models.mlp,
        {"features": 784, "width": 1024, "depth": 3, "classes": 10},
        2048,
    ),
    "CNN": (_models.cnn, {"size": 32, "widths": (16, 32, 64), "blocks": 1}, 64),
    "transformer LM": (
        _models.language_model,
        {"vocabulary": 512, "length": 64, "width": 128, "depth": 4, "heads": 4},
        64,
    ),
    "ViT": (
        _models.vision_transformer,
        {"size": 32, "patch": 4, "width": 128, "depth": 4, "heads": 4},
        64,
    ),
    "GRU": (_models.gru, {"vocabulary": 256, "length": 64, "width": 256}, 256),
    "dual encoder": (
        _models.dual_encoder,
        {"features": 256, "width": 512, "depth": 3, "size": 64},
        1024,
    ),
}
TINY: Mapping[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "MLP": (_models.mlp, {"features": 8, "width": 8, "depth": 1, "classes": 4}, 16),
    "dual encoder": (
        _models.dual_encoder,
        {"features": 8, "width": 8, "depth": 1, "size": 4},
        16,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=None)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    options = parser.parse_args()
    cases = TINY if options.tiny else CASES
    rows: list[dict[str, Any]] = []
    for name in options.models or cases:
        build, sizes, count = cases[name]
        rows += measured(build(**sizes), count, options.rounds, CLOCKS[options.clock])
        print(table([row for row in rows if row["model"] == name]), flush=True)
        if not options.tiny:
            write(rows, options.clock)


def measured(
    workload: Any, count: int, rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """One entry for each way of taking the step."""
    rivals = _started(workload, count)
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    names = list(rivals)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = clock()
            rivals[name].run()
            if number:  # the first round warms up
                seconds[name].append(clock() - begin)
    return [
        {
            "model": workload.name,
            "rows": count,
            "microbatch": count // PASSES,
            "way": name,
            "seconds": seconds[name],
            "seconds_to_first": rival.seconds_to_first,
            "bytes": rival.bytes,
        }
        for name, rival in rivals.items()
    ]


def _started(workload: Any, count: int) -> dict[str, Rival]:
    if isinstance(workload, _models.CoupledWorkload):
        coupled = CoupledSetting(workload, count, count // PASSES)
        return {name: start(coupled) for name, start in COUPLED_RIVALS.items()}
    setting = Setting(workload, count, count // PASSES)
    rivals = {name: start(setting) for name, start in RIVALS.items()}
    try:
        from _torch_rivals import torch_loop
    except ImportError:
        return rivals
    found = torch_loop(setting)
    return rivals if found is None else rivals | {"PyTorch": found}


def ratios(rows: Sequence[Mapping[str, Any]], way: str) -> list[float]:
    """eqaccum's time over a way's, of each round."""
    times = {row["way"]: row["seconds"] for row in rows}
    return [a / b for a, b in zip(times[OURS], times[way], strict=True)]


def best(rows: Sequence[Mapping[str, Any]]) -> str:
    """The fastest of the others that cut the batch as eqaccum does."""
    cut = [r for r in rows if r["way"] not in (OURS, "whole batch", "PyTorch")]
    return min(cut, key=lambda row: statistics.median(row["seconds"]))["way"]


# The page


def write(rows: list[dict[str, Any]], clock: str) -> None:
    told = {"machine": _machine.facts(), "clock": clock, "steps": rows}
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(told))
    draw(rows, RESULTS.with_suffix(".png"))


def page(told: Mapping[str, Any]) -> str:
    rows = told["steps"]
    blocks = [
        "# How fast is a step?",
        f"{_machine.described(told['machine'])} Made by `make bench`.",
        f"Every way takes the same AdamW step, {PASSES} passes over host arrays (the "
        "whole batch: one), in one process, in turn. *time* is eqaccum's over that "
        f"way's ({told['clock']} time): the median over rounds of the ratio within "
        "each round, and its quartiles; below 1 eqaccum is faster. *memory* is what "
        "the compiler says that the step holds at once, eqaccum's over that way's "
        "(without convolutions' scratch, which it does not tell). *first step* is the "
        "time with tracing and compiling, absolute: one run, a guide.",
    ]
    blocks += [table([r for r in rows if r["model"] == m]) for m in _models_of(rows)]
    return "\n\n".join(blocks) + "\n"


def _models_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    first, fastest = rows[0], best(rows)
    mine = next(row for row in rows if row["way"] == OURS)
    lines = [
        f"### {first['model']}: {first['rows']} rows, microbatch {first['microbatch']}",
        "",
        "| way | ms per step | time | quartiles | memory | first step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        found = ratios(rows, row["way"])
        low, _, high = statistics.quantiles(found, n=4)
        memory = "" if row["bytes"] is None else f"{mine['bytes'] / row['bytes']:.2f}"
        name = f"**{row['way']}** (best)" if row["way"] == fastest else row["way"]
        lines.append(
            f"| {name} | {1e3 * statistics.median(row['seconds']):.1f} | "
            f"{statistics.median(found):.2f} | {low:.2f}-{high:.2f} | {memory} | "
            f"{row['seconds_to_first']:.1f} s |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The ratios as bars, a group for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ways = [w for w in dict.fromkeys(row["way"] for row in rows) if w != OURS]
    models = _models_of(rows)
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for place, way in enumerate(ways):
        at, height, below, above = [], [], [], []
        for number, model in enumerate(models):
            some = [row for row in rows if row["model"] == model]
            if way in (row["way"] for row in some):
                low, middle, high = statistics.quantiles(ratios(some, way), n=4)
                at.append(number + 0.8 * (place - len(ways) / 2 + 0.5) / len(ways))
                height.append(middle)
                below.append(middle - low)
                above.append(high - middle)
        axes.bar(at, height, 0.8 / len(ways), yerr=[below, above], label=way)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel("eqaccum's time / the way's (below 1: faster)")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
