"""`eqx.nn.State` through the passes: counters, BatchNorm, axis names, re-use.

The references are loops over microbatches in plain JAX.
"""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_close, assert_trees_equal
from reference import Counter, recorder

import eqaccum

KEY = jax.random.key(1)


class Normed(eqx.Module):
    """A counter, a layer, BatchNorm and what comes after it."""

    counter: Counter
    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    scale: jax.Array

    def __init__(self, key, mode="batch", axis_name="batch", dtype: Any = jnp.float32):
        self.counter = Counter()
        self.layer = eqx.nn.Linear(3, 2, key=key, dtype=dtype)
        self.norm = eqx.nn.BatchNorm(2, axis_name, mode=mode, dtype=dtype)
        self.scale = jnp.array([1.0, -0.5], dtype)

    def __call__(self, x, state):
        state = self.counter(state)
        out, state = self.norm(self.layer(x), state)
        return jnp.tanh(out * self.scale), state


def make(*args: Any, **kwargs: Any):
    return eqx.nn.make_with_state(Normed)(KEY, *args, **kwargs)


def loss(model, state, example, key):
    x, y = example
    out, state = model(x, state)
    return jnp.sum((out - y) ** 2), state


def data(rows, dtype: Any = np.float32):
    rng = np.random.default_rng(rows)
    return (
        rng.normal(size=(rows, 3)).astype(dtype) + 1,
        rng.normal(size=(rows, 2)).astype(dtype),
    )


def by_hand(model, state, batch, cuts):
    """(gradient of the mean, state) of the passes one after another."""

    @eqx.filter_jit
    def one(model, state, rows, weights):
        def weighted(model, state):
            out, state = jax.vmap(
                model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
            )(rows[0], state)
            losses = jnp.sum((out - rows[1]) ** 2, axis=1)
            return jnp.sum(losses * weights), state

        return eqx.filter_grad(weighted, has_aux=True)(model, state)

    gradients, count = [], 0.0
    for rows, weights in cuts:
        part = jax.tree.map(lambda x, rows=rows: x[np.array(rows)], batch)
        weights = jnp.asarray(weights, jnp.float32)
        gradient, state = one(model, state, part, weights)
        gradients.append(gradient)
        count += float(jnp.sum(weights))
    mean = jax.tree.map(lambda *g: sum(g) / count, *gradients)
    return mean, state


def states(model, state):
    """The numbers of a state, by what they belong to."""
    return {
        "count": state.get(model.counter.index),
        "norm": [
            state.get(index)
            for index in (
                model.norm.batch_state_index
                if model.norm.mode == "batch"
                else model.norm.ema_state_index,
            )
        ],
    }


def step_of(microbatch, rows, fn=loss, **options):
    return eqaccum.make_step(
        fn, recorder(), global_batch=rows, microbatch=microbatch, **options
    )


WHOLE = {
    (6, 2): [([0, 1], [1, 1]), ([2, 3], [1, 1]), ([4, 5], [1, 1])],
    (6, 6): [([0, 1, 2, 3, 4, 5], [1] * 6)],
    (5, 2): [([0, 1], [1, 1]), ([2, 3], [1, 1]), ([4, 0], [1, 0])],
    (3, 2): [([0, 1], [1, 1]), ([2, 0], [1, 0])],
}


@pytest.mark.filterwarnings("ignore:BatchNorm")
@pytest.mark.parametrize(
    "mode,rows,microbatch",
    [("batch", 6, 2), ("batch", 6, 6), ("batch", 5, 2), ("ema", 6, 2)],
)
def test_batch_norm_is_that_of_the_microbatches(rows, microbatch, mode):
    """Gradient and state equal a loop over the microbatches, copies included."""
    model, state = make(mode)
    batch = data(rows)
    want, after = by_hand(model, state, batch, WHOLE[rows, microbatch])
    step = step_of(microbatch, rows)
    train, _ = step(step.init(model, KEY, state=state), batch)
    assert_trees_close(train.opt_state, want, rtol=1e-5, atol=1e-6)
    assert_trees_close(
        states(model, train.state), states(model, after), rtol=1e-6, atol=1e-7
    )
    assert int(train.state.get(model.counter.index)) == len(WHOLE[rows, microbatch])
    _, grads = eqaccum.value_and_grad(loss, microbatch=microbatch)(
        model, batch, key=KEY, state=state
    )
    assert_trees_close(grads, train.opt_state, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_a_short_batch_runs_only_its_passes():
    model, state = make()
    batch = data(3)
    want, after = by_hand(model, state, batch, WHOLE[3, 2])
    step = step_of(2, 6)
    train, _ = step(step.init(model, KEY, state=state), batch)
    assert_trees_close(train.opt_state, want, rtol=1e-5, atol=1e-6)
    assert_trees_close(
        states(model, train.state), states(model, after), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("n,mean", [(4, 0.03), (2, 0.0599)])
def test_what_is_said_of_batch_norm_is_what_happens(n, mean):
    """x = 0, 2, 4, 6: normalised as a whole with n = 4, by pairs with n = 2."""

    class Only(eqx.Module):
        norm: eqx.nn.BatchNorm
        w: jax.Array

        def __init__(self):
            self.norm = eqx.nn.BatchNorm(1, "batch", mode="batch")
            self.w = jnp.float32(1)

    def shows(model, state, x, key):
        out, state = model.norm(x, state)
        return model.w * jnp.sum(out), state, {"out": out}

    model, state = eqx.nn.make_with_state(Only)()
    step = step_of(n, 4, shows, has_aux=True)
    train = step.init(model, state=state)
    x = np.array([[0], [2], [4], [6]], np.float32)
    if n == 2:
        with pytest.warns(
            eqaccum.EqaccumWarning, match=r"BatchNorm \(norm\).*2 rows.*2 times"
        ):
            train, metrics = step(train, x)
        wanted = [-1, 1, -1, 1]
    else:
        train, metrics = step(train, x)  # a warning would be an error here
        wanted = [-1.3416, -0.4472, 0.4472, 1.3416]
    np.testing.assert_allclose(metrics.aux["out"][:, 0], wanted, atol=1e-4)
    got = train.state.get(model.norm.batch_state_index)
    means = [x for x in jax.tree.leaves(got) if x.dtype == jnp.float32]
    assert any(abs(float(x.reshape(-1)[0]) - mean) < 1e-6 for x in means), got


def test_it_is_said_once_and_by_name():
    class Two(eqx.Module):
        first: Normed
        rest: list

        def __init__(self, key):
            self.first = Normed(key)
            self.rest = [eqx.nn.BatchNorm(2, "batch", mode="batch")]

        def __call__(self, x, state):
            out, state = self.first(x, state)
            return self.rest[0](out, state)

    model, state = eqx.nn.make_with_state(Two)(KEY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = eqaccum.fit(
            model,
            data(6),
            global_batch=4,
            loss=loss,
            state=state,
            microbatch=2,
            epochs=2,
        )
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1, texts
    assert "BatchNorm (first.norm, rest[0])" in texts[0]
    assert "GroupNorm" in texts[0]
    assert result.plan.notes == tuple(texts)


def test_layers_in_inference_mode_stay_so_and_are_named_once(capsys):
    """Fixed statistics do not depend on the cut: no warning, but a word."""
    model, state = make()
    model = eqx.tree_at(lambda m: m.norm.inference, model, True)
    batch = data(6)
    gradients = []
    for microbatch in (2, 6):
        step = step_of(microbatch, 6)
        train = step.init(model, KEY, state=state)
        train, _ = step(train, batch)
        train, _ = step(train, batch)
        gradients.append(train.opt_state)
        said = capsys.readouterr().err
        assert said.count("inference mode") == 1 and "norm" in said
        assert train.model.norm.inference is True
    assert_trees_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_the_users_state_stays_usable():
    """`fit` twice from the same model and state gives the same, bit for bit."""
    model, state = make()
    before = jax.tree.map(np.asarray, states(model, state))

    def run():
        return eqaccum.fit(
            model,
            data(7),
            global_batch=4,
            loss=loss,
            optimizer=optax.sgd(0.1),
            state=state,
            microbatch=2,
            epochs=2,
        )

    first, second = run(), run()
    assert_trees_equal(first.train, second.train)
    assert_trees_equal(states(model, state), before)
    after = first.state
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    # Two epochs of 4 rows in two passes and 3 rows in two passes.
    assert int(after.get(model.counter.index)) == 8


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_axis_names_of_the_users_own_vmap():
    """Two views of each example, normalised over views and examples together."""
    model, state = make(axis_name=("views", "batch"))

    def views(model, state, example, key):
        x, y = example
        both = jnp.stack([x, 2 * x])
        out, state = jax.vmap(
            model, axis_name="views", in_axes=(0, None), out_axes=(0, None)
        )(both, state)
        return jnp.sum((out - y[None]) ** 2), state

    batch = data(6)
    step = step_of(2, 6, views)
    train, metrics = step(step.init(model, KEY, state=state), batch)

    def total(model, rows, state):
        x, y = rows
        out, state = jax.vmap(
            jax.vmap(model, axis_name="views", in_axes=(0, None), out_axes=(0, None)),
            axis_name="batch",
            in_axes=(0, None),
            out_axes=(0, None),
        )(jnp.stack([x, 2 * x], axis=1), state)
        return jnp.sum((out - y[:, None]) ** 2), state

    reference = eqx.filter_jit(eqx.filter_grad(total, has_aux=True))
    gradients = []
    for start in (0, 2, 4):
        rows = jax.tree.map(lambda x, s=start: jnp.asarray(x[s : s + 2]), batch)
        gradient, state = reference(model, rows, state)
        gradients.append(gradient)
    want = jax.tree.map(lambda *g: sum(g) / 6, *gradients)
    assert_trees_close(train.opt_state, want, rtol=1e-5, atol=1e-6)
    assert_trees_close(states(model, train.state), states(model, state), rtol=1e-6)
    assert float(metrics.weight) == 6


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_another_axis_name():
    model, state = make(axis_name="rows")
    batch = data(4)
    named, _ = make()
    want, _ = by_hand(named, state, batch, [([0, 1, 2, 3], [1] * 4)])
    step = step_of(4, 4, axis_name="rows")
    train, _ = step(step.init(model, KEY, state=state), batch)
    got = jax.tree.leaves(train.opt_state)
    assert_trees_close(got, jax.tree.leaves(want), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_a_batched_loss_with_state():
    """The user's own vmap over the microbatch; the state comes back once."""
    model, state = make()

    def whole(model, state, batch, keys):
        x, y = batch
        out, state = jax.vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )(x, state)
        return jnp.sum((out - y) ** 2, axis=1), state

    batch = data(6)
    trains = []
    for fn in (loss, eqaccum.batched(whole)):
        step = step_of(2, 6, fn)
        trains.append(step(step.init(model, KEY, state=state), batch)[0])
    assert_trees_close(trains[0].opt_state, trains[1].opt_state, rtol=1e-6)
    assert_trees_close(
        states(model, trains[0].state), states(model, trains[1].state), rtol=1e-6
    )


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_a_skipped_batch_leaves_the_state_bit_for_bit():
    model, state = make()
    step = step_of(2, 4, nonfinite="skip")
    x, y = data(4)
    train, _ = step(step.init(model, KEY, state=state), (x, y))
    before = jax.tree.map(np.array, states(model, train.state))
    train, metrics = step(train, (x, y * np.inf))
    assert metrics.skipped
    assert_trees_equal(states(model, train.state), before)
    train, metrics = step(train, (x, y))
    assert int(train.state.get(model.counter.index)) == 4


@pytest.mark.filterwarnings("ignore:BatchNorm")
def test_a_state_in_bfloat16_keeps_its_dtypes():
    model, state = make(dtype=jnp.bfloat16)
    step = step_of(2, 4)
    train, _ = step(step.init(model, KEY, state=state), data(4, jnp.bfloat16))
    old, new = jax.tree.leaves(state), jax.tree.leaves(train.state)
    assert [x.dtype for x in new] == [x.dtype for x in old]


class Remembers(eqx.Module):
    """A layer that puts what it saw into its state."""

    index: eqx.nn.StateIndex
    w: jax.Array

    def __init__(self, init=None):
        self.index = eqx.nn.StateIndex(jnp.zeros(()) if init is None else init)
        self.w = jnp.float32(1)


def test_a_state_that_differs_between_examples_is_refused():
    def keeps(model, state, x, key):
        return model.w * x, state.set(model.index, x)

    model, state = eqx.nn.make_with_state(Remembers)()
    step = step_of(2, 4, keeps)
    train = step.init(model, state=state)
    with pytest.raises(eqaccum.InputError, match="state differs between the examples"):
        step(train, np.ones(4, np.float32))


def test_a_state_of_the_last_microbatch_that_the_next_one_reads():
    """A running mean of the inputs, read by the loss: order matters, and is kept."""

    def keeps(model, state, x, key):
        old = state.get(model.index)
        new = 0.5 * old + 0.5 * jax.lax.pmean(x, "batch")
        return model.w * x * old, state.set(model.index, new)

    model, state = eqx.nn.make_with_state(Remembers)()
    step = step_of(2, 6, keeps)
    train = step.init(model, state=state)
    x = np.array([2, 4, 6, 8, 1, 3], np.float32)
    train, metrics = step(train, x)
    assert float(train.state.get(model.index)) == 0.125 * 3 + 0.25 * 7 + 0.5 * 2
    assert float(metrics.loss) == pytest.approx((14 * 1.5 + 4 * (0.75 + 3.5)) / 6)
    assert float(train.opt_state.w) == float(metrics.loss)
    train, metrics = step(train, x)  # and the next step goes on from there
    start = 0.125 * 3 + 0.25 * 7 + 0.5 * 2
    olds = [start, start / 2 + 1.5, start / 4 + 0.75 + 3.5]
    assert float(metrics.loss) == pytest.approx(np.dot([6, 14, 4], olds) / 6)


def test_a_weight_that_depends_on_the_state():
    """Two Means whose second weight is read from the state of the pass before."""

    def warms_up(model, state, x, key):
        count = state.get(model.index)
        value = eqaccum.Mean(model.w * x, 1) + eqaccum.Mean(model.w * x * count, count)
        return value, state.set(model.index, count + 1)

    model, state = eqx.nn.make_with_state(Remembers)()
    step = step_of(2, 6, warms_up)
    x = np.array([2, 4, 6, 8, 1, 3], np.float32)
    train, metrics = step(step.init(model, state=state), x)
    expected = x.mean() + (1 * 14 + 2 * 4) / (2 * 1 + 2 * 2)
    assert float(metrics.loss) == pytest.approx(expected)
    assert float(train.opt_state.w) == pytest.approx(expected)
    (value, _), grads = eqaccum.value_and_grad(warms_up, microbatch=2)(
        model, x, state=state
    )
    assert float(value) == float(grads.w) == pytest.approx(expected)


@pytest.mark.parametrize("typed", [True, False])
def test_a_key_in_the_state(typed):
    key = jax.random.key(4) if typed else jax.random.PRNGKey(4)

    def draws(model, state, x, _):
        now, later = jax.random.split(state.get(model.index))
        return model.w * x * jax.random.normal(now), state.set(model.index, later)

    model, state = eqx.nn.make_with_state(Remembers)(key)
    step = step_of(2, 4, draws)
    train, metrics = step(step.init(model, state=state), np.ones(4, np.float32))
    first, later = jax.random.split(key)
    second, last = jax.random.split(later)
    expected = (jax.random.normal(first) + jax.random.normal(second)) / 2
    assert float(metrics.loss) == pytest.approx(float(expected))
    got = train.state.get(model.index)
    assert got.dtype == key.dtype
    assert_trees_equal(got, last)


def test_an_old_state_given_again_is_not_the_librarys_doing():
    """The loss may consume its state; the next call gets a fresh one."""

    def consumes(model, state, x, key):
        new = state.set(model.index, state.get(model.index) + 1)
        with pytest.raises(ValueError, match="old"):
            state.get(model.index)
        return model.w * x, new

    model, state = eqx.nn.make_with_state(Remembers)()
    (_, new), _ = eqaccum.value_and_grad(consumes, microbatch=2)(
        model, np.ones(5, np.float32), state=state
    )
    assert float(new.get(model.index)) == 3
    assert float(state.get(model.index)) == 0
