"""Losses over all pairs of two sides: queries and passages, images and texts."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .. import _errors
from .._types import Own
from ._rows import Rows, Weights, by_blocks, checked_rows, weights_of


@_errors.short_tracebacks
def info_nce(
    q: Own[Float[Rows, "q d"], ...],
    p: Own[Float[Rows, "p d"], ...],
    *,
    temperature: float | Float[Rows, ""] = 1.0,
    weights: Any = None,
    hard_negatives: Own[Float[Rows, "p *k d"] | None, ...] = None,
    symmetric: bool = False,
    block_rows: Own[int | None, ...] = None,
) -> Float[Array, ""]:
    r"""The contrastive loss with in-batch negatives: each query finds its passage.

    With scores $s_{ij} = q_i \cdot p_j / \tau$ it is
    $-\frac{1}{\sum_i w_i} \sum_i w_i \log(\exp s_{ii} / \sum_j \exp s_{ij})$
    (van den Oord et al. 2018, arXiv:1807.03748, equation 4, as used for dense retrieval
    by Karpukhin et al. 2020, arXiv:2004.04906, equation 2). Nothing is normalised:
    divide by the norms in `embed` for cosine scores.

    **Arguments:**

    - `q`: the queries. Query i belongs to passage i.
    - `p`: the passages, at least as many as there are queries. Those beyond are
        negatives only, such as a memory bank's where the queries are not banked.
    - `temperature`: $\tau$; an array of the model, such as `jnp.exp(model.log_t)`, is
        learnt.
    - `weights`: one for each passage; the first ones are the queries'. They weigh the
        queries in the mean. A row of weight 0 is neither a query nor a negative, and so
        are its hard negatives none; a row of any other weight is one negative.
    - `hard_negatives`: further passages that are right for no query, one or several
        for each passage: (p, d) or (p, k, d). Every query sees all of them.
    - `symmetric`: the mean of this loss and of the same one with the sides exchanged,
        each passage finding its query among the queries (Radford et al. 2021,
        arXiv:2103.00020, figure 3). The hard negatives are in the first one only.
    - `block_rows`: compute the scores of so many queries at a time, and again for the
        gradient. The value is the same; a bank of many rows then takes memory
        proportional to its rows and not to their square.

    **Returns:**

    A scalar, in float32 or wider; 0 where all weights are 0.

    **Raises:**

    `InputError` where the shapes do not go together.

    !!! Example

        ```python
        def head(model, embeddings, weights):
            q, p = embeddings
            temperature = jnp.exp(model.log_t)
            return eqaccum.losses.info_nce(
                q, p, temperature=temperature, weights=weights
            )
        ```
    """
    sides = _Sides.of("info_nce", q, p, weights)
    columns, present = sides.p, sides.weights.present
    if hard_negatives is not None:
        hard, hard_present = _hard_columns(sides, hard_negatives)
        columns = jnp.concatenate([columns, hard])
        present = jnp.concatenate([present, hard_present])
    queries = sides.weights.first(sides.pairs)
    loss = _find(
        sides.q,
        columns,
        present,
        queries,
        temperature=temperature,
        block_rows=block_rows,
    )
    if not symmetric:
        return loss
    back = _find(
        sides.p[: sides.pairs],
        sides.q,
        queries.present,
        queries,
        temperature=temperature,
        block_rows=block_rows,
    )
    return (loss + back) / 2


@_errors.short_tracebacks
def sigmoid_contrastive(
    q: Own[Float[Rows, "q d"], ...],
    p: Own[Float[Rows, "p d"], ...],
    *,
    temperature: float | Float[Rows, ""] = 0.1,
    bias: float | Float[Rows, ""] = -10.0,
    weights: Any = None,
    block_rows: Own[int | None, ...] = None,
) -> Float[Array, ""]:
    r"""The sigmoid loss over all pairs (SigLIP): is this passage that query's own?

    With $s_{ij} = q_i \cdot p_j / \tau + b$ and $z_{ij} = 1$ for $i = j$, else $-1$, it
    is $-\frac{1}{\sum_i w_i} \sum_i w_i \sum_j \log \sigma(z_{ij} s_{ij})$ (Zhai et al.
    2023, arXiv:2303.15343, section 3.2, whose $t$ is $1 / \tau$). The defaults are the
    paper's values at the start of training.

    **Arguments:**

    - `q`, `p`: the two sides, of unit norm in the paper. Row i of one belongs to row i
        of the other; rows of `p` beyond those of `q` are negatives only.
    - `temperature`, `bias`: $\tau$ and $b$; arrays of the model are learnt.
    - `weights`: one for each row of `p`; the first ones are those of `q`. They weigh
        the rows of `q` in the mean. A row of weight 0 is in no pair.
    - `block_rows`: as in [`eqaccum.losses.info_nce`][].

    **Returns:**

    A scalar, in float32 or wider; 0 where all weights are 0.

    **Raises:**

    `InputError` where the shapes do not go together.

    !!! Example

        ```python
        def head(model, embeddings, weights):
            image, text = embeddings
            return eqaccum.losses.sigmoid_contrastive(
                image,
                text,
                temperature=jnp.exp(-model.log_scale),
                bias=model.bias,
                weights=weights,
            )
        ```
    """
    sides = _Sides.of("sigmoid_contrastive", q, p, weights)
    present = sides.weights.present

    def rows(q: Float[Array, "r d"], own: Int[Array, "r"]) -> Float[Array, "r"]:
        scores = _scores(q, sides.p, temperature)
        scores = scores + jnp.asarray(bias, scores.dtype)
        positive = own[:, None] == jnp.arange(sides.p.shape[0])[None, :]
        logs = jax.nn.log_sigmoid(jnp.where(positive, scores, -scores))
        return -jnp.sum(logs, axis=1, where=present[None, :])

    own = jnp.arange(sides.pairs)
    return sides.weights.first(sides.pairs).mean(
        by_blocks(rows, [sides.q, own], block_rows)
    )


class _Sides:
    """The two sides of a contrastive loss, checked; rows of weight 0 are zeros."""

    def __init__(self, q: Array, p: Array, weights: Weights) -> None:
        self.pairs = q.shape[0]
        self.weights = weights
        self.q = weights.first(self.pairs).clean(q)
        self.p = weights.clean(p)

    @staticmethod
    def of(loss: str, q: Any, p: Any, weights: Any) -> "_Sides":
        q, p = checked_rows(loss, q=q, p=p)
        if q.shape[0] > p.shape[0] or q.shape[1] != p.shape[1]:
            raise _errors.loss_sides(loss, q.shape, p.shape)
        return _Sides(q, p, weights_of(loss, weights, p.shape[0]))


def _hard_columns(
    sides: _Sides, hard_negatives: Any
) -> tuple[Float[Array, "h d"], Bool[Array, "h"]]:
    """The hard negatives as columns of their own, and which of them count."""
    shape, (rows, dim) = jnp.shape(hard_negatives), sides.p.shape
    if len(shape) not in (2, 3) or shape[0] != rows or shape[-1] != dim:
        raise _errors.loss_hard_negatives(shape, sides.p.shape)
    hard = sides.weights.clean(jnp.asarray(hard_negatives)).astype(sides.p.dtype)
    each = 1 if len(shape) == 2 else shape[1]
    return hard.reshape(rows * each, dim), jnp.repeat(sides.weights.present, each)


def _find(
    q: Float[Array, "q d"],
    columns: Float[Array, "c d"],
    present: Bool[Array, "c"],
    weights: Weights,
    *,
    temperature: float | Float[Rows, ""],
    block_rows: int | None,
) -> Float[Array, ""]:
    """The mean of -log softmax at the own column of each row."""

    def rows(q: Float[Array, "r d"], own: Int[Array, "r"]) -> Float[Array, "r"]:
        scores = _scores(q, columns, temperature)
        # Finite, so that the gradient is where a row sees no column at all.
        absent = jnp.asarray(jnp.finfo(scores.dtype).min / 2, scores.dtype)
        scores = jnp.where(present[None, :], scores, absent)
        positive = jnp.take_along_axis(scores, own[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(scores, axis=1) - positive

    losses = by_blocks(rows, [q, jnp.arange(q.shape[0])], block_rows)
    return weights.mean(losses)


def _scores(
    q: Float[Array, "r d"],
    columns: Float[Array, "c d"],
    temperature: float | Float[Rows, ""],
) -> Float[Array, "r c"]:
    products = q @ columns.T
    return products / jnp.asarray(temperature, products.dtype)
