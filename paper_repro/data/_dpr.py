"""The files of Dense Passage Retrieval: NQ, TriviaQA, WebQ, Curated TREC."""

import ast
import csv
import dataclasses
import gzip
import io
import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from .. import _errors
from .._retrieval import Hits
from ._pairs import Pairs, lines_of

_TRAINING = (
    "a JSON array of objects with question, positive_ctxs and hard_negative_ctxs "
    "(biencoder-nq-train.json and its like)"
)
_QUESTIONS = "question, tab, list of answers (nq-test.qa.csv and its like)"
_PASSAGES = "id, text, title, separated by tabs, after a header (psgs_w100.tsv)"
# BERT's tokenizer reads this as the token that it is.
_SEPARATOR = " [SEP] "
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Question:
    """A question and the strings that answer it."""

    text: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Passage:
    """A passage of the corpus; `text` is title and body as an encoder reads them."""

    id: str
    text: str


def read_dpr_training(path: str | Path) -> Pairs:
    """Reads a DPR training file: question, first positive, first hard negative.

    The file is read piece by piece (NQ's is 7 GB of text). Questions without a positive
    or without a hard negative are left out, as in the ContAccum paper.

    **Arguments:**

    - `path`: the JSON file, gzipped if its name ends in .gz.

    **Returns:** `Pairs` with negatives; title and body are joined by `[SEP]`.

    **Raises:** `MissingError` without the file, `FormatError` for another format.

    !!! Example

        ```python
        pairs = read_dpr_training("biencoder-nq-train.json")
        ```
    """
    path = Path(path)
    queries, passages, negatives = [], [], []
    for number, record in enumerate(_objects(path), 1):
        try:
            positive, negative = (
                [_joined(context["title"], context["text"]) for context in contexts[:1]]
                for contexts in (record["positive_ctxs"], record["hard_negative_ctxs"])
            )
            question = record["question"]
        except (KeyError, TypeError) as error:
            raise _errors.record(path, number, repr(error), _TRAINING) from error
        if positive and negative:
            queries.append(question)
            passages += positive
            negatives += negative
    return Pairs(queries, passages, negatives)


def read_dpr_questions(path: str | Path) -> list[Question]:
    """Reads the questions of an evaluation with their answers.

    **Arguments:**

    - `path`: a file of lines `question, tab, ['answer', ...]`, as `nq-test.qa.csv`.

    **Raises:** `MissingError` without the file, `FormatError` for another format.

    !!! Example

        ```python
        questions = read_dpr_questions("nq-test.qa.csv")
        ```
    """
    path = Path(path)
    rows = csv.reader(lines_of(path, _QUESTIONS), delimiter="\t")
    questions = []
    for number, row in enumerate(rows, 1):
        try:
            text, listed = row
            answers = ast.literal_eval(listed)
        except (ValueError, SyntaxError) as error:
            raise _errors.record(path, number, repr(error), _QUESTIONS) from error
        if not isinstance(answers, list):
            raise _errors.record(path, number, "the answers are no list", _QUESTIONS)
        questions.append(Question(text, tuple(map(str, answers))))
    return questions


def read_dpr_passages(path: str | Path) -> Iterator[Passage]:
    """Reads the corpus, a passage at a time: 21 million would not fit otherwise.

    **Arguments:**

    - `path`: `psgs_w100.tsv`, or a part of it with its header.

    **Raises:** `MissingError` without the file, `FormatError` for another format.

    !!! Example

        ```python
        for passage in read_dpr_passages("psgs_w100.tsv.gz"):
            ...
        ```
    """
    path = Path(path)
    rows = csv.reader(lines_of(path, _PASSAGES), delimiter="\t")
    for number, row in enumerate(rows):
        if len(row) != 3:
            raise _errors.record(path, number, f"{len(row)} fields", _PASSAGES)
        if number > 0:  # the header
            name, text, title = row
            yield Passage(name, _joined(title, text))


def answered(
    hits: Hits,
    passages: Sequence[str],
    questions: Sequence[Question],
    *,
    regex: bool = False,
) -> Bool[np.ndarray, "queries k"]:
    """Which hits hold an answer to their question: DPR's measure of Top@k.

    **Arguments:**

    - `hits`: what a search found, a row for each question.
    - `passages`: the corpus that was searched.
    - `questions`: with their answers.
    - `regex`: the answers are regular expressions, as those of Curated TREC.

    !!! Example

        ```python
        scores(answered(hits, passages, questions), at=(20, 100))
        ```
    """
    check = matches_answer if regex else has_answer
    found = [
        [check(passages[int(passage)], question.answers) for passage in row]
        for row, question in zip(hits.passages, questions, strict=True)
    ]
    return np.array(found, bool).reshape(hits.passages.shape)


def has_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether the words of an answer stand in the text, one after another.

    Letter case, and how accents are encoded, do not count.
    """
    words = _words(text)
    for answer in map(_words, answers):
        width = len(answer)
        starts = range(len(words) - width + 1)
        if width and any(words[i : i + width] == answer for i in starts):
            return True
    return False


def matches_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether one of the answers, as a regular expression, matches in the text.

    An answer that is no valid expression matches nothing.
    """
    text = unicodedata.normalize("NFD", text)
    for answer in answers:
        try:
            pattern = re.compile(
                unicodedata.normalize("NFD", answer), re.IGNORECASE | re.MULTILINE
            )
        except re.error:
            continue
        if pattern.search(text):
            return True
    return False


def _words(text: str) -> list[str]:
    """Runs of letters, digits and marks; any other visible character by itself."""
    words: list[str] = []
    folded = unicodedata.normalize("NFD", text).lower()
    for in_word, run in itertools.groupby(folded, _is_word_character):
        if in_word:
            words.append("".join(run))
        else:
            words += (one for one in run if unicodedata.category(one)[0] not in "ZC")
    return words


def _is_word_character(character: str) -> bool:
    return unicodedata.category(character)[0] in "LNM"


def _joined(title: str, text: str) -> str:
    return f"{title}{_SEPARATOR}{text}" if title else text


def _objects(path: Path) -> Iterator[Any]:
    """The elements of a JSON array, one at a time, from a file of any size."""
    if not path.is_file():
        raise _errors.no_file(path, _TRAINING)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        yield from _elements(file, path)


def _elements(file: io.TextIOWrapper, path: Path) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    text = file.read(_CHUNK).lstrip()
    if not text.startswith("["):
        raise _errors.record(path, 1, "no `[` begins the file", _TRAINING)
    text, number = text[1:], 1
    while True:
        text = text.lstrip(" \n\r\t,")
        if text.startswith("]"):
            return
        try:
            element, end = decoder.raw_decode(text)
        except json.JSONDecodeError as error:
            more = file.read(max(_CHUNK, len(text)))
            if not more:  # not an element cut in two by the chunk's end
                raise _errors.record(path, number, str(error), _TRAINING) from error
            text += more
            continue
        yield element
        text, number = text[end:], number + 1
