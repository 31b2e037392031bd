"""`microbatch="fastest"`: the sizes that fit, tried on the first steps of training.

The result does not depend on the microbatch, so no step of a trial is wasted. Each
candidate runs `_WARM_UP + _TIMED` steps; the median of the timed ones counts. From the
largest that fits on, each candidate has half the rows of the one before; after two in a
row that are clearly slower than the best the trial ends.
"""

import dataclasses
import statistics
from dataclasses import dataclass, field

from .. import _errors
from ._planner import Planner, Ready

_WARM_UP = 1
_TIMED = 4
_SLOWER = 1.15


@dataclass
class Trial:
    """The candidates of one layout and what was measured of them."""

    largest: Ready
    current: Ready
    _left: list[int]  # numbers of passes not tried yet
    _seconds: dict[int, float] = field(default_factory=dict)
    _ready: dict[int, Ready] = field(default_factory=dict)
    _times: list[float] = field(default_factory=list)
    _steps: int = 0
    _slower_in_a_row: int = 0

    @property
    def settled(self) -> bool:
        return not self._left and self.current.cut.num_microbatches in self._seconds

    def note(self, seconds: float) -> Ready:
        """One step took so long; returns the programs for the next step."""
        if self.settled:
            return self.current
        self._steps += 1
        if self._steps <= _WARM_UP:
            return self.current
        self._times.append(seconds)
        if len(self._times) < _TIMED:
            return self.current
        self._finish_candidate(statistics.median(self._times))
        return self.current

    def _finish_candidate(self, seconds: float) -> None:
        passes = self.current.cut.num_microbatches
        self._seconds[passes], self._ready[passes] = seconds, self.current
        self._times, self._steps = [], 0
        best = min(self._seconds.values())
        slower = seconds > _SLOWER * best
        self._slower_in_a_row = self._slower_in_a_row + 1 if slower else 0
        if self._slower_in_a_row >= 2:
            self._left = []
        following = self._next()
        self.current = following if following is not None else self._settle()

    def _next(self) -> Ready | None:
        """The next candidate that fits."""
        while self._left:
            ready = Planner(self.current.builder).with_passes(
                self._left.pop(0), like=self.current
            )
            if ready is not None:
                return ready
        return None

    def _settle(self) -> Ready:
        best = min(self._seconds, key=lambda passes: self._seconds[passes])
        chosen = self._ready[best]
        tried = ", ".join(
            f"{self._ready[k].cut.microbatch}: {1e3 * s:.3g} ms"
            for k, s in self._seconds.items()
        )
        text = (
            f'microbatch="fastest" tried {tried} per step and settled on '
            f"{chosen.cut.microbatch}"
        )
        _errors.say(text)
        Planner(chosen.builder).remember_seconds(self.largest, self._seconds)
        plan = dataclasses.replace(chosen.plan, notes=(*chosen.plan.notes, text))
        return dataclasses.replace(chosen, plan=plan)


def start_trial(ready: Ready) -> Trial:
    """The trial that begins with the largest microbatch that fits."""
    choices = ready.builder.choices(windows=ready.cut.windows)
    wanted, size = [], ready.cut.microbatch
    while size > 1:
        size = -(-size // 2)
        fewest = choices.within(size)
        if fewest not in wanted and fewest > ready.cut.num_microbatches:
            wanted.append(fewest)
    trial = Trial(ready, ready, wanted)
    remembered = Planner(ready.builder).remembered_seconds(ready, wanted)
    best = 0
    if remembered is not None:
        best = min(remembered, key=lambda passes: remembered[passes])
    told = ready.builder.settings.placement.exchange(best)
    if best == 0 or set(told) != {(best,)}:
        return trial
    # An earlier run has settled, in every process: nothing is left to try.
    if best != ready.cut.num_microbatches:
        chosen = Planner(ready.builder).with_passes(best, like=ready)
        trial.current = ready if chosen is None else chosen
    trial._left, trial._seconds = [], {trial.current.cut.num_microbatches: 0.0}
    _errors.say(
        f'microbatch="fastest": {trial.current.cut.microbatch}, as an earlier run found'
    )
    return trial
