"""The losses that `fit` chooses where none is given, against numpy."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum

SGD = optax.sgd(0.5)
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(6, 3)).astype(np.float32)
W = GENERATOR.normal(size=(4, 3)).astype(np.float32)
LABELS = np.array([0, 3, 1, 1, 2, 0])


class Linear(eqx.Module):
    w: Any

    def __call__(self, x):
        return self.w @ x


class Shaped(eqx.Module):
    """A linear model whose output has any shape."""

    w: Any
    shape: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, x):
        return (self.w @ x).reshape(self.shape)


def fit(model: Any = None, data: Any = (X, LABELS), **more: Any) -> eqaccum.FitResult:
    """One whole-batch step by SGD(0.5), in passes of at most 2 rows."""
    arguments = {"global_batch": 6, "microbatch": 2, "optimizer": SGD} | more
    model = Linear(jnp.asarray(W)) if model is None else model
    return eqaccum.fit(model, data, **arguments)


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_integers_give_cross_entropy(dtype):
    result = fit(data=(X, LABELS.astype(dtype)))
    p = softmax(X.astype(np.float64) @ W.T)
    loss = -np.log(p[range(6), LABELS]).mean()
    gradient = (p - np.eye(4)[LABELS]).T @ X / 6
    np.testing.assert_allclose(result.history["loss"], [loss], rtol=1e-5)
    np.testing.assert_allclose(result.model.w, W - 0.5 * gradient, rtol=1e-5)


def test_floats_give_the_mean_squared_error():
    y = GENERATOR.normal(size=(6, 4))
    result = fit(data=(X, y))
    difference = X.astype(np.float64) @ W.T - y
    np.testing.assert_allclose(result.history["loss"], [(difference**2).mean()], 1e-5)
    gradient = 2 * difference.T @ X / difference.size
    np.testing.assert_allclose(result.model.w, W - 0.5 * gradient, rtol=1e-5)


@pytest.mark.parametrize("output, target", [((1,), ()), ((), (1,))])
def test_a_trailing_one_does_not_matter(output, target):
    # The classic fault: (n, 1) - (n,) broadcasts to (n, n).
    y = GENERATOR.normal(size=(6, *target)).astype(np.float32)
    result = fit(Shaped(jnp.asarray(W[:1]), output), (X, y))
    loss = ((X @ W[0] - y.reshape(-1)) ** 2).mean()
    np.testing.assert_allclose(result.history["loss"], [loss], rtol=1e-5)


def test_labels_for_each_token():
    class Tokens(eqx.Module):
        table: Any

        def __call__(self, tokens):
            return self.table[tokens]

    tokens = GENERATOR.integers(0, 5, (6, 7))
    table = GENERATOR.normal(size=(5, 4)).astype(np.float32)
    labels = GENERATOR.integers(0, 4, (6, 7))
    result = fit(Tokens(jnp.asarray(table)), (tokens, labels))
    p = softmax(table[tokens])
    loss = -np.log(np.take_along_axis(p, labels[..., None], -1)).mean()
    np.testing.assert_allclose(result.history["loss"], [loss], rtol=1e-5)


def test_bfloat16_logits_are_compared_in_float32():
    w = jnp.asarray(W, jnp.bfloat16)
    result = fit(Linear(w), (jnp.asarray(X, jnp.bfloat16), LABELS))
    logits = jax.vmap(Linear(w))(jnp.asarray(X, jnp.bfloat16)).astype(np.float32)
    loss = -np.log(softmax(np.asarray(logits))[range(6), LABELS]).mean()
    np.testing.assert_allclose(result.history["loss"], [loss], rtol=1e-3)
    assert result.model.w.dtype == jnp.bfloat16


def test_the_key_is_passed_where_the_model_takes_one():
    class Noisy(eqx.Module):
        w: Any

        def __call__(self, x, *, key):
            return self.w * jax.random.normal(key, ())

    result = fit(Noisy(jnp.ones(())), (X, np.zeros(6, np.float32)))
    # The documented keys: batch 0, a key for rows, one for each position.
    rows, _ = jax.random.split(jax.random.fold_in(jax.random.key(0), 0))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rows, jnp.arange(6))
    noise = jax.vmap(lambda key: jax.random.normal(key, ()))(keys)
    np.testing.assert_allclose(result.history["loss"], [(noise**2).mean()], rtol=1e-5)


def test_the_state_is_passed_on():
    class Counting(eqx.Module):
        w: Any
        index: eqx.nn.StateIndex

        def __init__(self):
            self.w = jnp.asarray(W)
            self.index = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

        def __call__(self, x, state):
            return self.w @ x, state.set(self.index, state.get(self.index) + 1)

    model, state = eqx.nn.make_with_state(Counting)()
    result = fit(model, state=state)
    assert int(result.state.get(model.index)) == 3  # passes
    np.testing.assert_allclose(result.history["loss"], fit().history["loss"], 1e-6)


def test_what_was_chosen_is_said(capsys, monkeypatch):
    monkeypatch.setenv("EQACCUM_CACHE", "0")
    monkeypatch.setattr("eqaccum._plan._cache._process", {})
    fit(optimizer=None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "cross-entropy (integer targets), adamw(1e-3)" in said[0]
    fit(data=(X, X[:, :1] @ np.ones((1, 4), np.float32)))
    said = capsys.readouterr().err
    assert "mean squared error (floating targets)" in said and "adamw" not in said


REFUSED = {
    "bool": ((X, LABELS > 1), ("bool", "two classes", "sigmoid_binary_cross_entropy")),
    "one-hot integers": (
        (X, np.eye(4, dtype=int)[LABELS]),
        ("int32", "looks one-hot", "optax.softmax_cross_entropy(model(x), y)"),
    ),
    "one-hot floats": (
        (X, np.eye(4, dtype=np.float32)[LABELS]),
        ("float32", "look one-hot", "optax.softmax_cross_entropy(model(x), y)"),
    ),
    "labels too large": ((X, LABELS + 1), ("1 to 4", "4 outputs", "0 to 3", "loss=")),
    "negative labels": ((X, LABELS - 1), ("-1 to 2", "0 to 3", "Relabel")),
    "another shape": (
        (X, np.zeros((6, 3), np.float32)),
        ("(4,)", "(3,)", "equal shapes"),
    ),
    "labels of another shape": (
        (X, np.zeros((6, 3), int)),
        ("(4,)", "(3,)", "logits of shape (*targets, classes)"),
    ),
    "complex": (
        (X, LABELS * 1j),
        ("complex64", "integers (labels) or floats", "loss="),
    ),
    "a dict": ({"x": X, "y": LABELS}, ("(x, y)", "'x'", "loss(model, example, key)")),
    "three columns": ((X, X, LABELS), ("(x, y)", "*, *, *", "loss=")),
    "one column": (X, ("(x, y)", "loss=")),
    "a pair of batches": (((X, X), (LABELS, LABELS)), ("(x, y)", "loss=")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_ambiguous_is_refused(name, capsys):
    data, parts = REFUSED[name]
    with pytest.raises(eqaccum.InputError) as caught:
        fit(data=data)
    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text
    assert "eqaccum:" not in capsys.readouterr().err


MODELS = {
    "a single logit": (
        Shaped(jnp.ones((1, 3)), (1,)),
        (X, LABELS),
        ("single logit", "sigmoid_binary_cross_entropy"),
    ),
    "a scalar": (
        Shaped(jnp.ones((1, 3)), ()),
        (X, LABELS),
        ("()", "logits of shape (*targets, classes)"),
    ),
    "no function": ({"w": jnp.ones(3)}, (X, LABELS), ("dict", "cannot be called")),
    "two outputs": (
        lambda x: (x, x),
        (X, LABELS),
        ("returned a tuple", "state="),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_need_a_loss(name):
    model, data, parts = MODELS[name]
    with pytest.raises(eqaccum.InputError) as caught:
        fit(model, data)
    assert [p for p in parts if p not in str(caught.value)] == [], caught.value


def test_labels_of_other_kinds_of_data_are_checked_by_batch():
    class Pairs:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return X[index], (0, 1, 2, 3, 7, 0)[index]

    for data in (Pairs(), [(X[:3], LABELS[:3]), (X[3:], LABELS[3:] + 2)].__iter__()):
        with pytest.raises(
            eqaccum.InputError, match="outputs; expected 0 to 3"
        ) as caught:
            fit(data=data, global_batch=3, shuffle=None if data else False)
        assert "Relabel" in str(caught.value)


def test_labels_of_rows_without_weight_do_not_matter():
    labels = LABELS.copy()
    labels[1] = -1
    weights = [1, 0, 1, 1, 1, 1]
    result = fit(data=(X, labels), example_weights=weights)
    kept = np.array(weights, bool)
    p = softmax(X @ W.T)[kept]
    loss = -np.log(p[range(5), labels[kept]]).mean()
    np.testing.assert_allclose(result.history["loss"], [loss], rtol=1e-5)
