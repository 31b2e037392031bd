"""In which order rows are seen, and which row each slot of a batch computes."""

import dataclasses

import numpy as np


def epoch_order(key_data: np.ndarray, epoch: int, rows: int) -> np.ndarray:
    """The order of the rows in an epoch: a permutation that depends on nothing else.

    Philox is keyed by (key data, epoch), so epochs need not be made one after another.
    Random numbers that carry their row in the lowest bits are sorted: unlike
    `Generator.permutation`, numpy promises that the raw numbers will never change, and
    no two are equal, so that every sort agrees. A run can be resumed elsewhere.
    """
    high, low = (int(word) for word in np.asarray(key_data, np.uint32))
    key = np.array([high << 32 | low, epoch], np.uint64)
    numbers = np.random.Philox(key=key).random_raw(rows)
    row_bits = np.uint64(max(rows - 1, 1).bit_length())
    mask = (np.uint64(1) << row_bits) - np.uint64(1)
    numbers &= ~mask
    numbers |= np.arange(rows, dtype=np.uint64)
    numbers.sort()
    numbers &= mask
    return numbers.astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Which row of a batch each slot computes, and what it weighs.

    `last` is one more than the last slot of positive weight, 0 if there is none.
    """

    order: np.ndarray
    weights: np.ndarray
    last: int


def slots(count: int, weights: np.ndarray | None, *, capacity: int) -> Slots:
    """Fills `capacity` slots from a batch of `count` rows.

    A slot beyond the batch, and a row of weight 0, computes a copy of a row of positive
    weight, cyclically through them, and weighs 0: rows of zeros give NaN in a `log`,
    `0 * NaN` is NaN, and copies of a single row ruin batch statistics.
    """
    if not 0 < count <= capacity:
        raise ValueError(f"{count} rows for {capacity} slots")
    slot_weights = np.zeros(capacity, np.float32)
    slot_weights[:count] = 1 if weights is None else weights
    positive = np.flatnonzero(slot_weights)
    order = np.arange(capacity)
    if len(positive) == 0:
        return Slots(order % count, slot_weights, 0)
    replaced = np.flatnonzero(slot_weights == 0)
    order[replaced] = np.resize(positive, len(replaced))
    return Slots(order, slot_weights, int(positive[-1]) + 1)
