"""The moving average of the parameters, and metrics of the finished gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

N = 8
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)


def loss(w, x, key):
    return jnp.sum((x @ w - 1) ** 2)


@pytest.mark.parametrize("microbatch", [2, N])
def test_ema_moves_once_a_step(microbatch):
    import eqaccum

    optimizer = optax.adam(0.1)
    step = eqaccum.make_step(
        loss, optimizer, global_batch=N, microbatch=microbatch, ema=0.9
    )
    train = step.init(jnp.zeros(3))
    average = np.zeros(3)
    np.testing.assert_array_equal(train.ema, average)
    w, state = jnp.zeros(3), optimizer.init(jnp.zeros(3))
    for _ in range(4):
        gradient = jax.grad(lambda w: jnp.mean((X @ w - 1) ** 2))(w)
        updates, state = optimizer.update(gradient, state, w)
        w = optax.apply_updates(w, updates)
        average = 0.9 * average + 0.1 * np.asarray(w)
        train, _ = step(train, X)
    np.testing.assert_allclose(train.model, w, rtol=1e-5)
    np.testing.assert_allclose(train.ema, average, rtol=1e-5)
    # the optimizer's own state is what the user knows
    assert jax.tree.structure(train.opt_state) == jax.tree.structure(state)


def test_one_step_from_zero():
    import eqaccum

    step = eqaccum.make_step(
        lambda w, x, key: -w, optax.sgd(1.0), global_batch=4, microbatch=1, ema=0.9
    )
    train, _ = step(step.init(jnp.zeros(())), np.zeros((4, 1), np.float32))
    assert float(train.model) == 1.0
    np.testing.assert_allclose(train.ema, 0.1, rtol=1e-6)


def test_narrow_parameters_are_averaged_in_float32():
    import eqaccum

    step = eqaccum.make_step(
        lambda w, x, key: -w.astype(jnp.float32) * 1e-2,
        optax.sgd(1.0),
        global_batch=4,
        microbatch=4,
        ema=0.999,
    )
    train = step.init(jnp.ones((), jnp.bfloat16))
    for _ in range(3):
        train, _ = step(train, np.zeros((4, 1), np.float32))
    assert train.ema.dtype == jnp.bfloat16
    assert any(leaf.dtype == jnp.float32 for leaf in train.opt_leaves)


def test_grad_metrics_see_the_gradient_before_clipping():
    import eqaccum

    params = {"a": jnp.ones(3), "b": jnp.ones(3)}

    def two(params, x, key):
        return jnp.sum(x @ params["a"] + 2 * (x @ params["b"]))

    result = eqaccum.fit(
        params,
        X,
        global_batch=N,
        loss=two,
        steps=2,
        microbatch=3,
        shuffle=False,
        optimizer=optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0)),
        grad_metrics=lambda g: {"a": optax.tree.norm(g["a"]), "loss": jnp.sum(g["b"])},
        progress=False,
    )
    mean = X.mean(axis=0)
    np.testing.assert_allclose(
        result.history["a"], np.full(2, np.linalg.norm(mean)), rtol=1e-5
    )
    np.testing.assert_allclose(result.history["grad.loss"], 2 * mean.sum(), rtol=1e-5)


def test_refused():
    import eqaccum

    for bad in (1.0, -0.1, "0.9", True):
        with pytest.raises(eqaccum.InputError, match="expected the decay"):
            eqaccum.make_step(loss, optax.sgd(1.0), global_batch=N, ema=bad)
    step = eqaccum.make_step(
        loss, optax.sgd(1.0), global_batch=N, grad_metrics=lambda g: {"g": g}
    )
    train = step.init(jnp.zeros(3))
    with pytest.raises(eqaccum.InputError, match="expected a dict of scalars"):
        step(train, X)
