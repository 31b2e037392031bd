"""Exact search by inner product, and the measures of what it finds."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from . import _errors

# For each query, the passages that answer it and how well, by their rows.
Grades = Sequence[Mapping[int, float]]


@dataclasses.dataclass(frozen=True)
class Hits:
    """The best passages for each query, best first.

    Of equal scores the passage of the lower row comes first.
    """

    passages: Int[np.ndarray, "queries k"]
    scores: Float[np.ndarray, "queries k"]


@dataclasses.dataclass(frozen=True)
class Scores:
    """How often the answer was among the first, in percent.

    **Attributes:**

    - `top`: by depth k, the share of the queries with an answer in the first k hits.
    - `mrr`: the mean of 1 / rank of the first answer, 0 beyond rank 10.
    """

    top: dict[int, float]
    mrr: float

    def __str__(self) -> str:
        depths = "/".join(map(str, self.top))
        values = " / ".join(f"{value:.1f}" for value in self.top.values())
        return f"Top@{depths} {values}, MRR@10 {self.mrr:.1f}"


def search(
    queries: Float[np.ndarray | Array, "queries d"],
    passages: Float[np.ndarray | Array, "passages d"],
    *,
    k: int,
    query_block: int = 1024,
    passage_block: int = 16384,
) -> Hits:
    """Finds the k passages of the largest inner product with each query, exactly.

    One block of queries meets one block of passages at a time, so the memory needed is
    that of `query_block` x `passage_block` floats. `passages` may be a memory map.

    **Arguments:**

    - `queries`, `passages`: their representations, one a row. For cosine similarity
        normalise them before.
    - `k`: how many, at most the number of passages.
    - `query_block`, `passage_block`: rows at a time.

    **Returns:** `Hits`.

    **Raises:** `FormatError` for a `k` out of range, or if a score is not finite.

    !!! Example

        ```python
        hits = search(q, p, k=100)
        print(scores(is_gold(hits, gold)))
        ```
    """
    rows = len(passages)
    if not 1 <= k <= rows:
        raise _errors.top_k(k, rows)
    blocks = [
        _search_block(block, passages, k=k, passage_block=min(passage_block, rows))
        for block in _blocks(queries, min(query_block, max(len(queries), 1)))
    ]
    found = _joined(blocks, len(queries), k)
    if not np.isfinite(found.scores).all():
        raise _errors.not_finite()
    return found


def _search_block(
    queries: Float[Array, "block d"],
    passages: Float[np.ndarray | Array, "passages d"],
    *,
    k: int,
    passage_block: int,
) -> Hits:
    scores = jnp.full((len(queries), k), -jnp.inf, jnp.float32)
    ids = jnp.zeros((len(queries), k), jnp.int32)
    for number, block in enumerate(_blocks(passages, passage_block)):
        first = number * passage_block
        scores, ids = _merge(
            *(scores, ids, queries, block),
            first=first,
            count=len(passages) - first,
        )
    return Hits(passages=np.asarray(ids), scores=np.asarray(scores))


@jax.jit
def _merge(
    scores: Float[Array, "block k"],
    ids: Int[Array, "block k"],
    queries: Float[Array, "block d"],
    passages: Float[Array, "columns d"],
    *,
    first: Int[Array, ""] | int,
    count: Int[Array, ""] | int,
) -> tuple[Float[Array, "block k"], Int[Array, "block k"]]:
    """The best k of those so far and the block's; `top_k` takes the first of equals."""
    k = scores.shape[1]
    products = jnp.matmul(queries, passages.T, precision=jax.lax.Precision.HIGHEST)
    columns = jnp.arange(products.shape[1])
    products = jnp.where(columns[None, :] < count, products, -jnp.inf)
    new, places = jax.lax.top_k(products, min(k, products.shape[1]))
    all_scores = jnp.concatenate([scores, new], axis=1)
    all_ids = jnp.concatenate([ids, places.astype(jnp.int32) + first], axis=1)
    best, places = jax.lax.top_k(all_scores, k)
    return best, jnp.take_along_axis(all_ids, places, axis=1)


def _blocks(
    rows: Float[np.ndarray | Array, "rows d"], block: int
) -> Iterator[Float[Array, "block d"]]:
    """Blocks of one size, so that they share a program; the last is filled with 0."""
    for start in range(0, len(rows), block):
        part = np.asarray(rows[start : start + block], np.float32)
        yield jnp.asarray(np.pad(part, ((0, block - len(part)), (0, 0))))


def _joined(blocks: Sequence[Hits], queries: int, k: int) -> Hits:
    none = Hits(passages=np.zeros((0, k), np.int32), scores=np.zeros((0, k), "float32"))
    blocks = [none, *blocks]
    return Hits(
        passages=np.concatenate([block.passages for block in blocks])[:queries],
        scores=np.concatenate([block.scores for block in blocks])[:queries],
    )


def is_gold(
    hits: Hits, gold: Int[np.ndarray, " queries"]
) -> Bool[np.ndarray, "queries k"]:
    """Which hits are the query's one right passage."""
    return hits.passages == gold[:, None]


def scores(
    relevant: Bool[np.ndarray, "queries k"], *, at: Sequence[int] = (1, 5, 20, 100)
) -> Scores:
    """Top@k for several k, and MRR@10.

    **Arguments:**

    - `relevant`: which hits answer the query, best hit first.
    - `at`: the depths; none may exceed the number of hits.

    **Returns:** `Scores`, in percent.

    !!! Example

        ```python
        print(scores(is_gold(search(q, p, k=100), gold)))
        ```
    """
    depth = min(10, relevant.shape[1])
    return Scores(top={k: top_at(relevant, k) for k in at}, mrr=mrr_at(relevant, depth))


def top_at(relevant: Bool[np.ndarray, "queries k"], at: int) -> float:
    """Percent of the queries with an answer among the first `at` hits."""
    return 100 * float(_first(relevant, at).any(axis=1).mean())


def mrr_at(relevant: Bool[np.ndarray, "queries k"], at: int = 10) -> float:
    """Mean of 1 / rank of the first answer, 0 beyond rank `at`; in percent."""
    found = _first(relevant, at)
    ranks = found.argmax(axis=1) + 1
    return 100 * float(np.where(found.any(axis=1), 1 / ranks, 0).mean())


def ndcg_at(hits: Hits, grades: Grades, at: int) -> float:
    """Normalised discounted cumulative gain of the first `at` hits, in percent.

    The gain is the grade itself, the discount log2(rank + 1), as in trec_eval. A query
    without a positive grade counts 0.
    """
    values = []
    for row, graded in zip(_first(hits.passages, at), grades, strict=True):
        gains = np.array([graded.get(int(passage), 0.0) for passage in row])
        ideal = np.array(sorted(graded.values(), reverse=True)[:at])
        best = _discounted(ideal)
        values.append(_discounted(gains) / best if best > 0 else 0.0)
    return 100 * float(np.mean(values))


def recall_at(hits: Hits, grades: Grades, at: int) -> float:
    """Share of a query's answers that the first `at` hits hold, in percent."""
    values = []
    for row, graded in zip(_first(hits.passages, at), grades, strict=True):
        answers = {passage for passage, grade in graded.items() if grade > 0}
        found = answers.intersection(row.tolist())
        values.append(len(found) / len(answers) if answers else 0.0)
    return 100 * float(np.mean(values))


def _discounted(gains: Float[np.ndarray, " n"]) -> float:
    return float(np.sum(gains / np.log2(np.arange(2, len(gains) + 2))))


def _first(hits: np.ndarray, at: int) -> np.ndarray:
    if not 1 <= at <= hits.shape[1]:
        raise _errors.depth(at, hits.shape[1])
    return hits[:, :at]
