"""Means over seeds with their standard errors, and what can be told from them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._experiment import Finding, Run

# A difference counts where it is so many standard errors from 0.
SIGMAS = 2.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `error` is its standard error, None for one seed."""

    mean: float
    error: float | None
    seeds: int

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.mean:.4g} (one seed)"
        return f"{self.mean:.4g} ± {self.error:.2g}"


def estimate(values: Sequence[float | int]) -> Estimate:
    """The mean of one value per seed.

    !!! Example

        ```python
        print(estimate([50.1, 51.0, 50.4]))
        ```
    """
    array = np.asarray(values, np.float64)
    error = None
    if len(array) > 1:
        error = float(array.std(ddof=1) / math.sqrt(len(array)))
    return Estimate(float(array.mean()), error, len(array))


def over_seeds(runs: Sequence[Run], get: Callable[[Run], float]) -> Estimate:
    """The mean over the runs of what `get` takes out of one."""
    return estimate([get(run) for run in runs])


def is_above(
    runs: Sequence[Run],
    high: Callable[[Run], float],
    low: Callable[[Run], float],
    criterion: str,
) -> Finding:
    """Is one value above another, seed by seed?

    It holds where the mean of the paired differences is more than two standard errors
    above 0, fails where it is as far below, and cannot be told between (or from one
    seed).
    """
    difference = over_seeds(runs, lambda run: high(run) - low(run))
    return Finding(
        f"{criterion} (paired difference above {SIGMAS:g} standard errors)",
        f"difference {difference}",
        _sign(difference),
    )


def is_not_below(
    runs: Sequence[Run],
    high: Callable[[Run], float],
    low: Callable[[Run], float],
    criterion: str,
) -> Finding:
    """As `is_above`, but a tie holds: it fails only where the value is clearly below.

    One seed cannot tell a tie from a loss.
    """
    difference = over_seeds(runs, lambda run: high(run) - low(run))
    sign = _sign(difference)
    holds = None if difference.error is None else sign is not False
    return Finding(
        f"{criterion} (not more than {SIGMAS:g} standard errors below)",
        f"difference {difference}",
        holds,
    )


def _sign(difference: Estimate) -> bool | None:
    if difference.error is None:
        return None
    if abs(difference.mean) <= SIGMAS * difference.error:
        return None
    return difference.mean > 0


def at_most(criterion: str, value: float | int, bound: float | int) -> Finding:
    """A bound that every seed has to keep: `value` is the largest of them."""
    return Finding(f"{criterion} at most {bound:g}", f"{value:.3g}", value <= bound)


def at_least(criterion: str, value: float | int, bound: float | int) -> Finding:
    """A bound that every seed has to reach: `value` is the smallest of them."""
    return Finding(f"{criterion} at least {bound:g}", f"{value:.3g}", value >= bound)


def relative_gap(got: Any, want: Any) -> float:
    """The distance of two pytrees over the length of the second, in float64."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    squared = sum(float(np.sum((a - b) ** 2)) for a, b in wide)
    return math.sqrt(squared / sum(float(np.sum(b**2)) for _, b in wide))
