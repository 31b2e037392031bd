"""Remembered figures: in the process, on disk, and why one is missing."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import jax
import pytest
from helpers import REPOSITORY

import eqaccum._errors as errors
from eqaccum._plan import Cache, Key, Remembered, open_cache, program_key


def key(name="step, 4 passes", **parts):
    parts = {"program": "abc", "device": "cpu", "jax": "1"} | parts
    return Key(name, tuple(parts.items()))


def fresh(folder, **kwargs):
    """A cache as a new process would have it."""
    return Cache(folder, process={}, **kwargs)


def test_recalls_in_the_process():
    cache = fresh(None)
    assert cache.recall(key()) is None
    cache.remember(key(), bytes=123)
    assert cache.recall(key()) == Remembered(bytes=123)
    assert cache.recall(key(jax="2")) is None
    assert cache.recall(key(name="other")) is None


def test_recalls_in_another_process(tmp_path):
    folder = tmp_path / "not" / "yet" / "there"
    fresh(folder).remember(key(), bytes=123, step_seconds=0.25)
    assert fresh(folder).recall(key()) == Remembered(123, 0.25, False)
    assert fresh(folder).recall(key(device="gpu")) is None


def test_learns_more_about_the_same_program(tmp_path):
    fresh(tmp_path).remember(key(), bytes=123)
    fresh(tmp_path).remember(key(), step_seconds=0.5)
    fresh(tmp_path).remember(key(), out_of_memory=True)
    assert fresh(tmp_path).recall(key()) == Remembered(123, 0.5, True)
    assert len(list(tmp_path.iterdir())) == 1


def test_no_figure_is_remembered_too(tmp_path):
    fresh(tmp_path).remember(key(), bytes=None)
    assert fresh(tmp_path).recall(key()) == Remembered()


def test_an_unknown_field_is_refused(tmp_path):
    with pytest.raises(TypeError, match="surprise"):
        fresh(tmp_path).remember(key(), surprise=1)


def entry_file(folder):
    (path,) = folder.glob("*.json")
    return path


def damaged(**changes):
    return lambda text: json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "null",
        lambda text: "[" * 10**5,
        lambda text: "\0\xff",
        lambda text: json.dumps({}),
        damaged(kind="other"),
        damaged(version=2),
        damaged(bytes="123"),
        damaged(bytes=-1),
        damaged(bytes=True),
        damaged(step_seconds=float("nan")),
        damaged(out_of_memory=0),
        damaged(parts=[["a"]]),
        damaged(parts=7),
        damaged(extra=1),
        damaged(name="another step"),
        damaged(parts=[["program", "xyz"]]),
    ],
)
def test_a_damaged_or_foreign_file_is_a_miss_and_is_replaced(tmp_path, damage):
    fresh(tmp_path).remember(key(), bytes=123)
    path = entry_file(tmp_path)
    path.write_text(damage(path.read_text()), encoding="latin-1")
    cache = fresh(tmp_path)
    assert cache.recall(key()) is None
    assert isinstance(cache.why_missed(key()), str)
    cache.remember(key(), bytes=321)
    assert fresh(tmp_path).recall(key()) == Remembered(321)


def test_a_folder_in_place_of_the_file_is_a_miss(tmp_path):
    (tmp_path / key().file).mkdir()
    assert fresh(tmp_path).recall(key()) is None


def test_the_oldest_entries_are_removed(tmp_path):
    cache = fresh(tmp_path, most_entries=3)
    keys = [key(program=str(i)) for i in range(5)]
    for age, one in enumerate(keys[:3]):
        cache.remember(one, bytes=1)
        old = time.time() - 100 + age
        os.utime(tmp_path / one.file, (old, old))
    # A hit makes it young again.
    assert fresh(tmp_path).recall(keys[0]) is not None
    for one in keys[3:]:
        cache.remember(one, bytes=1)
    kept = [fresh(tmp_path).recall(one) is not None for one in keys]
    assert kept == [True, False, False, True, True]


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    young, old = tmp_path / "eqaccum-1.tmp", tmp_path / "eqaccum-2.tmp"
    for path in (young, old):
        path.write_text("")
    os.utime(old, (1.0, 1.0))
    fresh(tmp_path).remember(key(), bytes=1)
    assert young.exists() and not old.exists()


def test_files_of_others_are_left_alone(tmp_path):
    others = [tmp_path / "results.json", tmp_path / "work.tmp"]
    for path in others:
        path.write_text("mine")
        os.utime(path, (1.0, 1.0))
    cache = fresh(tmp_path, most_entries=1)
    for i in range(3):
        cache.remember(key(program=str(i)), bytes=1)
    assert [path.read_text() for path in others] == ["mine", "mine"]
    assert len(list(tmp_path.iterdir())) == 3


WRITER = """
import sys
from pathlib import Path
from eqaccum._plan import Cache, Key
for i in range(60):
    # One entry that all write to, and some of their own; more than are kept.
    shared = Key("shared", (("program", "x"),))
    own = Key("own", (("program", f"{sys.argv[2]} {i % 20}"),))
    cache = Cache(Path(sys.argv[1]), process={}, most_entries=8)
    cache.remember(own, bytes=i)
    cache.remember(shared, bytes=10**9 + i)
    known = cache.recall(shared)
    assert known is not None and known.bytes >= 10**9
"""


def test_concurrent_writers(tmp_path):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), name],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for writer in writers:
        _, problems = writer.communicate(timeout=100)
        assert writer.returncode == 0, problems
        assert problems == ""
    assert not list(tmp_path.glob("*.tmp"))
    files = list(tmp_path.glob("*.json"))
    assert 1 <= len(files) <= 9
    for file in files:
        assert json.loads(file.read_text())["bytes"] is not None


def test_a_folder_that_cannot_be_written_to_is_said_once(tmp_path, capsys):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    for _ in range(2):
        cache = fresh(blocked / "cache")
        cache.remember(key(), bytes=5)
        cache.remember(key(jax="2"), bytes=6)
        assert cache.folder is None
        assert cache.recall(key()) == Remembered(5)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "a file" in said[0] and "EQACCUM_CACHE_DIR" in said[0]


def test_why_missed_names_what_changed(tmp_path):
    cache = fresh(tmp_path)
    assert "nothing is remembered" in cache.why_missed(key())
    cache.remember(key(), bytes=1)
    cache.remember(key(jax="0", device="tpu", program="old"), bytes=1)
    cache.remember(key("another step"), bytes=1)
    # Against the nearest of the two.
    other = fresh(tmp_path)
    assert other.why_missed(key(jax="2")) == "jax was '1', is '2'"
    assert "the program changed" in other.why_missed(key(program="new"))
    assert "new part" in other.why_missed(key(**{"new part": "3"}))
    assert "it is remembered" in other.why_missed(key())
    assert "nothing is remembered" in other.why_missed(key("a third step"))


def test_another_program_of_the_same_process_is_no_miss_worth_saying(tmp_path):
    """Two losses over the same shapes, each planned for the first time."""
    cache = fresh(tmp_path)
    cache.remember(key(program="first"), bytes=1)
    assert "nothing is remembered" in cache.why_missed(key(program="second"))


# The key


def test_program_key_is_made_of_named_parts(monkeypatch):
    device = jax.devices()[0]
    make = lambda **kw: program_key(  # noqa: E731
        "step", kw.pop("program", "text"), device=device, **kw
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_a=2")
    one = make()
    parts = dict(one.parts)
    assert parts["device"] == f"{device.platform} {device.device_kind}"
    assert parts["jax"] == jax.__version__
    assert parts["jaxlib"] and parts["processors"] == str(os.cpu_count())
    assert "limit" not in " ".join(parts)
    same = make()
    assert same == one and same.digest == one.digest and same.file == one.file
    # Order does not matter, nor do flags that write files.
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=2 --xla_dump_to=/x --xla_b=1")
    assert make() == one
    assert make(options={"a": 1, "b": 2}) == make(options={"b": 2, "a": 1})
    others = [make(program="other"), make(options={"xla_x": True})]
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=3")
    others.append(make())
    for other in others:
        assert other.digest != one.digest and other.name == one.name
        assert other.file.split("-")[0] == one.file.split("-")[0]


def test_names_and_parts_do_not_run_into_each_other():
    keys = [
        Key("a", (("b", "c"),)),
        Key("ab", (("", "c"),)),
        Key("a", (("b", "c"), ("d", ""))),
    ]
    assert len({k.digest for k in keys}) == 3
    assert replace(keys[0], name="z").digest != keys[0].digest


# Opening


def test_open_cache_follows_argument_and_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EQACCUM_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.delenv("EQACCUM_CACHE", raising=False)
    assert open_cache().folder == tmp_path / "here"
    assert open_cache(False).folder is None
    for word in ("0", "off", "False"):
        monkeypatch.setenv("EQACCUM_CACHE", word)
        assert open_cache().folder is None
    for word in ("1", "", "on"):
        monkeypatch.setenv("EQACCUM_CACHE", word)
        assert open_cache().folder == tmp_path / "here"
    monkeypatch.setenv("EQACCUM_CACHE", "maybe")
    with pytest.raises(errors.InputError, match="EQACCUM_CACHE='maybe'"):
        open_cache()


def test_open_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("EQACCUM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = open_cache().folder
    assert folder is not None and folder.name == "eqaccum"
    if sys.platform == "linux":
        assert folder == tmp_path / "eqaccum"
    assert not folder.exists() or sys.platform != "linux"


def test_the_process_remembers_across_caches_without_a_folder():
    one = key(program="shared by all caches of this process")
    open_cache(False).remember(one, bytes=7)
    assert open_cache(False).recall(one) == Remembered(7)
