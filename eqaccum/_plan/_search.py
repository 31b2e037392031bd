"""The fewest passes that fit, in as few compilations as possible.

The search runs over K, the number of passes, not over sizes: n = ceil(N / K) is the
smallest microbatch for that many passes, so no memory is wasted. Nothing that was not
compiled is ever returned, and memory is not trusted to be monotone: one pass and
several are different programs, and so is one example per pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import _errors
from ._bytes import format_bytes
from ._limit import Limit
from ._line import Line, Point
from ._record import Parts, Probe, advise

# The next larger size is compiled, as a proof, unless the line puts it this far above
# the limit.
_DOUBT = 1.05
# Looks after which the line is helped on: nothing fits yet, so the passes at least
# double; or something fits, so what is left is halved.
_DOUBLE_AFTER = 7
_HALVE_AFTER = 10


@dataclass(frozen=True)
class Measurement:
    """What `measure` learned about one number of passes.

    **Arguments:**

    - `bytes`: what the step needs on one device; `None` is "cannot tell".
    - `fixed`: bytes of it that do not depend on the number of passes.
    - `seconds`: how long it took to compile.
    - `note`: the word for the probe's row in the plan.
    - `program`: what was compiled, handed back for the size that is chosen. Those of
        other sizes are let go at once.
    - `fits`: `False` where it is known not to fit although there is no figure (memory
        ran out while compiling).
    - `parts`: the bytes by what they hold, for the error where nothing fits.
    """

    bytes: int | None
    fixed: int
    seconds: float
    note: str
    program: Any = None
    fits: bool | None = None
    parts: Parts | None = None

    def within(self, limit: int) -> bool | None:
        """Whether it fits; `None` is "cannot tell", which is never "fits"."""
        if self.fits is False:
            return False
        return None if self.bytes is None else self.bytes <= limit


@dataclass(frozen=True)
class Found:
    """What a search chose, and every size it looked at."""

    num_microbatches: int
    microbatch: int
    measurement: Measurement
    probes: tuple[Probe, ...]


Measure = Callable[[int], Measurement]


@dataclass(frozen=True)
class Choices:
    """The numbers of passes to choose from, where not every number makes a cut.

    `passes` increase, `microbatches` are those of each and do not; the last is 1.
    """

    passes: Sequence[int]
    microbatches: Sequence[int]

    def within(self, microbatch: int) -> int:
        """The fewest passes whose microbatch is at most that."""
        pairs = zip(self.passes, self.microbatches, strict=True)
        return next(k for k, n in pairs if n <= microbatch)

    def microbatch(self, num_microbatches: int) -> int:
        return self.microbatches[self.passes.index(num_microbatches)]


def every_number(rows: int, devices: int) -> Choices:
    """Each number of passes worth a look, of rows that may be cut anywhere."""
    passes = distinct_passes(-(-rows // devices))
    return Choices(passes, [-(-rows // (devices * k)) for k in passes])


def search(
    measure: Measure,
    *,
    rows: int,
    devices: int,
    limit: int,
    divisor: bool = False,
    limit_source: str = "",
    choices: Choices | None = None,
) -> Found:
    """The fewest passes whose step fits.

    **Arguments:**

    - `measure`: compiles the step for a number of passes. What it raises passes
        through.
    - `rows`: examples in the global batch.
    - `devices`: how many share them.
    - `limit`: bytes on one device.
    - `divisor`: take the fewest fitting passes that cut the rows evenly instead, where
        that is below twice as many (padding copies enter batch statistics).
    - `limit_source`: where the limit comes from, for the error.
    - `choices`: the numbers of passes there are; None: every number.

    **Returns:**

    A [`Found`][], always of a size that was measured and is within the limit.

    **Raises:**

    `DoesNotFit` where not even one example per device and pass fits, `CannotTell`
    where no look gives a figure.
    """
    _check(rows, devices)
    choices = choices or every_number(rows, devices)
    looks = _Looks(measure, rows, devices, limit, choices)
    best = _smallest(looks, choices.passes)
    if best is None:
        raise _refusal(looks, limit, limit_source)
    return looks.found(_even(looks, best) if divisor else best)


def pinned(
    measure: Measure,
    *,
    rows: int,
    devices: int,
    microbatch: int,
    limit: Limit | None,
    choices: Choices | None = None,
) -> Found:
    """The passes for a microbatch that was asked for.

    `microbatch` is an upper bound of the examples per device and pass: the passes are
    as few as it allows, and the rows are spread evenly over them. Over the limit it is
    an error where the user gave the limit, else a warning. `limit=None` means that
    there is none to compare with.

    **Raises:**

    `DoesNotFit` over a given limit, and where memory ran out while compiling.
    """
    _check(rows, devices)
    if isinstance(microbatch, bool) or microbatch < 1:
        raise _errors.bad_microbatch(microbatch)
    choices = choices or every_number(rows, devices)
    num_microbatches = choices.within(microbatch)
    size = choices.microbatch(num_microbatches)
    measurement = measure(num_microbatches)
    ran_out = measurement.fits is False
    over = limit is not None and measurement.within(limit.bytes) is False
    if ran_out or over:
        error = _errors.pinned_over_limit(
            microbatch=size,
            needed=_needed(measurement),
            limit=_limit_text(limit.bytes, limit.source) if limit else "unknown",
            remedies=_remedies(measurement.parts),
        )
        if ran_out or (limit is not None and limit.given):
            raise error
        _errors.warn(str(error))
    probe = _probe(num_microbatches, size, measurement)
    return Found(num_microbatches, size, measurement, (probe,))


def distinct_passes(rows: int) -> list[int]:
    """The numbers of passes worth a look: the smallest one for each microbatch.

    `rows` are those of one device. In increasing order, from one pass of all rows to
    one row per pass; about twice the square root of `rows` many.
    """
    passes, microbatch = [1], rows
    while microbatch > 1:
        passes.append(-(-rows // (microbatch - 1)))
        microbatch = -(-rows // passes[-1])
    return passes


class _Looks:
    """Every look taken: what it gave, in order, and the program of the best one."""

    def __init__(
        self,
        measure: Measure,
        rows: int,
        devices: int,
        limit: int,
        choices: Choices,
    ) -> None:
        self._measure = measure
        self._rows, self._devices = rows, devices
        self.limit = limit
        self.choices = choices
        self.seen: dict[int, Measurement] = {}

    def at(self, num_microbatches: int) -> bool | None:
        """Looks, once: whether that many passes fit."""
        if num_microbatches not in self.seen:
            new = self._measure(num_microbatches)
            if new.within(self.limit):
                # At most one program lives on: that of the latest size that fits.
                self.seen = {k: replace(m, program=None) for k, m in self.seen.items()}
            else:
                new = replace(new, program=None)
            self.seen[num_microbatches] = new
        return self.seen[num_microbatches].within(self.limit)

    def microbatch(self, num_microbatches: int) -> int:
        return self.choices.microbatch(num_microbatches)

    def evenly(self, num_microbatches: int) -> bool:
        microbatch = self.microbatch(num_microbatches)
        return self._rows == self._devices * num_microbatches * microbatch

    def line(self) -> Line:
        """The line through what is known so far."""
        points = [
            Point(self.microbatch(k), m.bytes, whole=k == 1)
            for k, m in self.seen.items()
            if m.bytes is not None
        ]
        fixed = next(reversed(self.seen.values())).fixed
        return Line(tuple(points), fixed)

    def found(self, num_microbatches: int) -> Found:
        probes = tuple(_probe(k, self.microbatch(k), m) for k, m in self.seen.items())
        chosen = self.seen[num_microbatches]
        return Found(
            num_microbatches, self.microbatch(num_microbatches), chosen, probes
        )


def _probe(num_microbatches: int, microbatch: int, found: Measurement) -> Probe:
    return Probe(num_microbatches, microbatch, found.bytes, found.seconds, found.note)


# Choosing where to look


@dataclass
class _Bracket:
    """Positions among the candidates: the last that failed, the first that fits."""

    failed: int = -1
    fits: int | None = None


def _smallest(looks: _Looks, passes: Sequence[int]) -> int | None:
    """The fewest passes that fit, or `None`."""
    bracket, position = _Bracket(), 0
    while position is not None:
        if looks.at(passes[position]):
            bracket.fits = position
        elif bracket.fits is None or position < bracket.fits:
            bracket.failed = max(bracket.failed, position)
        if bracket.fits is None:
            position = _further(looks, passes, bracket.failed)
        else:
            position = _between(looks, passes, bracket.failed, bracket.fits)
    return None if bracket.fits is None else passes[bracket.fits]


def _further(looks: _Looks, passes: Sequence[int], failed: int) -> int | None:
    """Where to look next while nothing fits."""
    last = len(passes) - 1
    if failed == last:
        # One example per pass is a program of its own, at times the larger one.
        two = last - 1
        return two if two >= 0 and passes[two] not in looks.seen else None
    doubled = _first(passes, failed + 1, lambda k: k >= 2 * passes[failed])
    line = looks.line()
    if not line.knows or looks.seen[passes[failed]].bytes is None:
        return doubled
    guess = _predicted(looks, passes, failed + 1, line)
    if guess == last and not line.measured:
        # Before the claim that nothing will fit is believed, a second point.
        middle = (passes[failed] * passes[last]) ** 0.5
        guess = _first(passes, failed + 1, lambda k: k >= middle)
    return max(guess, doubled) if len(looks.seen) >= _DOUBLE_AFTER else guess


def _between(
    looks: _Looks, passes: Sequence[int], failed: int, fits: int
) -> int | None:
    """Where to look next for fewer passes than those that fit, if anywhere."""
    if fits - failed <= 1:
        return None
    line, limit = looks.line(), looks.limit
    nearest = line.at_least(looks.microbatch(passes[fits - 1]))
    if nearest > _DOUBT * limit:
        return None
    if len(looks.seen) >= _HALVE_AFTER:
        return (failed + fits) // 2
    return min(_predicted(looks, passes, failed + 1, line), fits - 1)


def _predicted(looks: _Looks, passes: Sequence[int], start: int, line: Line) -> int:
    """The first candidate that the line puts within the limit, else the last one."""
    return _first(passes, start, lambda k: line.at(looks.microbatch(k)) <= looks.limit)


def _first(passes: Sequence[int], start: int, holds: Callable[[int], bool]) -> int:
    positions = range(start, len(passes))
    return next((i for i in positions if holds(passes[i])), len(passes) - 1)


def _even(looks: _Looks, best: int) -> int:
    """The fewest fitting passes that cut evenly, if below twice the fewest fitting."""
    for more in looks.choices.passes:
        if best <= more < 2 * best and looks.evenly(more) and looks.at(more):
            return more
    return best


# Refusing


def _check(rows: int, devices: int) -> None:
    if rows < 1 or devices < 1:
        raise _errors.bad_rows(rows=rows, devices=devices)


def _refusal(looks: _Looks, limit: int, source: str) -> Exception:
    seen = looks.seen
    if all(m.bytes is None and m.fits is None for m in seen.values()):
        tried = ", ".join(f"microbatch {looks.microbatch(k)}" for k in seen)
        return _errors.no_figures(tried)
    one = seen[max(seen)]
    return _errors.nothing_fits(
        needed=_needed(one),
        limit=_limit_text(limit, source),
        largest=_largest(one),
        remedies=_remedies(one.parts),
    )


def _needed(measurement: Measurement) -> str:
    if measurement.bytes is None:
        out = measurement.fits is False
        return "more than could be compiled" if out else "unknown bytes"
    return f"{format_bytes(measurement.bytes)} ({measurement.bytes:,} bytes)"


def _limit_text(limit: int, source: str) -> str:
    exact = f"{format_bytes(limit)} ({limit:,} bytes)"
    return f"{exact}, {source}" if source else exact


def _largest(measurement: Measurement) -> str:
    parts = measurement.parts
    if parts is None:
        return f"Of that, {format_bytes(measurement.fixed)} depend on no microbatch."
    largest = sorted(parts.named().items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    return f"The largest parts: {listed}."


def _remedies(parts: Parts | None) -> str:
    # Without parts, the advice for all that a step usually holds.
    even = Parts(optimizer=1, batch=1, activations=1)
    advice = advise(even if parts is None else parts)
    return "; ".join(f"{name}: {text}" for name, text in advice.items())
