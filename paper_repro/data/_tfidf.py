"""The lexical baseline: TF-IDF, and the hard negatives that it finds."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from .. import _errors
from .._cache import made_once
from .._optional import optional_module
from .._retrieval import Hits, Scores, is_gold, scores
from ._pairs import Pairs

_BLOCK = 256  # queries at a time: 256 x 32,000 scores are 33 MB


def lexical_scores(pairs: Pairs, test: Int[np.ndarray, " test"]) -> Scores:
    """How well plain TF-IDF finds the passages of the test queries among all.

    **Arguments:**

    - `pairs`: the pairs; all their passages are the corpus.
    - `test`: the rows of the test queries.

    **Returns:** `Scores`: Top@1/5/20/100 and MRR@10.

    !!! Example

        ```python
        print(lexical_scores(pairs, split(pairs).test))
        ```
    """
    at = [k for k in (1, 5, 20, 100) if k <= len(pairs)]
    hits = lexical_search(pairs.take(test).queries, pairs.passages, k=at[-1])
    return scores(is_gold(hits, test), at=at)


def lexical_search(queries: list[str], passages: list[str], *, k: int) -> Hits:
    """The k passages nearest to each query by the cosine of their TF-IDF vectors.

    Words, counted as 1 + log(count); the inverse document frequencies are those of the
    passages.
    """
    if not 1 <= k <= len(passages):
        raise _errors.top_k(k, len(passages))
    found, values = [], []
    for block in _similarities(queries, passages):
        best, places = jax.lax.top_k(block, k)
        found.append(np.asarray(places, np.int32))
        values.append(np.asarray(best))
    return Hits(passages=np.concatenate(found), scores=np.concatenate(values))


def hard_negatives(pairs: Pairs) -> Int[np.ndarray, " pairs"]:
    """For each query the row of the passage most like it that is not its own.

    Of equal ones the first is taken. A query that shares no word with any other passage
    gets the next row's. Kept in the user's cache folder.

    **Arguments:**

    - `pairs`: the pairs, two at least.

    **Raises:** `FormatError` where there is no other passage.

    !!! Example

        ```python
        rows = hard_negatives(pairs)
        print(pairs.passages[rows[0]])
        ```
    """
    if len(pairs) < 2:
        raise _errors.no_negative(len(pairs))

    def make(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, _hard_negatives(pairs))

    return np.load(made_once(f"negatives-{_digest(pairs)}.npy", make))


def with_negatives(pairs: Pairs) -> Pairs:
    """The same pairs, each with its hard negative from `hard_negatives`."""
    rows = hard_negatives(pairs)
    negatives = [pairs.passages[row] for row in rows]
    return Pairs(pairs.queries, pairs.passages, negatives)


def _hard_negatives(pairs: Pairs) -> Int[np.ndarray, " pairs"]:
    best = np.zeros(len(pairs), np.int32)
    start = 0
    for block in _similarities(pairs.queries, pairs.passages):
        rows = np.arange(start, start + len(block))
        block[rows - start, rows] = -1  # its own passage
        best[rows] = block.argmax(axis=1)
        nothing_shared = rows[block.max(axis=1) <= 0]
        best[nothing_shared] = (nothing_shared + 1) % len(pairs)
        start += len(block)
    return best


def _similarities(
    queries: list[str], passages: list[str]
) -> Iterator[Float[np.ndarray, "block passages"]]:
    text: Any = optional_module("sklearn.feature_extraction.text", "TF-IDF")
    vectorizer = text.TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    columns = vectorizer.fit_transform(passages).T.tocsr()
    for start in range(0, len(queries), _BLOCK):
        rows = vectorizer.transform(queries[start : start + _BLOCK])
        yield (rows @ columns).toarray()


def _digest(pairs: Pairs) -> str:
    texts = "\n".join([*pairs.queries, *pairs.passages])
    return hashlib.sha256(texts.encode()).hexdigest()[:16]
