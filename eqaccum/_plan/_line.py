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
    """One look: a microbatch and its bytes; `whole` if it was all rows in one pass."""

    microbatch: int
    bytes: int
    whole: bool


@dataclass(frozen=True)
class Line:
    """The looks so far, and the bytes that no microbatch changes."""

    points: tuple[Point, ...]
    fixed: int

    @property
    def knows(self) -> bool:
        """Whether there is anything to draw a line through."""
        return any(point.bytes > self.fixed for point in self.points)

    def at(self, microbatch: int) -> float:
        """The bytes to expect."""
        near = self._nearest(microbatch)
        slope = self._measured_slope(near, microbatch)
        if slope is None:
            slope = self._other_slopes(near)[0]
        return near.bytes + slope * (microbatch - near.microbatch)

    def at_least(self, microbatch: int) -> float:
        """The bytes below which it would be a surprise; above the nearest look."""
        near = self._nearest(microbatch)
        slope = self._measured_slope(near, microbatch)
        if slope is None:
            slope = _DOUBT * min(self._other_slopes(near))
        return near.bytes + slope * (microbatch - near.microbatch)

    def _nearest(self, microbatch: int) -> Point:
        # One pass is another program than several: it counts only where it is alone.
        several = [p for p in self.points if not p.whole] or list(self.points)
        return min(several, key=lambda p: abs(p.microbatch - microbatch))

    def _measured_slope(self, near: Point, microbatch: int) -> float | None:
        """Bytes per example between the two nearest looks at several passes."""
        several = [p for p in self.points if not p.whole and p is not near]
        if near.whole or not several:
            return None
        other = min(several, key=lambda p: abs(p.microbatch - microbatch))
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
