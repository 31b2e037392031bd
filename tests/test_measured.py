"""A device that keeps count of its own peak: what it says is put beside the plan."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum
from eqaccum._step import _measured

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
OTHERS, OWN = 5000, 4 * 4  # bytes of other programs, and of four parameters


def loss(w, x, key):
    return jnp.sum((x @ w - 1) ** 2)


@pytest.fixture
def count(monkeypatch):
    """Gives the devices a count: before the step, then after it."""

    def told(*peaks):
        answers = iter(peaks)

        def stats(device):
            # sgd has no state: the parameters are all that is resident
            return {"bytes_in_use": OTHERS + OWN, "peak_bytes_in_use": next(answers)}

        monkeypatch.setattr(_measured, "_stats", stats)

    return told


def fit(**more):
    return eqaccum.fit(
        jnp.ones(4),
        X,
        loss=loss,
        optimizer=optax.sgd(0.1),
        global_batch=8,
        epochs=3,
        memory_limit="1MiB",
        progress=False,
        **more,
    )


def test_the_peak_of_the_first_step_is_shown_beside_the_prediction(count):
    count(OTHERS + 50, OTHERS + 300)
    plan = fit().plan
    assert plan.measured_bytes == 300 < plan.predicted_bytes
    lines = str(plan).splitlines()
    predicted = next(i for i, line in enumerate(lines) if line.startswith("predicted"))
    assert lines[predicted + 1].split()[:3] == ["measured", "300", "B"]
    assert eqaccum.Plan.from_dict(plan.to_dict()).measured_bytes == 300


def test_a_prediction_that_was_too_low_is_warned_of(count):
    count(0, OTHERS + 10**6)
    text = "976.6 KiB.*were predicted"
    with pytest.warns(eqaccum.EqaccumWarning, match=text) as told:
        result = fit()
    assert len(told) == 1
    assert result.plan.measured_bytes == 10**6


def test_a_higher_peak_of_something_before_hides_the_step(count):
    count(10**9, 10**9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit().plan.measured_bytes is None


def test_a_device_that_keeps_no_count():
    assert fit().plan.measured_bytes is None


@pytest.mark.devices(2)
def test_the_fullest_device_counts(count):
    count(OTHERS, OTHERS, OTHERS + 200, OTHERS + 400)
    assert fit().plan.measured_bytes == 400


def test_a_step_by_hand_is_compared_once(count):
    count(0, OTHERS + 300)  # and no further answers
    step = eqaccum.make_step(loss, optax.sgd(0.1), global_batch=8)
    train = step.init(jnp.ones(4))
    for rows in (8, 8, 5):
        train, _ = step(train, X[:rows])
    assert step.plan.measured_bytes == 300
