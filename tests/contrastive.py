"""Encoders for contrastive losses, and the same losses by hand in float64 numpy.

No code of eqaccum is used, except in `head`, which is what the tests are about. Keys
follow the documented formula.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from reference import example_keys

import eqaccum

DIM = 4


class Towers(eqx.Module):
    """Two encoders, or one for both sides, and a learnt temperature."""

    query: eqx.nn.Linear
    passage: eqx.nn.Linear | None
    dropout: eqx.nn.Dropout
    log_t: jax.Array

    def __init__(self, *, tied: bool = False, dtype: Any = jnp.float32):
        keys = jax.random.split(jax.random.key(0))
        self.query = eqx.nn.Linear(3, DIM, key=keys[0], dtype=dtype)
        self.passage = None
        if not tied:
            self.passage = eqx.nn.Linear(3, DIM, key=keys[1], dtype=dtype)
        self.dropout = eqx.nn.Dropout(0.3)
        self.log_t = jnp.asarray(-0.4, dtype)

    def __call__(self, x, *, side):
        tower = self.query if side == 0 or self.passage is None else self.passage
        return jnp.tanh(tower(x))


def embed(model, example, key):
    q, p, hard = example
    return model(q, side=0), model(p, side=1), model(hard, side=1)


def embed_with_dropout(model, example, key):
    q, p, hard = embed(model, example, key)
    return model.dropout(q, key=key), p, hard


def head(model, embeddings, weights, *, symmetric=False, hard=True):
    q, p, h = embeddings
    return eqaccum.losses.info_nce(
        q,
        p,
        temperature=jnp.exp(model.log_t),
        weights=weights,
        hard_negatives=h if hard else None,
        symmetric=symmetric,
    )


def rows_of(count, dtype=np.float32, seed=0):
    rng = np.random.default_rng((seed, count))
    return tuple(rng.normal(size=(count, 3)).astype(dtype) for _ in range(3))


def softmax(x):
    exps = np.exp(x - x.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def contrast(q, columns, w, t):
    """Mean of -log softmax at the own column; its slopes at q, columns and log t."""
    scores = q @ columns.T / t
    chances = softmax(scores)
    own = np.arange(len(q))
    value = -np.sum(w * np.log(chances[own, own]))
    chances[own, own] -= 1
    slope = w[:, None] * chances
    return value, slope @ columns / t, slope.T @ q / t, -np.sum(slope * scores)


def full(model, batch, weights, *, masks=None, symmetric=False, hard=True):
    """(value, gradient) of all rows at once by hand, in float64 numpy.

    Rows of weight 0 are not there at all. `masks` are dropout's, for the queries.
    """
    there = np.flatnonzero(weights)
    w = np.asarray(weights, np.float64)[there]
    w /= w.sum()
    x = [np.asarray(rows, np.float64)[there] for rows in batch]
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), model)
    sides = [wide.query, wide.passage or wide.query, wide.passage or wide.query]
    z = [np.tanh(x @ m.weight.T + m.bias) for x, m in zip(x, sides, strict=True)]
    keep = np.ones_like(z[0]) if masks is None else masks[there]
    q, p, h = z[0] * keep, z[1], z[2]
    n, t = len(there), np.exp(wide.log_t)
    columns = np.concatenate([p, h]) if hard else p
    value, dq, dcolumns, dt = contrast(q, columns, w, t)
    slopes = [dq, dcolumns[:n], dcolumns[n:] if hard else np.zeros_like(h)]
    if symmetric:
        back, dp, dq, more = contrast(p, q, w, t)
        value, dt = (value + back) / 2, (dt + more) / 2
        slopes = [s / 2 for s in (slopes[0] + dq, slopes[1] + dp, slopes[2])]
    slopes[0] = slopes[0] * keep
    before = [s * (1 - z**2) for s, z in zip(slopes, z, strict=True)]
    towers = [(s.T @ x, s.sum(axis=0)) for s, x in zip(before, x, strict=True)]

    def both(*parts):
        return tuple(sum(leaves) for leaves in zip(*parts, strict=True))

    if wide.passage is None:
        leaves = [*both(*towers), dt]
    else:
        leaves = [*towers[0], *both(*towers[1:]), dt]
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    structure = jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))
    typed = [np.asarray(g, a.dtype) for g, a in zip(leaves, arrays, strict=True)]
    return value, jax.tree.unflatten(structure, typed)


@functools.partial(jax.jit, static_argnums=1)
def dropout_masks(key, rows):
    """What `embed_with_dropout` multiplies the queries by, row by row."""
    keys, _ = example_keys(key, rows)
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.7, (DIM,)))(keys)
    return keep / 0.7
