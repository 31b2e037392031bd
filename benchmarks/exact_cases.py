"""The losses of `exact.py`, each written twice: for eqaccum, and for a batch.

`Case.full` is plain JAX without a line of eqaccum: the loss of any number of rows. It
is the reference (all rows at once, in float64), and what the other ways are given.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PyTree

import eqaccum

WIDTH, HIDDEN, OUT, LENGTH = 6, 16, 8, 5


@dataclass(frozen=True)
class Case:
    """One loss.

    - `loss`: for eqaccum. `penalty`: as in `make_step`.
    - `full`: `(model, batch, key)` -> value, of the rows of `batch`; where the loss is
        random, each row finds its own key under `"key"`.
    - `weights`: of the examples; under `"weight"` in the batch of `full`.
    - `exact`: whether eqaccum promises the whole batch's gradient.
    """

    name: str
    loss: Any
    full: Callable
    model: Any
    batch: PyTree
    penalty: Callable | None = None
    weights: np.ndarray | None = None
    state: Any = None
    key: str = ""  # "rows", "shared" or none
    exact: bool = True


class Net(eqx.Module):
    """Two layers and what the heads need."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    log_temperature: Float[Array, ""]
    bias: Float[Array, ""]

    def __init__(self) -> None:
        k1, k2 = jr.split(jr.key(0))
        self.first = eqx.nn.Linear(WIDTH, HIDDEN, key=k1)
        self.second = eqx.nn.Linear(HIDDEN, OUT, key=k2)
        self.log_temperature = jnp.asarray(-1.0)
        self.bias = jnp.asarray(-0.5)

    def __call__(self, x: Array, drop: Any = None) -> Array:
        hidden = jnp.tanh(self.first(x))
        if drop is not None:  # the same bits in float32 and in float64
            hidden = 2 * hidden * (jr.uniform(drop, (HIDDEN,), jnp.float32) < 0.5)
        return self.second(hidden)


class Normed(eqx.Module):
    """The same with BatchNorm between the layers."""

    net: Net
    norm: eqx.nn.BatchNorm

    def __init__(self) -> None:
        self.net = Net()
        self.norm = eqx.nn.BatchNorm(HIDDEN, "batch", mode="batch")


def square(model: Any, x: Array, y: Array, drop: Any = None) -> Array:
    return jnp.sum((model(x, drop) - y) ** 2)


def tokens(model: Any, e: PyTree) -> tuple[Array, Array]:
    """The sum of one row's valid tokens, and how many there are."""
    values = jax.vmap(lambda x: square(model, x, e["y"]))(e["xs"])
    return jnp.sum(jnp.where(e["mask"], values, 0)), jnp.sum(e["mask"])


def positions(model: Any, e: PyTree) -> tuple[Array, Array]:
    """A second term with a denominator of its own."""
    return e["count"] * jnp.sum(model(e["x"]) ** 2), e["count"]


def _arrays(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


def norm(model: Any) -> Array:
    return 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(_arrays(model)))


def rows(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, count)[:, None]
    return {
        "x": normal(count, WIDTH) + np.linspace(0, 1, count, dtype=np.float32)[:, None],
        "z": normal(count, WIDTH),
        "xs": normal(count, LENGTH, WIDTH),
        "y": normal(count, OUT),
        "mask": mask,
        "count": rng.integers(1, 4, count).astype(np.float32),
    }


def mean_of(fn: Callable, e: PyTree) -> Array:
    return jnp.mean(jax.vmap(fn)(e))


def cases(count: int) -> Iterator[Case]:
    yield from _sums(Net(), rows(count))
    yield from _random(Net(), rows(count))
    yield from _coupled(Net(), rows(count))
    yield _batch_norm(rows(count))


# Sums over examples


def _sums(net: Net, batch: dict) -> Iterator[Case]:
    def one(model: Any, e: PyTree, key: Any) -> Array:
        return square(model, e["x"], e["y"])

    def full(model: Any, b: PyTree, key: Any) -> Array:
        return mean_of(lambda e: square(model, e["x"], e["y"]), b)

    yield Case("mean over examples", one, full, net, batch)

    def weighted(model: Any, b: PyTree, key: Any) -> Array:
        values = jax.vmap(lambda e: square(model, e["x"], e["y"]))(b)
        return jnp.sum(b["weight"] * values) / jnp.sum(b["weight"])

    count = len(batch["x"])
    weight = np.random.default_rng(1).uniform(0.1, 2, count).astype(np.float32)
    yield Case(
        "example weights",
        one,
        weighted,
        net,
        batch | {"weight": weight},
        weights=weight,
    )

    def by_token(model: Any, b: PyTree, key: Any) -> Array:
        totals, counts = jax.vmap(lambda e: tokens(model, e))(b)
        return jnp.sum(totals) / jnp.sum(counts)

    yield Case(
        "mean over tokens, ragged rows",
        lambda model, e, key: eqaccum.Mean(*tokens(model, e)),
        by_token,
        net,
        batch,
    )

    def two(model: Any, e: PyTree, key: Any) -> Any:
        second = eqaccum.Mean(*positions(model, e))
        return eqaccum.Mean(*tokens(model, e)) + 0.5 * second

    def two_full(model: Any, b: PyTree, key: Any) -> Array:
        totals, counts = jax.vmap(lambda e: positions(model, e))(b)
        return by_token(model, b, key) + 0.5 * jnp.sum(totals) / jnp.sum(counts)

    yield Case("two means, two denominators", two, two_full, net, batch)

    def penalised(model: Any, b: PyTree, key: Any) -> Array:
        return full(model, b, key) + norm(model)

    yield Case("penalty on the weights", one, penalised, net, batch, penalty=norm)


# Randomness


def _random(net: Net, batch: dict) -> Iterator[Case]:
    def dropped(model: Any, e: PyTree, key: Any) -> Array:
        return square(model, e["x"], e["y"], key)

    def full(model: Any, b: PyTree, key: Any) -> Array:
        return mean_of(lambda e: square(model, e["x"], e["y"], e["key"]), b)

    yield Case("dropout", dropped, full, net, batch, key="rows")

    def shifted(model: Any, e: PyTree, key: Any, step_key: Any) -> Array:
        shift = jr.normal(step_key, (WIDTH,), jnp.float32)
        return square(model, e["x"] + shift, e["y"])

    def shifted_full(model: Any, b: PyTree, key: Any) -> Array:
        return mean_of(lambda e: shifted(model, e, None, key), b)

    loss = eqaccum.shared_key(shifted)
    yield Case("noise shared by the step", loss, shifted_full, net, batch, key="shared")


# Losses of the whole batch


def _coupled(net: Net, batch: dict) -> Iterator[Case]:
    heads = {
        "mean(z)**2": lambda model, a, b: jnp.sum(jnp.mean(a, axis=0) ** 2),
        "router balance": _balance,
        "InfoNCE": _info_nce,
        "InfoNCE, both directions": lambda model, a, b: (
            _info_nce(model, a, b) + _info_nce(model, b, a)
        ),
        "sigmoid (SigLIP)": _sigmoid,
        "Barlow Twins": _barlow,
    }
    for name, head in heads.items():
        yield _coupled_case(name, head, net, batch)

    def grouped(model: Any, b: PyTree, key: Any) -> Array:
        a, z = (jax.vmap(model)(b[name]) for name in ("x", "z"))
        count, total = len(a), jnp.zeros(())
        for start in range(0, count, 4):  # the last one may be smaller
            part = slice(start, min(start + 4, count))
            share = (part.stop - start) / count
            total = total + share * _info_nce(model, a[part], z[part])
        return total

    yield Case(
        "InfoNCE in groups of 4",
        eqaccum.coupled(_embed, _head(_info_nce), group=4),
        grouped,
        net,
        batch,
    )


def _embed(model: Any, e: PyTree, key: Any) -> tuple[Array, Array]:
    return model(e["x"]), model(e["z"])


def _head(head: Callable) -> Callable:
    def weighted(model: Any, embeddings: Any, weights: Any) -> Array:
        return head(model, *embeddings)  # no row of weight 0 occurs here

    return weighted


def _coupled_case(name: str, head: Callable, net: Net, batch: dict) -> Case:
    def full(model: Any, b: PyTree, key: Any) -> Array:
        return head(model, jax.vmap(model)(b["x"]), jax.vmap(model)(b["z"]))

    return Case(name, eqaccum.coupled(_embed, _head(head)), full, net, batch)


def _unit(x: Array) -> Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _info_nce(model: Any, a: Array, b: Array) -> Array:
    scores = _unit(a) @ _unit(b).T / jnp.exp(model.log_temperature)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))


def _sigmoid(model: Any, a: Array, b: Array) -> Array:
    scores = _unit(a) @ _unit(b).T / jnp.exp(model.log_temperature) + model.bias
    labels = 2 * jnp.eye(len(a)) - 1
    return -jnp.sum(jax.nn.log_sigmoid(labels * scores)) / len(a)


def _barlow(model: Any, a: Array, b: Array) -> Array:
    def standard(x: Array) -> Array:
        centred = x - jnp.mean(x, axis=0, keepdims=True)
        return centred / jnp.sqrt(jnp.mean(centred**2, axis=0, keepdims=True) + 1e-3)

    correlation = standard(a).T @ standard(b) / len(a)
    off = correlation * (1 - jnp.eye(OUT))
    diagonal = jnp.diagonal(correlation)
    return jnp.sum((diagonal - 1) ** 2) + 0.005 * jnp.sum(off**2)


def _balance(model: Any, a: Array, b: Array) -> Array:
    """Switch Transformer's: experts times the share of rows by the mean probability."""
    probabilities = jax.nn.softmax(a)
    chosen = jax.nn.one_hot(jnp.argmax(a, axis=-1), OUT, dtype=a.dtype)
    return OUT * jnp.sum(jnp.mean(chosen, axis=0) * jnp.mean(probabilities, axis=0))


# The one that depends on the cut by its nature


def _batch_norm(batch: dict) -> Case:
    model, state = eqx.nn.make_with_state(Normed)()

    def loss(model: Any, state: Any, e: PyTree, key: Any) -> tuple[Array, Any]:
        hidden, state = model.norm(model.net.first(e["x"]), state)
        return jnp.sum((model.net.second(jnp.tanh(hidden)) - e["y"]) ** 2), state

    def full(model: Any, b: PyTree, key: Any) -> Array:
        hidden = jax.vmap(model.net.first)(b["x"])
        centred = hidden - jnp.mean(hidden, axis=0, keepdims=True)
        variance = jnp.mean(centred**2, axis=0, keepdims=True)
        out = centred / jnp.sqrt(variance + model.norm.eps)
        out = out * model.norm.weight[None] + model.norm.bias[None]
        out = jax.vmap(model.net.second)(jnp.tanh(out))
        return jnp.mean(jnp.sum((out - b["y"]) ** 2, axis=1))

    return Case("BatchNorm", loss, full, model, batch, state=state, exact=False)
