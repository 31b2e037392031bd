"""Does data on disk keep up with data in memory?

    python benchmarks/streaming.py [--tiny] [--rounds 5]
    make bench-streaming

`fit` on a shuffled memory-mapped file against the same rows in memory, in turn, for a
step above 20 ms. Before each run the file's pages are dropped from the page cache, so
that every row comes from the disk, as with a file larger than memory. Writes
`results/streaming.json` and `.md`; ten minutes on two cores and 2 GB of disk.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import _machine
import _models
import numpy as np
import optax

import eqaccum

RESULTS = Path(__file__).with_name("results") / "streaming.json"
SIZES = {"size": 32, "patch": 4, "width": 128, "depth": 3, "heads": 4}
ROWS, GLOBAL_BATCH = 160_000, 128  # of 12 KiB: 2 GB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows, steps, rounds = ROWS, 40, options.rounds
    if options.tiny:
        rows, steps, rounds = 1000, 3, 2
    with tempfile.TemporaryDirectory() as folder:
        found = compared(Path(folder), rows, steps, rounds)
    told = {"machine": _machine.facts(), "rows": rows, "steps": steps, **found}
    print(page(told))
    if not options.tiny:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(told))


def compared(folder: Path, rows: int, steps: int, rounds: int) -> dict[str, Any]:
    path = folder / "images.npy"
    random = np.random.default_rng(0)
    images = random.standard_normal((rows, 3, 32, 32), np.float32)
    labels = random.integers(0, 10, rows, np.int32)
    np.save(path, images)
    seconds: dict[str, list[float]] = {"memory": [], "disk": []}
    for turn in range(rounds + 1):
        for name in seconds:
            if name == "disk":
                drop_from_cache(path)
                taken = run((np.load(path, mmap_mode="r"), labels), steps, turn)
            else:
                taken = run((images, labels), steps, turn)
            if turn:
                seconds[name].append(taken)
    return {"seconds": seconds, "bytes": path.stat().st_size}


def drop_from_cache(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def run(data: Any, steps: int, seed: int) -> float:
    """Seconds per step, the first ones left out."""
    import jax

    workload = _models.vision_transformer(**SIZES)
    result = eqaccum.fit(
        workload.model,
        data,
        loss=workload.loss,
        optimizer=optax.adamw(1e-3),
        global_batch=GLOBAL_BATCH,
        microbatch=GLOBAL_BATCH // 4,
        steps=steps,
        key=jax.random.key(seed),
        progress=False,
    )
    return float(np.mean(result.history["seconds"][1:]))


def page(told: dict[str, Any]) -> str:
    memory, disk = told["seconds"]["memory"], told["seconds"]["disk"]
    rates = [a / b for a, b in zip(memory, disk, strict=True)]
    spread = f"{min(rates):.3f} to {max(rates):.3f}"
    return (
        "# Data on disk\n\n"
        f"{_machine.described(told['machine'])} Made by `make bench-streaming`.\n\n"
        f"{told['rows']:,} shuffled rows of a memory-mapped file of "
        f"{told['bytes'] / 1e9:.1f} GB whose pages were dropped from the cache, ViT, "
        f"{GLOBAL_BATCH} rows and {1e3 * statistics.median(memory):.0f} ms a step, "
        f"{told['steps']} steps a run, {len(rates)} runs of each in turn: rate over "
        f"that of the same rows in memory **{statistics.median(rates):.3f}** "
        f"({spread}; asked for: at least 0.95).\n"
    )


if __name__ == "__main__":
    main()
