"""ContAccum over the global batch and the bank's length, at one local batch."""

from collections.abc import Sequence
from typing import Any

from .._comparison import (
    ComparisonConfig,
    compare,
    score_table,
    start_b,
    start_c,
    tiny,
    top,
    top_over_seeds,
)
from .._experiment import Experiment, Finding, Run, Table
from .._methods import Method, cont_accum, dpr, grad_accum
from .._statistics import is_above, is_not_below


def methods(
    local: int, totals: tuple[int, ...], banks: tuple[int, ...]
) -> tuple[Method, ...]:
    """The grid, N_memory 0 being GradAccum, and DPR at the largest batch."""
    grid = []
    for total in totals:
        for bank in banks:
            name = _cell(total, bank)
            if bank:
                grid.append(cont_accum(local, total, bank, name=name))
            else:
                grid.append(_named(grad_accum(local, total), name))
    return (*grid, dpr(totals[-1]))


def _named(method: Method, name: str) -> Method:
    return Method(name, method.global_batch, group=method.group)


def _cell(total: int, bank: int) -> str:
    return f"N_total {total}, N_memory {bank}"


def _axes(config: ComparisonConfig) -> tuple[list[int], list[int]]:
    """The global batches and the banks of the grid."""
    grid = config.methods[:-1]
    totals = sorted({method.global_batch for method in grid})
    return totals, sorted({method.bank for method in grid})


def measure(config: ComparisonConfig, seed: int) -> Run:
    return compare(config, seed)


def judge(config: ComparisonConfig, runs: Sequence[Run]) -> list[Finding]:
    """A bank helps at every global batch, and a longer one does no harm."""
    totals, banks = _axes(config)
    findings = []
    for total in totals:
        cells = [_cell(total, bank) for bank in banks]
        findings.append(
            is_above(
                *(runs, top(cells[1]), top(cells[0])),
                f"N_total {total}: Top@20 of bank {banks[1]} above no bank",
            )
        )
        findings += [
            is_not_below(
                *(runs, top(longer), top(shorter)),
                f"Top@20 of {longer} at least that of {shorter}",
            )
            for shorter, longer in zip(cells[1:], cells[2:], strict=False)
        ]
    return findings


def tables(config: ComparisonConfig, runs: Sequence[Run]) -> list[Table]:
    totals, banks = _axes(config)
    rows = [
        [str(total), *(str(top_over_seeds(runs, _cell(total, b))) for b in banks)]
        for total in totals
    ]
    header = ["N_total", *(f"N_memory {bank}" for bank in banks)]
    return [Table("Top@20", header, rows), score_table(runs)]


def draw(config: ComparisonConfig, runs: Sequence[Run], figure: Any) -> None:
    axes = figure.add_subplot()
    totals, banks = _axes(config)
    for total in totals:
        found = [top_over_seeds(runs, _cell(total, bank)) for bank in banks]
        errors = [one.error or 0.0 for one in found]
        means = [one.mean for one in found]
        axes.errorbar(
            *(range(len(banks)), means), errors, capsize=3, label=f"N_total {total}"
        )
    whole = config.methods[-1].name
    axes.axhline(top_over_seeds(runs, whole).mean, color="grey", label=whole)
    axes.set_xticks(range(len(banks)), [str(bank) for bank in banks])
    axes.set(xlabel="N_memory", ylabel="Top@20, percent")
    axes.legend()


EXPERIMENT = Experiment(
    name="capacity",
    title="Figure 3: global batch against the bank's length",
    claim=(
        "ContAccum is above GradAccum at every global batch; it rises with the bank's "
        "length and then flattens; a bank alone, without accumulation, helps too."
    ),
    says=(
        "ContAccum, Figure 3 (an image, without values in the text): at N_total 64 a "
        "bank of 128 is already above DPR-128."
    ),
    notes=(
        "As `table1`, on a coarser grid, the similarity matrix of long banks in row "
        "blocks (`info_nce(block_rows=256)`)."
    ),
    minutes=120.0,
    full=start_b(methods(8, (8, 32, 128), (0, 128, 512, 2048))),
    tiny=tiny(methods(4, (8,), (0, 8, 300))),
    large=start_c(methods(8, (8, 32, 64, 128), (0, 128, 512, 2048))),
    measure=measure,
    judge=judge,
    tables=tables,
    draw=draw,
)
