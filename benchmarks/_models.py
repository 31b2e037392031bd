"""The models that the benchmarks share: plain Equinox, no import of eqaccum.

Each function builds one workload; its arguments are sizes. Rows are random, for what
is measured does not depend on them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Workload:
    """A model, its loss for one example, and rows to train on.

    - `loss`: `(model, example, key)` -> value, or with a state
        `(model, state, example, key)` -> (value, state).
    - `rows`: makes so many rows, as a pytree of numpy arrays.
    - `axis_name`: the name that the loss's axis over examples must have.
    """

    name: str
    model: Any
    loss: Loss
    rows: Callable[[int], PyTree]
    state: eqx.nn.State | None = None
    convolutions: bool = False
    axis_name: str = "batch"


@dataclass(frozen=True)
class CoupledWorkload:
    """A model whose loss couples the rows of the global batch.

    - `embed`: `(model, example, key)` -> embeddings of one example.
    - `head`: `(model, embeddings, weights)` of all rows -> value.
    """

    name: str
    model: Any
    embed: Loss
    head: Loss
    rows: Callable[[int], PyTree]


def cross_entropy(logits: Float[Array, "*rows n"], labels: Int[Array, "*rows"]):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _classified(model: Any, example: Any, key: Any) -> Float[Array, ""]:
    x, y = example
    return cross_entropy(model(x, key=key), y)


def _classified_with_state(model: Any, state: Any, example: Any, key: Any):
    x, y = example
    logits, state = model(x, state, key=key)
    return cross_entropy(logits, y), state


def _next_token(model: Any, tokens: Int[Array, "n"], key: Any) -> Float[Array, ""]:
    return jnp.mean(cross_entropy(model(tokens[:-1], key=key), tokens[1:]))


def _labelled(shape: tuple[int, ...], classes: int) -> Callable[[int], PyTree]:
    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        x = random.standard_normal((count, *shape), np.float32)
        return x, random.integers(0, classes, count, np.int32)

    return rows


def _tokens(length: int, vocabulary: int) -> Callable[[int], PyTree]:
    def rows(count: int) -> np.ndarray:
        random = np.random.default_rng(0)
        return random.integers(0, vocabulary, (count, length), np.int32)

    return rows


# Multilayer perceptron


def mlp(*, features: int, width: int, depth: int, classes: int) -> Workload:
    """Fully connected layers."""
    model = eqx.nn.MLP(features, classes, width, depth, key=jr.key(0))
    return Workload("MLP", model, _classified, _labelled((features,), classes))


# Convolutions


class _Block(eqx.Module):
    """Two convolutions around a shortcut, normed by groups of channels."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    norm1: eqx.nn.GroupNorm
    norm2: eqx.nn.GroupNorm
    shortcut: eqx.nn.Conv2d | None

    def __init__(self, inside: int, outside: int, stride: int, key: Key[Array, ""]):
        k1, k2, k3 = jr.split(key, 3)
        self.conv1 = _conv3(inside, outside, stride, k1)
        self.conv2 = _conv3(outside, outside, 1, k2)
        self.norm1 = eqx.nn.GroupNorm(8, outside)
        self.norm2 = eqx.nn.GroupNorm(8, outside)
        self.shortcut = None
        if stride != 1 or inside != outside:
            self.shortcut = eqx.nn.Conv2d(
                inside, outside, 1, stride, use_bias=False, key=k3
            )

    def __call__(self, x: Float[Array, "c h w"]) -> Float[Array, "d i j"]:
        out = jax.nn.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return jax.nn.relu(out + (x if self.shortcut is None else self.shortcut(x)))


def _conv3(inside: int, outside: int, stride: int, key: Key[Array, ""]):
    return eqx.nn.Conv2d(inside, outside, 3, stride, padding=1, use_bias=False, key=key)


class _ResNet(eqx.Module):
    stem: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    blocks: list[_Block]
    head: eqx.nn.Linear

    def __init__(self, widths: tuple[int, ...], blocks: int, classes: int):
        stem, head, *keys = jr.split(jr.key(0), 2 + len(widths) * blocks)
        self.stem = _conv3(3, widths[0], 1, stem)
        self.norm = eqx.nn.GroupNorm(8, widths[0])
        sizes = [width for width in widths for _ in range(blocks)]
        self.blocks = [
            _Block(inside, outside, 1 if inside == outside else 2, key)
            for (inside, outside), key in zip(
                pairwise([widths[0], *sizes]), keys, strict=True
            )
        ]
        self.head = eqx.nn.Linear(widths[-1], classes, key=head)

    def __call__(self, x: Float[Array, "3 h w"], *, key: Any = None):
        x = jax.nn.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def cnn(
    *, size: int, widths: tuple[int, ...], blocks: int = 2, classes: int = 10
) -> Workload:
    """A residual network with group norm; each width but the first halves the image."""
    return Workload(
        "CNN",
        _ResNet(widths, blocks, classes),
        _classified,
        _labelled((3, size, size), classes),
        convolutions=True,
    )


class _BatchNormNet(eqx.Module):
    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    head: eqx.nn.Linear

    def __init__(self, widths: tuple[int, ...], classes: int):
        head, *keys = jr.split(jr.key(0), 1 + len(widths))
        self.convs = [
            _conv3(inside, outside, 1 if inside == 3 else 2, key)
            for (inside, outside), key in zip(pairwise((3, *widths)), keys, strict=True)
        ]
        self.norms = [eqx.nn.BatchNorm(w, "batch", mode="batch") for w in widths]
        self.head = eqx.nn.Linear(widths[-1], classes, key=head)

    def __call__(self, x: Float[Array, "3 h w"], state: Any, *, key: Any = None):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x, state = norm(conv(x), state)
            x = jax.nn.relu(x)
        return self.head(jnp.mean(x, axis=(1, 2))), state


def batch_norm_net(
    *, size: int, widths: tuple[int, ...], classes: int = 10
) -> Workload:
    """Convolutions with batch norm: a state that moves with every microbatch."""
    model, state = eqx.nn.make_with_state(_BatchNormNet)(widths, classes)
    return Workload(
        "BatchNorm",
        model,
        _classified_with_state,
        _labelled((3, size, size), classes),
        state=state,
        convolutions=True,
    )


# Transformers


class _TransformerLayer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    wide: eqx.nn.Linear
    narrow: eqx.nn.Linear
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, width: int, heads: int, key: Key[Array, ""]):
        k1, k2, k3 = jr.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=k1)
        self.wide = eqx.nn.Linear(width, 4 * width, key=k2)
        self.narrow = eqx.nn.Linear(4 * width, width, key=k3)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.norm2 = eqx.nn.LayerNorm(width)

    def __call__(self, x: Float[Array, "n d"], mask: Any) -> Float[Array, "n d"]:
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask)
        hidden = jax.nn.gelu(jax.vmap(self.wide)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.narrow)(hidden)


class _Transformer(eqx.Module):
    """Pre-norm layers over a sequence of vectors."""

    positions: Float[Array, "n d"]
    layers: list[_TransformerLayer]
    norm: eqx.nn.LayerNorm
    causal: bool = eqx.field(static=True)

    def __init__(
        self, length: int, width: int, depth: int, heads: int, causal: bool, key: Any
    ):
        k, *keys = jr.split(key, 1 + depth)
        self.positions = 0.02 * jr.normal(k, (length, width))
        self.layers = [_TransformerLayer(width, heads, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.causal = causal

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool)) if self.causal else None
        x = x + self.positions[: len(x)]
        for layer in self.layers:
            x = layer(x, mask)
        return jax.vmap(self.norm)(x)


class _LanguageModel(eqx.Module):
    embed: eqx.nn.Embedding
    body: _Transformer
    head: eqx.nn.Linear

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int
    ):
        k1, k2, k3 = jr.split(jr.key(0), 3)
        self.embed = eqx.nn.Embedding(vocabulary, width, key=k1)
        self.body = _Transformer(length, width, depth, heads, True, k2)
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=k3)

    def __call__(self, tokens: Int[Array, "n"], *, key: Any = None):
        return jax.vmap(self.head)(self.body(jax.vmap(self.embed)(tokens)))


def language_model(
    *, vocabulary: int, length: int, width: int, depth: int, heads: int
) -> Workload:
    """A causal transformer that reads `length` tokens and predicts the next ones."""
    return Workload(
        "transformer LM",
        _LanguageModel(vocabulary, length, width, depth, heads),
        _next_token,
        _tokens(length + 1, vocabulary),
    )


class _VisionTransformer(eqx.Module):
    patch: int = eqx.field(static=True)
    embed: eqx.nn.Linear
    body: _Transformer
    head: eqx.nn.Linear

    def __init__(
        self, size: int, patch: int, width: int, depth: int, heads: int, classes: int
    ):
        k1, k2, k3 = jr.split(jr.key(0), 3)
        self.patch = patch
        self.embed = eqx.nn.Linear(3 * patch**2, width, key=k1)
        length = (size // patch) ** 2
        self.body = _Transformer(length, width, depth, heads, False, k2)
        self.head = eqx.nn.Linear(width, classes, key=k3)

    def __call__(self, x: Float[Array, "3 h w"], *, key: Any = None):
        p, (c, h, w) = self.patch, x.shape
        x = x.reshape(c, h // p, p, w // p, p).transpose(1, 3, 0, 2, 4)
        x = jax.vmap(self.embed)(x.reshape(-1, c * p * p))
        return self.head(jnp.mean(self.body(x), axis=0))


def vision_transformer(
    *, size: int, patch: int, width: int, depth: int, heads: int, classes: int = 10
) -> Workload:
    """A vision transformer whose patches are cut by reshaping: no convolution."""
    return Workload(
        "ViT",
        _VisionTransformer(size, patch, width, depth, heads, classes),
        _classified,
        _labelled((3, size, size), classes),
    )


# Recurrence


class _GRU(eqx.Module):
    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, width: int):
        k1, k2, k3 = jr.split(jr.key(0), 3)
        self.embed = eqx.nn.Embedding(vocabulary, width, key=k1)
        self.cell = eqx.nn.GRUCell(width, width, key=k2)
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=k3)

    def __call__(self, tokens: Int[Array, "n"], *, key: Any = None):
        def cell(hidden: Array, x: Array) -> tuple[Array, Array]:
            hidden = self.cell(x, hidden)
            return hidden, hidden

        start = jnp.zeros(self.cell.hidden_size)
        _, hidden = jax.lax.scan(cell, start, jax.vmap(self.embed)(tokens))
        return jax.vmap(self.head)(hidden)


def gru(*, vocabulary: int, length: int, width: int) -> Workload:
    """A recurrent network, scanned over `length` tokens."""
    return Workload(
        "GRU",
        _GRU(vocabulary, width),
        _next_token,
        _tokens(length + 1, vocabulary),
    )


# Two towers


class _DualEncoder(eqx.Module):
    query: eqx.nn.MLP
    passage: eqx.nn.MLP
    log_temperature: Float[Array, ""]

    def __init__(self, features: int, width: int, depth: int, size: int):
        k1, k2 = jr.split(jr.key(0))
        self.query = eqx.nn.MLP(features, size, width, depth, key=k1)
        self.passage = eqx.nn.MLP(features, size, width, depth, key=k2)
        self.log_temperature = jnp.log(jnp.asarray(0.07))


def _embed_pair(model: _DualEncoder, example: Any, key: Any):
    def unit(x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.sum(x * x) + 1e-12)

    query, passage = example
    return unit(model.query(query)), unit(model.passage(passage))


def _info_nce(model: _DualEncoder, embeddings: Any, weights: Float[Array, "n"]):
    """Each query against all passages; rows of weight 0 are neither."""
    query, passage = embeddings
    scores = query @ passage.T / jnp.exp(model.log_temperature)
    scores = jnp.where(weights[None, :] > 0, scores, -1e9)
    losses = cross_entropy(scores, jnp.arange(len(query)))
    return jnp.sum(losses * weights) / jnp.sum(weights)


class _TransformerPair(eqx.Module):
    """Two transformers over sequences of vectors, the mean over positions."""

    query: _Transformer
    passage: _Transformer
    log_temperature: Float[Array, ""]

    def __init__(self, length: int, width: int, depth: int, heads: int):
        k1, k2 = jr.split(jr.key(0))
        self.query = _Transformer(length, width, depth, heads, False, k1)
        self.passage = _Transformer(length, width, depth, heads, False, k2)
        self.log_temperature = jnp.log(jnp.asarray(0.07))


def _embed_sequences(model: _TransformerPair, example: Any, key: Any):
    def unit(x: Array) -> Array:
        mean = jnp.mean(x, axis=0)
        return mean * jax.lax.rsqrt(jnp.sum(mean * mean) + 1e-12)

    query, passage = example
    return unit(model.query(query)), unit(model.passage(passage))


def transformer_dual_encoder(
    *, length: int, width: int, depth: int, heads: int
) -> CoupledWorkload:
    """Two transformers under InfoNCE."""

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        both = random.standard_normal((2, count, length, width), np.float32)
        return both[0], both[1]

    model = _TransformerPair(length, width, depth, heads)
    return CoupledWorkload(
        "transformer dual encoder", model, _embed_sequences, _info_nce, rows
    )


def dual_encoder(
    *, features: int, width: int, depth: int, size: int
) -> CoupledWorkload:
    """Two towers under InfoNCE: every row is every other row's negative."""

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        both = random.standard_normal((2, count, features), np.float32)
        return both[0], both[1]

    return CoupledWorkload(
        "dual encoder",
        _DualEncoder(features, width, depth, size),
        _embed_pair,
        _info_nce,
        rows,
    )
