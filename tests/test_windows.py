"""A global batch that does not fit beside the activations is fed in windows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

N, WIDTH = 240, 96
ROWS = np.random.default_rng(0)
X = ROWS.normal(size=(N, WIDTH)).astype(np.float32)
Y = ROWS.normal(size=N).astype(np.float32)
# Two windows take at most a quarter of this, and all rows together four times as much.
LIMIT = X.nbytes // 4


@pytest.fixture
def eqaccum():
    import eqaccum

    return eqaccum


def scalar(w, example, key):
    x, y = example
    return (x @ w - y) ** 2


def scalar_reference(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def two_means_reference(w, x, y):
    first = jnp.mean((x @ w - y) ** 2)
    return first + jnp.sum(y**2 * (x @ w)) / jnp.sum(y**2)


@pytest.mark.parametrize("terms", [1, 2])
def test_windows_give_the_gradient_of_the_whole_batch(eqaccum, terms):
    def two_means(w, example, key):
        x, y = example
        other = eqaccum.Mean(y**2 * (x @ w), y**2)
        return eqaccum.Mean(scalar(w, example, key), 1) + other

    loss, reference = [
        (scalar, scalar_reference),
        (two_means, two_means_reference),
    ][terms - 1]
    step = eqaccum.make_step(loss, optax.sgd(1.0), global_batch=N, memory_limit=LIMIT)
    w = jnp.full(WIDTH, 0.1)
    train = step.init(w)
    for rows in (N, 25, 1):  # all windows, a part of them, one row
        before = np.asarray(train.model)
        train, metrics = step(train, (X[:rows], Y[:rows]))
        value, gradient = jax.value_and_grad(reference)(before, X[:rows], Y[:rows])
        moved = before - np.asarray(train.model)
        np.testing.assert_allclose(metrics.loss, value, rtol=2e-6)
        error = np.linalg.norm(moved - gradient) / np.linalg.norm(gradient)
        assert error < 2e-6
    assert step.plan.windows > 1
    assert step.plan.predicted_bytes <= LIMIT
    assert f"{step.plan.windows} windows" in str(step.plan)


def test_keys_rows_and_state_do_not_know_of_windows(eqaccum):
    class Counter(eqx.Module):
        w: jax.Array
        count: eqx.nn.StateIndex

        def __init__(self):
            self.w = jnp.full(WIDTH, 0.1)
            self.count = eqx.nn.StateIndex(jnp.array(0))

    def loss(model, state, example, key):
        state = state.set(model.count, state.get(model.count) + 1)
        drawn = jax.random.normal(key, (2,))
        return scalar(model.w, example, key), state, drawn

    model, state = eqx.nn.make_with_state(Counter)()
    drawn, plans = [], []
    for limit in (LIMIT, None):
        step = eqaccum.make_step(
            loss, optax.sgd(0.0), global_batch=N, memory_limit=limit, has_aux=True
        )
        train = step.init(model, jax.random.key(1), state=state)
        train, metrics = step(train, (X, Y))
        drawn.append(np.asarray(metrics.aux))
        plans.append(step.plan)
        assert train.state.get(model.count) == step.plan.num_microbatches
    assert plans[0].windows > 1 == plans[1].windows
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_fit_trains_in_windows_with_the_same_losses(eqaccum):
    given = {"global_batch": N, "loss": scalar, "epochs": 3, "progress": False}
    w = jnp.zeros(WIDTH)
    optimizer = optax.sgd(1e-3)
    small = eqaccum.fit(w, (X, Y), optimizer=optimizer, memory_limit=LIMIT, **given)
    whole = eqaccum.fit(w, (X, Y), optimizer=optimizer, **given)
    assert small.plan.windows > 1 == whole.plan.windows
    np.testing.assert_allclose(small.history["loss"], whole.history["loss"], rtol=1e-6)
    pinned = eqaccum.fit(w, (X, Y), optimizer=optimizer, plan=small.plan, **given)
    assert pinned.plan.windows == small.plan.windows
    np.testing.assert_array_equal(small.model, pinned.model)


def test_what_no_window_can_hold_is_refused(eqaccum):
    step = eqaccum.make_step(scalar, optax.sgd(1.0), global_batch=N, memory_limit=1000)
    train = step.init(jnp.zeros(WIDTH))
    with pytest.raises(eqaccum.DoesNotFit, match="1000 B"):
        step(train, (X, Y))


def test_a_coupled_loss_is_not_fed_in_windows(eqaccum):
    """The error says so, where windows would have helped another loss."""
    loss = eqaccum.coupled(
        lambda w, example, key: example[0] @ w,
        lambda w, z, weights: jnp.sum(z * weights) ** 2 / jnp.sum(weights),
    )
    step = eqaccum.make_step(loss, optax.sgd(1.0), global_batch=N, memory_limit=LIMIT)
    with pytest.raises(eqaccum.DoesNotFit, match="coupled loss is not fed in windows"):
        step(step.init(jnp.zeros(WIDTH)), (X, Y))


class Counter(eqx.Module):
    """A model that knows how many passes it has seen."""

    w: jax.Array
    index: eqx.nn.StateIndex

    def __init__(self):
        self.w = jnp.full(WIDTH, 0.1)
        self.index = eqx.nn.StateIndex(jnp.zeros((), jnp.float32))


def test_a_weight_that_is_read_from_the_state(eqaccum):
    """`weigh` carries the state from window to window, as the gradient's passes do."""
    model, state = eqx.nn.make_with_state(Counter)()

    def loss(model, state, example, key):
        x, y = example
        seen = state.get(model.index)
        value = x @ model.w
        means = eqaccum.Mean(value, 1) + eqaccum.Mean(value, 1 + seen)
        return means, state.set(model.index, seen + 1)

    step = eqaccum.make_step(loss, optax.sgd(1.0), global_batch=N, memory_limit=LIMIT)
    train, metrics = step(step.init(model, state=state), (X, Y))
    assert step.plan.windows > 1
    passes = np.arange(N) // step.plan.microbatch  # of each row
    slope = X.mean(axis=0) + X.sum(axis=0) / np.sum(1 + passes)
    moved = 0.1 - np.asarray(train.model.w)
    np.testing.assert_allclose(moved, slope, rtol=2e-4, atol=1e-6)
