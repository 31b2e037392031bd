"""The same run under four limits and on one to four devices; no attempt fails."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import optax

import eqaccum

from .._experiment import Experiment, Finding, Run, Table
from .._images import image_rows
from .._statistics import at_least, at_most


@dataclasses.dataclass(frozen=True)
class Config:
    """What can be set.

    **Attributes:**

    - `synthetic`: made-up images instead of Fashion-MNIST.
    - `width`, `depth`: of the multilayer perceptron.
    - `global_batch`, `steps`, `learning_rate`: of the run (AdamW).
    - `pieces`: the limits, each just enough for so many passes.
    - `devices`: the runs on more of them, under no limit. What the process lacks is
        left out.
    - `apart`: the largest relative distance of two curves that still is rounding.
    """

    synthetic: bool = False
    width: int = 256
    depth: int = 3
    global_batch: int = 4096
    steps: int = 30
    learning_rate: float = 1e-3
    pieces: tuple[int, ...] = (1, 3, 8, 24)
    devices: tuple[int, ...] = (2, 4)
    apart: float = 1e-3


def measure(config: Config, seed: int) -> Run:
    """One curve for each limit and each number of devices, and the loop's attempts."""
    rows = 4 * config.global_batch
    data = image_rows(rows, synthetic=config.synthetic)
    model = eqx.filter_jit(eqx.nn.MLP)(
        data[0].shape[1], 10, config.width, config.depth, key=jr.key(seed)
    )
    runs = []
    for pieces in config.pieces:
        limit = _limit(config, model, data, pieces)
        runs.append(_fitted(config, model, data, seed, devices=1, limit=limit))
    for devices in config.devices:
        if devices <= len(jax.devices()):
            fitted = _fitted(config, model, data, seed, devices=devices, limit=None)
            runs.append(fitted)
    return {"runs": runs}


def _limit(config: Config, model: Any, data: Any, pieces: int) -> int:
    """Bytes that so many passes need and, in all but odd models, fewer do not."""
    plan = eqaccum.plan(
        *(model, data),
        global_batch=config.global_batch,
        optimizer=optax.adamw(config.learning_rate),
        microbatch=-(-config.global_batch // pieces),
        mesh=_mesh(1),
    )
    assert plan.predicted_bytes is not None
    return plan.predicted_bytes


def _fitted(
    config: Config, model: Any, data: Any, seed: int, *, devices: int, limit: int | None
) -> Run:
    result = eqaccum.fit(
        model,
        data,
        global_batch=config.global_batch,
        steps=config.steps,
        optimizer=optax.adamw(config.learning_rate),
        key=jr.key(seed),
        memory_limit=limit,
        mesh=_mesh(devices),
        progress=False,
    )
    plan = result.plan
    out_of_memory = sum(probe.note.startswith("out of") for probe in plan.probes)
    attempts = None if limit is None else _attempts(config, model, data, limit)
    return {
        "devices": devices,
        "limit": limit,
        "passes": plan.num_microbatches,
        "microbatch": plan.microbatch,
        "predicted": plan.predicted_bytes,
        "compilations": plan.compilations,
        "failed": out_of_memory,
        "doubling": attempts,
        "curve": [round(float(loss), 7) for loss in result.history["loss"]],
    }


def _attempts(config: Config, model: Any, data: Any, limit: int) -> Run:
    """A loop that begins with one pass and doubles the number when memory runs out.

    Running out is being told so: the program is over the limit. A loop on a real device
    finds the same out by allocating, and loses that step's work too.
    """
    failed, passes = 0, 1
    while True:
        try:
            eqaccum.plan(
                *(model, data),
                global_batch=config.global_batch,
                optimizer=optax.adamw(config.learning_rate),
                microbatch=-(-config.global_batch // passes),
                memory_limit=limit,
                mesh=_mesh(1),
            )
        except eqaccum.DoesNotFit:
            failed, passes = failed + 1, 2 * passes
        else:
            return {"failed": failed, "passes": passes}


def _mesh(devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])


def _apart(run: Run) -> float:
    """The largest relative distance of two of the curves at any step."""
    curves = np.array([one["curve"] for one in run["runs"]])
    return float(np.max(np.ptp(curves, axis=0) / np.min(curves, axis=0)))


def judge(config: Config, runs: Sequence[Run]) -> list[Finding]:
    """Four numbers of passes, one curve, no failed attempt."""
    every = [one for run in runs for one in run["runs"]]
    limited = [one for one in every if one["limit"] is not None]
    passes = min(len({one["passes"] for one in _limited(run)}) for run in runs)
    over = max(one["predicted"] / one["limit"] for one in limited)
    attempts = sum(one["doubling"]["failed"] for one in limited) / len(limited)
    return [
        at_least("different numbers of passes chosen", passes, len(config.pieces)),
        at_most("predicted bytes over the limit", over, 1.0),
        at_most("failed attempts", sum(one["failed"] for one in every), 0),
        at_most("largest relative distance of two curves", _max(runs), config.apart),
        at_least("failed attempts of the doubling loop, on average", attempts, 1.0),
    ]


def _max(runs: Sequence[Run]) -> float:
    return max(_apart(run) for run in runs)


def _limited(run: Run) -> list[Run]:
    return [one for one in run["runs"] if one["limit"] is not None]


def tables(config: Config, runs: Sequence[Run]) -> list[Table]:
    rows = []
    for one in runs[0]["runs"]:
        doubling = one["doubling"] or {"failed": "", "passes": ""}
        limit = "none" if one["limit"] is None else f"{one['limit'] / 2**20:.1f} MiB"
        rows.append(
            [
                *(str(one["devices"]), limit, str(one["passes"])),
                *(str(one["microbatch"]), f"{one['predicted'] / 2**20:.1f} MiB"),
                *(str(one["compilations"]), str(one["failed"])),
                *(str(doubling["failed"]), str(doubling["passes"])),
                f"{one['curve'][-1]:.6f}",
            ]
        )
    header = ["devices", "limit", "passes", "microbatch", "predicted", "compilations"]
    header += ["failed", "doubling: failed", "doubling: passes", "last loss"]
    return [Table("The first seed", header, rows)]


def draw(config: Config, runs: Sequence[Run], figure: Any) -> None:
    curves, apart = figure.subplots(1, 2)
    first = np.array(runs[0]["runs"][0]["curve"])
    for one in runs[0]["runs"]:
        label = f"{one['devices']} devices, {one['passes']} passes"
        curves.plot(one["curve"], label=label)
        apart.plot(np.abs(np.array(one["curve"]) / first - 1) + 1e-9, label=label)
    curves.set(xlabel="update", ylabel="loss")
    curves.legend()
    apart.set(yscale="log", xlabel="update", ylabel="relative distance to the first")


EXPERIMENT = Experiment(
    name="oom",
    title="One script on any memory and any number of devices",
    claim=(
        "The same script under four limits of memory, and on one, two and four "
        "devices, gives the same training curve; the passes are chosen before anything "
        "runs, so no attempt fails."
    ),
    says=(
        "MosaicML, 'Farewell, CUDA OOM' (June 2022): the loss curves of one model at "
        "one global batch coincide on 1, 8 and 32 GPUs. Theirs begins with one pass "
        "and doubles the number whenever memory runs out."
    ),
    notes=(
        "A multilayer perceptron on Fashion-MNIST. The limits are an argument "
        "(`memory_limit=`), the devices are faked on the CPU. The doubling loop is run "
        "beside, each of its attempts against the compiled program's bytes."
    ),
    minutes=4.0,
    full=Config(),
    tiny=Config(
        synthetic=True,
        width=16,
        depth=1,
        global_batch=512,
        steps=2,
        pieces=(1, 4),
        devices=(),
    ),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
    devices=4,
)
