"""The losses of the tests of exactness, each written twice.

`Kind.loss` is what eqaccum is given: a loss of one example, or one of its forms.
`Kind.full` is the reference: the same loss of all rows at once, in plain JAX, with no
code of eqaccum. The keys of the reference follow the documented formula.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum

# float32: the norm of the error over all leaves, relative. Narrower dtypes are compared
# with the error that the full batch itself makes in them.
TOLERANCE = {"float32": 1e-6, "float64": 1e-12, "complex64": 1e-6}


class Net(eqx.Module):
    """A table, a layer and an activation: leaves of every sort, all small."""

    table: jax.Array
    layer: eqx.nn.Linear
    activation: Callable

    def __init__(self, key, dtype: Any = jnp.float32):
        keys = jax.random.split(key)
        self.table = jax.random.normal(keys[0], (5, 3), dtype)
        self.layer = eqx.nn.Linear(3, 2, key=keys[1], dtype=dtype)
        self.activation = jnp.tanh

    def __call__(self, x, token, *, key):
        del key
        return self.activation(self.layer(x + self.table[token]))


class Dropped(Net):
    """The same with dropout on what goes into the layer."""

    def __call__(self, x, token, *, key):
        hidden = eqx.nn.Dropout(0.5)(x + self.table[token], key=key)
        return self.activation(self.layer(hidden))


class Counter(eqx.Module):
    """A stateful layer: it counts how often it was called."""

    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

    def __call__(self, state):
        return state.set(self.index, state.get(self.index) + 1)


class Counted(eqx.Module):
    net: Net
    counter: Counter

    def __init__(self, key, dtype: Any = jnp.float32):
        self.net = Net(key, dtype)
        self.counter = Counter()


class Complex(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __init__(self, key, dtype: Any = jnp.complex64):
        keys = jax.random.split(key)
        self.weight = jax.random.normal(keys[0], (2, 3), dtype)
        self.bias = jax.random.normal(keys[1], (2,), dtype)


def batch_of(rows: int, dtype: Any = jnp.float32, seed: int = 0) -> dict:
    """A batch of numpy arrays; some rows have no valid item, some have all."""
    rng = np.random.default_rng((seed, rows))
    mask = rng.random((rows, 2)) < 0.6
    mask[0] = False
    mask[-1] = True
    return {
        "x": rng.normal(size=(rows, 3)).astype(dtype),
        "token": rng.integers(0, 5, rows).astype(np.int32),
        "y": rng.normal(size=(rows, 2)).astype(dtype),
        "mask": mask,
    }


def weights_of(rows: int, kind: str) -> np.ndarray:
    """Weights of ones, random ones, and random ones of which half are 0."""
    rng = np.random.default_rng((7, rows))
    weights = {
        "ones": np.ones(rows),
        "random": rng.uniform(0.1, 2, rows),
        "zeros": rng.uniform(0.1, 2, rows) * (rng.random(rows) < 0.5),
    }[kind].astype(np.float32)
    if kind == "zeros" and rows > 2:
        weights[[0, -1]] = 0
        weights[1] = 0.5
    if not weights.any():
        weights[-1] = 0.5
    return weights


WEIGHTS = ("ones", "random", "zeros")


# --- what one example gives ------------------------------------------------------


def residuals(net, example, key):
    prediction = net(example["x"], example["token"], key=key)
    return (prediction - example["y"]) ** 2


def masked(net, example, key):
    squares = residuals(net, example, key)
    return jnp.sum(jnp.where(example["mask"], squares, 0))


def size(net, example, key):
    return jnp.sum(jnp.abs(net(example["x"], example["token"], key=key)))


def count(example):
    return jnp.sum(example["mask"])


def penalty(net):
    return 0.01 * sum(
        jnp.sum(jnp.square(leaf))
        for leaf in jax.tree.leaves(eqx.filter(net, eqx.is_inexact_array))
    )


# --- and the same over all rows --------------------------------------------------


@dataclass(frozen=True)
class Full:
    """All rows at once: what a reference computes with."""

    model: Any
    batch: Any
    weights: jax.Array
    keys: Any
    step_key: Any

    def rows(self, fn, *more) -> jax.Array:
        return jax.vmap(lambda e, k: fn(self.model, e, k, *more))(self.batch, self.keys)

    def sum(self, values) -> jax.Array:
        """Sum over rows with the weights, in float32 or wider."""
        return jnp.sum(
            values * self.weights.astype(jnp.promote_types(values.dtype, jnp.float32))
        )

    def mean(self, totals, counts=None) -> jax.Array:
        dtype = jnp.promote_types(totals.dtype, jnp.float32)
        counts = jnp.ones(totals.shape, dtype) if counts is None else counts
        return self.sum(totals) / self.sum(counts.astype(dtype))

    @property
    def counts(self):
        return jax.vmap(count)(self.batch)

    @property
    def example_ids(self):
        return (self.batch["token"] > 0).astype(jnp.int32) + 1


@dataclass(frozen=True)
class Kind:
    name: str
    loss: Any
    full: Callable[[Full], jax.Array]
    model: Callable = Net
    has_aux: bool = False
    has_state: bool = False


def _scalar(net, example, key):
    return jnp.sum(residuals(net, example, key))


def _mean(net, example, key):
    return eqaccum.Mean(masked(net, example, key), count(example))


def _means(net, example, key):
    ids = (example["token"] > 0).astype(jnp.int32) + 1
    return (
        eqaccum.Mean(masked(net, example, key), count(example))
        + 0.25 * eqaccum.Mean(size(net, example, key), ids)
        - eqaccum.Mean(0.125 * _scalar(net, example, key), 1.0)
    )


def _full_means(f: Full):
    return (
        f.mean(f.rows(masked), f.counts)
        + 0.25 * f.mean(f.rows(size), f.example_ids)
        - 0.125 * f.mean(f.rows(_scalar))
    )


def _state(model, state, example, key):
    state = model.counter(state)
    return _scalar(model.net, example, key), state


def _state_means_aux(model, state, example, key):
    state = model.counter(state)
    value = _means(model.net, example, key)
    return value, state, {"size": size(model.net, example, key)}


def _aux(net, example, key):
    squares = residuals(net, example, key)
    aux = {
        "mean": jnp.mean(squares),
        "hit": squares[0] < squares[1],
        "ratio": eqaccum.Mean(masked(net, example, key), count(example)),
        "count": eqaccum.Sum(count(example)),
        "rows": squares,
        "nothing": None,
    }
    return jnp.sum(squares), aux


def _batched(net, batch, keys):
    return jax.vmap(lambda e, k: _scalar(net, e, k))(batch, keys)


def _batched_mean(net, batch, keys):
    totals = jax.vmap(lambda e, k: masked(net, e, k))(batch, keys)
    return eqaccum.Mean(totals, jax.vmap(count)(batch))


def _weighted(net, batch, keys, weights):
    totals = jax.vmap(lambda e, k: masked(net, e, k))(batch, keys)
    counts = jax.vmap(count)(batch)
    wide = weights.astype(jnp.promote_types(totals.dtype, jnp.float32))
    return eqaccum.Mean(jnp.sum(wide * totals), jnp.sum(wide * counts))


def _shared(net, example, key, step_key):
    shift = jax.random.normal(step_key, (3,), example["x"].dtype)
    return _scalar(net, example | {"x": example["x"] + shift}, key)


def _complex(model, example, key):
    out = model.weight @ example["x"] + model.bias
    noise = jax.random.normal(key, (2,))
    return jnp.sum(jnp.abs(out - example["y"] - noise) ** 2) + jnp.sum(out.imag**3)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("scalar", _scalar, lambda f: f.mean(f.rows(_scalar))),
        Kind("dropout", _scalar, lambda f: f.mean(f.rows(_scalar)), model=Dropped),
        Kind("mean", _mean, lambda f: f.mean(f.rows(masked), f.counts)),
        Kind("means", _means, _full_means),
        Kind(
            "state",
            _state,
            lambda f: f.mean(f.rows(lambda m, e, k: _scalar(m.net, e, k))),
            model=Counted,
            has_state=True,
        ),
        Kind(
            "state_means_aux",
            _state_means_aux,
            lambda f: _full_means(
                Full(f.model.net, f.batch, f.weights, f.keys, f.step_key)
            ),
            model=Counted,
            has_state=True,
            has_aux=True,
        ),
        Kind("aux", _aux, lambda f: f.mean(f.rows(_scalar)), has_aux=True),
        Kind("batched", eqaccum.batched(_batched), lambda f: f.mean(f.rows(_scalar))),
        Kind(
            "batched_mean",
            eqaccum.batched(_batched_mean),
            lambda f: f.mean(f.rows(masked), f.counts),
        ),
        Kind(
            "weighted",
            eqaccum.batched(_weighted, weighted=True),
            lambda f: f.mean(f.rows(masked), f.counts),
        ),
        Kind(
            "shared_key",
            eqaccum.shared_key(_shared),
            lambda f: f.mean(f.rows(_shared, f.step_key)),
        ),
        Kind("complex", _complex, lambda f: f.mean(f.rows(_complex)), model=Complex),
    )
}


def make(kind: Kind, dtype: Any = jnp.float32, seed: int = 0):
    """(model, state) of a kind; the state is None where there is none."""
    key = jax.random.key(seed)
    if kind.has_state:
        return eqx.nn.make_with_state(kind.model)(key, dtype)
    return kind.model(key, dtype), None


def example_keys(key, rows: int):
    """The documented keys: `rows, shared = split(key)`, then `fold_in(rows, i)`."""
    rows_key, shared = jax.random.split(key)
    return jax.vmap(lambda i: jax.random.fold_in(rows_key, i))(jnp.arange(rows)), shared


@functools.cache
def _full(kind: Kind, penalised: bool) -> Callable:
    def value(model, batch, weights, key):
        rows = weights.shape[0]
        keys, step_key = example_keys(key, rows)
        loss = kind.full(Full(model, batch, weights, keys, step_key))
        return loss + penalty(model) if penalised else loss

    return eqx.filter_jit(eqx.filter_value_and_grad(value))


def full_batch(kind: Kind, model, batch, weights, key, *, penalised: bool = False):
    """(loss, gradient) of all rows at once, by `jax.grad`."""
    return _full(kind, penalised)(model, batch, jnp.asarray(weights), key)


# --- comparing -------------------------------------------------------------------


def flat(tree) -> np.ndarray:
    """All numbers of a tree's inexact leaves, in float64 or complex128."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    wide = [
        np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)
        for x in leaves
    ]
    return np.concatenate([x.ravel() for x in wide])


def error(got, want) -> float:
    """The norm of the difference over all leaves, relative to that of `want`."""
    difference = np.linalg.norm(flat(got) - flat(want))
    return float(difference / np.linalg.norm(flat(want)))


def assert_same_kind(got, want) -> None:
    """The same structure, shapes and dtypes."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def distinct_cuts(rows: int) -> list[int]:
    """One n for each number of passes that a batch of `rows` can be cut into."""
    by_passes = {-(-rows // n): n for n in range(rows, 0, -1)}
    return sorted(by_passes.values(), reverse=True)


def recorder() -> optax.GradientTransformation:
    """An optimizer that changes nothing and keeps the gradient as its state."""

    def init(parameters):
        return jax.tree.map(jnp.zeros_like, parameters)

    def update(gradient, state, parameters=None):
        del state, parameters
        return jax.tree.map(jnp.zeros_like, gradient), gradient

    return optax.GradientTransformation(init, update)
