"""Running an experiment and keeping what it gave: JSON, a page and a plot."""

import dataclasses
import datetime
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import _errors
from ._experiment import Experiment, Finding, verdict
from ._optional import optional_module

ROOT = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Result:
    """What one command produced, with all that is needed to believe it.

    **Attributes:**

    - `experiment`, `config`, `seeds`: what was run.
    - `runs`: what each seed measured.
    - `findings`: each criterion and whether it is met.
    - `seconds`: how long it took, compilations included.
    - `date`, `machine`: when and where, with the packages' versions.
    """

    experiment: str
    config: dict[str, Any]
    seeds: list[int]
    runs: list[dict[str, Any]]
    findings: list[Finding]
    seconds: float
    date: str
    machine: dict[str, Any]

    @property
    def verdict(self) -> str:
        return verdict(self.findings)


def folder_of(experiment: Experiment) -> Path:
    return ROOT / experiment.name


def results_of(experiment: Experiment) -> Path:
    return folder_of(experiment) / "results"


def run(experiment: Experiment, config: Any, *, seeds: int) -> Result:
    """Measures every seed, then judges.

    **Arguments:**

    - `experiment`: what to run.
    - `config`: its `full`, `tiny` or `large` record, or one like them.
    - `seeds`: how many; an experiment without chance has one.
    """
    numbers = list(range(seeds if experiment.seeded else 1))
    start = time.perf_counter()
    runs = []
    for seed in numbers:
        # Through JSON and back, so that a run judged later is the run judged now.
        runs.append(json.loads(json.dumps(experiment.measure(config, seed))))
    return Result(
        experiment=experiment.name,
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        seeds=numbers,
        runs=runs,
        findings=experiment.judge(config, runs),
        seconds=time.perf_counter() - start,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine().facts(),
    )


def save(experiment: Experiment, config: Any, result: Result, folder: Path) -> None:
    """Writes `results.json` and `plot.svg` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(result), indent=1, allow_nan=False)
    (folder / "results.json").write_text(text + "\n")
    draw(experiment, config, result.runs, folder / "plot.svg")


def load(experiment: Experiment) -> Result | None:
    """The committed result, None where the experiment has not been run."""
    path = results_of(experiment) / "results.json"
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    if values.get("experiment") != experiment.name:
        raise _errors.other_result(path, experiment.name, values.get("experiment"))
    values["findings"] = [Finding(**finding) for finding in values["findings"]]
    return Result(**values)


def draw(experiment: Experiment, config: Any, runs: Sequence[Any], path: Path) -> None:
    """The experiment's plot as an SVG, the same bytes for the same runs."""
    figures = optional_module("matplotlib.figure", "The plot of an experiment")
    matplotlib = optional_module("matplotlib", "The plot of an experiment")
    with matplotlib.rc_context({"svg.hashsalt": experiment.name}):
        figure = figures.Figure(figsize=(7, 4), layout="constrained")
        experiment.draw(config, runs, figure)
        figure.savefig(path, metadata={"Date": None})


def machine() -> ModuleType:
    """What the benchmarks say about the machine; they are scripts and no package."""
    path = ROOT.parent / "benchmarks" / "_machine.py"
    spec = importlib.util.spec_from_file_location("_benchmarks_machine", path)
    if spec is None or spec.loader is None:
        raise _errors.no_file(path, "the benchmarks' words about the machine")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
