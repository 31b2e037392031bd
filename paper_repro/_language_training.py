"""What the language-model experiments share: the model, its loss, its test loss."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

import eqaccum

from .data import Tokens
from .models import LanguageModel, language_model


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The size of the language model."""

    width: int = 64
    depth: int = 2
    num_heads: int = 4
    hidden: int = 256


TINY_MODEL = ModelConfig(width=8, depth=0)


def fresh_model(
    config: ModelConfig, tokens: Tokens, *, vocab_size: int, seed: int
) -> LanguageModel:
    """A model of this size for these texts."""
    return language_model(
        vocab_size=vocab_size,
        max_length=tokens.ids.shape[1],
        **dataclasses.asdict(config),
        key=jr.key(seed),
    )


def token_loss(model: LanguageModel, example: Tokens, key: Any) -> eqaccum.Mean:
    """A text's loss, to be divided once by the tokens of the global batch."""
    return eqaccum.Mean(*model.losses(example))


@eqx.filter_jit
def token_mean(model: LanguageModel, batch: Tokens) -> Float[Array, ""]:
    """The loss per token over a whole batch, in plain JAX."""
    totals, counts = jax.vmap(model.losses)(batch)
    return jnp.sum(totals) / jnp.maximum(jnp.sum(counts), 1)


def test_loss(model: LanguageModel, tokens: Tokens) -> float:
    """The loss per token over texts that were not trained on."""
    return float(token_mean(model, tokens))
