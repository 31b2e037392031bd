"""The page that `plan.py` writes: Markdown tables out of what it measured."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import _machine
import plan_best
import plan_cases

_CONVOLUTIONS = ("CNN", "BatchNorm")
_BOUNDS = {False: (0.03, 0.10), True: (None, 0.15)}  # median, worst


def page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    blocks = [
        "# Are plans true?",
        _machine.described(found["machine"])
        + " Made by `make bench-plan` and `make bench-plan-live`.",
    ]
    if found.get("peak"):
        blocks += list(_peak(found["peak"]))
    if found.get("best"):
        blocks += list(_best(found["best"]))
    if found.get("live"):
        blocks += list(_live(found["live"]))
    return "\n\n".join(blocks) + "\n"


# Predicted and measured


def error(row: Mapping[str, Any]) -> float:
    """Of the prediction, relative to what was measured."""
    return row["predicted"] / row["measured"] - 1


def _peak(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## Predicted and measured peak"
    yield (
        "Measured: the high-water mark of the resident set of a process of its own, "
        "from the beginning of a second `fit` of two steps to its end, less what was "
        "resident before it (the first `fit` compiled and warmed up). Where a device "
        "keeps count of its own peak, that is taken. glibc's allocator as it comes. "
        "By hand: what XLA's analysis says of the same step in plain JAX, one program, "
        "with the next batch; it is compared with the prediction less what it says "
        "that convolutions take, for the analysis leaves that out."
    )
    for convolutions, title in ((False, "Without convolutions"), (True, "With")):
        some = [r for r in rows if (r["case"] in _CONVOLUTIONS) == convolutions]
        if some:
            yield f"### {title}"
            yield _verdict([error(row) for row in some], *_BOUNDS[convolutions])
            yield table(
                ("model", "optimizer", "passes", "microbatch")
                + ("predicted", "measured", "error", "by hand", "difference"),
                (_peak_row(row) for row in some),
            )


def _verdict(errors: list[float], median: float | None, worst: float) -> str:
    sizes = [abs(e) for e in errors]
    got_median, got_worst = statistics.median(sizes), max(sizes)
    kept = got_worst <= worst and (median is None or got_median <= median)
    asked = f"{worst:.0%}" if median is None else f"{median:.0%} and {worst:.0%}"
    return (
        f"{len(errors)} runs: median error {got_median:.1%}, worst {got_worst:.1%} "
        f"(asked for: at most {asked}; {'kept' if kept else 'NOT kept'})."
    )


def _peak_row(row: Mapping[str, Any]) -> Sequence[str]:
    hand, compared = row.get("by_hand"), ""
    if hand is not None:
        told = row["predicted"] - row["parts"].get("convolutions", 0)
        compared = f"{told / hand - 1:+.1%}"
    return (
        row["case"],
        row["optimizer"],
        str(row["passes"]),
        str(row["microbatch"]),
        _mb(row["predicted"]),
        _mb(row["measured"]),
        f"{error(row):+.1%}",
        "" if hand is None else _mb(hand),
        compared,
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


# The best passes, and the cost


def _best(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    told = plan_best.summary(rows)
    yield "## The best number of passes"
    yield (
        f"{plan_cases.SMALL_BATCH} rows, adamw; every number of passes that can "
        f"matter compiled, then {plan_best.LIMITS} limits from what the smallest size "
        f"needs to more than the largest does. **{told['best']} of {told['plans']} "
        f"plans are the best under the rule, {told['over the limit']} over the limit; "
        f"median {told['median compilations']:g} compilations, at most "
        f"{told['most compilations']}.** Doubling: run, and double the passes when "
        "memory runs out. Bisection: of the microbatch, by trying to run it. Both "
        "simulated with the same compiled sizes; each of their failures would be a "
        "step that runs out of memory, whose time is not counted."
    )
    ways = tuple(rows[0]["costs"])
    yield table(
        ("way", "compilations", "most", "seconds", "failed steps", "passes / best"),
        (_cost_row(way, rows) for way in ways),
    )
    yield table(
        ("model", "limit", "needed", "passes", "best", *ways),
        (_best_row(row, ways) for row in rows),
    )


def _cost_row(way: str, rows: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    costs = [row["costs"][way] for row in rows]
    ratios = [c["passes"] / r["best"] for c, r in zip(costs, rows, strict=True)]
    return (
        way,
        f"median {statistics.median(c['compilations'] for c in costs):g}",
        str(max(c["compilations"] for c in costs)),
        f"{statistics.mean(c['seconds'] for c in costs):.1f} on average",
        f"{statistics.mean(c['failed'] for c in costs):.1f} on average",
        f"{statistics.mean(ratios):.2f} on average",
    )


def _best_row(row: Mapping[str, Any], ways: Sequence[str]) -> Sequence[str]:
    return (
        row["case"],
        f"{row['limit']:,}",
        f"{row['bytes']:,}",
        str(row["passes"]),
        str(row["best"]),
        *(
            f"{c['compilations']} ({c['seconds']:.1f} s) -> {c['passes']}"
            for c in (row["costs"][way] for way in ways)
        ),
    )


# Under a real limit


def _live(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    alive = [row for row in rows if "died" not in row]
    yield "## Under a real limit"
    yield (
        "Each plan made and run (two steps) in a process of its own under RLIMIT_AS: "
        "what it had mapped, the limit, and the 256 MB that eqaccum keeps for "
        "compiler and threads. Half of the runs are given the limit, half find it and "
        "keep their margin of 5 %. Running out of memory is a death, also where `fit` "
        f"would go on with more passes. **{len(rows)} plans, {len(alive)} live.** They "
        f"fill a median of {statistics.median(map(_filled, alive)):.0%} of the limit."
    )
    yield table(
        ("run", "model", "optimizer", "rows", "limit", "told", "passes", "predicted"),
        (_live_row(row) for row in rows),
    )


def _filled(row: Mapping[str, Any]) -> float:
    return row["predicted"] / row["limit"]


def _live_row(row: Mapping[str, Any]) -> Sequence[str]:
    died = row.get("died")
    return (
        str(row["number"]),
        row["case"],
        row["optimizer"],
        str(row["rows"]),
        _mb(row["limit"]),
        "yes" if row["given"] else "no",
        f"DIED: {died}" if died else str(row["passes"]),
        "" if died else _mb(row["predicted"]),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
