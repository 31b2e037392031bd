"""The ready-made callbacks: what they write, when they stop, what they refuse."""

import csv
import json
import struct
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum
from eqaccum import callbacks

# The mean of each batch of two is its only pull: the loss is known by hand.
Y = np.array([1, 1, 2, 2, 3, 3, 4], np.float32)
HELD_OUT = np.array([2, 2, 2], np.float32)


def loss(model, y, key):
    return (model - y) ** 2


def fit(*calls: Any, **more: Any) -> eqaccum.FitResult:
    arguments = {
        "global_batch": 2,
        "loss": loss,
        "optimizer": optax.sgd(0.1),
        "shuffle": False,
        "validation": HELD_OUT,
        "callbacks": calls,
    }
    return eqaccum.fit(jnp.float32(0.0), Y, **(arguments | more))


def by_hand(epochs: int) -> tuple[list[float], list[float]]:
    """The losses of all batches, and the validation losses at the epochs' ends."""
    w, losses, validations = 0.0, [], []
    for _ in range(epochs):
        for start in range(0, len(Y), 2):
            rows = Y[start : start + 2]
            losses.append(float(np.mean((w - rows) ** 2)))
            w -= 0.1 * float(np.mean(2 * (w - rows)))
        validations.append(float(np.mean((w - HELD_OUT) ** 2)))
    return losses, validations


# --- CSV and JSONL ------------------------------------------------------------------


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def json_rows(path: Path) -> list[dict[str, Any]]:
    def refuse(text):
        raise ValueError(text)

    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_csv_has_a_row_for_each_step(tmp_path):
    path = tmp_path / "new" / "log.csv"
    fit(callbacks.CSV(path), epochs=2)
    losses, validations = by_hand(2)
    rows = csv_rows(path)
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    assert [int(row["epoch"]) for row in rows] == [0] * 4 + [1] * 4
    np.testing.assert_allclose([float(row["loss"]) for row in rows], losses, rtol=1e-5)
    told = [row["validation_loss"] for row in rows]
    assert told[:3] == told[4:7] == [""] * 3
    np.testing.assert_allclose([float(told[3]), float(told[7])], validations, rtol=1e-5)
    assert rows[0]["examples"] == "2" and rows[3]["examples"] == "1"
    assert rows[0]["skipped"] == "False"
    # No more digits than a float32 has.
    assert all(len(row["loss"]) < 14 for row in rows)


def test_json_lines_hold_the_same(tmp_path):
    log = tmp_path / "log.jsonl"
    fit(callbacks.JSONL(log), callbacks.CSV(tmp_path / "log.csv"), epochs=2)
    lines, rows = json_rows(log), csv_rows(tmp_path / "log.csv")
    for line, row in zip(lines, rows, strict=True):
        assert {k: str(v) for k, v in line.items()} == {
            k: v for k, v in row.items() if v
        }
    assert "validation_loss" in lines[3] and "validation_loss" not in lines[2]


def test_every_counts_steps_and_no_validation_is_left_out(tmp_path):
    path = tmp_path / "log.csv"
    fit(callbacks.CSV(path, every=3), epochs=2)
    # Every third step, and steps 4 and 8 which end an epoch.
    assert [row["step"] for row in csv_rows(path)] == ["3", "4", "6", "8"]


def test_what_is_not_finite_is_null_in_json(tmp_path):
    path = tmp_path / "log.jsonl"
    data = np.array([1, np.inf, 2, 2], np.float32)
    arguments: dict[str, Any] = {"validation": None, "nonfinite": "skip"}
    eqaccum.fit(
        jnp.float32(0),
        data,
        global_batch=2,
        loss=loss,
        shuffle=False,
        callbacks=[callbacks.JSONL(path)],
        **arguments,
    )
    first, second = json_rows(path)
    assert first["loss"] is None and first["skipped"] is True
    assert second["loss"] == 4.0 and second["skipped"] is False


LOGS = {"csv": (callbacks.CSV, csv_rows), "jsonl": (callbacks.JSONL, json_rows)}


@pytest.mark.parametrize("kind", LOGS)
def test_a_resumed_run_goes_on_in_its_log(kind, tmp_path):
    make, read = LOGS[kind]
    path, whole = tmp_path / "log", tmp_path / "whole"
    first = fit(make(path), steps=6)
    # As a killed process leaves it: two steps after the checkpoint, and half a third.
    lines = path.read_text().splitlines(keepends=True)
    extra = lines[-1].replace("6", "7", 1), lines[-1].replace("6", "8", 1)
    path.write_text("".join([*lines, *extra, lines[-1][:4]]))
    fit(make(path), epochs=2, resume=first)
    fit(make(whole), epochs=2)
    names = {"step", "epoch", "loss", "validation_loss"}

    def told(file):
        return [{k: v for k, v in row.items() if k in names} for row in read(file)]

    assert told(path)[6:] == told(whole)[6:]
    assert [row["step"] for row in told(path)] == [row["step"] for row in told(whole)]
    # A new run begins the file anew.
    fit(make(path), steps=1)
    assert len(read(path)) == 1


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize(
    "text", ["name,age\nann,3\n", '{"name": 1}\n', "thesis", "\xff"]
)
def test_a_file_that_is_no_log_is_left_alone(kind, text, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(eqaccum.InputError, match="was not written by") as caught:
        LOGS[kind][0](path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == text.encode("latin1")


# --- TensorBoard --------------------------------------------------------------------


def events(folder: Path) -> list[Any]:
    """The events of a folder, out of the frames of TensorFlow's record files."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def soon(read: Any, *, has: str, entries: int) -> dict[str, list[Any]]:
    """What is read once all is written: tensorboardX writes in a thread of its own."""
    for _ in range(500):
        if len(read().get(has, ())) >= entries:
            break
        time.sleep(0.02)
    return read()


@pytest.fixture
def quick_events(monkeypatch):
    """The thread of tensorboardX that writes need not be waited for long."""
    pytest.importorskip("tensorboardX")
    monkeypatch.setattr("eqaccum.callbacks._tensorboard._FLUSH_SECONDS", 0.05)


def test_tensorboard_gets_every_scalar(quick_events, tmp_path):
    fit(callbacks.TensorBoard(tmp_path), epochs=2)
    found = soon(lambda: scalars(tmp_path), has="train/seconds", entries=8)
    losses, validations = by_hand(2)
    steps, values = zip(*found["train/loss"], strict=True)
    assert steps == tuple(range(1, 9))
    np.testing.assert_allclose(values, losses, rtol=1e-5)
    assert [step for step, _ in found["validation/loss"]] == [4, 8]
    told = [value for _, value in found["validation/loss"]]
    np.testing.assert_allclose(told, validations, rtol=1e-5)
    assert {"train/grad_norm", "train/examples", "train/seconds"} <= set(found)


def test_tensorboard_hides_what_a_resumed_run_repeats(quick_events, tmp_path):
    first = fit(callbacks.TensorBoard(tmp_path), steps=3)
    fit(callbacks.TensorBoard(tmp_path), steps=5, resume=first)
    found = soon(lambda: scalars(tmp_path), has="train/seconds", entries=5)
    purged = [e.step for e in events(tmp_path) if e.HasField("session_log")]
    assert purged == [1, 4]
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["TensorBoard", "WandB"])
def test_what_is_missing_is_said_before_training(name, monkeypatch):
    package = {"TensorBoard": "tensorboardX", "WandB": "wandb"}[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(eqaccum.EqaccumError, match=f"{package}.*pip install"):
        getattr(callbacks, name)("logs")


# --- W&B ----------------------------------------------------------------------------


class Run:
    """What is used of a run of W&B."""

    def __init__(self):
        self.logged = []

    def log(self, values, step):
        self.logged.append((step, values))


def test_wandb_logs_and_starts_a_run_where_none_is_given(monkeypatch):
    started = []

    def init(**arguments):
        started.append((arguments, Run()))
        return started[-1][1]

    fake = types.ModuleType("wandb")
    vars(fake)["init"] = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    mine = Run()
    given = callbacks.WandB(mine, every=2)
    made = callbacks.WandB(project="digits")
    assert started == []
    fit(given, made)
    ((arguments, run),) = started
    assert arguments == {"project": "digits"}
    assert [step for step, _ in mine.logged] == [2, 4]
    assert [step for step, _ in run.logged] == [1, 2, 3, 4]
    losses, validations = by_hand(1)
    np.testing.assert_allclose([v["loss"] for _, v in run.logged], losses, rtol=1e-5)
    assert run.logged[3][1]["validation_loss"] == pytest.approx(validations[0], 1e-5)
    assert {type(value) for value in run.logged[0][1].values()} <= {int, float, bool}
    with pytest.raises(eqaccum.InputError, match="a run and project"):
        callbacks.WandB(mine, project="digits")


# --- stopping -----------------------------------------------------------------------


def records(like: eqaccum.Info, values: list[float]):
    """The records of a run with these validation losses, one per epoch."""
    history = eqaccum.History()
    for step, value in enumerate(values, 1):
        history.add(like.metrics, step=step, epoch=step - 1, seconds=0.1)
        history.add_validation(step, {"loss": float(value)})
        yield replace(
            like, step=step, validation={"loss": float(value)}, history=history
        )


@pytest.fixture(scope="module")
def some_info() -> eqaccum.Info:
    seen = []
    fit(seen.append, steps=1)
    return seen[0]


@pytest.mark.parametrize(
    "values, arguments, stops_at",
    [
        ([3, 2, 2.5, 2.1, 1.9], {"patience": 2}, 4),
        ([3, 2, 2.5, 1.9, 2, 2], {"patience": 2}, 6),
        ([3, 2, 2, 2], {"patience": 3}, None),
        ([3, 2, 2, 2, 2], {"patience": 3}, 5),  # as good is no better
        ([1, 2, 3, 2, 2], {"patience": 2, "maximize": True}, 5),
        ([3, 2.9, 2.8], {"patience": 2, "margin": 0.5}, 3),
        ([3, 2.9, 2.4], {"patience": 2, "margin": 0.5}, None),
        ([3, float("nan"), float("nan")], {"patience": 2}, 3),
        ([float("nan"), 3, 2], {"patience": 2}, None),
    ],
)
def test_when_early_stopping_stops(values, arguments, stops_at, some_info):
    stop = callbacks.EarlyStopping("validation_loss", **arguments)
    stopped = [info.step for info in records(some_info, values) if stop(info)]
    assert (stopped or [None])[0] == stops_at


def test_early_stopping_in_a_run(capsys):
    # Diverging: with this rate each epoch is worse than the one before.
    stop = callbacks.EarlyStopping(patience=2)
    arguments: dict[str, Any] = {"optimizer": optax.sgd(1.1), "epochs": 9}
    result = fit(stop, **arguments)
    assert result.train.step == 3 * 4
    said = capsys.readouterr().err
    assert "validation_loss is no better than" in said and "EarlyStopping" in said
    # The same object serves another run, and one that is resumed.
    assert fit(stop, **arguments).train.step == 3 * 4
    first = fit(callbacks.EarlyStopping(patience=2), **(arguments | {"epochs": 2}))
    resumed = fit(callbacks.EarlyStopping(patience=2), resume=first, **arguments)
    assert resumed.train.step == 3 * 4


def test_early_stopping_on_a_name_of_training():
    stop = callbacks.EarlyStopping("loss", patience=3)
    arguments: dict[str, Any] = {"optimizer": optax.sgd(1.1), "validation": None}
    result = fit(stop, epochs=9, **arguments)
    losses = result.history["loss"]
    assert len(losses) - 1 - int(np.argmin(losses)) == 3


# --- the best -----------------------------------------------------------------------


def test_the_best_state_is_kept(tmp_path):
    best = callbacks.BestCheckpoint(tmp_path / "best")
    seen = {}

    def look(info):
        if info.validation is not None:
            seen[info.validation["loss"]] = float(info.model), info.step

    # It nears 2 from below and runs past it.
    result = fit(look, best, epochs=6, optimizer=optax.sgd(0.04))
    at_best, step = seen[min(seen)]
    assert 4 < step < result.train.step
    model = eqaccum.load(tmp_path / "best", jnp.float32(0))
    assert float(model) == at_best != float(result.model)
    assert not any(tmp_path.joinpath("best").glob("*.part"))


def test_the_best_needs_a_directory_of_its_own(tmp_path):
    fit(checkpoint=tmp_path, steps=1)
    with pytest.raises(eqaccum.InputError, match="holds the checkpoints of a fit"):
        callbacks.BestCheckpoint(tmp_path)


# --- the history as a frame ---------------------------------------------------------


def test_a_frame_has_a_row_for_each_batch():
    pandas = pytest.importorskip("pandas")
    result = fit(epochs=2)
    frame = result.history.frame()
    losses, validations = by_hand(2)
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 8
    np.testing.assert_allclose(frame["loss"], losses, rtol=1e-5)
    assert frame["step"].tolist() == list(range(1, 9))
    assert frame["validation_loss"].notna().tolist() == ([False] * 3 + [True]) * 2
    np.testing.assert_allclose(
        frame["validation_loss"].dropna(), validations, rtol=1e-5
    )
    assert "validation_step" not in frame
    assert "validation_loss" not in fit(validation=None).history.frame()


def test_a_frame_places_validations_where_batches_were_skipped():
    pytest.importorskip("pandas")
    data = np.array([1, 1, np.inf, 1, 1, 1], np.float32)
    result = eqaccum.fit(
        jnp.float32(0),
        data,
        global_batch=2,
        loss=loss,
        shuffle=False,
        nonfinite="skip",
        validation=HELD_OUT,
        validate_every=1,
    )
    frame = result.history.frame()
    assert frame["step"].tolist() == [1, 1, 2]
    validations = result.history["validation_loss"]
    assert len(validations) == len(result.history["validation_step"])
    assert frame["validation_loss"].notna().tolist()[-1]


def test_a_frame_needs_pandas(monkeypatch):
    history = fit(steps=1).history
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(eqaccum.EqaccumError, match="pandas.*pip install"):
        history.frame()
