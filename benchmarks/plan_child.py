"""One process of `plan.py`: measures a peak, or lives under an address-space limit.

    python benchmarks/plan_child.py '{"kind": "peak", "case": "GRU", ...}'

Prints one line of JSON. The allocator is glibc's as it comes: nothing is set.
"""

import ctypes
import gc
import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import plan_cases
from _models import Workload
from plan_by_hand import bytes_by_hand

import eqaccum


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(x.split()[1]) for x in lines if x.startswith(name)) * 1024


def trim() -> None:
    """Frees what the allocator keeps, so that it is not counted as a baseline."""
    gc.collect()
    time.sleep(1)  # a program's temporaries are freed in another thread
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def run(workload: Workload, optimizer: str, rows: Any, **more: Any) -> Any:
    """`fit`, from its beginning to the end of its last update."""
    result = eqaccum.fit(
        workload.model,
        rows,
        loss=workload.loss,
        state=workload.state,
        optimizer=plan_cases.OPTIMIZERS[optimizer](),
        epochs=100,
        progress=False,
        cache=False,
        **more,
    )
    jax.block_until_ready(result.train.trainable_leaves)
    return result


def peak(spec: dict[str, Any]) -> dict[str, Any]:
    """Predicted and measured bytes of the second of two equal runs.

    The first one compiles and warms up. What is resident before the second one begins
    (Python, the compiled programs, the user's model and data) is none of the plan's.
    """
    case = plan_cases.LARGE[spec["case"]]
    workload, passes = case.workload(), spec["passes"]
    data = workload.rows(passes * case.microbatch)
    shared = {
        "global_batch": passes * case.microbatch,
        "microbatch": case.microbatch,
    }
    plan = run(workload, spec["optimizer"], data, steps=1, **shared).plan
    trim()
    before = _begin()
    run(workload, spec["optimizer"], data, steps=2, **shared)
    measured = _end() - before
    found = {
        "passes": plan.num_microbatches,
        "microbatch": plan.microbatch,
        "predicted": plan.predicted_bytes,
        "measured": measured,
        "parts": plan.parts.named(),
    }
    if spec["by_hand"]:
        found["by_hand"] = bytes_by_hand(
            workload,
            plan_cases.OPTIMIZERS[spec["optimizer"]](),
            num_microbatches=plan.num_microbatches,
            microbatch=plan.microbatch,
        )
    return found


def _begin() -> int:
    """Starts to measure; the bytes in use."""
    told = jax.local_devices()[0].memory_stats()
    if told:  # the device's own peak cannot be reset: it is that of both runs
        return told["bytes_in_use"]
    resident = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return resident


def _end() -> int:
    """The most bytes that were in use."""
    told = jax.local_devices()[0].memory_stats()
    return told["peak_bytes_in_use"] if told else status("VmHWM")


def live(spec: dict[str, Any]) -> dict[str, Any]:
    """Trains some steps under RLIMIT_AS; running out of memory is an error.

    With a `microbatch` the plan is told that there is no limit.
    """
    warnings.simplefilter("error", eqaccum.EqaccumWarning)
    warnings.filterwarnings("ignore", message="BatchNorm")
    cases = plan_cases.CASES[spec.get("cases", "large")]
    workload, rows = cases[spec["case"]].workload(), spec["rows"]
    data = workload.rows(rows)
    most = spec["limit"] + spec["reserve"]
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + most,) * 2)
    asked = {"memory_limit": spec["limit"] if spec["given"] else None}
    if "microbatch" in spec:
        asked = {"microbatch": spec["microbatch"], "memory_limit": 2**50}
    result = run(
        workload,
        spec["optimizer"],
        data,
        steps=2,
        global_batch=rows,
        **asked,
    )
    if not np.isfinite(result.history["loss"]).all():
        raise SystemExit("the loss is not finite")
    plan = result.plan
    return {
        "passes": plan.num_microbatches,
        "microbatch": plan.microbatch,
        "predicted": plan.predicted_bytes,
        "limit": plan.limit_bytes,
        "looks": len(plan.probes),
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"peak": peak, "live": live}[asked["kind"]](asked)))
