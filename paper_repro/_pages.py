"""Pages in Markdown: an experiment's README and results, and one of all verdicts."""

import json
from collections.abc import Iterator, Sequence

from ._experiment import Experiment, Finding, Table
from ._results import ROOT, Result, machine

NOT_RUN = "not run yet"
_WORDS = {True: "yes", False: "NO", None: "cannot be told"}


def readme(experiment: Experiment, result: Result | None) -> str:
    """The README of an experiment's folder, with what the committed result says."""
    return _joined(_readme(experiment, result))


def _readme(experiment: Experiment, result: Result | None) -> Iterator[str]:
    yield f"# {experiment.title}"
    yield f"**Claim.** {experiment.claim}"
    yield (
        f"**Command.** `{experiment.command}` (about {experiment.minutes:g} minutes on "
        "two cores without other work"
        + ("; `--large` is the form for a GPU" if experiment.large else "")
        + "). `--tiny` runs the same program on made-up data in seconds; it proves "
        "nothing."
    )
    yield f"**What the source says.** {experiment.says}"
    if experiment.notes:
        yield f"**Our setting.** {experiment.notes}"
    if result is None:
        yield (
            f"**What we got.** Not run yet: no result is committed. "
            f"`{experiment.command}` produces it."
        )
        return
    yield f"**Verdict: {result.verdict}.** The criteria, and what was measured:"
    yield _findings(result.findings)
    yield (
        "[All tables](results/results.md), [the raw figures](results/results.json), "
        "and the plot:"
    )
    yield "![plot](results/plot.svg)"


def results_page(experiment: Experiment, config: object, result: Result) -> str:
    """The page beside `results.json`: everything that was measured, as tables."""
    blocks = [f"# {experiment.title}: results", _provenance(result)]
    blocks += ["## Criteria", f"Verdict: **{result.verdict}**."]
    blocks.append(_findings(result.findings))
    for made in experiment.tables(config, result.runs):
        blocks += [f"## {made.title}", table(made)]
    blocks += ["## Setting", f"```json\n{json.dumps(result.config, indent=1)}\n```"]
    return _joined(blocks)


def _provenance(result: Result) -> str:
    seeds = ", ".join(map(str, result.seeds))
    return (
        f"Made by `python -m paper_repro {result.experiment}` on {result.date} in "
        f"{result.seconds / 60:.1f} minutes, seeds {seeds}. "
        + machine().described(result.machine)
    )


def verdicts_page(results: Sequence[tuple[Experiment, Result | None]]) -> str:
    """One page of all verdicts, those that failed and those not run included."""
    blocks = [
        "# Claims of papers, and whether they hold here",
        "Made by `python -m paper_repro report` from the committed results. Each "
        "criterion was stated before its run; a claim that does not hold is said so.",
        table(Table("", _VERDICT_HEADER, [_verdict_row(e, r) for e, r in results])),
    ]
    failed = [
        f"- [{experiment.name}]({experiment.name}/README.md): {finding.criterion}: "
        f"{finding.measured}"
        for experiment, result in results
        if result is not None
        for finding in result.findings
        if finding.holds is False
    ]
    blocks += ["## Criteria that are not met", "\n".join(failed) or "None."]
    blocks += ["## Three figures that nobody publishes", *_three_figures(results)]
    return _joined(blocks)


_VERDICT_HEADER = ("experiment", "claim", "verdict", "criteria met", "seeds", "date")


def _verdict_row(experiment: Experiment, result: Result | None) -> Sequence[str]:
    link = f"[{experiment.name}]({experiment.name}/README.md)"
    if result is None:
        return (link, experiment.title, NOT_RUN, "", "", "")
    met = sum(finding.holds is True for finding in result.findings)
    of = f"{met} of {len(result.findings)}"
    seeds = str(len(result.seeds))
    return (link, experiment.title, result.verdict, of, seeds, result.date)


def _three_figures(
    results: Sequence[tuple[Experiment, Result | None]],
) -> Iterator[str]:
    """Gradient equivalence from here; the plan's truth and cost from the benchmarks."""
    found = {experiment.name: result for experiment, result in results}
    exact = found.get("exactness")
    yield "Gradient equivalence (from [exactness](exactness/README.md)):"
    yield _findings(exact.findings) if exact else f"{NOT_RUN.capitalize()}."
    yield "The plan's prediction error, and what planning costs (`make bench-plan`):"
    plan = ROOT.parent / "benchmarks" / "results" / "plan.md"
    if plan.is_file():
        yield "see [the benchmark's page](../benchmarks/results/plan.md). It begins:"
        yield "\n".join(_verdict_lines(plan.read_text()))
    else:
        yield f"{NOT_RUN.capitalize()}: `benchmarks/results/plan.md` is not there."


def _verdict_lines(page: str) -> Iterator[str]:
    """The lines that state a figure against what was asked for, with their titles."""
    heading = ""
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif "asked for" in line or "compilations" in line and "|" not in line:
            yield f"- {heading}: {line}"


def _findings(findings: Sequence[Finding]) -> str:
    rows = [(f.criterion, f.measured, _WORDS[f.holds]) for f in findings]
    return table(Table("", ("criterion", "measured", "met"), rows))


def table(made: Table) -> str:
    """A table in Markdown."""
    lines = [made.header, ["---"] * len(made.header), *made.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _joined(blocks: Sequence[str] | Iterator[str]) -> str:
    return "\n\n".join(blocks) + "\n"
