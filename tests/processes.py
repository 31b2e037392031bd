"""One process of a job, started by test_processes.py; prints what it saw as JSON.

    python tests/processes.py SCENARIO PROCESS PROCESSES PORT FOLDER

Each process has two faked CPU devices; they speak over loopback (gloo).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum

DEVICES = 2  # of each process
GLOBAL_BATCH = 24
HEARTBEAT = 10  # seconds
LEAST = "700KiB"  # of the unequal memory limits


# --- the run, the same in one process or in several --------------------------------


class Net(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self):
        one, two = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(6, 16, key=one)
        self.dropout = eqx.nn.Dropout(0.3)
        self.second = eqx.nn.Linear(16, 4, key=two)

    def __call__(self, x, key=None):
        return self.second(self.dropout(jnp.tanh(self.first(x)), key=key))


def loss(model, example, key):
    x, y = example
    hidden = model.dropout(jnp.tanh(model.first(x)), key=key)
    error = jnp.mean((model.second(hidden) - y) ** 2)
    return error, {"mask": hidden == 0, "positive": y[0] > 0}


def wide(**options: Any) -> dict[str, Any]:
    """A loss that needs some 130 kB for each example."""
    numbers = np.linspace(0, 1, 2000, dtype=np.float32)

    def loss(model, example, key):
        x, y = example
        hidden = model.dropout(jnp.tanh(model.first(x)), key=key)
        spread = jnp.tanh(hidden[:, None] * numbers[None])
        return jnp.mean((model.second(jnp.mean(spread, axis=1)) - y) ** 2)

    return dict(loss=loss, has_aux=False, validation=None) | options


def embed(model, example, key):
    x, y = example
    return model(x, key), y


def head(model, embeddings, weights):
    one, other = embeddings
    scores = one @ other.T - jnp.where(weights > 0, 0.0, 1e9)[None]
    own = jnp.diag(jax.nn.log_softmax(scores, axis=1))
    return -jnp.sum(own * weights) / jnp.sum(weights)


def columns(rows=65):
    """65 rows: the last of three batches is short."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 4))
    return x.astype(np.float32), y.astype(np.float32)


def trained(**options: Any) -> eqaccum.FitResult:
    options = (
        dict(
            loss=loss,
            has_aux=True,
            global_batch=GLOBAL_BATCH,
            optimizer=optax.adamw(1e-2),
            steps=6,
            epochs=10,
            microbatch=3,
            validation=columns(10),
        )
        | options
    )
    data = options.pop("data", columns())
    return eqaccum.fit(Net(), data, **options)


def coupled() -> dict[str, Any]:
    return dict(loss=eqaccum.coupled(embed, head), has_aux=False)


def told(result: eqaccum.FitResult) -> dict[str, Any]:
    """What is compared between processes and with one alone."""
    return {
        "loss": [float(value) for value in result.history["loss"]],
        "validation": [float(v) for v in result.history.get("validation_loss", ())],
        "parameters": [np.ravel(leaf).tolist() for leaf in arrays(result.model)],
        "microbatch": result.plan.microbatch,
        "passes": result.plan.num_microbatches,
        "limit": result.plan.limit_bytes,
        "devices": result.plan.devices,
        "step": result.train.step,
    }


def arrays(model) -> list[np.ndarray]:
    return [
        np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))
    ]


# --- scenarios ---------------------------------------------------------------------


def limits(process: int, folder: Path) -> dict[str, Any]:
    """Unequal limits: the least decides in all processes."""
    limit = ["1GiB", LEAST, "2GiB"][process]
    return told(trained(**wide(), microbatch="largest", memory_limit=limit))


def plain(process: int, folder: Path) -> dict[str, Any]:
    masks = []
    result = trained(callbacks=[lambda info: masks.append(info.metrics.aux["mask"])])
    bits = [int(np.packbits(mask).astype(int).sum()) for mask in masks]
    return told(result) | {"masks": bits}


def gathered(process: int, folder: Path) -> dict[str, Any]:
    return told(trained(**coupled()))


def sharded(process: int, folder: Path) -> dict[str, Any]:
    result = trained(shard_optimizer=True)
    moment = result.opt_state[0].mu.first.weight
    shape = moment.addressable_shards[0].data.shape
    return told(result) | {"moment": list(shape)}


def skipping(process: int, folder: Path) -> dict[str, Any]:
    """A row that only the last process holds is not finite."""
    x, y = columns()
    x[11] = np.nan
    result = trained(data=(x, y), shuffle=False, nonfinite="skip", steps=3)
    return told(result) | {"skipped": [bool(s) for s in result.history["skipped"]]}


def stopping(process: int, folder: Path) -> dict[str, Any]:
    """One process asks to stop."""

    def callback(info):
        return process == 1 and info.step == 3

    return told(trained(callbacks=[callback]))


def raising(process: int, folder: Path) -> dict[str, Any]:
    """A callback raises in one process; all stop, save together and can go on."""

    def callback(info):
        if process == 1 and info.step == 3:
            raise OSError("the disk of process 1")

    try:
        trained(callbacks=[callback], checkpoint=folder / "run")
    except (OSError, eqaccum.StepError) as error:
        seen = f"{type(error).__name__}: {error}"
    again = trained(checkpoint=folder / "run", resume=True)
    return told(again) | {"error": seen}


def terminated(process: int, folder: Path) -> dict[str, Any]:
    """SIGTERM reaches one process; all save that step and exit with 143."""

    def callback(info):
        if process == 1 and info.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        trained(callbacks=[callback], checkpoint=folder / "run")
    except SystemExit as error:
        code = error.code
    again = trained(checkpoint=folder / "run", resume=True)
    return told(again) | {"code": code}


def short_of_memory(process: int, folder: Path) -> dict[str, Any]:
    """Accumulate fails once in one process: all take smaller passes."""
    from eqaccum._step._launch import Launcher

    accumulate, failures = Launcher._accumulate, []

    def failing(self, train, placed):
        if process == 1 and train.step == 2 and not failures:
            failures.append(1)
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
        return accumulate(self, train, placed)

    Launcher._accumulate = failing
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = trained(microbatch=6)
    words = [str(w.message) for w in seen if "out of memory" in str(w.message)]
    return told(result) | {"warned": len(words)}


def dying(process: int, folder: Path) -> dict[str, Any]:
    """One process is killed; the others are to stop."""

    def callback(info):
        if info.step == 3:
            (folder / f"alive{process}").write_text(str(time.time()))
            if process == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    return told(trained(callbacks=[callback], steps=10_000, epochs=10_000))


def own_rows(process: int, folder: Path) -> dict[str, Any]:
    """Each process gives its own share of every global batch, by an iterable."""
    processes = jax.process_count()
    share = GLOBAL_BATCH // processes
    x, y = columns(64)

    def batches():
        for start in range(0, 64, GLOBAL_BATCH):
            own = slice(start + process * share, start + (process + 1) * share)
            if len(x[own]):
                yield x[own], y[own]

    class Loader:
        def __iter__(self):
            return batches()

    return told(trained(data=Loader()))


def resuming(process: int, folder: Path) -> dict[str, Any]:
    return told(trained(checkpoint=folder / "run", resume=True, shard_optimizer=True))


def door(process: int, folder: Path) -> dict[str, Any]:
    """A loop of one's own, evaluate and predict."""
    step = eqaccum.make_step(
        loss, optax.sgd(0.1), global_batch=GLOBAL_BATCH, has_aux=True, microbatch=4
    )
    train = step.init(Net())
    x, y = columns()
    train, metrics = step(train, (x[:20], y[:20]))
    scores = eqaccum.predict(train.model, x)
    eqaccum.save(folder / "own", train)
    back = eqaccum.restore(folder / "own", like=train)
    same = all(map(np.array_equal, arrays(train.model), arrays(back.model)))
    return {
        "loss": float(metrics.loss),
        "mask": metrics.aux["mask"].astype(int).tolist(),
        "validation": eqaccum.evaluate(train.model, (x, y))["loss"],
        "scores": scores.tolist(),
        "same": same,
    }


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        limits,
        plain,
        gathered,
        sharded,
        skipping,
        stopping,
        raising,
        terminated,
        short_of_memory,
        dying,
        own_rows,
        resuming,
        door,
    )
}


# --- starting them -----------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """What became of one process."""

    code: int
    said: str  # standard error
    told: Any  # the JSON of its last line, None without
    seconds: float


def run_processes(
    scenario: str, processes: int, folder: Path, *, timeout: float = 250
) -> list[Done]:
    """Runs scenarios, one after the other, in so many processes of one job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"EQACCUM_CACHE": "0"}
    words = [str(processes), str(port), str(folder)]
    start = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, __file__, scenario, str(process), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(processes)
    ]
    done = []
    try:
        for child in children:
            out, said = child.communicate(timeout=timeout)
            seconds = time.monotonic() - start
            lines = [line for line in out.splitlines() if line.startswith("{")]
            result = json.loads(lines[-1]) if lines else None
            done.append(Done(child.returncode, said, result, seconds))
    finally:
        for child in children:
            child.kill()
            child.wait()
    return done


def main() -> None:
    scenario, process, processes, port, folder = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(processes),
        int(process),
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    results = {}
    for name in scenario.split(","):
        own = Path(folder) / name
        own.mkdir(exist_ok=True)
        results[name] = SCENARIOS[name](int(process), own)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
