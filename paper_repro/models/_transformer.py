"""The small encoder that is trained from scratch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from .. import _errors
from ..data import Tokens
from ._layers import FeedForward, SelfAttention, split_or_none


class Transformer(eqx.Module):
    """A transformer encoder that normalises before each part (pre-LN).

    The defaults are those of the small runs: 2 layers, d = 128, 4 heads.

    **Arguments:**

    - `vocab_size`: word pieces in the vocabulary.
    - `max_length`: the longest text, in word pieces.
    - `width`: d.
    - `depth`: the number of layers.
    - `num_heads`: heads of the attention.
    - `hidden`: width inside the feed-forward part.
    - `dropout`: in training, after the embeddings and each part, and on the attention.
    - `causal`: whether a token sees only itself and those before it.
    - `key`: for the initial weights.

    !!! Example

        ```python
        encoder = Transformer(vocab_size=30522, max_length=64, key=jax.random.key(0))
        states = encoder(tokens)
        ```
    """

    words: Float[Array, "vocabulary d"]
    positions: Float[Array, "max_length d"]
    layers: tuple["_Layer", ...]
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    causal: bool = eqx.field(static=True)

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int,
        width: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        hidden: int = 512,
        dropout: float = 0.0,
        causal: bool = False,
        key: PRNGKeyArray,
    ):
        words_key, positions_key, *layer_keys = jr.split(key, 2 + depth)
        # Far below what Adam moves them in a short run: a rare word's first gradients
        # then set its direction (the loss falls much faster than from 0.02 or 0.1).
        self.words = 0.004 * jr.normal(words_key, (vocab_size, width))
        self.positions = 0.004 * jr.normal(positions_key, (max_length, width))
        self.layers = tuple(
            _Layer(
                width=width,
                num_heads=num_heads,
                hidden=hidden,
                dropout=dropout,
                key=layer_key,
            )
            for layer_key in layer_keys
        )
        self.norm = eqx.nn.LayerNorm(width)
        self.dropout = eqx.nn.Dropout(dropout)
        self.causal = causal

    def __call__(
        self, tokens: Tokens, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "T d"]:
        """The last layer's states of one text's tokens.

        **Arguments:**

        - `tokens`: one text.
        - `key`: for dropout; needed in training unless it is 0.

        **Returns:** One state per token, those of the padding included.
        """
        length = len(tokens)
        if length > len(self.positions):
            raise _errors.too_long(length, len(self.positions))
        first_key, *layer_keys = split_or_none(key, 1 + len(self.layers))
        x = self.words[jnp.asarray(tokens.ids)] + self.positions[:length]
        x = self.dropout(x, key=first_key)
        mask = jnp.asarray(tokens.mask)
        if self.causal:
            mask = jnp.tril(jnp.broadcast_to(mask[None, :], (length, length)))
        for layer, layer_key in zip(self.layers, layer_keys, strict=True):
            x = layer(x, mask, key=layer_key)
        return jax.vmap(self.norm)(x)


class _Layer(eqx.Module):
    attention_norm: eqx.nn.LayerNorm
    attention: SelfAttention
    feed_forward_norm: eqx.nn.LayerNorm
    feed_forward: FeedForward
    dropout: eqx.nn.Dropout

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        hidden: int,
        dropout: float,
        key: PRNGKeyArray,
    ):
        attention_key, feed_forward_key = jr.split(key)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = SelfAttention(
            width=width, num_heads=num_heads, dropout=dropout, key=attention_key
        )
        self.feed_forward_norm = eqx.nn.LayerNorm(width)
        self.feed_forward = FeedForward(
            width=width, hidden=hidden, key=feed_forward_key
        )
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "T d"],
        mask: Bool[Array, "*queries T"],
        *,
        key: PRNGKeyArray | None,
    ) -> Float[Array, "T d"]:
        keys = split_or_none(key, 3)
        seen = self.attention(jax.vmap(self.attention_norm)(x), mask, key=keys[0])
        x = x + self.dropout(seen, key=keys[1])
        thought = self.feed_forward(jax.vmap(self.feed_forward_norm)(x))
        return x + self.dropout(thought, key=keys[2])
