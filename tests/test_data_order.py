"""The order of an epoch, and which row each slot of a batch computes."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from eqaccum._data import epoch_order, slots

KEY = np.array([0, 7], np.uint32)


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 65, 1000])
@pytest.mark.parametrize("epoch", [0, 1, 2**40])
def test_order_is_a_permutation(rows, epoch):
    order = epoch_order(KEY, epoch, rows)
    np.testing.assert_array_equal(np.sort(order), np.arange(rows))


def test_order_depends_on_key_and_epoch_alone():
    first = epoch_order(KEY, 3, 50)
    np.random.seed(0)
    np.random.random(10)
    np.testing.assert_array_equal(epoch_order(KEY, 3, 50), first)
    others = [
        epoch_order(KEY, 4, 50),
        epoch_order(np.array([7, 0], np.uint32), 3, 50),
        epoch_order(np.array([0, 8], np.uint32), 3, 50),
    ]
    assert not any(np.array_equal(first, other) for other in others)


def test_order_never_changes():
    # Recomputed with Python's own integers and sort from Philox's raw numbers: what a
    # run that is resumed under another numpy must find again.
    raw = np.random.Philox(key=np.array([7, 2], np.uint64)).random_raw(10)
    numbers = sorted((int(number) >> 4, row) for row, number in enumerate(raw))
    expected = [row for _, row in numbers]
    np.testing.assert_array_equal(epoch_order(KEY, 2, 10), expected)
    assert expected == [6, 7, 8, 4, 0, 1, 5, 3, 9, 2]


def test_orders_are_fair():
    # Row r lands at place p in 1 of 6 epochs: 6 standard deviations of 6,000 trials.
    places = np.zeros((6, 6))
    for epoch in range(6000):
        places[np.arange(6), epoch_order(KEY, epoch, 6)] += 1
    assert abs(places - 1000).max() < 6 * np.sqrt(6000 / 6 * 5 / 6)


def test_full_batch_keeps_its_order():
    found = slots(4, None, capacity=4)
    np.testing.assert_array_equal(found.order, [0, 1, 2, 3])
    np.testing.assert_array_equal(found.weights, [1, 1, 1, 1])
    assert found.weights.dtype == np.float32
    assert found.last == 4


def test_padding_copies_rows_cyclically():
    found = slots(3, None, capacity=8)
    np.testing.assert_array_equal(found.order, [0, 1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(found.weights, [1, 1, 1, 0, 0, 0, 0, 0])
    assert found.last == 3


def test_rows_of_weight_zero_are_never_computed():
    weights = np.array([0, 2, 0, 0.5, 0], np.float32)
    found = slots(5, weights, capacity=7)
    np.testing.assert_array_equal(found.order, [1, 1, 3, 3, 1, 3, 1])
    np.testing.assert_array_equal(found.weights, [0, 2, 0, 0.5, 0, 0, 0])
    assert found.last == 4


def test_no_weight_at_all():
    found = slots(2, np.zeros(2, np.float32), capacity=5)
    np.testing.assert_array_equal(found.order, [0, 1, 0, 1, 0])
    assert not found.weights.any()
    assert found.last == 0


@pytest.mark.parametrize("count", [0, 5])
def test_slots_hold_what_they_can(count):
    with pytest.raises(ValueError, match=f"{count} rows for 4 slots"):
        slots(count, None, capacity=4)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=12),
    extra=st.integers(0, 12),
)
def test_slots_weigh_every_row_once(weights, extra):
    given_weights = np.array(weights, np.float32)
    found = slots(len(weights), given_weights, capacity=len(weights) + extra)
    totals = np.zeros(len(weights), np.float32)
    np.add.at(totals, found.order, found.weights)
    np.testing.assert_array_equal(totals, given_weights)
    if given_weights.any():
        assert (given_weights[found.order] > 0).all()
        assert found.weights[found.last - 1] > 0
        assert not found.weights[found.last :].any()
