"""A small language model: the causal transformer, its word vectors used twice."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..data import Tokens
from ._transformer import Transformer


class LanguageModel(eqx.Module):
    """Predicts each word piece of a text from those before it.

    **Arguments:**

    - `vocab_size`, `max_length`, `width`, `depth`, `num_heads`, `hidden`: as in
        `Transformer`.
    - `key`: for the initial weights.

    !!! Example

        ```python
        model = LanguageModel(vocab_size=2000, max_length=64, key=jax.random.key(0))
        losses = model.losses(tokens)
        ```
    """

    decoder: Transformer

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int,
        width: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        hidden: int = 256,
        key: PRNGKeyArray,
    ):
        self.decoder = Transformer(
            vocab_size=vocab_size,
            max_length=max_length,
            width=width,
            depth=depth,
            num_heads=num_heads,
            hidden=hidden,
            causal=True,
            key=key,
        )

    def losses(self, tokens: Tokens) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The summed cross-entropy of one text, and how many word pieces it is of.

        The first piece is given, and padding is not counted.
        """
        ids = jnp.asarray(tokens.ids)
        counted = jnp.asarray(tokens.mask)[1:]
        logits = self.decoder(tokens)[:-1] @ self.decoder.words.T
        own = jnp.take_along_axis(logits, ids[1:, None], axis=1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=1) - own
        return jnp.sum(losses, where=counted), jnp.sum(counted).astype(jnp.float32)


@eqx.filter_jit
def language_model(**arguments: Any) -> LanguageModel:
    """A `LanguageModel`, made by one program instead of one for each operation."""
    return LanguageModel(**arguments)
