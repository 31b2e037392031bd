"""`value_and_grad`: what it returns, and that it is a plain jitted function."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal
from reference import KINDS, Net, batch_of, make, recorder, weights_of

import eqaccum

KEY = jax.random.key(3)


def f32(*values):
    return np.array(values, np.float32)


def square(w, y, key):
    return (w - y) ** 2


def gradient_of_squares(w, y, weights=None):
    weights = np.ones_like(y) if weights is None else weights
    return 2 * np.sum(weights * (w - y)) / np.sum(weights)


# --- what comes back ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["aux", "state", "state_means_aux"])
def test_returns_what_equinox_returns(name):
    """The same nesting as `eqx.filter_value_and_grad`, the same structure of grads."""
    kind = KINDS[name]
    model, state = make(kind)
    fn = eqaccum.value_and_grad(kind.loss, microbatch=3, has_aux=kind.has_aux)
    out, grads = fn(model, batch_of(7), key=KEY, state=state)
    expected = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    for grad, leaf in zip(
        jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
    ):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
    if kind.has_state:
        value, new_state, *aux = out
        assert jax.tree.structure(new_state) == jax.tree.structure(state)
        assert int(new_state.get(model.counter.index)) == 3
        assert int(state.get(model.counter.index)) == 0  # the user's is as it was
        assert len(aux) == kind.has_aux
    elif kind.has_aux:
        value, aux = out
        assert aux["rows"].shape == (7, 2) and aux["nothing"] is None
    else:
        value = out
    assert value.shape == () and value.dtype == jnp.float32


class Parts(eqx.Module):
    w: jax.Array
    frozen: jax.Array
    number: jax.Array
    buffer: np.ndarray
    rate: float
    name: str
    missing: None
    function: Any


def parts():
    return Parts(
        jnp.ones(2), jnp.full(2, 2.0), jnp.array(3), np.ones(2), 0.5, "a", None, jnp.sin
    )


def use_parts(m, x, key):
    inner = jnp.dot(m.w * m.frozen + m.buffer.astype(np.float32), x) * m.rate
    return inner * m.number + m.function(inner)


@pytest.mark.parametrize("how", ["tree", "prefix", "predicate"])
def test_what_is_not_trained_has_no_gradient(how):
    spec = jax.tree.map(lambda _: False, parts())
    spec = eqx.tree_at(lambda m: m.w, spec, True)
    trainable = {
        "tree": spec,
        "prefix": eqx.tree_at(
            lambda m: m.missing, spec, None, is_leaf=lambda x: x is None
        ),
        "predicate": lambda leaf: leaf.shape == (2,) and leaf.dtype == np.float32,
    }[how]
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    fn = eqaccum.value_and_grad(use_parts, microbatch=2, trainable=trainable)
    _, grads = fn(parts(), x)
    if how == "predicate":  # which both floating leaves satisfy
        assert grads.frozen is not None
    else:
        assert grads.frozen is None
    assert (grads.number, grads.rate, grads.name, grads.function) == (None,) * 4

    def whole(w):
        model = eqx.tree_at(lambda m: m.w, parts(), w)
        return jnp.mean(jax.vmap(lambda row: use_parts(model, row, None))(x))

    np.testing.assert_allclose(grads.w, jax.grad(whole)(jnp.ones(2)), rtol=1e-6)


def test_tied_weights_add_their_gradients():
    """(3 a + b)**2 at a = b = 1: 24 and 8, which add up where they are one leaf."""

    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self):
            pair = (jnp.float32(1), jnp.float32(1))
            self.shared = eqx.nn.Shared(pair, lambda p: p[1], lambda p: p[0])

        def __call__(self):
            a, b = self.shared()
            return (3 * a + b) ** 2

    fn = eqaccum.value_and_grad(lambda m, x, key: x * m(), microbatch=2)
    _, grads = fn(Tied(), np.ones(3, np.float32))
    assert [float(g) for g in jax.tree.leaves(grads)] == [32]


def test_two_leaves_of_one_array_are_two():
    w = jnp.float32(1)
    fn = eqaccum.value_and_grad(
        lambda m, x, key: x * (3 * m[0] + m[1]) ** 2, microbatch=2
    )
    _, grads = fn((w, w), np.ones(3, np.float32))
    assert [float(g) for g in grads] == [24, 8]


def test_leaves_without_elements_and_without_use():
    model = {"w": jnp.float32(1), "empty": jnp.zeros((0, 3)), "unused": jnp.ones(2)}
    fn = eqaccum.value_and_grad(lambda m, y, key: square(m["w"], y, key), microbatch=2)
    _, grads = fn(model, f32(1, 2, 3))
    assert grads["empty"].shape == (0, 3)
    np.testing.assert_array_equal(grads["unused"], [0, 0])
    assert float(grads["w"]) == -2


def test_leaves_of_the_batch_without_rows_reach_every_pass_whole():
    batch = {"x": f32(1, 2, 3), "table": f32(10, 20), "scale": 0.5, "kind": "double"}

    def loss(w, example, key):
        assert example["table"].shape == (2,) and example["kind"] == "double"
        return w * example["x"] * example["table"][1] * example["scale"]

    fn = eqaccum.value_and_grad(
        loss,
        microbatch=2,
        in_axes={"x": 0, "table": None, "scale": None, "kind": None},
    )
    value, grads = fn(jnp.float32(1), batch)
    assert (float(value), float(grads)) == (20, 20)


# --- keys --------------------------------------------------------------------------


def test_without_a_key_the_loss_gets_none():
    def loss(w, y, key):
        assert key is None
        return w * y

    def several(w, batch, keys):
        assert keys is None
        return w * batch

    for form in (loss, eqaccum.batched(several)):
        value, _ = eqaccum.value_and_grad(form, microbatch=2)(jnp.ones(()), f32(1, 2))
        assert float(value) == 1.5


def test_a_legacy_key_is_the_same_key():
    kind = KINDS["dropout"]
    model, _ = make(kind)
    fn = eqaccum.value_and_grad(kind.loss, microbatch=3)
    typed = fn(model, batch_of(7), key=jax.random.key(9))
    legacy = fn(model, batch_of(7), key=jax.random.PRNGKey(9))
    assert_trees_equal(typed, legacy)


def test_a_step_is_it_at_the_batch_s_key():
    kind = KINDS["dropout"]
    model, _ = make(kind)
    batch = batch_of(7)
    step = eqaccum.make_step(
        kind.loss, optimizer=recorder(), global_batch=7, microbatch=3
    )
    train = step.init(model, KEY)
    fn = eqaccum.value_and_grad(kind.loss, microbatch=3)
    for index in range(2):
        train, metrics = step(train, batch)
        value, grads = fn(model, batch, key=jax.random.fold_in(KEY, index))
        assert_trees_close(train.opt_state, grads, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(metrics.loss, value, rtol=1e-6)


# --- a plain jitted function -------------------------------------------------------


def test_traces_once_for_all_values():
    traces = []

    def loss(w, y, key):
        traces.append(1)
        return square(w, y, key)

    fn = eqaccum.value_and_grad(loss, microbatch=2)
    for seed in range(4):
        w, y = jnp.float32(seed), f32(1, 2, seed)
        weights = f32(seed, 1, 0.5)
        _, grads = fn(w, y, key=jax.random.key(seed), weights=weights)
        expected = gradient_of_squares(seed, y, weights)
        np.testing.assert_allclose(grads, expected, rtol=1e-6, atol=1e-6)
    assert len(traces) == 1
    fn(jnp.float32(1), f32(1, 2, 3, 4), key=KEY, weights=f32(1, 1, 1, 1))
    assert len(traces) == 2  # of another shape


def test_inside_jit_everything_may_be_traced():
    kind = KINDS["dropout"]
    model, _ = make(kind)
    batch, weights = batch_of(7), weights_of(7, "zeros")

    def run(model, batch, key, weights):
        scale = jnp.sum(weights)  # a value of the outer trace that the loss captures

        def loss(m, example, key):
            return scale * kind.loss(m, example, key)

        fn = eqaccum.value_and_grad(loss, microbatch=3)
        return fn(model, batch, key=key, weights=weights)

    inside = eqx.filter_jit(run)(model, jax.tree.map(jnp.asarray, batch), KEY, weights)
    value, grads = eqaccum.value_and_grad(kind.loss, microbatch=3)(
        model, batch, key=KEY, weights=weights
    )
    scale = weights.sum()
    expected = (scale * value, jax.tree.map(lambda g: scale * g, grads))
    assert_trees_close(inside, expected, rtol=2e-6, atol=1e-6)
    legacy = eqx.filter_jit(run)(
        model, jax.tree.map(jnp.asarray, batch), jax.random.PRNGKey(3), weights
    )
    assert_trees_equal(legacy, inside)


def test_under_vmap_and_grad():
    """An ensemble of models, and a derivative of the accumulated value."""
    fn = eqaccum.value_and_grad(square, microbatch=2)
    y = f32(1, 2, 6)
    models = jnp.arange(3, dtype=jnp.float32)
    values, grads = jax.vmap(lambda w: fn(w, y))(models)
    np.testing.assert_allclose(grads, [gradient_of_squares(w, y) for w in range(3)])
    np.testing.assert_allclose(values, [np.mean((w - y) ** 2) for w in range(3)])
    second = jax.grad(lambda w: fn(w, y)[1])(jnp.float32(5))
    assert float(second) == 2


def test_a_loss_that_holds_arrays_is_not_trained_and_not_baked_in():
    traces = []

    class Distil(eqx.Module):
        teacher: jax.Array

        def __call__(self, w, x, key):
            traces.append(1)
            return (w * x - self.teacher * x) ** 2

    x = f32(1, 2, 3)
    for teacher in (2.0, 5.0):
        fn = eqaccum.value_and_grad(Distil(jnp.float32(teacher)), microbatch=2)
        _, grads = fn(jnp.float32(1), x)
        np.testing.assert_allclose(grads, np.mean(2 * (1 - teacher) * x**2), rtol=1e-6)
    assert len(traces) == 2


def test_a_function_that_takes_its_arrays_by_partial():
    def loss(teacher, w, x, key):
        return (w - teacher) ** 2 * x

    for bound in (functools.partial, eqx.Partial):
        fn = eqaccum.value_and_grad(bound(loss, jnp.float32(3)), microbatch=2)
        assert float(fn(jnp.float32(1), f32(1, 1, 1))[1]) == -4


# --- weights and sizes -------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [1, np.int64(2), 100])
def test_any_microbatch(microbatch):
    y = f32(1, 5, 2, 8)
    value, grads = eqaccum.value_and_grad(square, microbatch=microbatch)(
        jnp.float32(0), y
    )
    assert float(grads) == gradient_of_squares(0, y) == -8
    assert float(value) == np.mean(y**2)


@pytest.mark.parametrize("microbatch", [1, 2, 5])
def test_rows_of_weight_zero_may_hold_anything(microbatch):
    """They are replaced: 0 * NaN is NaN, and so is the gradient of log at 0."""
    fn = eqaccum.value_and_grad(
        lambda w, y, key: square(w, y, key) + jnp.log(y * w), microbatch=microbatch
    )
    for given in ((0, 1, 0, 2, 0), (0, 0, 0, 0, 3), (1, 0, 0, 0, 0), (0, 0, 2, 0, 0)):
        weights = np.array(given, np.int32)
        y = np.where(weights > 0, f32(1, 2, 3, 4, 5), np.nan)
        value, grads = fn(jnp.float32(2), y, weights=weights)
        kept, w = y[weights > 0], weights[weights > 0]
        expected = gradient_of_squares(2, kept, w) + 0.5
        np.testing.assert_allclose(grads, expected, rtol=1e-6)
        losses = (2 - kept) ** 2 + np.log(2 * kept)
        np.testing.assert_allclose(value, np.average(losses, weights=w), rtol=1e-6)


def test_zeros_in_the_log_are_not_computed_as_padding():
    """Three rows in passes of two: a row of zeros would give NaN."""
    fn = eqaccum.value_and_grad(lambda w, y, key: jnp.log(w * y), microbatch=2)
    value, grads = fn(jnp.float32(1), f32(1, 2, 3))
    np.testing.assert_allclose(value, np.log([1, 2, 3]).mean(), rtol=1e-6)
    assert float(grads) == 1


@pytest.mark.parametrize(
    "weights,words",
    [
        (f32(1, 2), r"\(2,\).*3"),
        (f32(1, -2, 3), "-2"),
        (f32(1, np.nan, 3), "nan"),
        (np.ones((3, 1), np.float32), r"\(3, 1\)"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights, words):
    fn = eqaccum.value_and_grad(square, microbatch=2)
    with pytest.raises(eqaccum.InputError, match=words):
        fn(jnp.float32(1), f32(1, 2, 3), weights=weights)
    if weights.shape != (3,):  # what is known inside of jit too
        with pytest.raises(eqaccum.InputError, match=words):
            jax.jit(lambda v: fn(jnp.float32(1), f32(1, 2, 3), weights=v))(weights)


def test_weights_narrower_and_wider_than_float32():
    fn = eqaccum.value_and_grad(square, microbatch=2)
    y = f32(1, 2, 3)
    for dtype in (np.float64, np.float16, jnp.bfloat16, np.int32, np.uint8, bool):
        weights = np.array([1, 0, 1], dtype)
        assert float(fn(jnp.float32(0), y, weights=weights)[1]) == -4


def test_the_model_is_as_it_was():
    model = Net(jax.random.key(0))
    before = jax.tree.map(np.asarray, eqx.filter(model, eqx.is_array))
    fn = eqaccum.value_and_grad(KINDS["scalar"].loss, microbatch=3)
    fn(model, batch_of(7), key=KEY)
    assert_trees_equal(eqx.filter(model, eqx.is_array), before)
