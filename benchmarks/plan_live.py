"""A hundred plans, each made and run in a process that may not allocate more.

Each process sets RLIMIT_AS to what it has mapped already, the limit, and 256 MB for the
compiler and threads, which is what eqaccum keeps free of such a limit. Every other one
is told the limit (`memory_limit=`); the others find it (`memory_limit=None`) and keep
their margin of 5 %. An out-of-memory error is a death, also where `fit` could go on
with more passes.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import plan_cases

import eqaccum

RESERVE = 256 * 10**6
MOST_PASSES = 16
MARGIN = 0.95

Run = Callable[[dict[str, Any]], dict[str, Any]]


def runs(count: int, run: Run, *, done: int = 0) -> Iterator[dict[str, Any]]:
    """Draws cases and limits, and runs each in a process of its own.

    The first `done` were run before and are left out.
    """
    names, optimizers = sorted(plan_cases.LARGE), sorted(plan_cases.OPTIMIZERS)
    for number in range(done, count):
        draw = random.Random(number)
        name, optimizer = draw.choice(names), draw.choice(optimizers)
        rows = round(plan_cases.LARGE[name].microbatch * draw.uniform(0.5, 0.9))
        most = _need(name, optimizer, rows, rows)
        least = _need(name, optimizer, rows, -(-rows // MOST_PASSES))
        limit = round(draw.uniform(1.01 * least, 1.05 * most))
        given = number % 2 == 0
        spec = {
            "kind": "live",
            "case": name,
            "optimizer": optimizer,
            "rows": rows,
            "limit": limit if given else round(limit / MARGIN),
            "reserve": RESERVE,
            "given": given,
        }
        yield spec | {"number": number} | run(spec)


def _need(name: str, optimizer: str, rows: int, microbatch: int) -> int:
    """Bytes of a step; nothing is allocated."""
    workload = plan_cases.LARGE[name].workload()
    plan = eqaccum.plan(
        workload.model,
        workload.rows(rows),
        global_batch=rows,
        loss=workload.loss,
        state=workload.state,
        optimizer=plan_cases.OPTIMIZERS[optimizer](),
        microbatch=microbatch,
        cache=False,
    )
    assert plan.predicted_bytes is not None
    return plan.predicted_bytes
