"""The step beside the other ways of writing it, and the plan's truth, on a GPU.

    python benchmarks/gpu.py [--minutes 8] [--anywhere]
    make bench-gpu

Runs on whatever GPU JAX finds, with the JAX that is there and without network; where
there is none it says so, claims nothing and exits with 0. Prints Markdown, and writes
`results/gpu.json` and `.md`. `--anywhere` tries the program itself on any device, in a
tiny form, and writes nothing. Models that do not fit into the minutes are left out, and
named.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _machine
import _models
import jax
import jax.numpy as jnp
import steps

RESULTS = Path(__file__).with_name("results") / "gpu.json"
CASES = {
    "transformer LM": (
        _models.language_model,
        {"vocabulary": 8192, "length": 256, "width": 512, "depth": 8, "heads": 8},
        256,
    ),
    "MLP": (
        _models.mlp,
        {"features": 4096, "width": 4096, "depth": 4, "classes": 1000},
        8192,
    ),
    "CNN": (_models.cnn, {"size": 64, "widths": (64, 128, 256), "blocks": 2}, 512),
    "ViT": (
        _models.vision_transformer,
        {"size": 64, "patch": 4, "width": 512, "depth": 6, "heads": 8},
        256,
    ),
    "GRU": (_models.gru, {"vocabulary": 1024, "length": 128, "width": 512}, 1024),
}
TINY = {"MLP": steps.TINY["MLP"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--anywhere", action="store_true")
    parser.add_argument("--truth", help=argparse.SUPPRESS)  # a process of its own
    options = parser.parse_args()
    cases = TINY if options.anywhere else CASES
    if options.truth:
        print(json.dumps(truth(cases, **json.loads(options.truth))))
        return
    if jax.default_backend() != "gpu" and not options.anywhere:
        print(
            f"No GPU: JAX {jax.__version__} runs on {jax.devices()}. Nothing measured."
        )
        return
    end = time.monotonic() + 60 * options.minutes
    told: dict[str, Any] = {"machine": _machine.facts(), "steps": [], "truth": []}
    told["left out"] = measure(told, cases, end, anywhere=options.anywhere)
    print(page(told))
    if not options.anywhere:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(told))


def measure(
    told: dict[str, Any], cases: dict[str, Any], end: float, *, anywhere: bool
) -> list[str]:
    """Truth first: this process takes no memory of the device before."""
    left_out, longest = [], 0.0
    specs = [
        {"name": name, "narrow": narrow, "passes": k}
        for name in cases
        for narrow in (False, True)
        for k in (1, 4)
    ]
    jobs: list[Any] = [
        lambda s=s: told["truth"].append(_child(s, anywhere)) for s in specs
    ]
    for build, sizes, rows in cases.values():
        jobs.append(
            lambda b=build, s=sizes, r=rows: told["steps"].extend(
                steps.measured(b(**s), r, 9, time.perf_counter)
            )
        )
    names = [f"truth of {s}" for s in specs] + [f"steps of {name}" for name in cases]
    for name, job in zip(names, jobs, strict=True):
        begin = time.monotonic()
        if begin + longest > end:
            left_out.append(name)
            continue
        job()
        longest = max(longest, time.monotonic() - begin)
    return left_out


def _child(spec: dict[str, Any], anywhere: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--truth", json.dumps(spec)]
    done = subprocess.run(
        command + (["--anywhere"] if anywhere else []),
        # the device's own peak, not what was set aside for it beforehand
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return spec | {"died": last[:300]}
    return json.loads(done.stdout.splitlines()[-1])


def truth(
    cases: dict[str, Any], *, name: str, narrow: bool, passes: int
) -> dict[str, Any]:
    """What a plan predicts, and the device's own peak of its first step."""
    import optax

    import eqaccum

    build, sizes, rows = cases[name]
    workload = build(**sizes)
    result = eqaccum.fit(
        workload.model,
        workload.rows(rows),
        loss=workload.loss,
        optimizer=optax.adamw(1e-3),
        global_batch=rows,
        microbatch=rows // passes,
        compute_dtype=jnp.bfloat16 if narrow else None,
        steps=2,
        progress=False,
        cache=False,
    )
    return {
        "name": name,
        "narrow": narrow,
        "passes": passes,
        "predicted": result.plan.predicted_bytes,
        "measured": result.plan.measured_bytes,
    }


def page(told: dict[str, Any]) -> str:
    rows = told["steps"]
    models = dict.fromkeys(row["model"] for row in rows)
    lines = [
        "# On a GPU",
        "",
        f"{_machine.described(told['machine'])} Made by `make bench-gpu`.",
        "",
        "| model | compute | passes | predicted | device's own peak | error |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_truth_row(one) for one in told["truth"]),
        "",
        *(steps.table([r for r in rows if r["model"] == m]) + "\n" for m in models),
    ]
    if told["left out"]:
        lines.append(f"Left out for lack of time: {'; '.join(told['left out'])}.")
    return "\n".join(lines) + "\n"


def _truth_row(one: dict[str, Any]) -> str:
    start = f"| {one['name']} | {'bfloat16' if one['narrow'] else 'float32'} | "
    start += f"{one['passes']} | "
    if "died" in one:
        return f"{start}{one['died']} | | |"
    if one["measured"] is None:
        return f"{start}{one['predicted']:,} | the device keeps no count | |"
    error = one["predicted"] / one["measured"] - 1
    return f"{start}{one['predicted']:,} | {one['measured']:,} | {error:+.1%} |"


if __name__ == "__main__":
    main()
