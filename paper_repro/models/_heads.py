"""From token states to one vector per text; two encoders side by side."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from ..data import Tokens
from ._layers import split_or_none

Pooling = Literal["cls", "mean"]


class TextEncoder(eqx.Module):
    """An encoder with its head: one vector per text, compared by inner product.

    **Arguments:**

    - `encoder`: gives one state per token, `(tokens, *, key) -> (T, d)`.
    - `pooling`: `"cls"`, the first token's state, or `"mean"`, that of all tokens.
    - `normalize`: to length 1, which makes the inner product the cosine.

    CLS with dot product is the papers' head; mean with cosine is MiniLM's.

    !!! Example

        ```python
        encode = TextEncoder(encoder, pooling="cls", normalize=False)
        q = encode(tokens)
        ```
    """

    encoder: Any
    pooling: Pooling = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)

    def __init__(self, encoder: Any, *, pooling: Pooling, normalize: bool):
        self.encoder = encoder
        self.pooling = pooling
        self.normalize = normalize

    def __call__(
        self, tokens: Tokens, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " d"]:
        states = self.encoder(tokens, key=key)
        pool = cls_state if self.pooling == "cls" else mean_state
        vector = pool(states, jnp.asarray(tokens.mask))
        return unit(vector) if self.normalize else vector


class DualEncoder(eqx.Module):
    """The query encoder f and the passage encoder g, with weights of their own.

    **Arguments:**

    - `query`, `passage`: a `TextEncoder` each. To begin from one pretrained encoder
        pass it twice: in training the two then go their own ways.

    !!! Example

        ```python
        model = DualEncoder(query=encode, passage=encode)
        q, p = model(query_tokens, passage_tokens, key=key)
        ```
    """

    query: TextEncoder
    passage: TextEncoder

    def __call__(
        self, query: Tokens, passage: Tokens, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        query_key, passage_key = split_or_none(key, 2)
        q = self.query(query, key=query_key)
        return q, self.passage(passage, key=passage_key)


def cls_state(
    states: Float[Array, "T d"], mask: Bool[Array, " T"]
) -> Float[Array, " d"]:
    """The state of the first token."""
    del mask
    return states[0]


def mean_state(
    states: Float[Array, "T d"], mask: Bool[Array, " T"]
) -> Float[Array, " d"]:
    """The mean of the states, padding left out."""
    total = jnp.sum(states, axis=0, where=mask[:, None])
    return total / jnp.maximum(jnp.sum(mask), 1).astype(states.dtype)


def unit(vector: Float[Array, " d"]) -> Float[Array, " d"]:
    """The vector at length 1; 0 stays 0."""
    squared = jnp.sum(vector.astype(jnp.float32) ** 2)
    return vector * jax.lax.rsqrt(jnp.maximum(squared, 1e-24)).astype(vector.dtype)


def encode_all(
    encoder: TextEncoder, tokens: Tokens, *, block: int = 128, step: int = 32
) -> Float[np.ndarray, "texts d"]:
    """The vectors of many texts, in inference mode.

    Texts of about one length are encoded together and cut to the longest of them, for
    most of a corpus is padding.

    **Arguments:**

    - `encoder`: a `TextEncoder`.
    - `tokens`: the texts.
    - `block`: how many texts at a time.
    - `step`: lengths are rounded up to a multiple of it; each length is compiled once.

    !!! Example

        ```python
        hits = search(encode_all(f, queries), encode_all(g, passages), k=100)
        ```
    """
    encoder = eqx.nn.inference_mode(encoder)
    mask = np.asarray(tokens.mask)
    # The place of the last token, for a mask may have gaps.
    lengths = np.where(mask, np.arange(1, mask.shape[1] + 1)[None, :], 0).max(axis=1)
    order = np.argsort(lengths, kind="stable")
    vectors: list[np.ndarray] = []
    for start in range(0, len(order), block):
        rows = order[start : start + block]
        longest = max(int(lengths[rows[-1]]), 1)
        length = min(-(-longest // step) * step, mask.shape[1])
        # One size, so one program per length: the last block repeats its last text.
        filled = np.pad(rows, (0, block - len(rows)), mode="edge")
        part = Tokens(np.asarray(tokens.ids)[filled, :length], mask[filled, :length])
        vectors += list(np.asarray(_encode(encoder, part))[: len(rows)])
    return np.stack([vectors[place] for place in np.argsort(order, kind="stable")])


@eqx.filter_jit
def _encode(encoder: TextEncoder, tokens: Tokens) -> Float[Array, "block d"]:
    return jax.vmap(lambda one: encoder(one))(tokens)
