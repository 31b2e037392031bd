"""An iterable in each of several processes: each gives its share of every batch."""

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import _errors
from ._batch import Batch
from ._source import Source

_FAILED = -1


class Shares(Source):
    """One process's iterable, and what all of them tell each other of their rows.

    Process p of P gives the rows at positions p N / P to (p + 1) N / P of a global
    batch of N. An epoch lasts as long as one of them has rows; one that has none left
    computes copies of weight 0.
    """

    kind = "iterable"
    rows = None
    weights = None
    can_shuffle = False

    def __init__(
        self, own: Source, processes: int, exchange: Callable[..., list[tuple]]
    ) -> None:
        self._own = own
        self._processes = processes
        self._exchange = exchange
        self.layout = own.layout
        self.restartable = own.restartable
        self.description = f"{own.description} in each of {processes} processes"

    def epoch(
        self,
        epoch: int,
        *,
        global_batch: int,
        order: np.ndarray | None = None,
        drop_remainder: bool = False,
        start: int = 0,
    ) -> Iterator[Batch]:
        share = global_batch // self._processes
        batches = self._own.epoch(
            epoch,
            global_batch=share,
            order=order,
            drop_remainder=drop_remainder,
            start=start,
        )
        last: Batch | None = None
        while True:
            batch, counts = self._together(batches)
            over = min if drop_remainder else max
            if over(counts) == 0:
                return
            last = batch or _of_no_weight(last)
            # where an iterable stands is told for one process only: its number says it
            yield dataclasses.replace(last, counts=counts, after=None)

    def batches_per_epoch(
        self, global_batch: int, drop_remainder: bool = False
    ) -> None:
        return None

    def column_chunks(self, leaf: int) -> Iterator[np.ndarray]:
        return iter(())

    def _together(
        self, batches: Iterator[Batch]
    ) -> tuple[Batch | None, tuple[int, ...]]:
        """This process's next batch, and how many rows each process has.

        **Raises:**

        What its iterable raises, `StepError` where another's did, `InputError` where
        their rows have other shapes.
        """
        batch, failure = None, None
        try:
            batch = next(batches, None)
        except Exception as error:
            failure = error
        count = 0 if batch is None else batch.count
        shapes = 0 if batch is None else _shapes(batch)
        told = self._exchange(count if failure is None else _FAILED, shapes)
        if failure is not None:
            raise failure
        failed = [p for p, (count, _) in enumerate(told) if count == _FAILED]
        if failed:
            raise _errors.stopped_elsewhere(failed)
        if len({shapes for count, shapes in told if count}) > 1:
            raise _errors.shapes_differ_between_processes()
        return batch, tuple(count for count, _ in told)


def _shapes(batch: Batch) -> int:
    """A number for the shapes and dtypes of rows, the same in every process."""
    return zlib.crc32(repr(batch.layout.row_structs).encode())


def _of_no_weight(last: Batch | None) -> Batch:
    """Rows to compute beside the others', of weight 0: those of the batch before."""
    if last is None:
        raise _errors.no_rows_to_share()
    weights: Any = np.zeros(last.count, np.float32)
    return dataclasses.replace(last, weights=weights, index=last.index + 1)
