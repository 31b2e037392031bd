"""Bytes as a function of the microbatch, as far as a few looks show it.

Over useful sizes memory is close to affine; what this line says decides only where to
look next, never what fits.
"""

from dataclasses import dataclass

# While only one look at several passes is known, memory may grow this much more slowly
# than any line through the other figures says: one pass can be the dearer program.
_DOUBT = 0.6


@dataclass(frozen=True)
class Point:
    """One look: a microbatch and its bytes.

    All rows in one pass (`whole`) and one example per pass are programs of their own.
    """

    microbatch: int
    bytes: int
    whole: bool

    @property
    def ordinary(self) -> bool:
        return not self.whole and self.microbatch > 1


@dataclass(frozen=True)
class Line:
    """The looks so far, and the bytes that no microbatch changes."""

    points: tuple[Point, ...]
    fixed: int

    @property
    def knows(self) -> bool:
        """Whether there is anything to draw a line through."""
        return any(point.bytes > self.fixed for point in self.points)

    @property
    def measured(self) -> bool:
        """Whether two looks at ordinary programs give a slope."""
        return sum(point.ordinary for point in self.points) > 1

    def at(self, microbatch: int) -> float:
        """The bytes to expect."""
        near = self._nearest(microbatch)
        slope = self._measured_slope(near, microbatch)
        if slope is None:
            slope = self._other_slopes(near)[0]
        return near.bytes + slope * (microbatch - near.microbatch)

    def at_least(self, microbatch: int) -> float:
        """The bytes below which it would be a surprise."""
        near = self._nearest(microbatch)
        further = microbatch - near.microbatch
        slope = self._measured_slope(near, microbatch)
        if slope is None:
            slopes = self._other_slopes(near)
            slope = _DOUBT * min(slopes) if further > 0 else max(slopes) / _DOUBT
        return near.bytes + slope * further

    def _nearest(self, microbatch: int) -> Point:
        # Programs of their own count only where there is no other.
        ordinary = [p for p in self.points if p.ordinary] or list(self.points)
        return min(ordinary, key=lambda p: abs(p.microbatch - microbatch))

    def _measured_slope(self, near: Point, microbatch: int) -> float | None:
        """Bytes per example between the two nearest looks at several passes."""
        others = [p for p in self.points if p.ordinary and p is not near]
        if not near.ordinary or not others:
            return None
        other = min(others, key=lambda p: abs(p.microbatch - microbatch))
        slope = _slope(near, other)
        return slope if slope > 0 else None

    def _other_slopes(self, near: Point) -> list[float]:
        """Towards one pass, and towards the fixed bytes; the better guess first."""
        whole = [p for p in self.points if p.whole and p is not near]
        slopes = [_slope(near, other) for other in whole]
        through_fixed = max(0.0, (near.bytes - self.fixed) / near.microbatch)
        return [slope for slope in slopes if slope > 0] + [through_fixed]


def _slope(one: Point, other: Point) -> float:
    return (one.bytes - other.bytes) / (one.microbatch - other.microbatch)
