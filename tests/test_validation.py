"""`validation=` inside `fit`: when it is made, of which model, over which rows."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compilations

import eqaccum

Y = np.array([1, 3, 5, 7, 9, 11], np.float32)
# Seven rows under a global batch of 2: the last evaluation batch is short.
HELD_OUT = np.array([0, 1, 2, 4, 8, 16, 32], np.float32)


def loss(model, y, key):
    return (model - y) ** 2


def fit(**more: Any) -> eqaccum.FitResult:
    arguments = {
        "global_batch": 2,
        "loss": loss,
        "optimizer": optax.sgd(0.1),
        "shuffle": False,
        "validation": HELD_OUT,
    }
    return eqaccum.fit(jnp.float32(0.0), Y, **(arguments | more))


def models(steps: int) -> list[float]:
    """SGD by hand: the model after each step."""
    w, after = 0.0, []
    for step in range(steps):
        rows = Y[2 * (step % 3) : 2 * (step % 3) + 2]
        w -= 0.1 * float(np.mean(2 * (w - rows)))
        after.append(w)
    return after


def held_out_loss(w: float) -> float:
    return float(np.mean((w - HELD_OUT) ** 2))


@pytest.mark.parametrize(
    "more, steps",
    [
        ({"epochs": 2}, [3, 6]),
        ({"epochs": 2, "validate_every": 2}, [2, 4, 6]),
        ({"epochs": 2, "validate_every": 4}, [4]),
        ({"steps": 4}, [3, 4]),  # the end of the run ends its epoch
        ({"steps": 4, "validate_every": 3}, [3]),
    ],
)
def test_when_it_is_made(more, steps):
    history = fit(**more).history
    np.testing.assert_array_equal(history["validation_step"], steps)
    after = models(max(steps))
    expected = [held_out_loss(after[step - 1]) for step in steps]
    np.testing.assert_allclose(history["validation_loss"], expected, rtol=1e-5)


def test_it_changes_nothing_in_the_training():
    alone = fit(epochs=2, validation=None)
    watched = fit(epochs=2, validate_every=1)
    np.testing.assert_array_equal(alone.model, watched.model)
    np.testing.assert_array_equal(alone.history["loss"], watched.history["loss"])
    assert "validation_loss" not in alone.history


def test_callbacks_are_told_when_there_was_one():
    told = []
    fit(epochs=2, callbacks=[lambda info: told.append(info.validation)])
    assert [v is not None for v in told] == [False, False, True] * 2
    assert told[2]["loss"] == pytest.approx(held_out_loss(models(3)[-1]), 1e-5)


def test_auxiliary_outputs_are_there_by_name():
    def with_aux(model, y, key):
        aux = {"near": jnp.abs(model - y) < 3, "seen": eqaccum.Sum(1)}
        return (model - y) ** 2, aux

    history = fit(loss=with_aux, has_aux=True).history
    w = models(3)[-1]
    near = np.mean(np.abs(w - HELD_OUT) < 3)
    np.testing.assert_allclose(history["validation_near"], [near], rtol=1e-6)
    np.testing.assert_array_equal(history["validation_seen"], [len(HELD_OUT)])


class Dropped(eqx.Module):
    weight: Any
    dropout: eqx.nn.Dropout

    def __call__(self, x, key=None):
        return jnp.sum(self.weight * self.dropout(x, key=key))


def test_it_is_made_in_inference_mode_by_a_program_of_its_own():
    model = Dropped(jnp.ones(4), eqx.nn.Dropout(0.5))
    x = np.arange(24, dtype=np.float32).reshape(6, 4)

    def through(model, x, key):
        return model(x, key=key)

    def run():
        return eqaccum.fit(
            model,
            x,
            global_batch=3,
            microbatch=2,
            loss=through,
            optimizer=optax.sgd(0.0),  # the weights stay 1
            validation=x,
            epochs=3,
        )

    with compilations() as compiled:
        history = run().history
    # Without dropout: the mean of the rows' sums, each time.
    np.testing.assert_allclose(
        history["validation_loss"], [x.sum(1).mean()] * 3, rtol=1e-6
    )
    assert (history["loss"] != x.sum(1).mean()).all()
    # Compiled once, before training: accumulate of the step, and of the validation.
    assert compiled.count("jit(eqaccum_accumulate)") == 2


def test_validation_data_may_be_of_another_kind():
    class Batches:
        def __iter__(self):
            yield HELD_OUT[:3]
            yield HELD_OUT[3:]

    by_batches = fit(epochs=2, validation=Batches()).history["validation_loss"]
    columns = fit(epochs=2).history["validation_loss"]
    np.testing.assert_allclose(by_batches, columns, rtol=1e-6)


def test_it_equals_evaluate_on_the_model_of_that_moment():
    kept = []

    def keep(info):
        if info.validation is not None:
            kept.append((jnp.array(info.model), info.validation))

    fit(epochs=2, callbacks=[keep])
    assert len(kept) == 2
    for model, validation in kept:
        alone = eqaccum.evaluate(model, HELD_OUT, loss=loss, key=jax.random.key(9))
        assert alone["loss"] == pytest.approx(validation["loss"], 1e-6)
