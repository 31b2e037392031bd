"""Out of memory while a step runs: more passes, the same batch, nothing lost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

N = 12
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
TEXTS = (
    "RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.",
    "INTERNAL: Error dispatching computation: Out of memory allocating 64 bytes.",
    "INTERNAL: YNNPACK operation failed",
)


@pytest.fixture
def eqaccum():
    import eqaccum

    return eqaccum


def loss(w, x, key):
    return jnp.sum((x @ w - 1) ** 2)


def failing(step, text):
    """Makes the step's accumulate program fail as a device does."""

    def fail(*args):
        raise jax.errors.JaxRuntimeError(text)

    ((layout, ready),) = step._ready.items()
    program = dataclasses.replace(ready.accumulate, compiled=fail)
    step._ready[layout] = dataclasses.replace(ready, accumulate=program)


@pytest.mark.parametrize("text", TEXTS)
def test_the_batch_is_replayed_in_more_passes(eqaccum, text):
    step = eqaccum.make_step(loss, optax.adam(0.1), global_batch=N, microbatch=N)
    train, _ = step(step.init(jnp.ones(4)), X)
    failing(step, text)
    with pytest.warns(eqaccum.EqaccumWarning, match="out of memory with 12 = 1 pass"):
        train, metrics = step(train, X)
    assert step.plan.num_microbatches == 2
    assert train.step == 2

    # bit for bit a run that was given the new microbatch from that step on
    first = eqaccum.make_step(loss, optax.adam(0.1), global_batch=N, microbatch=N)
    other = eqaccum.make_step(loss, optax.adam(0.1), global_batch=N, microbatch=6)
    other.describe(jnp.ones(4))
    expected, _ = first(first.init(jnp.ones(4)), X)
    expected, told = other(expected, X)
    np.testing.assert_array_equal(train.model, expected.model)
    assert float(metrics.loss) == float(told.loss)


def test_every_size_down_to_one_example_then_a_clear_end(eqaccum):
    step = eqaccum.make_step(loss, optax.sgd(0.1), global_batch=N, microbatch=N)
    train, _ = step(step.init(jnp.ones(4)), X)
    seen = []
    with pytest.warns(eqaccum.EqaccumWarning):
        while step.plan.microbatch > 1:
            failing(step, TEXTS[0])
            train, _ = step(train, X)
            seen.append(step.plan.microbatch)
    assert seen == [6, 4, 3, 2, 1]
    failing(step, TEXTS[0])
    kept = np.asarray(train.model)
    with pytest.raises(eqaccum.StepError, match="ran out of memory in accumulate"):
        step(train, X)
    np.testing.assert_array_equal(train.model, kept)


def test_other_failures_are_not_retried(eqaccum):
    step = eqaccum.make_step(loss, optax.sgd(0.1), global_batch=N, microbatch=N)
    train, _ = step(step.init(jnp.ones(4)), X)
    failing(step, "INTERNAL: something else broke")
    with pytest.raises(eqaccum.StepError, match="something else broke"):
        step(train, X)
    assert step.plan.num_microbatches == 1


def test_what_ran_out_is_not_chosen_again(eqaccum):
    def own_loss(w, x, key):
        return jnp.sum((x @ w - 3) ** 2)

    step = eqaccum.make_step(own_loss, optax.sgd(0.1), global_batch=N)
    train, _ = step(step.init(jnp.ones(4)), X)
    failing(step, TEXTS[0])
    with pytest.warns(eqaccum.EqaccumWarning):
        step(train, X)
    again = eqaccum.make_step(own_loss, optax.sgd(0.1), global_batch=N)
    again(again.init(jnp.ones(4)), X)
    assert again.plan.num_microbatches == 2
    assert "out of memory while running" in str(again.plan)
