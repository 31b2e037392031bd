"""What an experiment is: a claim, how it is measured, and what it is judged by."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# What one seed measured, as JSON takes it.
Run = Mapping[str, Any]

HOLDS = "holds"
IN_PART = "holds in part"
FAILS = "does not hold"
OPEN = "cannot be told from these seeds"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One criterion, stated before the run, and whether what was measured meets it.

    **Attributes:**

    - `criterion`: what has to be the case.
    - `measured`: the figures that decide it, with their standard errors.
    - `holds`: None where the noise over the seeds is too large to tell.
    """

    criterion: str
    measured: str
    holds: bool | None


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a result's page."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A claim of a paper and all that is needed to see whether it holds.

    **Attributes:**

    - `name`: its folder and its word on the command line.
    - `title`, `claim`: what is claimed, in one line and in full.
    - `says`: what the source says, its own figures included.
    - `notes`: what a reader should know about our setting, and where it differs.
    - `minutes`: what the command takes at three seeds on two cores without other work.
    - `full`, `tiny`: frozen records of all that can be set. The tiny one needs no file
        and no network; it shows that the program runs and proves nothing.
    - `large`: the setting for a GPU, None where there is none.
    - `measure`: `(config, seed)` to what that seed measured.
    - `judge`: `(config, runs)` to the findings.
    - `tables`: `(config, runs)` to the tables of the page.
    - `draw`: `(config, runs, figure)` draws into a matplotlib figure.
    - `seeded`: False where nothing is drawn at random, so that one run is enough.
    - `devices`: the CPU devices that the whole run fakes.
    """

    name: str
    title: str
    claim: str
    says: str
    minutes: float
    full: Any
    tiny: Any
    measure: Callable[[Any, int], Run]
    judge: Callable[[Any, Sequence[Run]], list[Finding]]
    tables: Callable[[Any, Sequence[Run]], list[Table]]
    draw: Callable[[Any, Sequence[Run], Any], None]
    notes: str = ""
    large: Any = None
    seeded: bool = True
    devices: int = 1

    @property
    def command(self) -> str:
        seeds = " --seeds 3" if self.seeded else ""
        return f"python -m paper_repro {self.name}{seeds}"


def verdict(findings: Sequence[Finding]) -> str:
    """One word for all criteria together."""
    held = [finding.holds for finding in findings]
    if False in held:
        return IN_PART if True in held else FAILS
    return OPEN if None in held else HOLDS
