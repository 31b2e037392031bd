"""`evaluate` and `predict`: every form of loss, against numpy on all rows at once."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, compilations

import eqaccum
from eqaccum import Mean, Sum, batched, coupled, evaluate, predict

ROWS = 11
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(ROWS, 2)).astype(np.float32)
W = np.array([1, 0, 2, 0.5, 1, 3, 0, 1, 1, 1, 0.25], np.float32)


class Line(eqx.Module):
    weight: jax.Array
    drop: eqx.nn.Dropout

    def __init__(self):
        self.weight = jax.random.normal(jax.random.key(2), (2, 3))
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        return self.weight @ self.drop(x, key=key)


MODEL = Line()
WEIGHT = np.asarray(MODEL.weight, np.float64)
OUT = X.astype(np.float64) @ WEIGHT.T
ERRORS = np.mean((OUT - Y) ** 2, axis=1)
COUNTS = np.abs(X[:, 0]).astype(np.float64)
ENERGY = np.sum(OUT**2, axis=1)


def error(model, example, key):
    x, y = example
    return jnp.mean((model(x, key=key) - y) ** 2)


def mean(model, example, key):
    count = jnp.abs(example[0][0])
    return Mean(count * error(model, example, key), count)


def means(model, example, key):
    energy = jnp.sum(model(example[0], key=key) ** 2)
    return mean(model, example, key) + 0.5 * Mean(energy, 1.0)


@batched
def rows(model, batch, keys):
    return jax.vmap(error, in_axes=(None, 0, 0))(model, batch, keys)


def summed(model, batch, keys, weights):
    return Mean(jnp.sum(rows.fn(model, batch, keys) * weights), jnp.sum(weights))


def average(values, weights):
    return np.sum(values * weights) / np.sum(weights)


FORMS: dict[str, tuple[Any, Any]] = {
    "scalar": (error, lambda w: average(ERRORS, w)),
    "mean": (mean, lambda w: average(ERRORS, w * COUNTS)),
    "means": (
        means,
        lambda w: average(ERRORS, w * COUNTS) + 0.5 * average(ENERGY, w),
    ),
    "batched": (rows, lambda w: average(ERRORS, w)),
    "weighted": (batched(summed, weighted=True), lambda w: average(ERRORS, w)),
    "default": (None, lambda w: average(ERRORS, w)),
}


@pytest.mark.parametrize("name", FORMS)
def test_is_the_mean_over_all_rows(name):
    """Short last batches, padding and weights: one division at the end."""
    loss, expected = FORMS[name]
    for weights in (None, W):
        got = evaluate(
            MODEL,
            (X, Y),
            loss=loss,
            example_weights=weights,
            global_batch=4,
            microbatch=3,
        )
        assert set(got) == {"loss"} and type(got["loss"]) is float
        want = expected(np.ones(ROWS) if weights is None else W)
        np.testing.assert_allclose(got["loss"], want, rtol=1e-5)


@pytest.mark.parametrize("cut", [{}, {"microbatch": 1}, {"global_batch": 100}])
def test_neither_microbatch_nor_global_batch_matters(cut):
    got = evaluate(MODEL, (X, Y), loss=mean, **cut)
    np.testing.assert_allclose(got["loss"], average(ERRORS, COUNTS), rtol=1e-5)


class Pairs:
    """A data set of examples, read one by one."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.mark.parametrize(
    "data",
    [
        Pairs(),
        [(X[:3], Y[:3]), (X[3:10], Y[3:10]), (X[10:], Y[10:])].__iter__(),
    ],
    ids=["dataset", "iterator"],
)
def test_other_kinds_of_data(data):
    got = evaluate(MODEL, data, loss=error, global_batch=4, microbatch=2)
    np.testing.assert_allclose(got["loss"], np.mean(ERRORS), rtol=1e-5)


def test_aux_by_kind_rows_left_out():
    def loss(model, example, key):
        count = jnp.abs(example[0][0])
        value = error(model, example, key)
        aux = {
            "error": value,
            "above": value > 1,
            "energy": Mean(jnp.sum(model(example[0]) ** 2), count),
            "hits": Sum(jnp.sum(example[0] > 0)),
            "rows": model(example[0]),
            "loss": 2 * value,
        }
        return Mean(count * value, count), aux

    got = evaluate(
        MODEL,
        (X, Y),
        loss=loss,
        has_aux=True,
        example_weights=W,
        global_batch=4,
        microbatch=3,
    )
    by = W * COUNTS
    want = {
        "loss": average(ERRORS, by),
        "aux.loss": 2 * average(ERRORS, by),
        "error": average(ERRORS, by),
        "above": average(ERRORS > 1, by),
        "energy": np.sum(W * ENERGY) / np.sum(by),
        "hits": np.sum((X > 0)[W > 0]),
    }
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_coupled_needs_a_global_batch_and_is_averaged_by_rows():
    def embed(model, example, key):
        return model(example[0], key=key)

    def head(model, embeddings, weights):
        z = jnp.sum(embeddings * weights[:, None], axis=0) / jnp.sum(weights)
        return jnp.sum(z**2)

    loss = coupled(embed, head)
    with pytest.raises(eqaccum.InputError, match="global_batch"):
        evaluate(MODEL, (X, Y), loss=loss)
    got = evaluate(MODEL, (X, Y), loss=loss, global_batch=4, microbatch=2)
    parts = [OUT[:4], OUT[4:8], OUT[8:]]
    values = [np.sum(part.mean(axis=0) ** 2) for part in parts]
    want = np.average(values, weights=[4, 4, 3])
    np.testing.assert_allclose(got["loss"], want, rtol=1e-5)


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(x, state)


def trained_norm():
    """A BatchNorm that has seen some rows, and the statistics that it keeps."""
    model, state = eqx.nn.make_with_state(Normed)()
    call = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    _, state = call(3 * X + 1, state)
    return model, state


def test_batch_norm_in_inference_mode_nothing_is_changed():
    model, state = trained_norm()
    before = jax.tree.map(np.array, eqx.filter((model, state), eqx.is_array))
    moded = eqx.nn.inference_mode(model)
    plain = jax.vmap(moded, in_axes=(0, None), out_axes=(0, None))
    want = np.asarray(plain(jnp.asarray(X), state)[0])

    def loss(model, state, example, key):
        out, state = model(example, state)
        return jnp.sum(out**2), state

    got = evaluate(model, X, loss=loss, state=state, microbatch=2)
    np.testing.assert_allclose(got["loss"], np.mean(np.sum(want**2, 1)), rtol=1e-4)
    out = predict(model, X, state=state, microbatch=2)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert_trees_equal(eqx.filter((model, state), eqx.is_array), before)
    assert not model.norm.inference


def test_dropout_is_off_unless_asked_for_and_keys_are_the_same_each_time():
    assert not MODEL.drop.inference
    off = evaluate(MODEL, (X, Y), loss=error)["loss"]
    on = [
        evaluate(MODEL, (X, Y), loss=error, inference=False, microbatch=n)["loss"]
        for n in (11, 2)
    ]
    other = evaluate(MODEL, (X, Y), loss=error, inference=False, key=jax.random.key(9))[
        "loss"
    ]
    np.testing.assert_allclose(off, np.mean(ERRORS), rtol=1e-5)
    np.testing.assert_allclose(on[0], on[1], rtol=1e-5)
    assert abs(on[0] - off) > 1e-3 and abs(on[0] - other) > 1e-3
    assert not MODEL.drop.inference


# --- predict ---------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, {"microbatch": 3, "global_batch": 5}])
def test_predict_keeps_the_order(cut):
    out = predict(MODEL, X, **cut)
    assert isinstance(out, np.ndarray) and out.dtype == np.float32
    np.testing.assert_allclose(out, OUT, rtol=1e-5, atol=1e-6)


def test_predict_structures():
    def model(row):
        x, number = row
        return {
            "scalar": x[0],
            "one": x[:1],
            "matrix": (x[:, None] * x[None, :], number),
            "true": x[0] > 0,
        }

    numbers = np.arange(ROWS, dtype=np.int32)
    out = predict(model, (X, numbers), global_batch=4, microbatch=3)
    assert out["scalar"].shape == (ROWS,) and out["one"].shape == (ROWS, 1)
    np.testing.assert_array_equal(out["scalar"], X[:, 0])
    np.testing.assert_array_equal(out["one"], X[:, :1])
    np.testing.assert_array_equal(out["matrix"][1], numbers)
    assert out["matrix"][1].dtype == np.int32 and out["true"].dtype == np.bool_
    np.testing.assert_array_equal(out["true"], X[:, 0] > 0)
    np.testing.assert_allclose(
        out["matrix"][0], X[:, :, None] * X[:, None, :], rtol=1e-6
    )


def test_predict_of_a_data_set_and_of_an_iterable():
    class Rows:
        def __len__(self):
            return ROWS

        def __getitem__(self, index):
            return X[index]

    for data in (Rows(), iter([X[:2], X[2:9], X[9:]])):
        out = predict(MODEL, data, global_batch=4, microbatch=2)
        np.testing.assert_allclose(out, OUT, rtol=1e-5, atol=1e-6)


def test_predict_compiles_once_for_all_batches():
    with compilations() as few:
        predict(MODEL, X[:4], global_batch=4, microbatch=2)
    with compilations() as many:
        predict(MODEL, np.tile(X, (4, 1)), global_batch=4, microbatch=2)
    assert len(many) <= len(few)


@pytest.mark.devices(4)
def test_on_several_devices():
    got = evaluate(MODEL, (X, Y), loss=mean, example_weights=W, microbatch=2)
    np.testing.assert_allclose(got["loss"], average(ERRORS, W * COUNTS), rtol=1e-5)
    np.testing.assert_allclose(
        predict(MODEL, X, microbatch=2, global_batch=8), OUT, rtol=1e-5, atol=1e-6
    )
