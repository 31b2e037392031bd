"""The dual encoder of the retrieval experiments, its loss, and its measures."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

import eqaccum

from ._retrieval import Scores, is_gold, scores, search
from ._texts import RetrievalTask
from .data import Tokens
from .models import (
    DualEncoder,
    TextEncoder,
    Transformer,
    encode_all,
    load_bert,
    load_minilm,
)

# The training data of a retriever: queries, passages, and hard negatives or none.
Example = tuple[Tokens, Tokens] | tuple[Tokens, Tokens, Tokens]


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Which encoder, and how its vectors are compared.

    **Attributes:**

    - `weights`: `"fresh"`, `"minilm"`, or the folder of a BERT checkpoint.
    - `width`, `depth`, `num_heads`, `hidden`: of a fresh one.
    - `pooling`, `normalize`: the head; the paper's is CLS without normalising.
    - `temperature`: the scores are divided by it.
    """

    weights: str = "fresh"
    width: int = 128
    depth: int = 2
    num_heads: int = 4
    hidden: int = 512
    pooling: Literal["cls", "mean"] = "mean"
    normalize: bool = True
    temperature: float = 0.05


# No layer: what compiles takes most of a tiny run.
TINY_ENCODER = EncoderConfig(width=8, depth=0)


def dual_encoder(
    config: EncoderConfig, task: RetrievalTask, *, key: PRNGKeyArray
) -> DualEncoder:
    """Two encoders, each with weights of its own."""
    if config.weights == "fresh":
        length = task.corpus.ids.shape[1]
        return _fresh(config, task.vocab_size, length, key)
    minilm = config.weights == "minilm"
    encoder = load_minilm() if minilm else load_bert(config.weights)
    one = TextEncoder(encoder, pooling=config.pooling, normalize=config.normalize)
    return DualEncoder(query=one, passage=one)


@eqx.filter_jit
def _fresh(
    config: EncoderConfig, vocab_size: int, max_length: int, key: PRNGKeyArray
) -> DualEncoder:
    def one(key: PRNGKeyArray) -> TextEncoder:
        encoder = Transformer(
            vocab_size=vocab_size,
            max_length=max_length,
            width=config.width,
            depth=config.depth,
            num_heads=config.num_heads,
            hidden=config.hidden,
            key=key,
        )
        return TextEncoder(encoder, pooling=config.pooling, normalize=config.normalize)

    query_key, passage_key = jr.split(key)
    return DualEncoder(query=one(query_key), passage=one(passage_key))


def embed(model: DualEncoder, example: Example, key: PRNGKeyArray | None) -> Any:
    """The vectors of a query, of its passage, and of its hard negative if it has one.

    The negative is encoded as its passage is, in the same draw of dropout.
    """
    query, passage, *negative = example
    keys = (None, None) if key is None else tuple(jr.split(key))
    vectors = [model.query(query, key=keys[0]), model.passage(passage, key=keys[1])]
    return (*vectors, *(model.passage(one, key=keys[1]) for one in negative))


def head(
    config: EncoderConfig, *, block_rows: int | None = None
) -> Callable[[DualEncoder, Any, Array], Float[Array, ""]]:
    """InfoNCE over what it is given: a group, a group and a bank, or the whole batch.

    **Arguments:**

    - `config`: its temperature is used.
    - `block_rows`: rows of the similarity matrix at a time, None for all.
    """

    def loss(model: DualEncoder, embeddings: Any, weights: Array) -> Float[Array, ""]:
        del model
        q, p, *negative = embeddings
        return eqaccum.losses.info_nce(
            q,
            p,
            temperature=config.temperature,
            weights=weights,
            hard_negatives=negative[0] if negative else None,
            block_rows=block_rows,
        )

    return loss


def plain_info_nce(
    model: DualEncoder, batch: Example, *, temperature: float
) -> Float[Array, ""]:
    """Equation (1) of the paper written down in plain JAX, for comparison."""
    q, p, *negative = jax.vmap(lambda example: embed(model, example, None))(batch)
    columns = jnp.concatenate([p, *negative])
    similarity = q @ columns.T / temperature  # S
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(similarity, axis=1)))


def training_data(task: RetrievalTask) -> Example:
    """What `fit` takes."""
    if task.negative is None:
        return task.query, task.passage
    return task.query, task.passage, task.negative


def retrieval_scores(model: DualEncoder, task: RetrievalTask) -> Scores:
    """How often the test queries find their passage among all."""
    at = [k for k in (1, 5, 20, 100) if k <= len(task.corpus)]
    queries = encode_all(model.query, task.test)
    passages = encode_all(model.passage, task.corpus)
    return scores(is_gold(search(queries, passages, k=at[-1]), task.gold), at=at)
