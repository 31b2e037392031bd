"""Is the chosen number of passes the best one, and what does it cost to find it?

Every number of passes that can matter is compiled once; then the plan is made for six
limits, and compared with the first number that fits.
"""

import math
import os
import statistics
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import plan_cases
from _models import Workload

import eqaccum

LIMITS = 6


@dataclass(frozen=True)
class Size:
    """What a number of passes needs, and how long it took to compile."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Chosen:
    """What was chosen for one limit, and the best choice."""

    case: str
    limit: int
    passes: int
    bytes: int
    best: int
    costs: Mapping[str, "Cost"]


@dataclass(frozen=True)
class Cost:
    """What a way of searching took, and the passes that it found."""

    compilations: int
    seconds: float
    failed: int  # steps that ran out of memory
    passes: int


def sweep(*, done: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """All small cases, but those that are done, times six limits."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EQACCUM_CACHE_DIR"] = folder
        for name, case in plan_cases.SMALL.items():
            if name not in done:
                yield from map(asdict, _of_case(name, case.workload()))


def _of_case(name: str, workload: Workload) -> Iterator[Chosen]:
    rows, stateful = plan_cases.SMALL_BATCH, workload.state is not None
    sizes = {k: _measured(workload, rows, k) for k in _worth_a_look(rows, stateful)}
    for limit in _limits(sizes):
        plan = _plan(workload, rows, memory_limit=limit)
        best = best_passes(sizes, limit, rows, even=stateful)
        looked = [sizes[p.num_microbatches] for p in plan.probes]
        own = Cost(
            len(looked), sum(s.seconds for s in looked), 0, plan.num_microbatches
        )
        assert plan.predicted_bytes is not None
        yield Chosen(
            name,
            limit,
            plan.num_microbatches,
            plan.predicted_bytes,
            best,
            {
                "eqaccum": own,
                "doubling": doubling(sizes, limit, rows),
                "bisection": bisection(sizes, limit, rows),
            },
        )


def _worth_a_look(rows: int, stateful: bool) -> list[int]:
    """The first number of passes of each microbatch; all, where even ones are sought.

    More passes of the same microbatch never need less.
    """
    if stateful:
        return list(range(1, rows + 1))
    first: dict[int, int] = {}
    for k in range(1, rows + 1):
        first.setdefault(math.ceil(rows / k), k)
    return sorted(first.values())


def best_passes(sizes: Mapping[int, Size], limit: int, rows: int, *, even: bool) -> int:
    """The rule, by trying everything.

    The fewest passes that fit; where the model holds batch statistics, the fewest
    fitting ones that cut the rows evenly, if they are below twice as many.
    """
    fewest = min(k for k, size in sizes.items() if size.bytes <= limit)
    if not even:
        return fewest
    return next(
        (
            k
            for k in range(fewest, 2 * fewest)
            if rows % k == 0 and sizes[k].bytes <= limit
        ),
        fewest,
    )


def doubling(sizes: Mapping[int, Size], limit: int, rows: int) -> Cost:
    """Runs, and doubles the passes when the step runs out of memory."""
    tried, k = [], 1
    while True:
        tried.append(_as_measured(sizes, k, rows))
        if tried[-1].bytes <= limit:
            seconds = sum(size.seconds for size in tried)
            return Cost(len(tried), seconds, len(tried) - 1, k)
        k = min(2 * k, rows)


def bisection(sizes: Mapping[int, Size], limit: int, rows: int) -> Cost:
    """Bisects the microbatch between 1 and all rows, by trying to run it."""
    tried = [_as_measured(sizes, 1, rows)]
    fits, over = 0, rows
    if tried[0].bytes <= limit:
        return Cost(1, tried[0].seconds, 0, 1)
    while over - fits > 1:
        middle = (fits + over) // 2
        tried.append(_as_measured(sizes, math.ceil(rows / middle), rows))
        if tried[-1].bytes <= limit:
            fits = middle
        else:
            over = middle
    failed = sum(size.bytes > limit for size in tried)
    seconds = sum(size.seconds for size in tried)
    return Cost(len(tried), seconds, failed, math.ceil(rows / fits) if fits else 0)


def _as_measured(sizes: Mapping[int, Size], k: int, rows: int) -> Size:
    """The size of the fewest passes with the same microbatch."""
    microbatch = math.ceil(rows / k)
    return sizes[k] if k in sizes else sizes[math.ceil(rows / microbatch)]


def _limits(sizes: Mapping[int, Size]) -> list[int]:
    """From just enough for the smallest size to more than the largest needs."""
    least = min(size.bytes for size in sizes.values())
    most = max(size.bytes for size in sizes.values())
    ratio = (1.05 * most / least) ** (1 / (LIMITS - 1))
    return [math.ceil(least * ratio**i) for i in range(LIMITS)]


def _measured(workload: Workload, rows: int, k: int) -> Size:
    plan = _plan(workload, rows, microbatch=math.ceil(rows / k))
    if plan.num_microbatches != k:  # that microbatch takes fewer passes
        return _measured(workload, rows, plan.num_microbatches)
    assert plan.predicted_bytes is not None
    return Size(plan.predicted_bytes, plan.seconds)


def _plan(workload: Workload, rows: int, **more: Any) -> eqaccum.Plan:
    return eqaccum.plan(
        workload.model,
        workload.rows(rows),
        global_batch=rows,
        loss=workload.loss,
        state=workload.state,
        optimizer=plan_cases.OPTIMIZERS["adamw"](),
        **more,
    )


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the sweep that matter."""
    looks = [one["costs"]["eqaccum"]["compilations"] for one in found]
    return {
        "plans": len(found),
        "best": sum(one["passes"] == one["best"] for one in found),
        "over the limit": sum(one["bytes"] > one["limit"] for one in found),
        "median compilations": statistics.median(looks),
        "most compilations": max(looks),
    }
