"""One run on changing machines, against one undisturbed.

    python benchmarks/elastic.py [--tiny] [--figure docs/elastic.svg]

A small transformer with dropout learns to reverse its input, with AdamW; 64 examples
per update. The disturbed run is four jobs that share a directory of checkpoints: one
CPU device, four faked ones, two processes of two each (over loopback, gloo), one device
with a memory limit that makes it cut the batch otherwise. Each resumes where the one
before stopped. Examples, order and dropout masks must be the same, so its losses must
lie on the undisturbed ones, up to rounding. Takes three minutes on two cores (`--tiny`:
one) and prints a Markdown table; the figure needs matplotlib.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, LETTERS, WIDTH = 12, 8, 32
GLOBAL_BATCH = 64


@dataclass(frozen=True)
class Phase:
    """A part of the disturbed run: how many updates, and where."""

    name: str
    share: float  # of all updates, those before included
    devices: int  # of each process
    limit: str | None = None
    processes: int = 1


PHASES = (
    Phase("one device", 1 / 4, 1),
    Phase("four devices", 2 / 4, 4),
    Phase("two processes of two devices", 3 / 4, 2, processes=2),
    Phase("one device, less memory", 1.0, 1, "1MiB"),
)


def train(options: argparse.Namespace) -> None:
    """One process of a run; prints its losses and its plan as JSON."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    import eqaccum

    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{options.port}"
        jax.distributed.initialize(address, options.processes, options.process)

    class Reverser(eqx.Module):
        embed: eqx.nn.Embedding
        attend: eqx.nn.MultiheadAttention
        dropout: eqx.nn.Dropout
        mix: eqx.nn.MLP
        out: eqx.nn.Linear
        places: jax.Array

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.embed = eqx.nn.Embedding(LETTERS, WIDTH, key=keys[0])
            self.attend = eqx.nn.MultiheadAttention(2, WIDTH, key=keys[1])
            self.dropout = eqx.nn.Dropout(0.1)
            self.mix = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=keys[2])
            self.out = eqx.nn.Linear(WIDTH, LETTERS, key=keys[3])
            self.places = jax.random.normal(keys[4], (LENGTH, WIDTH))

        def __call__(self, letters, key):
            x = jax.vmap(self.embed)(letters) + self.places
            x = x + self.attend(x, x, x)
            x = x + jax.vmap(self.mix)(self.dropout(x, key=key))
            return jax.vmap(self.out)(x)

    def loss(model, letters, key):
        scores = model(letters, key)
        wanted = letters[::-1]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, wanted))

    letters = np.random.default_rng(0).integers(0, LETTERS, (1000, LENGTH))
    kept: dict[str, Any] = {}
    if options.directory:
        kept = {"checkpoint": options.directory, "resume": True}
    result = eqaccum.fit(
        Reverser(jax.random.key(1)),
        letters,
        loss=loss,
        optimizer=optax.adamw(8e-4),
        global_batch=GLOBAL_BATCH,
        epochs=10_000,
        steps=options.steps,
        memory_limit=options.limit,
        key=jax.random.key(2),
        **kept,
    )
    leaves = jax.tree.leaves(eqx.filter(result.model, eqx.is_array))
    print(
        "\n",  # a collective's library may have left a line unfinished
        json.dumps(
            {
                "loss": [float(value) for value in result.history["loss"]],
                "plan": result.plan.summary(),
                "parameters": [np.ravel(leaf).tolist() for leaf in leaves],
            }
        ),
        sep="",
    )


def in_processes(steps: int, phase: Phase, directory: str) -> dict[str, Any]:
    """A job that goes on up to so many steps; what its first process told."""
    words = ["--steps", str(steps), "--devices", str(phase.devices)]
    words += ["--directory", directory] if directory else []
    words += ["--limit", phase.limit] if phase.limit else []
    words += ["--processes", str(phase.processes), "--port", str(free_port())]
    command = [sys.executable, __file__, *words, "--process"]
    others = [
        subprocess.Popen([*command, str(process)], stdout=subprocess.DEVNULL)
        for process in range(1, phase.processes)
    ]
    done = subprocess.run([*command, "0"], stdout=subprocess.PIPE, text=True)
    if any([done.returncode, *(other.wait() for other in others)]):
        raise SystemExit(f"{phase.name} failed")
    return json.loads(done.stdout.splitlines()[-1])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    """The norm of the difference over all parameters, relative to theirs."""
    first, second = (np.concatenate(leaves) for leaves in (one, other))
    return float(np.linalg.norm(first - second) / np.linalg.norm(first))


def draw(file: Path, calm: np.ndarray, parts: dict[str, tuple[int, int]], got: Any):
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7, 5), sharex=True, layout="constrained"
    )
    steps = np.arange(1, len(calm) + 1)
    above.plot(steps, calm, color="black", linewidth=1, label="undisturbed")
    apart = np.abs(got - calm) / calm
    for name, (start, stop) in parts.items():
        part = slice(start, stop)
        above.plot(steps[part], got[part], ".", markersize=4, label=name)
        below.plot(steps[part], np.maximum(apart[part], 1e-9), ".", markersize=4)
    above.set(ylabel="loss", title="The same run on changing machines")
    above.legend()
    below.set(
        xlabel="update",
        ylabel="relative difference\n(1e-9: none)",
        yscale="log",
        ylim=(5e-10, 1e-3),
    )
    figure.savefig(file)


def compare(options: argparse.Namespace) -> None:
    total = 32 if options.tiny else 160
    calm = in_processes(total, PHASES[0], "")
    parts, rows, start = {}, [], 0
    got: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for phase in PHASES:
            stop = round(phase.share * total)
            got = in_processes(stop, phase, directory)
            parts[phase.name] = (start, stop)
            rows.append((phase.name, start, stop, got["plan"]))
            start = stop
    losses, expected = np.array(got["loss"]), np.array(calm["loss"])
    apart = np.abs(losses - expected) / expected
    print("| part | updates | plan | largest relative difference of a loss |")
    print("|---|---|---|---|")
    for name, start, stop, plan in rows:
        worst = apart[start:stop].max()
        print(f"| {name} | {start + 1}-{stop} | {plan} | {worst:.1e} |")
    norm = distance(calm["parameters"], got["parameters"])
    print(f"\nParameters at the end: {norm:.1e} apart, relative, over all of them.")
    if options.figure:
        draw(Path(options.figure), expected, parts, losses)
    if apart.max() > 1e-3:
        raise SystemExit("the losses do not lie on the undisturbed ones")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--figure")
    parser.add_argument("--steps", type=int, help="(of one process)")
    parser.add_argument("--devices", type=int, default=1, help="(of one process)")
    parser.add_argument("--processes", type=int, default=1, help="(of one process)")
    parser.add_argument("--process", type=int, default=0, help="(of one process)")
    parser.add_argument("--port", type=int, default=0, help="(of one process)")
    parser.add_argument("--directory", default="", help="(of one process)")
    parser.add_argument("--limit", help="(of one process)")
    options = parser.parse_args()
    train(options) if options.steps else compare(options)
