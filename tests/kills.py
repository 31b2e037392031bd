"""Kills a training run at random moments, resumes it, and compares it with its like.

    python tests/kills.py [--kills 100] [--each 25] [--seed 0]     (make test-kills)

The run is that of `resumed.py` (dropout, BatchNorm, AdamW with warm-up, a shuffled
epoch with a short last batch), 120 steps, with a checkpoint after each step. A child is
sent SIGKILL: one in five at some moment of its start (reading the checkpoint,
compiling), the others up to a second after its first step. Then it is resumed. After
`--each` kills a run may end; its parameters, moments, statistics and history must be
those of a run that was never disturbed and wrote no checkpoint, bit for bit, and each
step must have been made of the same examples every time that it was made: else this
script fails. Takes some fifteen minutes on two cores.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint
import resumed

import eqaccum

EPOCHS, STEPS_PER_EPOCH = 15, 8
STEPS = EPOCHS * STEPS_PER_EPOCH
AT_START = 0.2  # of the kills
LONGEST = 1.0  # seconds after the first step


@dataclass
class Tally:
    """What was seen over all runs."""

    kills: int = 0
    at_start: int = 0
    saves_in_flight: int = 0
    steps_repeated: int = 0
    runs: int = 0


def train(directory: Path, *, is_calm: bool) -> None:
    """One life of a run: it starts or resumes, and says each step and its examples."""
    jax.config.update("jax_compilation_cache_dir", str(directory.parent / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ["EQACCUM_CACHE_DIR"] = str(directory.parent / "plans")

    def note(info: Any) -> None:
        with (directory / "rows.jsonl").open("a") as file:
            examples = resumed.rows_of(info)[: info.metrics.examples]
            file.write(json.dumps([info.step, info.epoch, examples]) + "\n")

    kept = {"checkpoint": directory / "run", "save_every": 1, "resume": True}
    result = eqaccum.fit(
        **resumed.arguments(epochs=EPOCHS, callbacks=[note], **{} if is_calm else kept)
    )
    (directory / "digest").write_text(digest(result))


def digest(result: eqaccum.FitResult) -> str:
    """One number for all leaves and the whole history, the clock's apart."""
    leaves = jax.tree.leaves(result.train)
    leaves += [a for n, a in result.history.items() if n != "seconds"]
    total = hashlib.sha256()
    for leaf in leaves:
        array = np.asarray(leaf)
        total.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return total.hexdigest()


def start(directory: Path, *, is_calm: bool = False) -> int:
    """A child of its own; this process has imported everything and started nothing."""
    child = os.fork()
    if child:
        return child
    try:
        log = os.open(directory / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(directory, is_calm=is_calm)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def lives(child: int) -> bool:
    done, status = os.waitpid(child, os.WNOHANG)
    if done and status:
        raise SystemExit(f"the run failed by itself: {status}")
    return not done


def entries(directory: Path) -> int:
    file = directory / "rows.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_step(child: int, directory: Path) -> bool:
    """Returns at the child's first step; False where it ended without one."""
    before = entries(directory)
    while entries(directory) == before:
        if not lives(child):
            return False
        time.sleep(0.005)
    return True


def disturb(directory: Path, draw: random.Random, tally: Tally, usual: float) -> bool:
    """One life that ends by SIGKILL; False where it ended before."""
    before, child = entries(directory), start(directory)
    if draw.random() < AT_START:
        time.sleep(draw.uniform(0, usual))
    elif wait_for_step(child, directory):
        time.sleep(draw.uniform(0, LONGEST))
    else:
        return False
    if not lives(child):
        return False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    tally.kills += 1
    tally.at_start += entries(directory) == before
    tally.saves_in_flight += any((directory / "run").glob("*.orbax-checkpoint-tmp"))
    return True


def rows_by_step(directory: Path, tally: Tally) -> dict[int, Any]:
    """The examples of each step; each time it was made they must be the same."""
    steps: dict[int, Any] = {}
    for line in (directory / "rows.jsonl").read_text().splitlines():
        step, *what = json.loads(line)
        if step in steps:
            tally.steps_repeated += 1
            if steps[step] != what:
                raise SystemExit(f"step {step}: {steps[step]}, then {what}")
        steps[step] = what
    return steps


def check_epochs(steps: dict[int, Any]) -> None:
    """Each epoch has each example once."""
    if sorted(steps) != list(range(1, STEPS + 1)):
        raise SystemExit(f"steps are missing: {sorted(steps)}")
    for epoch in range(EPOCHS):
        rows = [row for e, some in steps.values() if e == epoch for row in some]
        if sorted(rows) != list(range(resumed.ROWS)):
            raise SystemExit(f"epoch {epoch}: {Counter(rows)}")


def finish(directory: Path, *, is_calm: bool = False) -> None:
    """Lets a run end."""
    _, status = os.waitpid(start(directory, is_calm=is_calm), 0)
    if status:
        raise SystemExit((directory / "said").read_text()[-3000:])


def first_step(directory: Path) -> float:
    """The seconds that a life needs until its first step, programs in the cache."""
    began, child = time.perf_counter(), start(directory)
    wait_for_step(child, directory)
    until = time.perf_counter() - began
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return until


def main(kills: int, each: int, seed: int) -> None:
    draw, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as folder:
        calm = Path(folder) / "calm"
        calm.mkdir()
        finish(calm, is_calm=True)
        want, rows = (calm / "digest").read_text(), rows_by_step(calm, tally)
        check_epochs(rows)
        usual = 0.0  # the seconds of a start; known after the first life
        while tally.kills < kills:
            directory = Path(folder) / f"run{tally.runs}"
            directory.mkdir()
            here = 0
            usual = usual or first_step(directory)
            while here < each and tally.kills < kills:
                if not disturb(directory, draw, tally, usual):
                    break
                here += 1
            finish(directory)
            got = rows_by_step(directory, tally)
            if got != rows:
                raise SystemExit("the examples are not those of the calm run")
            if (directory / "digest").read_text() != want:
                raise SystemExit("the numbers are not those of the calm run")
            tally.runs += 1
            print(f"run {tally.runs}: {here} kills, the same to the bit", flush=True)
            shutil.rmtree(directory)
    report(tally, seed)


def report(tally: Tally, seed: int) -> None:
    found = {
        "kills by SIGKILL": tally.kills,
        "of them before the first step of that life": tally.at_start,
        "of them with a save in flight": tally.saves_in_flight,
        f"runs of {STEPS} steps that they were spread over": tally.runs,
        "of them equal to the undisturbed run, bit for bit": tally.runs,
        "steps that were lost and made again, of the same examples": (
            tally.steps_repeated
        ),
        "examples left out or used twice in an epoch": 0,
    }
    print(f"\n# {tally.kills} kills, seed {seed}\n\n| | |\n|---|---|")
    for what, number in found.items():
        print(f"| {what} | {number} |")
    print(
        f"\n{os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}, jax {jax.__version__}, "
        f"orbax-checkpoint {orbax.checkpoint.__version__}; threads as JAX sets them."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--each", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(main(options.kills, options.each, options.seed))
