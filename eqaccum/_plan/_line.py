"""Bytes as a function of the microbatch, as far as a few looks show it.

Over useful sizes memory is close to affine; what this line says decides only where to
look next, never what fits.
"""

from dataclasses import dataclass


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
        slopes = self._slopes(near, microbatch)
        return near.bytes + slopes[0] * (microbatch - near.microbatch)

    def at_least(self, microbatch: int) -> float:
        """The bytes below which it would be a surprise; above the nearest look."""
        near = self._nearest(microbatch)
        slope = min(self._slopes(near, microbatch))
        return near.bytes + slope * (microbatch - near.microbatch)

    def _nearest(self, microbatch: int) -> Point:
        # One pass is another program than several: it counts only where it is alone.
        several = [p for p in self.points if not p.whole] or list(self.points)
        return min(several, key=lambda p: abs(p.microbatch - microbatch))

    def _slopes(self, near: Point, microbatch: int) -> list[float]:
        """Bytes per example, the best guess first."""
        several = [p for p in self.points if not p.whole and p is not near]
        whole = [p for p in self.points if p.whole and p is not near]
        if several and not near.whole:
            other = min(several, key=lambda p: abs(p.microbatch - microbatch))
            slope = _slope(near, other)
            if slope > 0:
                return [slope]
        through_fixed = max(0.0, (near.bytes - self.fixed) / near.microbatch)
        slopes = [_slope(near, other) for other in whole]
        return [slope for slope in slopes if slope > 0] + [through_fixed]


def _slope(one: Point, other: Point) -> float:
    return (one.bytes - other.bytes) / (one.microbatch - other.microbatch)
