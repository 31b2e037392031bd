"""remat=: the same gradient out of less memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

X = np.random.default_rng(0).normal(size=(4, 512, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=4).astype(np.float32)


class Deep(eqx.Module):
    """Equal layers; a dropout, an integer leaf and a custom rule among them."""

    layers: list
    dropout: eqx.nn.Dropout
    index: jax.Array

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(8, 8, key=k) for k in jax.random.split(key, 12)]
        self.dropout = eqx.nn.Dropout(0.1)
        self.index = jnp.array(3)

    def __call__(self, x, key):
        for layer in self.layers:
            x = x + jnp.sin(jnp.tanh(jnp.sin(jax.vmap(layer)(x))))
        return jnp.mean(self.dropout(x, key=key)[self.index])


def loss(model, example, key):
    x, y = example
    return (model(x, key) - y) ** 2


@pytest.fixture(scope="module")
def model():
    return Deep(jax.random.key(0))


def moved(eqaccum, model, **options):
    step = eqaccum.make_step(loss, optax.sgd(1.0), global_batch=4, **options)
    train, _ = step(step.init(model), (X, Y))
    leaves = jax.tree.leaves(eqx.filter(train.model, eqx.is_inexact_array))
    return step.plan, np.concatenate([np.ravel(leaf) for leaf in leaves])


def difference(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def test_segments_save_memory_and_change_nothing(model):
    import eqaccum

    plain, expected = moved(eqaccum, model, microbatch=1)
    plan, got = moved(eqaccum, model, microbatch=1, remat=True)
    assert difference(got, expected) < 1e-6
    assert plan.rematerialised and not plain.rematerialised
    assert plan.parts.activations < 0.85 * plain.parts.activations


@pytest.mark.slow
def test_auto_only_where_one_example_does_not_fit(model, capsys):
    import eqaccum

    plain, expected = moved(eqaccum, model, microbatch=1)
    saved, _ = moved(eqaccum, model, microbatch=1, remat=True)
    limit = (plain.predicted_bytes + saved.predicted_bytes) // 2
    with pytest.raises(eqaccum.DoesNotFit, match='remat="auto"'):
        moved(eqaccum, model, memory_limit=limit)
    plan, got = moved(eqaccum, model, memory_limit=limit, remat="auto")
    assert plan.rematerialised and plan.predicted_bytes <= limit
    assert "recomputed in segments" in capsys.readouterr().err
    assert "rematerialised" in str(plan)
    assert difference(got, expected) < 1e-6
    wide, _ = moved(eqaccum, model, remat="auto")
    assert not wide.rematerialised
    pinned, again = moved(eqaccum, model, plan=plan)
    assert pinned.rematerialised
    np.testing.assert_array_equal(again, got)


def test_a_policy_gives_the_same_gradient(model):
    import eqaccum

    _, expected = moved(eqaccum, model, microbatch=2)
    policy = jax.checkpoint_policies.dots_saveable
    plan, got = moved(eqaccum, model, microbatch=2, remat=policy)
    assert difference(got, expected) < 1e-6
    assert not plan.rematerialised  # that word is for the segments


def test_other_values_are_refused(model):
    import eqaccum

    with pytest.raises(eqaccum.InputError, match="remat='always'; expected None"):
        moved(eqaccum, model, remat="always")
