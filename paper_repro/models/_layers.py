"""The two parts that every transformer layer here is made of."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from .. import _errors


class SelfAttention(eqx.Module):
    """Each token looks at all tokens of its text, in several heads; no padding is seen.

    **Arguments:**

    - `width`: d, shared out evenly to the heads.
    - `num_heads`: the number of heads.
    - `dropout`: how much of the attention weights is dropped in training.
    - `key`: for the initial weights.

    !!! Example

        ```python
        attention = SelfAttention(width=128, num_heads=4, dropout=0.1, key=key)
        ```
    """

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)

    def __init__(
        self, *, width: int, num_heads: int, dropout: float, key: PRNGKeyArray
    ):
        if width % num_heads:
            raise _errors.width_and_heads(width, num_heads)
        keys = jr.split(key, 4)
        self.query, self.key, self.value, self.output = (
            eqx.nn.Linear(width, width, key=key) for key in keys
        )
        self.dropout = eqx.nn.Dropout(dropout)
        self.num_heads = num_heads

    def __call__(
        self,
        x: Float[Array, "T d"],
        mask: Bool[Array, "*queries T"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "T d"]:
        """The tokens mixed: `mask` says what all of them, or each of them, may see."""
        queries, keys, values = (
            self._heads(linear, x) for linear in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("qhc,khc->hqk", queries, keys)
        # The softmax in float32: half precision would lose the small weights.
        scores = scores.astype(jnp.float32) / queries.shape[-1] ** 0.5
        # Not -inf: a text that is all padding would give NaN.
        lowest = jnp.finfo(jnp.float32).min
        weights = jax.nn.softmax(jnp.where(mask.reshape(1, -1, len(x)), scores, lowest))
        weights = self.dropout(weights.astype(x.dtype), key=key)
        mixed = jnp.einsum("hqk,khc->qhc", weights, values)
        return jax.vmap(self.output)(mixed.reshape(x.shape))

    def _heads(
        self, linear: Callable[[Array], Array], x: Float[Array, "T d"]
    ) -> Float[Array, "T heads c"]:
        return jax.vmap(linear)(x).reshape(x.shape[0], self.num_heads, -1)


class FeedForward(eqx.Module):
    """Two linear maps with a nonlinearity between, for each token by itself.

    !!! Example

        ```python
        feed_forward = FeedForward(width=128, hidden=512, key=key)
        ```
    """

    inner: eqx.nn.Linear
    outer: eqx.nn.Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        *,
        width: int,
        hidden: int,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        key: PRNGKeyArray,
    ):
        inner_key, outer_key = jr.split(key)
        self.inner = eqx.nn.Linear(width, hidden, key=inner_key)
        self.outer = eqx.nn.Linear(hidden, width, key=outer_key)
        self.activation = activation

    def __call__(self, x: Float[Array, "T d"]) -> Float[Array, "T d"]:
        return jax.vmap(lambda row: self.outer(self.activation(self.inner(row))))(x)


def split_or_none(key: PRNGKeyArray | None, number: int) -> list[PRNGKeyArray | None]:
    """Keys for parts that take one or None."""
    return [None] * number if key is None else list(jr.split(key, number))
