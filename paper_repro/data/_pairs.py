"""Pairs of a query and the passage that answers it, and how they are split."""

import dataclasses
import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int

from .. import _errors


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Queries and their passages: row i of one goes with row i of the other.

    **Arguments:**

    - `queries`, `passages`: the texts.
    - `negatives`: for each query a passage that is like the right one and is not
        it (a hard negative), or None where there are none.

    !!! Example

        ```python
        pairs = Pairs(["capital of France"], ["Paris is the capital of France."])
        ```
    """

    queries: list[str]
    passages: list[str]
    negatives: list[str] | None = None

    def __post_init__(self):
        for other in (self.passages, self.negatives):
            if other is not None and len(other) != len(self.queries):
                raise _errors.pairs_lengths(len(self.queries), len(other))

    def __len__(self) -> int:
        return len(self.queries)

    def take(self, rows: Int[np.ndarray, " rows"]) -> "Pairs":
        """The pairs of these rows, in this order."""

        def pick(texts: list[str]) -> list[str]:
            return [texts[row] for row in rows]

        negatives = None if self.negatives is None else pick(self.negatives)
        return Pairs(pick(self.queries), pick(self.passages), negatives)


@dataclasses.dataclass(frozen=True)
class Split:
    """Which pairs train and which are tested, as rows.

    The corpus that a test query is searched in is all passages, those of the training
    pairs included.
    """

    train: Int[np.ndarray, " train"]
    test: Int[np.ndarray, " test"]


def split(pairs: Pairs, *, test: int = 2000, seed: int = 0) -> Split:
    """Shuffles the rows by a seed; the first `test` of them are the test queries.

    **Arguments:**

    - `pairs`: the pairs.
    - `test`: the number of test queries.
    - `seed`: another seed gives another split.

    **Returns:** A `Split`. It depends on the number of pairs and the seed alone.

    **Raises:** `FormatError` if no pair would be left to train on.

    !!! Example

        ```python
        rows = split(pairs)
        train, test = pairs.take(rows.train), pairs.take(rows.test)
        ```
    """
    if not 0 < test < len(pairs):
        raise _errors.too_few_pairs(len(pairs), test)
    # Raw numbers, for numpy promises that they never change; `permutation` may.
    numbers = np.random.Philox(key=seed).random_raw(len(pairs))
    order = np.argsort(numbers, kind="stable")
    return Split(train=order[test:], test=order[:test])


def read_pairs(path: str | Path) -> Pairs:
    """Reads pairs: a line each, query, tab, passage; gzipped if the name ends in .gz.

    **Arguments:**

    - `path`: the file, in UTF-8.

    **Raises:** `FormatError` at a line that is no pair, `MissingError` without a file.

    !!! Example

        ```python
        pairs = read_pairs("mine.tsv")
        ```
    """
    path = Path(path)
    queries, passages = [], []
    for number, line in enumerate(lines_of(path, "pairs, one a line"), 1):
        fields = line.split("\t")
        if len(fields) != 2 or not all(fields):
            raise _errors.pair_line(path, number, len(fields))
        queries.append(fields[0])
        passages.append(fields[1])
    return Pairs(queries, passages)


def write_pairs(path: str | Path, pairs: Pairs) -> None:
    """Writes queries and passages as `read_pairs` reads them (gzipped under .gz).

    The same pairs give the same bytes.

    !!! Example

        ```python
        write_pairs("mine.tsv.gz", pairs)
        ```
    """
    path = Path(path)
    text = "".join(_lines(pairs)).encode()
    if path.suffix == ".gz":
        text = gzip.compress(text, mtime=0)
    path.write_bytes(text)


def _lines(pairs: Pairs) -> Iterator[str]:
    for row, texts in enumerate(zip(pairs.queries, pairs.passages, strict=True)):
        for text in texts:
            # str.splitlines would also split at \x0b and the like; a file does not.
            if not text or any(character in text for character in "\t\n\r"):
                raise _errors.pair_text(row, text)
        yield "\t".join(texts) + "\n"


def lines_of(path: Path, what: str) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends, gzipped if the name says so."""
    if not path.is_file():
        raise _errors.no_file(path, what)
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        for line in file:
            yield line.decode().rstrip("\r\n")


def one_line(text: str) -> str:
    """The text with each run of white space made one space."""
    return " ".join(text.split())


def unique(texts: Iterable[str]) -> set[str]:
    """The texts, case folded, that occur once."""
    seen, again = set(), set()
    for text in map(str.casefold, texts):
        (again if text in seen else seen).add(text)
    return seen - again
