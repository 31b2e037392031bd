"""A loss or gradient that is not finite: named, skipped or ignored, nothing spoiled."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

N = 10
X = np.random.default_rng(0).uniform(1, 2, (N, 3)).astype(np.float32)


def loss(w, x, key):
    return jnp.log(x[0]) * jnp.sum(w * x)


def root(w, x, key):
    """Finite everywhere; its gradient is not where x[0] is 0."""
    return jnp.sqrt(jnp.sum((w * x[0]) ** 2)) + jnp.sum(w * x[1:].sum())


def with_rows(value, rows):
    x = X.copy()
    x[rows, 0] = value
    return x


@pytest.mark.parametrize("microbatch", [3, N])
@pytest.mark.parametrize(
    ("fn", "value", "what"),
    [(loss, -1.0, "the loss is nan"), (root, 0.0, "the loss is finite but")],
)
def test_raise_names_step_and_rows_and_spoils_nothing(microbatch, fn, value, what):
    import eqaccum

    step = eqaccum.make_step(fn, optax.adam(0.1), global_batch=N, microbatch=microbatch)
    train, _ = step(step.init(jnp.ones(3)), X)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(train)]
    with pytest.raises(eqaccum.NonFiniteError) as caught:
        step(train, with_rows(value, [2, 7]))
    text = str(caught.value)
    assert f"step 2: {what}" in text and "rows [2, 7]" in text
    for old, new in zip(before, jax.tree.leaves(train), strict=True):
        np.testing.assert_array_equal(old, new)
    train, _ = step(train, X)  # the next one goes on
    assert train.step == 2


def test_rows_are_found_with_their_own_keys():
    import eqaccum

    def unlucky(w, x, key):
        drawn = jax.random.uniform(key)
        return jnp.where(drawn < 0.3, jnp.nan, 1.0) * jnp.sum(w * x)

    step = eqaccum.make_step(unlucky, optax.sgd(0.1), global_batch=N, microbatch=4)
    train = step.init(jnp.ones(3), jax.random.key(5))
    rows, _ = jax.random.split(jax.random.fold_in(jax.random.key(5), 0))
    drawn = [jax.random.uniform(jax.random.fold_in(rows, i)) for i in range(N)]
    expected = [i for i in range(N) if drawn[i] < 0.3]
    assert expected
    with pytest.raises(eqaccum.NonFiniteError) as caught:
        step(train, X)
    assert f"rows {expected} of" in str(caught.value)


def test_skip_leaves_everything_but_the_position(capsys):
    import eqaccum

    class Net(eqx.Module):
        w: jax.Array
        norm: eqx.nn.BatchNorm

    def signed(model, state, example, key):
        x, sign = example
        x, state = model.norm(x, state)
        return jnp.log(sign) * jnp.sum(model.w * x), state

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        3, axis_name="batch", mode="batch"
    )
    net = Net(jnp.ones(3), norm)
    optimizer = optax.chain(
        optax.scale_by_adam(), optax.scale_by_schedule(lambda t: 1.0)
    )
    step = eqaccum.make_step(
        signed, optimizer, global_batch=N, nonfinite="skip", microbatch=N
    )
    ones, bad = np.ones(N, np.float32), np.ones(N, np.float32)
    bad[4] = -1
    train = step.init(net, state=state)
    train, metrics = step(train, (X, ones))
    assert not metrics.skipped
    before = [
        np.asarray(x)
        for x in jax.tree.leaves((train.model, train.state, train.opt_state))
    ]
    train, metrics = step(train, (X, bad))
    assert metrics.skipped and train.step == 1 and train.batch_index == 2
    after = jax.tree.leaves((train.model, train.state, train.opt_state))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert "skipped: step 2" in capsys.readouterr().err
    train, metrics = step(train, (X, ones))
    assert train.step == 2 and not metrics.skipped


def test_a_batch_without_weight():
    import eqaccum

    def masked(w, x, key):
        return eqaccum.Mean(jnp.sum(w * x), jnp.zeros(()))

    for mode in ("raise", "skip"):
        step = eqaccum.make_step(
            masked, optax.sgd(0.1), global_batch=N, nonfinite=mode, microbatch=5
        )
        train = step.init(jnp.ones(3))
        if mode == "raise":
            with pytest.raises(eqaccum.NonFiniteError, match="add up to 0"):
                step(train, X)
        else:
            train, metrics = step(train, X)
            assert metrics.skipped
        np.testing.assert_array_equal(train.model, np.ones(3))


def test_ignore_goes_on():
    import eqaccum

    step = eqaccum.make_step(
        loss, optax.sgd(0.1), global_batch=N, nonfinite="ignore", microbatch=N
    )
    train, metrics = step(step.init(jnp.ones(3)), with_rows(-1.0, [3]))
    assert train.step == 1 and not metrics.skipped
    assert np.isnan(train.model).all()


def test_twenty_skips_in_a_row_end_the_run():
    import eqaccum

    with pytest.raises(eqaccum.NonFiniteError, match="20 steps in a row"):
        eqaccum.fit(
            jnp.ones(3),
            with_rows(-1.0, range(N)),
            global_batch=N,
            loss=loss,
            epochs=50,
            nonfinite="skip",
            progress=False,
        )
