"""Plans under a limit of the operating system: they live, and fewer passes die.

Each run is a process of its own, above 1 GB, that may map what it has mapped already,
the limit, and what eqaccum keeps free of such a limit for the compiler. Running out of
memory is an error there, also where `fit` could go on with more passes.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import optax
import plan_cases
import pytest
from helpers import REPOSITORY

import eqaccum

BENCHMARKS = REPOSITORY / "benchmarks"
RESERVE = 256 * 10**6
MARGIN = 1.05
MODELS = ("MLP", "transformer LM", "CNN")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS holds on Linux"),
]


@dataclass(frozen=True)
class Need:
    """A plan's figures for a microbatch that was asked for."""

    bytes: int
    microbatch: int


@functools.cache
def need(model: str, passes: int) -> Need:
    """Of three microbatches of rows in so many passes; nothing is allocated."""
    case = plan_cases.WIDE_BATCH[model]
    workload, rows = case.workload(), 3 * case.microbatch
    plan = eqaccum.plan(
        workload.model,
        workload.rows(rows),
        global_batch=rows,
        loss=workload.loss,
        optimizer=optax.adamw(1e-3),
        microbatch=-(-rows // passes),
        cache=False,
    )
    return Need(plan.predicted_bytes, plan.microbatch)


def run(model: str, limit: int, **more: Any) -> subprocess.CompletedProcess[str]:
    spec = {
        "kind": "live",
        "cases": "wide batch",
        "case": model,
        "optimizer": "adamw",
        "rows": 3 * plan_cases.WIDE_BATCH[model].microbatch,
        "limit": limit,
        "reserve": RESERVE,
        "given": True,
    }
    return subprocess.run(
        [sys.executable, BENCHMARKS / "plan_child.py", json.dumps(spec | more)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("tight", [True, False], ids=["tight", "loose"])
@pytest.mark.parametrize("model", MODELS)
def test_a_plan_lives_and_fewer_passes_die(model, tight):
    passes, fewer = (3, 2) if tight else (2, 1)
    limit = round(1.01 * need(model, passes).bytes)
    assert limit > 10**9

    lives = run(model, limit)
    assert lives.returncode == 0, lives.stderr[-2000:]
    told = json.loads(lives.stdout.splitlines()[-1])
    assert told["passes"] == passes
    assert told["predicted"] <= limit

    too_much = need(model, fewer)
    assert too_much.bytes > MARGIN * limit + RESERVE
    dies = run(model, limit, microbatch=too_much.microbatch)
    assert dies.returncode != 0, dies.stdout
    aborted = model == "CNN" and dies.returncode == -6
    assert aborted or "out of memory" in dies.stderr.lower(), dies.stderr[-2000:]


def test_the_limit_that_is_found_by_itself_holds():
    """`memory_limit=None` reads RLIMIT_AS, and keeps its margin."""
    limit = round(MARGIN * need("MLP", 3).bytes) + 10**7
    lives = run("MLP", limit, given=False)
    assert lives.returncode == 0, lives.stderr[-2000:]
    told = json.loads(lives.stdout.splitlines()[-1])
    assert told["passes"] == 3
    assert told["predicted"] <= told["limit"] <= limit / (MARGIN - 0.01)
