"""What a device says that a plan's first step took, where it keeps count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Watch:
    """What devices had in use before a plan's first step.

    - `others`: bytes on each that are not the step's own.
    - `peaks`: the most that each has ever had in use.
    """

    devices: Sequence[Any]
    others: Sequence[int]
    peaks: Sequence[int]

    def measured(self) -> int | None:
        """The most bytes of the step on one device since.

        A device's peak cannot be reset: where something before was higher, what the
        step took is not known, and the answer is None.
        """
        peaks = [stats["peak_bytes_in_use"] for stats in map(_stats, self.devices)]
        if any(now <= old for now, old in zip(peaks, self.peaks, strict=True)):
            return None
        return max(p - other for p, other in zip(peaks, self.others, strict=True))


def watch(devices: Sequence[Any], *, own_bytes: int) -> Watch | None:
    """Starts to watch this process's devices; None where one keeps no count.

    **Arguments:**

    - `devices`: those that run the step.
    - `own_bytes`: bytes on each device that are in use and the step's own.
    """
    mine = [d for d in devices if d.process_index == jax.process_index()]
    told = [_stats(device) for device in mine]
    if not mine or not all(told):
        return None
    return Watch(
        mine,
        [max(0, stats["bytes_in_use"] - own_bytes) for stats in told],
        [stats["peak_bytes_in_use"] for stats in told],
    )


def _stats(device: Any) -> dict[str, int]:
    stats = device.memory_stats() or {}
    return stats if {"bytes_in_use", "peak_bytes_in_use"} <= stats.keys() else {}
