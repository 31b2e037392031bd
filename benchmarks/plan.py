"""Are plans true? Predicted against measured bytes, the best passes, and what it costs.

    python benchmarks/plan.py peak       each model, optimizer and number of passes
    python benchmarks/plan.py best       the chosen passes against all others
    python benchmarks/plan.py live       a hundred runs under a real limit
    make bench-plan                      the first two
    make bench-plan-live                 the last

Writes `results/plan.json` (after each run; `--resume` goes on where it stopped) and
`results/plan.md`. Needs Linux and 4 GB; `peak` takes half an hour on two cores, `best`
three minutes, `live` half an hour.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _machine
import plan_best
import plan_cases
import plan_live
import plan_report

RESULTS = Path(__file__).with_name("results") / "plan.json"
CHILD = Path(__file__).with_name("plan_child.py")
RUNS = 100
BY_HAND = "adamw"  # of each case's rows, one is compiled by hand as well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=["peak", "best", "live"])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--most", type=int, help="stop after so many runs")
    options = parser.parse_args()
    for section in options.sections:
        found = [] if not options.resume else _read().get(section, [])
        rows = {"peak": _peaks, "best": _best, "live": _lives}[section](found)
        for row in rows:
            print(json.dumps(row), flush=True)
            found.append(row)
            _write(section, found)
            if options.most is not None:
                options.most -= 1
                if options.most < 1:
                    return


def _peaks(known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    done = {(row["case"], row["optimizer"], row["passes"]) for row in known}
    for name in plan_cases.LARGE:
        for optimizer in plan_cases.OPTIMIZERS:
            for passes in plan_cases.PASSES:
                if (name, optimizer, passes) in done:
                    continue
                spec = {
                    "kind": "peak",
                    "case": name,
                    "optimizer": optimizer,
                    "passes": passes,
                    "by_hand": optimizer == BY_HAND,
                }
                got = in_a_process(spec)
                if "died" in got:
                    raise SystemExit(f"{spec}: {got['died']}")
                yield {"case": name, "optimizer": optimizer} | got


def _best(known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from plan_best.sweep(done={row["case"] for row in known})


def _lives(known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from plan_live.runs(RUNS, in_a_process, done=len(known))


def in_a_process(spec: dict[str, Any]) -> dict[str, Any]:
    """What the child process measured, or how it died."""
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(spec)],
        env=os.environ | {"PYTHONPATH": str(CHILD.parent.parent)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        return {"died": f"{last[0][:300]} (exit {done.returncode})"}
    return json.loads(done.stdout.splitlines()[-1])


def _read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _write(section: str, found: list[dict[str, Any]]) -> None:
    everything = _read() | {"machine": _machine.facts(), section: found}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(everything, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(plan_report.page(everything))


if __name__ == "__main__":
    main()
