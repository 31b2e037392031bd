"""The command line: one experiment, all of them, or the page of verdicts."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from . import _errors
from ._experiment import Experiment
from ._list import EXPERIMENTS
from ._pages import readme, results_page, verdicts_page
from ._results import ROOT, Result, folder_of, load, results_of, run, save


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    **Arguments:**

    - `arguments`: those of the command line; None takes the process's own.

    **Returns:** The exit status, 2 for a mistake in the command.
    """
    asked = _parser().parse_args(arguments)
    try:
        _do(asked)
    except (_errors.MissingError, _errors.FormatError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paper_repro",
        description="Experiments of published papers, one command each.",
        epilog="names: " + ", ".join(EXPERIMENTS),
    )
    parser.add_argument("name", help="an experiment, or all, or report")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default 3)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--tiny",
        action="store_true",
        help="made-up data, one seed, seconds; keeps no result",
    )
    size.add_argument("--large", action="store_true", help="the form for a GPU")
    parser.add_argument(
        "--out", type=Path, help="a folder for the result instead of the repository's"
    )
    return parser


def _do(asked: argparse.Namespace) -> None:
    if asked.name == "report":
        write_pages()
    elif asked.name == "all":
        _all(asked)
    elif asked.name in EXPERIMENTS:
        _one(EXPERIMENTS[asked.name], asked)
    else:
        raise _errors.unknown_experiment(asked.name, list(EXPERIMENTS))


def _all(asked: argparse.Namespace) -> None:
    for experiment in EXPERIMENTS.values():
        if asked.tiny:
            _one(experiment, asked)
        else:
            # A process of its own: some fake devices, some measure memory.
            command = [sys.executable, "-m", "paper_repro", experiment.name]
            options = ["--seeds", str(asked.seeds), *["--large"] * asked.large]
            if not (asked.large and experiment.large is None):
                subprocess.run([*command, *options], check=True)


def _one(experiment: Experiment, asked: argparse.Namespace) -> None:
    if asked.tiny:
        result = run(experiment, experiment.tiny, seeds=1)
        print(
            f"{experiment.name}: tiny, on made-up data, no evidence: {result.verdict}"
        )
        if asked.out is not None:
            _write(experiment, experiment.tiny, result, asked.out / experiment.name)
        else:
            with tempfile.TemporaryDirectory() as folder:
                _write(experiment, experiment.tiny, result, Path(folder))
        return
    config = experiment.full
    if asked.large:
        if experiment.large is None:
            raise _errors.no_large(experiment.name)
        config = experiment.large
    elif experiment.devices > 1:
        jax.config.update("jax_num_cpu_devices", experiment.devices)
    result = run(experiment, config, seeds=asked.seeds)
    # A GPU's result stands beside the CPU's and does not replace it.
    beside = "large" if asked.large else ""
    folder = asked.out or results_of(experiment) / beside
    _write(experiment, config, result, folder)
    if asked.out is None:
        (folder_of(experiment) / "README.md").write_text(
            readme(experiment, load(experiment))
        )
    print(f"{experiment.name}: {result.verdict}, {result.seconds / 60:.1f} minutes")


def _write(experiment: Experiment, config: Any, result: Result, folder: Path) -> None:
    save(experiment, config, result, folder)
    (folder / "results.md").write_text(results_page(experiment, config, result))


def write_pages() -> None:
    """Writes every README anew, and the page of all verdicts."""
    results = [(one, load(one)) for one in EXPERIMENTS.values()]
    for experiment, result in results:
        (folder_of(experiment) / "README.md").write_text(readme(experiment, result))
    path = ROOT / "VERDICTS.md"
    path.write_text(verdicts_page(results))
    print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
