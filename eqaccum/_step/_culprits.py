"""Which rows of a batch make its loss or gradient not finite, found one by one."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .._accumulate import Batch as Slots, Cut
from .._mesh import DATA
from .._types import TrainState
from ._launch import Launcher, Placed

# A search that only names rows in an error may not take for ever.
_MOST_SECONDS = 30.0
_MOST_ROWS = 20


@dataclass(frozen=True)
class Culprits:
    """Positions in the global batch; `looked` is how many rows were tried."""

    loss: list[int]
    gradient: list[int]
    looked: int
    rows: int

    def __str__(self) -> str:
        found = self.loss or self.gradient
        if not found:
            return "no single row of the batch does that alone"
        what = "losses" if self.loss else "gradients"
        more = "" if self.looked == self.rows else f" (of the first {self.looked:,})"
        return f"the {what} of rows {found} of the global batch are not finite{more}"


def find_culprits(
    launcher: Launcher, train: TrainState, placed: Placed
) -> Culprits | None:
    """Replays a batch row by row, with the keys that its rows had.

    Returns None for losses that couple the rows: there is no loss of one row.
    """
    if not placed.ready.traced.windowed:
        return None
    builder, tail = placed.ready.builder, placed.ready.tail
    if tail.row_by_row is None:
        # A window of one row, so that its position can be told.
        cut = Cut(1, 1, placed.ready.cut.devices, DATA, windows=2)
        passes = builder.trace(cut)
        tail.row_by_row = (passes, builder.accumulate(passes, cut).compile())
    traced, program = tail.row_by_row
    place = launcher.placement.place
    zeros = [np.zeros(s.shape, s.dtype) for s in traced.gradient_structs]
    gradients = place(zeros, builder.summed(traced))
    ratios = [np.ones(s.shape, s.dtype) for s in builder.ratios(traced)]
    structs = builder.before(traced)
    nothing = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), structs)
    rows = np.flatnonzero(placed.laid.weights[: placed.batch.count] > 0)
    before = _rows_before(launcher, placed)
    bad_loss: list[int] = []
    bad_gradient: list[int] = []
    start, looked = time.monotonic(), 0
    for row in rows:
        batch = _one_row(launcher, train, placed, int(row))
        gradients, outputs = program(
            launcher.buffers.captured(traced.captured),
            launcher.arguments(train, placed),
            train.state_leaves,
            batch,
            ratios,
            gradients,
            nothing,
        )
        looked += 1
        if not np.isfinite(np.asarray(outputs.totals)).all():
            bad_loss.append(before + int(row))
        elif not all(bool(jnp.isfinite(g).all()) for g in gradients):
            bad_gradient.append(before + int(row))
        late = time.monotonic() - start > _MOST_SECONDS
        if late or len(bad_loss) + len(bad_gradient) >= _MOST_ROWS:
            break
    return Culprits(bad_loss, bad_gradient, looked, len(rows))


def _rows_before(launcher: Launcher, placed: Placed) -> int:
    """Rows of the global batch before those of this process, where they are shared."""
    cut = placed.ready.cut
    if cut.shares == 1:
        return 0
    devices = cut.devices // cut.shares
    return launcher.placement.here[0] // devices * (cut.rows // cut.shares)


def _one_row(launcher: Launcher, train: TrainState, placed: Placed, row: int) -> Slots:
    placement = launcher.placement
    place, devices = placement.place_rows, len(placement.here)
    taken = placed.batch.take(np.full(devices, row))
    return Slots(
        place([leaf.reshape(1, devices, *leaf.shape[1:]) for leaf in taken]),
        place([np.ones((1, devices), np.float32)])[0],
        train.key,
        train.batch_count,
        None,
        # the first device's slot is the row's position: of this process's devices
        np.asarray(_rows_before(launcher, placed) + row - placement.here[0], np.int32),
        np.asarray(True),
        None,
    )
