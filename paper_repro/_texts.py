"""Texts for the experiments: Debian's descriptions, or made-up ones for a tiny run."""

import dataclasses
import functools
from typing import Literal

import numpy as np
from jaxtyping import Int

from ._errors import FormatError
from .data import Tokenizer, Tokens, debian_pairs, split, with_negatives

Source = Literal["debian", "synthetic"]
# Made-up pairs: how many, and their topics' words.
_PAIRS, _WORDS, _RESERVED = 160, 60, 4


@dataclasses.dataclass(frozen=True)
class RetrievalTask:
    """Pairs cut into word pieces: those that train, and those that are searched for.

    **Attributes:**

    - `query`, `passage`, `negative`: the training pairs, and the hard negatives.
    - `test`: the test queries; `gold` the row of each one's passage in `corpus`.
    - `vocab_size`: word pieces in the vocabulary.
    """

    query: Tokens
    passage: Tokens
    negative: Tokens | None
    test: Tokens
    gold: Int[np.ndarray, " test"]
    corpus: Tokens
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class TextsConfig:
    """Which texts, and how they are cut.

    **Attributes:**

    - `source`: `"debian"`, or `"synthetic"`, which needs nothing.
    - `query_length`, `passage_length`: word pieces at most.
    - `vocab_size`: of a vocabulary trained on the texts; None takes MiniLM's.
    - `pairs`: so many of all pairs, drawn once; None takes all.
    - `test`: test queries.
    - `train`: the first so many training pairs; None takes all.
    - `negatives`: whether each query has a hard negative.
    """

    source: Source = "debian"
    query_length: int = 20
    passage_length: int = 64
    vocab_size: int | None = 8000
    pairs: int | None = None
    test: int = 2000
    train: int | None = None
    negatives: bool = False


TINY_TEXTS = TextsConfig(
    source="synthetic", query_length=6, passage_length=10, vocab_size=None, test=32
)


@functools.lru_cache(maxsize=2)  # the vocabulary takes a while
def retrieval_task(config: TextsConfig) -> RetrievalTask:
    """The pairs of a retrieval experiment."""
    if config.source == "synthetic":
        return _synthetic_task(config)
    pairs = debian_pairs()
    if config.pairs is not None:
        pairs = pairs.take(split(pairs, test=1, seed=1).train[: config.pairs])
    if config.negatives:
        pairs = with_negatives(pairs)
    rows = split(pairs, test=config.test)
    train = rows.train[: config.train]
    tokenize = _tokenizer(config, [*pairs.queries, *pairs.passages])
    queries = tokenize(pairs.queries, length=config.query_length)
    passages = tokenize(pairs.passages, length=config.passage_length)
    negative = None
    if pairs.negatives is not None:
        negative = tokenize(pairs.negatives, length=config.passage_length)[train]
    return RetrievalTask(
        query=queries[train],
        passage=passages[train],
        negative=negative,
        test=queries[rows.test],
        gold=rows.test,
        corpus=passages,
        vocab_size=tokenize.vocab_size,
    )


def passages(config: TextsConfig) -> tuple[Tokens, Tokens, int]:
    """Texts to train a language model on, texts to test it, the vocabulary's size."""
    task = retrieval_task(config)
    held_out = np.zeros(len(task.corpus), bool)
    held_out[task.gold] = True
    train, test = task.corpus[~held_out], task.corpus[held_out]
    return train[: config.train], test, task.vocab_size


def rows_of_steps(
    rows: int, *, batch: int, steps: int, seed: int
) -> Int[np.ndarray, "steps batch"]:
    """(steps, batch) rows, in fresh orders one after the other."""
    rng = np.random.default_rng(seed)
    needed = steps * batch
    epochs = [rng.permutation(rows) for _ in range(-(-needed // rows))]
    return np.concatenate(epochs)[:needed].reshape(steps, batch)


def _tokenizer(config: TextsConfig, texts: list[str]) -> Tokenizer:
    if config.vocab_size is None:
        return Tokenizer.minilm()
    return Tokenizer.trained(texts, vocab_size=config.vocab_size)


def _synthetic_task(config: TextsConfig) -> RetrievalTask:
    """Pairs that share rare words, of differing lengths."""
    if config.test >= _PAIRS:
        raise FormatError(f"test={config.test} of {_PAIRS} made-up pairs; ask for less")
    rng = np.random.default_rng(0)
    topics = rng.integers(_RESERVED, _RESERVED + _WORDS, (_PAIRS, 3))
    queries = _synthetic(rng, topics, config.query_length)
    texts = _synthetic(rng, topics, config.passage_length)
    train = np.arange(config.test, _PAIRS)
    negative = texts[np.roll(train, 1)] if config.negatives else None
    return RetrievalTask(
        query=queries[train],
        passage=texts[train],
        negative=negative,
        test=queries[: config.test],
        gold=np.arange(config.test),
        corpus=texts,
        vocab_size=_RESERVED + _WORDS,
    )


def _synthetic(
    rng: np.random.Generator, topics: Int[np.ndarray, "texts 3"], length: int
) -> Tokens:
    picks = rng.integers(0, topics.shape[1], (len(topics), length))
    ids = np.take_along_axis(topics, picks, axis=1).astype(np.int32)
    ids[:, 0] = 2  # [CLS], as BERT's texts begin
    lengths = rng.integers(3, length + 1, len(topics))
    mask = np.arange(length)[None, :] < lengths[:, None]
    return Tokens(np.where(mask, ids, 0).astype(np.int32), mask)
