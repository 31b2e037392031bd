"""Two ways of the same work timed side by side, in one process."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Ratio:
    """Of one way's time to the other's, taken within each round."""

    median: float
    low: float  # quartiles
    high: float
    seconds: tuple[float, float]  # medians of both

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def compared(
    one: Callable[[], object],
    other: Callable[[], object],
    *,
    rounds: int,
    clock: str = "wall",
) -> Ratio:
    """The time of `one` to that of `other`; each call must wait for its result.

    Which of them comes first alternates, so that a machine that slows down, or does
    other work too, favours neither. The clock "cpu" counts the time of all of the
    process's threads: for a machine whose cores others use as well.
    """
    for _ in range(2):
        one(), other()
    times: list[tuple[float, float]] = []
    for index in range(rounds):
        if index % 2:
            b, a = _seconds(other, clock), _seconds(one, clock)
        else:
            a, b = _seconds(one, clock), _seconds(other, clock)
        times.append((a, b))
    low, median, high = statistics.quantiles([a / b for a, b in times], n=4)
    both = tuple(statistics.median(column) for column in zip(*times, strict=True))
    return Ratio(median, low, high, (both[0], both[1]))


def stepping(step: Any, model: Any, rows: Any) -> Callable[[], None]:
    """A function that takes one step of eqaccum's and waits for it."""
    held: list[Any] = [step.init(model)]

    def call() -> None:
        held[0], _ = step(held[0], rows)
        jax.block_until_ready(held[0].trainable_leaves)

    return call


def _seconds(call: Callable[[], object], clock: str) -> float:
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    start = now()
    call()
    return now() - start
