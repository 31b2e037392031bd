"""Builds wheel and sdist, installs each in a fresh environment, and trains there.

Command: `make dist`; `ARGS="--python 3.12"` tries one Python only
Time: a minute or two for each Python, most of it spent installing JAX

Not a test of its own: it needs a package index. Pythons that are not on this machine
are named and left out.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13")

# Run where there is no source tree, so that what is imported is what was installed.
PROGRAM = """
import pathlib, sys
import equinox as eqx, jax, numpy as np, optax
import eqaccum

assert pathlib.Path(eqaccum.__file__).is_relative_to(sys.prefix), eqaccum.__file__
x = np.random.default_rng(0).standard_normal((256, 8), np.float32)
y = (x[:, 0] > 0).astype(np.int32)
model = eqx.nn.MLP(8, 2, 16, 1, key=jax.random.key(0))
result = eqaccum.fit(
    model, (x, y), global_batch=64, microbatch=16, epochs=20, optimizer=optax.adam(1e-2)
)
loss = result.history["loss"]
assert result.plan.num_microbatches == 4 and loss[-1] < loss[0] / 2, loss
print(f"trained: loss {loss[0]:.3f} -> {loss[-1]:.3f}, jax {jax.__version__}")
"""


def build(folder: Path) -> list[Path]:
    """The wheel and the sdist, the wheel made out of the sdist."""
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder])
    (sdist,) = folder.glob("*.tar.gz")
    unpacked = folder / "unpacked"
    shutil.unpack_archive(sdist, unpacked)
    (source,) = unpacked.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    run(command, cwd=source)
    (wheel,) = folder.glob("*.whl")
    return [wheel, sdist]


def try_out(packages: list[Path], version: str, interpreter: str) -> None:
    """Installs each package in an environment of its own and trains with it."""
    with tempfile.TemporaryDirectory() as folder:
        run([interpreter, "-m", "venv", folder])
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "install", "--quiet"]
        # The versions of the lock, without its hashes: those are of one Python.
        pins = Path(folder) / "pins.txt"
        pins.write_text("\n".join(pinned(REPOSITORY / "requirements" / "run.txt")))
        for package in packages:
            print(f"Python {version}, {package.name}: ", end="", flush=True)
            # What eqaccum needs is there after the first; eqaccum itself is not.
            run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "eqaccum"])
            run([*pip, "--constraint", pins, package])
            run([python, "-m", "pip", "check"])
            run([python, "-W", "error", "-c", PROGRAM], cwd=Path(folder))


def pinned(lock: Path) -> list[str]:
    lines = lock.read_text().splitlines()
    return [line.split(" ")[0] for line in lines if "==" in line and line[0] != " "]


def run(command: list, cwd: Path = REPOSITORY) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))[:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", choices=VERSIONS)
    asked = parser.parse_args().python
    with tempfile.TemporaryDirectory() as folder:
        packages = build(Path(folder))
        for version in asked or VERSIONS:
            interpreter = shutil.which(f"python{version}")
            if interpreter is None or not works(interpreter):
                print(f"Python {version} is not here")
                continue
            try_out(packages, version, interpreter)


def works(interpreter: str) -> bool:
    return not subprocess.run([interpreter, "-c", ""], capture_output=True).returncode


if __name__ == "__main__":
    main()
