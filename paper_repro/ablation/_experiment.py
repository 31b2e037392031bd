"""ContAccum less its query bank, less old encodings, less both, less accumulation."""

from collections.abc import Sequence
from typing import Any

from .._comparison import (
    ComparisonConfig,
    compare,
    draw_scores,
    score_table,
    start_b,
    start_c,
    tiny,
    top,
    top_over_seeds,
)
from .._experiment import Experiment, Finding, Run, Table
from .._methods import Method, cont_accum, dpr
from .._statistics import is_above

FULL, NO_QUERIES = "ContAccum", "no query bank"
NO_PAST, NEITHER, NO_ACCUMULATION = "no past encodings", "neither", "no accumulation"


def methods(local: int, total: int, bank: int) -> tuple[Method, ...]:
    """The rows of Table 2."""
    return (
        dpr(local),
        dpr(total),
        cont_accum(local, total, bank, name=FULL),
        cont_accum(local, total, bank, name=NO_QUERIES, queries=False),
        cont_accum(local, total, bank, name=NO_PAST, clear=True),
        cont_accum(local, total, bank, name=NEITHER, queries=False, clear=True),
        cont_accum(local, local, bank, name=NO_ACCUMULATION),
    )


def measure(config: ComparisonConfig, seed: int) -> Run:
    return compare(config, seed)


def judge(config: ComparisonConfig, runs: Sequence[Run]) -> list[Finding]:
    """Each part gives something, and the query bank most."""
    findings = [
        is_above(runs, top(FULL), top(name), f"Top@20 of {FULL} above: {name}")
        for name in (NO_QUERIES, NO_PAST, NEITHER, NO_ACCUMULATION)
    ]
    for name in (NO_PAST, NO_ACCUMULATION):
        findings.append(
            is_above(
                *(runs, top(name), top(NO_QUERIES)),
                f"the query bank matters more: Top@20 of {name} above {NO_QUERIES}",
            )
        )
    return findings


def tables(config: ComparisonConfig, runs: Sequence[Run]) -> list[Table]:
    full = top_over_seeds(runs, FULL).mean
    rows = [
        [method.name, f"{top_over_seeds(runs, method.name).mean - full:+.1f}"]
        for method in config.methods
    ]
    difference = Table("Top@20 less ContAccum's", ["variant", "points"], rows)
    return [score_table(runs), difference]


def draw(config: ComparisonConfig, runs: Sequence[Run], figure: Any) -> None:
    draw_scores(runs, figure)


EXPERIMENT = Experiment(
    name="ablation",
    title="Table 2: what each part of ContAccum gives",
    claim=(
        "The query bank matters most; encodings of older weights and accumulation each "
        "give some points."
    ),
    says=(
        "ContAccum, Table 2, NQ Top@20 with / without hard negatives: ContAccum 78.8 / "
        "76.3; without the query bank -8.0 / -4.0; without past encodings -2.3 / -2.9; "
        "without both -11.0 / -2.4; without accumulation -2.1 / -2.2. (Without hard "
        "negatives, lacking both is thus better than lacking the query bank alone. The "
        "released code cannot run this ablation, by reading: clearing the bank uses an "
        "attribute that is never set.)"
    ),
    notes=(
        "As `table1`. Without accumulation the update is of 8 pairs, sixteen times as "
        "many updates. A bank cleared at each update holds at most 120 rows."
    ),
    minutes=55.0,
    full=start_b(methods(8, 128, 1024)),
    tiny=tiny(methods(4, 8, 8)[2:]),
    large=start_c(methods(8, 128, 1024)),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
