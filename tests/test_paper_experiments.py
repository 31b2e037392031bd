"""The paper experiments: every program runs, and their judging by hand-made figures."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
from helpers import REPOSITORY
from jaxtyping import install_import_hook

pytestmark = pytest.mark.program

with install_import_hook("paper_repro", "beartype.beartype"):
    from paper_repro import _cli, _pages, _results
    from paper_repro._errors import FormatError
    from paper_repro._experiment import FAILS, HOLDS, IN_PART, OPEN, Finding, verdict
    from paper_repro._list import EXPERIMENTS
    from paper_repro._statistics import (
        at_least,
        at_most,
        estimate,
        is_above,
        is_not_below,
        relative_gap,
    )


# The cheapest of each kind: retrieval, images, a language model in plain JAX.
QUICK = ("similarity", "noise", "adama")


@pytest.mark.parametrize(
    "name",
    ["adama", *(pytest.param(n, marks=pytest.mark.slow) for n in QUICK[:-1])],
)
def test_an_experiment_runs_tiny(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert _cli.main([name, "--tiny", "--out", str(tmp_path)]) == 0
    _check_tiny(name, tmp_path, capsys.readouterr().out)


@pytest.mark.slow  # a compilation for each method of each experiment
@pytest.mark.timeout(900)
def test_every_experiment_runs_tiny(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert _cli.main(["all", "--tiny", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in EXPERIMENTS:
        _check_tiny(name, tmp_path, said)
    # What is exact is so in the tiny form too.
    assert "exactness: tiny, on made-up data, no evidence: holds" in said


def _check_tiny(name: str, folder: Path, said: str):
    assert f"{name}: tiny, on made-up data, no evidence" in said
    page = (folder / name / "results.md").read_text()
    assert "Made by" in page and "| criterion | measured | met |" in page
    assert (folder / name / "plot.svg").read_text().startswith("<?xml")


def test_committed_pages_are_those_of_the_committed_results():
    results = [(one, _results.load(one)) for one in EXPERIMENTS.values()]
    for experiment, result in results:
        page = _results.folder_of(experiment) / "README.md"
        assert page.read_text() == _pages.readme(experiment, result), experiment.name
        if result is not None:
            # A verdict is what the criteria make of the figures, today too.
            judged = experiment.judge(experiment.full, result.runs)
            assert judged == result.findings, experiment.name
            results_page = _pages.results_page(experiment, experiment.full, result)
            path = _results.results_of(experiment) / "results.md"
            assert path.read_text() == results_page
            assert result.machine["versions"]["jax"]
    page = REPOSITORY / "paper_repro" / "VERDICTS.md"
    # Below it quotes the benchmarks' page, which is made anew by itself.
    committed, made = (
        text.partition("## Three figures")[0]
        for text in (page.read_text(), _pages.verdicts_page(results))
    )
    assert committed == made


def test_verdicts():
    yes, no, open_ = (Finding("c", "m", holds) for holds in (True, False, None))
    assert verdict([yes, yes]) == HOLDS
    assert verdict([yes, no]) == IN_PART
    assert verdict([no, open_]) == FAILS
    assert verdict([yes, open_]) == OPEN


def test_estimates_by_hand():
    got = estimate([1.0, 2.0, 6.0])  # variance (4 + 1 + 9) / 2 = 7
    assert got.mean == 3
    assert got.error == pytest.approx(math.sqrt(7 / 3))
    assert estimate([4.0]).error is None
    assert "one seed" in str(estimate([4.0]))


@pytest.mark.parametrize(
    ("differences", "above", "not_below"),
    [
        ([1.0, 1.1, 0.9], True, True),
        ([-1.0, -1.1, -0.9], False, False),
        ([1.0, -1.0, 0.2], None, True),
        ([5.0], None, None),
    ],
)
def test_orders_are_told_from_paired_differences(
    differences: list[float], above: bool | None, not_below: bool | None
):
    # A seed's own level is far larger than the differences, and does not matter.
    runs = [{"a": 10 * n + d, "b": 10.0 * n} for n, d in enumerate(differences)]

    def a(run):
        return run["a"]

    def b(run):
        return run["b"]

    assert is_above(runs, a, b, "a > b").holds is above
    assert is_not_below(runs, a, b, "a >= b").holds is not_below


def test_bounds_and_gaps():
    assert at_most("x", 1.0, 1.0).holds and not at_most("x", 1.1, 1.0).holds
    assert at_least("x", 1.0, 1.0).holds and not at_least("x", 0.9, 1.0).holds
    assert not at_most("x", math.nan, 1.0).holds
    got = relative_gap([[3.0], [0.0, 1.0]], [[3.0], [4.0, 1.0]])
    assert got == pytest.approx(4 / math.sqrt(26))


def test_a_result_is_read_back_and_belongs_to_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_results, "ROOT", tmp_path)
    first, second = list(EXPERIMENTS.values())[:2]
    assert _results.load(first) is None
    assert "Not run yet" in _pages.readme(first, None)
    result = _results.Result(
        experiment=first.name,
        config={},
        seeds=[0],
        runs=[],
        findings=[at_most("x", 2.0, 1.0)],
        seconds=1.0,
        date="today",
        machine={"versions": {}},
    )
    folder = _results.results_of(first)
    folder.mkdir(parents=True)
    (tmp_path / "second").mkdir()
    text = _as_json(result)
    (folder / "results.json").write_text(text)
    assert _results.load(first) == result
    page = _pages.verdicts_page([(first, result), (second, None)])
    assert f"{first.name}/README.md): x at most 1: 2" in page
    assert _pages.NOT_RUN in page
    shutil.copytree(folder, tmp_path / second.name / "results")
    with pytest.raises(FormatError, match=f"result of '{first.name}'"):
        _results.load(second)


def _as_json(result: _results.Result) -> str:
    return json.dumps(dataclasses.asdict(result))


def test_mistakes_in_the_command(capsys: pytest.CaptureFixture):
    assert _cli.main(["nothing"]) == 2
    assert "no experiment 'nothing'" in capsys.readouterr().err
    assert _cli.main(["exactness", "--large"]) == 2
    assert "no form for a GPU" in capsys.readouterr().err
