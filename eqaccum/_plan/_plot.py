"""The drawing of a plan; matplotlib is imported when it is asked for."""

from collections.abc import Mapping
from typing import Any

from .. import _errors


def draw_plan(
    points: Mapping[int, int],
    *,
    chosen: int,
    limit: int | None,
    title: str,
    ax: Any = None,
) -> Any:
    """Bytes against microbatch: every probe, the chosen size, the limit."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise _errors.no_matplotlib() from error
        ax = pyplot.subplots()[1]
    sizes = sorted(points)
    ax.plot(sizes, [points[n] / 2**30 for n in sizes], "o-", label="probes")
    if chosen in points:
        ax.plot(
            [chosen],
            [points[chosen] / 2**30],
            "s",
            markersize=9,
            label=f"chosen: {chosen}",
        )
    if limit is not None:
        ax.axhline(limit / 2**30, linestyle="--", color="0.4", label="limit")
    ax.set_xscale("log", base=2)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("microbatch (examples per device and pass)")
    ax.set_ylabel("GiB on one device")
    ax.set_title(title, fontsize="small")
    ax.legend()
    return ax
