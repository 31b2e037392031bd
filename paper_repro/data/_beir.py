"""Collections in the format of BEIR, MS MARCO among them."""

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import _errors
from ._pairs import Pairs, lines_of

_CORPUS = 'a JSON object a line: {"_id": ..., "title": ..., "text": ...} (corpus.jsonl)'
_QUERIES = 'a JSON object a line: {"_id": ..., "text": ...} (queries.jsonl)'
_QRELS = "query-id, corpus-id, score, separated by tabs, after a header (qrels)"
_NEGATIVES = (
    'a JSON object a line: {"qid": ..., "pos": [...], "neg": {"bm25": [...]}}, whose '
    'entries are passages\' ids or {"pid": ..., "ce-score": ...}'
)


@dataclasses.dataclass(frozen=True)
class Collection:
    """A corpus, queries, and which passages answer them.

    **Attributes:**

    - `passages`, `queries`: the texts (title and body joined by a blank).
    - `passage_ids`, `query_ids`: their names in the files.
    - `grades`: for each query, the rows of its passages and their grades.
    """

    passages: list[str]
    passage_ids: list[str]
    queries: list[str]
    query_ids: list[str]
    grades: list[dict[int, float]]


def read_beir(folder: str | Path, *, split: str) -> Collection:
    """Reads a BEIR collection for an evaluation.

    The whole corpus is kept in memory: some 5 GB for MS MARCO.

    **Arguments:**

    - `folder`: holds corpus.jsonl, queries.jsonl (or .gz of either) and `qrels/`.
    - `split`: which relevance file, `test`, `dev` or `train`; only its queries are
        read.

    **Raises:** `MissingError` where a file is missing, `FormatError` for another format
        or for an id that the other file does not have.

    !!! Example

        ```python
        marco = read_beir("msmarco", split="dev")
        print(ndcg_at(hits, marco.grades, 20))
        ```
    """
    folder = Path(folder)
    qrels = _read_qrels(folder, split)
    passages = dict(_read_texts(folder, "corpus.jsonl", _CORPUS))
    rows = {name: row for row, name in enumerate(passages)}
    wanted = {name for name, _, _ in qrels}
    queries = _texts_of(folder, "queries.jsonl", _QUERIES, wanted.__contains__)
    grades: dict[str, dict[int, float]] = {name: {} for name in queries}
    path = _qrels_path(folder, split)
    for number, (query, passage, grade) in enumerate(qrels, 2):
        if query not in grades:
            raise _errors.unknown_id(path, number, query, "queries")
        if passage not in rows:
            raise _errors.unknown_id(path, number, passage, "passages")
        grades[query][rows[passage]] = grade
    return Collection(
        passages=list(passages.values()),
        passage_ids=list(passages),
        queries=list(queries.values()),
        query_ids=list(queries),
        grades=list(grades.values()),
    )


def read_beir_training(
    folder: str | Path,
    *,
    negatives: str | Path,
    system: str = "bm25",
    margin: float | None = 3.0,
) -> Pairs:
    """Reads training pairs with hard negatives: the first of each that will do.

    Of the corpus only the passages that are used are kept.

    **Arguments:**

    - `folder`: holds corpus.jsonl and queries.jsonl (or .gz of either).
    - `negatives`: a file of mined negatives, one query a line, with the scores of a
        cross-encoder (`msmarco-hard-negatives.jsonl.gz`).
    - `system`: whose negatives.
    - `margin`: a negative must score this much below the query's lowest positive,
        since one that scores as high may be an answer nobody marked. None takes all,
        and needs no scores.

    **Returns:** `Pairs` with negatives. Queries without a positive or a negative are
    left out.

    **Raises:** as `read_beir`.

    !!! Example

        ```python
        pairs = read_beir_training("msmarco", negatives="msmarco-hard-negatives.jsonl")
        ```
    """
    folder, path = Path(folder), Path(negatives)
    triples = list(_read_triples(path, system, margin))
    used = {name for triple in triples for name in (triple.positive, triple.negative)}
    asked = {triple.query for triple in triples}
    passages = _texts_of(folder, "corpus.jsonl", _CORPUS, used.__contains__)
    queries = _texts_of(folder, "queries.jsonl", _QUERIES, asked.__contains__)

    def look_up(texts: Mapping[str, str], triple: "_Triple", name: str, what: str):
        if name not in texts:
            raise _errors.unknown_id(path, triple.line, name, what)
        return texts[name]

    return Pairs(
        [look_up(queries, one, one.query, "queries") for one in triples],
        [look_up(passages, one, one.positive, "passages") for one in triples],
        [look_up(passages, one, one.negative, "passages") for one in triples],
    )


@dataclasses.dataclass(frozen=True)
class _Triple:
    """The ids of a query, its passage and its hard negative, and where they stood."""

    query: str
    positive: str
    negative: str
    line: int


def _read_triples(path: Path, system: str, margin: float | None) -> Iterator[_Triple]:
    for number, record in _json_lines(path, _NEGATIVES):
        try:
            positives = record["pos"]
            mined = record["neg"].get(system, [])
            highest = _highest_score(positives, margin)
            usable = [one for one in mined if _at_most(one, highest)]
            if positives and usable:
                yield _Triple(
                    query=str(record["qid"]),
                    positive=_name(positives[0]),
                    negative=_name(usable[0]),
                    line=number,
                )
        except (KeyError, TypeError, AttributeError) as error:
            raise _errors.record(path, number, repr(error), _NEGATIVES) from error


def _highest_score(positives: list[Any], margin: float | None) -> float | None:
    """What a negative may score at most; None is no limit."""
    if margin is None or not positives:
        return None
    return min(one["ce-score"] for one in positives) - margin


def _at_most(entry: Any, highest: float | None) -> bool:
    return highest is None or entry["ce-score"] <= highest


def _name(entry: Any) -> str:
    return str(entry["pid"] if isinstance(entry, dict) else entry)


def _texts_of(
    folder: Path, file: str, expected: str, wanted: Callable[[str], bool]
) -> dict[str, str]:
    return {
        name: text for name, text in _read_texts(folder, file, expected) if wanted(name)
    }


def _read_texts(folder: Path, file: str, expected: str) -> Iterator[tuple[str, str]]:
    path = folder / file
    zipped = folder / f"{file}.gz"
    path = zipped if zipped.is_file() and not path.is_file() else path
    for number, record in _json_lines(path, expected):
        try:
            name, title, text = record["_id"], record.get("title"), record["text"]
        except (KeyError, TypeError, AttributeError) as error:
            raise _errors.record(path, number, repr(error), expected) from error
        yield str(name), f"{title} {text}" if title else text


def _json_lines(path: Path, expected: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines_of(path, expected), 1):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise _errors.record(path, number, str(error), expected) from error


def _read_qrels(folder: Path, split: str) -> list[tuple[str, str, float]]:
    path = _qrels_path(folder, split)
    qrels = []
    # Ids are plain: a quotation mark in one is part of it.
    rows = csv.reader(
        lines_of(path, _QRELS), delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None
    )
    for number, row in enumerate(rows, 1):
        if number == 1 and row[-1:] == ["score"]:
            continue
        try:
            query, passage, grade = row
            qrels.append((query, passage, float(grade)))
        except ValueError as error:
            raise _errors.record(path, number, repr(error), _QRELS) from error
    return qrels


def _qrels_path(folder: Path, split: str) -> Path:
    return folder / "qrels" / f"{split}.tsv"
