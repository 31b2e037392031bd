"""A run that was stopped and resumed is the run that was never stopped."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import resumed
from helpers import REPOSITORY, assert_trees_close, assert_trees_equal

import eqaccum

pytestmark = [
    pytest.mark.filterwarnings("ignore:BatchNorm:eqaccum.EqaccumWarning"),
    # Orbax's threads that read or write in vain tell an event loop that is closed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def fit(**more: Any) -> eqaccum.FitResult:
    return eqaccum.fit(**resumed.arguments(**more))


def small_loss(model, example, key):
    kept = jax.random.bernoulli(key, 0.7, (4,))
    waves = jnp.mean(jnp.sin(model["w"] * example) ** 2)
    return jnp.sum(jnp.sin(model["b"] * example * kept)) + waves


def small(**more: Any) -> eqaccum.FitResult:
    """A run that compiles fast: dropout by hand, 60 rows, 8 steps an epoch."""
    arguments = {
        "model": {"w": jnp.linspace(-1, 1, 2000).reshape(40, 50), "b": jnp.ones(4)},
        "data": np.linspace(-1, 1, 60, dtype=np.float32),
        "loss": small_loss,
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "global_batch": 8,
        "microbatch": 4,
        "epochs": 3,
    }
    return eqaccum.fit(**arguments | more)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """As for the tests themselves, for fixtures that are made once."""
    import eqaccum._mesh

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eqaccum._mesh, "job_devices", lambda: jax.devices()[:1])
        yield


@pytest.fixture(scope="module")
def undisturbed() -> eqaccum.FitResult:
    with one_device():
        return fit(steps=6)


@pytest.fixture(scope="module")
def finished() -> eqaccum.FitResult:
    with one_device():
        return small(steps=6)


def assert_same_run(got: eqaccum.FitResult, want: eqaccum.FitResult) -> None:
    """Every leaf and every number of the history, bit for bit; the clock's apart."""
    assert_trees_equal(got.train, want.train)
    assert list(got.history) == list(want.history)
    for name in want.history:
        if name != "seconds":
            assert got.history[name].dtype == want.history[name].dtype, name
            assert got.history[name].tobytes() == want.history[name].tobytes(), name
        assert len(got.history[name]) == len(want.history[name]), name


def start_child(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "tests/resumed.py", str(directory), *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(entry.name) for entry in directory.iterdir())


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


# --- the same run ---------------------------------------------------------------


def test_three_steps_a_new_process_and_three_steps_are_six(tmp_path, undisturbed):
    directory = tmp_path / "run"
    child = start_child(directory, "3")
    _, said = child.communicate(timeout=100)
    assert child.returncode == 0, said
    assert checkpoints(directory) == [2, 3]
    assert_same_run(fit(steps=6, checkpoint=directory, resume=True), undisturbed)
    like, state = resumed.net(seed=2)
    loaded = eqaccum.load(directory, like, state=state)
    assert_trees_equal(loaded, (undisturbed.model, undisturbed.state))
    with pytest.raises(eqaccum.InputError, match=r"state= is a dict"):
        eqaccum.load(directory, like, state={})
    with pytest.raises(eqaccum.InputError, match="absent here"):
        eqaccum.load(directory, like, state=eqx.nn.State({}))


def test_a_process_that_is_told_to_terminate_saves_and_exits_143(tmp_path, undisturbed):
    directory = tmp_path / "run"
    child = start_child(directory, "6", "0.5")
    assert child.stdout is not None
    while child.stdout.readline() != "step 2\n":
        assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=100)
    assert child.returncode == 143, said
    assert "told to terminate: finishing this step and saving it" in said
    assert 2 <= checkpoints(directory)[-1] < 6
    assert_same_run(fit(steps=6, checkpoint=directory, resume=True), undisturbed)


def send(number: int, at: int) -> Any:
    """A callback that gets a signal at a step."""

    def callback(info: Any) -> None:
        if info.step == at:
            os.kill(os.getpid(), number)

    return callback


def test_ctrl_c_saves_and_returns(tmp_path, finished):
    stopped = small(steps=6, checkpoint=tmp_path, callbacks=[send(signal.SIGINT, at=2)])
    assert stopped.train.step == 2
    assert checkpoints(tmp_path) == [2]
    assert_same_run(small(steps=6, checkpoint=tmp_path, resume=True), finished)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_a_checkpoint_sigterm_is_left_alone():
    seen = []
    small(
        steps=1, callbacks=[lambda info: seen.append(signal.getsignal(signal.SIGTERM))]
    )
    assert seen == [signal.SIG_DFL]


def test_saving_after_every_step_changes_nothing(tmp_path, finished):
    assert_same_run(small(steps=6, checkpoint=tmp_path, save_every=1), finished)
    assert checkpoints(tmp_path) == [5, 6]


def test_where_checkpoints_are_taken(tmp_path):
    small(steps=5, checkpoint=tmp_path / "every", save_every=2)
    assert checkpoints(tmp_path / "every") == [4, 5]
    small(steps=18, checkpoint=tmp_path / "epochs")  # 8 steps an epoch
    assert checkpoints(tmp_path / "epochs") == [16, 18]


def test_a_stopped_run_in_the_next_epoch_and_with_validation(tmp_path):
    more = {"validation": np.ones(5, np.float32), "validate_every": 3, "steps": 11}
    want = small(**more)
    run = {"checkpoint": tmp_path, "resume": True}
    small(**more, **run, callbacks=[lambda info: info.step == 7])  # True stops
    small(**more, **run, callbacks=[lambda info: info.step == 8])  # the epoch's end
    assert_same_run(small(**more, **run), want)
    assert list(want.history["validation_step"]) == [3, 6, 9]


def test_a_finished_run_is_handed_out_again_and_can_go_on(tmp_path, finished):
    first = small(steps=4, checkpoint=tmp_path)
    assert_same_run(small(steps=4, checkpoint=tmp_path, resume=True), first)
    assert_same_run(small(steps=6, checkpoint=tmp_path, resume=True), finished)


def test_resume_starts_where_there_is_nothing(tmp_path, capsys, finished):
    got = small(steps=6, checkpoint=tmp_path / "new" / "run", resume=True)
    assert_same_run(got, finished)
    assert "yet: the run starts at step 0" in capsys.readouterr().err


def test_a_result_goes_on_from_a_copy(tmp_path, finished):
    first = small(steps=3)
    before = jax.tree.map(np.array, eqx.filter(first.train, eqx.is_array))
    got = small(steps=6, resume=first, checkpoint=tmp_path)
    assert_same_run(got, finished)
    assert_same_run(small(steps=6, checkpoint=tmp_path, resume=True), finished)
    assert_trees_equal(eqx.filter(first.train, eqx.is_array), before)
    assert len(first.history["loss"]) == 3


def test_the_keys_of_the_run_go_on(tmp_path, capsys, finished):
    small(steps=3, checkpoint=tmp_path)
    more = {"steps": 6, "key": jax.random.key(77)}
    got = small(**more, checkpoint=tmp_path, resume=True)
    assert_same_run(got, finished)
    assert "goes on, not the one passed" in capsys.readouterr().err


def with_nan(*rows: int) -> np.ndarray:
    data = np.linspace(-1, 1, 60, dtype=np.float32)
    data[list(rows)] = np.nan
    return data


def test_batches_that_were_skipped_are_not_seen_again(tmp_path):
    more = {"data": with_nan(*range(0, 60, 9)), "nonfinite": "skip"}
    want = small(**more, steps=6)
    assert want.history["skipped"].any()
    small(**more, steps=2, checkpoint=tmp_path, save_every=1)
    assert_same_run(small(**more, steps=6, checkpoint=tmp_path, resume=True), want)


def test_an_error_saves_the_last_good_step(tmp_path):
    data = with_nan(17)
    with pytest.raises(eqaccum.NonFiniteError) as caught:
        small(data=data, checkpoint=tmp_path, key=jax.random.key(2))
    steps = caught.value.result.train.step
    assert 1 <= steps == checkpoints(tmp_path)[-1]
    assert any(str(tmp_path / str(steps)) in note for note in caught.value.__notes__)
    more = {"data": data, "nonfinite": "skip", "steps": steps + 1}
    got = small(**more, checkpoint=tmp_path, resume=True)
    assert_same_run(got, small(**more, key=jax.random.key(2)))


def test_an_error_of_the_users_saves_too(tmp_path, finished):
    def callback(info):
        if info.step == 4:
            raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        small(steps=6, checkpoint=tmp_path, callbacks=[callback])
    assert checkpoints(tmp_path) == [4]
    assert_same_run(small(steps=6, checkpoint=tmp_path, resume=True), finished)


# --- another machine ------------------------------------------------------------


def assert_close_runs(got: eqaccum.FitResult, want: eqaccum.FitResult) -> None:
    np.testing.assert_allclose(got.history["loss"], want.history["loss"], rtol=2e-6)
    assert_trees_close(got.train.model, want.train.model, rtol=2e-6, atol=1e-7)
    np.testing.assert_array_equal(got.history["epoch"], want.history["epoch"])


def test_on_other_devices_and_memory_it_is_the_same_to_rounding(tmp_path, capsys):
    want = small(steps=12, microbatch="largest")
    run = {"checkpoint": tmp_path, "resume": True, "microbatch": "largest"}
    first = small(steps=4, **run).plan
    four = jax.make_mesh((4,), ("data",))
    assert small(steps=8, mesh=four, **run).plan.devices == 4
    assert "ran on 1 x cpu (cpu), this is 4 x cpu (cpu)" in capsys.readouterr().err
    less = first.predicted_bytes - 1
    got = small(steps=12, memory_limit=less, **run)
    assert (first.num_microbatches, got.plan.devices) == (1, 1)
    assert got.plan.num_microbatches > 1
    assert_close_runs(got, want)
    asked = small(steps=13, **run | {"microbatch": 3}).plan
    assert asked.num_microbatches == 3


def test_the_plan_counts_what_a_save_holds(tmp_path):
    """On CPU the arrays that are being written stay: parameters and momentum."""
    plain = small(steps=2).plan
    saving = small(steps=2, checkpoint=tmp_path / "run").plan
    held = 2 * (40 * 50 + 4) * 4
    assert saving.predicted_bytes - plain.predicted_bytes == held
    assert dict(saving.parts.extra)["checkpoint being written"] == held
    assert saving.parts.total == saving.predicted_bytes
    planned = eqaccum.plan(
        {"w": jnp.linspace(-1, 1, 2000).reshape(40, 50), "b": jnp.ones(4)},
        np.linspace(-1, 1, 60, dtype=np.float32),
        loss=small_loss,
        optimizer=optax.sgd(0.1, momentum=0.9),
        global_batch=8,
        microbatch=4,
        checkpoint=tmp_path / "another",
    )
    assert planned.predicted_bytes == saving.predicted_bytes


def test_a_plan_is_kept_where_it_fits(tmp_path, capsys):
    arguments = {
        "model": {"w": jnp.ones(1000)},
        "data": np.ones(64, np.float32),
        "loss": lambda model, example, key: jnp.sum(jnp.sin(model["w"] * example)),
        "optimizer": optax.sgd(0.1),
        "global_batch": 16,
        "checkpoint": tmp_path,
        "resume": True,
    }
    first = eqaccum.fit(**arguments, steps=1, memory_limit="60KiB").plan
    assert first.num_microbatches > 1
    same = eqaccum.fit(**arguments, steps=2).plan  # now the largest would be larger
    assert same.num_microbatches == first.num_microbatches
    assert "planning anew" not in capsys.readouterr().err
    less = first.predicted_bytes - 1
    other = eqaccum.fit(**arguments, steps=3, memory_limit=less).plan
    assert other.num_microbatches > first.num_microbatches
    said = capsys.readouterr().err
    assert f"planning anew: the plan of {tmp_path / '2'} no longer fits" in said
    asked = eqaccum.fit(**arguments, steps=4, microbatch=16).plan
    assert asked.num_microbatches == 1


# --- data that cannot be indexed ------------------------------------------------


class Loader:
    """Batches of 5 rows, in another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        rows = np.random.default_rng(self.epoch).permutation(60) / np.float32(60)
        yield from rows.astype(np.float32).reshape(-1, 5)


def test_a_loader_is_read_up_to_the_place(tmp_path):
    want = small(steps=13, data=Loader())
    for steps in (3, 10):
        small(steps=steps, data=Loader(), checkpoint=tmp_path, resume=True)
    got = small(steps=13, data=Loader(), checkpoint=tmp_path, resume=True)
    assert_same_run(got, want)


def test_an_iterator_cannot_be_resumed(tmp_path):
    more = {"epochs": None, "checkpoint": tmp_path}
    first = small(steps=3, data=iter(Loader()), **more)
    with pytest.raises(eqaccum.InputError) as caught:
        small(steps=6, data=iter(Loader()), resume=True, **more)
    for part in (str(tmp_path / "3"), "3 batches into an epoch", "__iter__"):
        assert part in str(caught.value)
    with pytest.raises(eqaccum.InputError, match="the fit before stopped 3 batches"):
        small(steps=6, data=iter(Loader()), resume=first, epochs=None)
    done = small(steps=3, data=iter(Loader()), resume=True, **more)
    assert done.train.step == 3


# --- refused --------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A run of six steps; tests that change it do so in a copy."""
    directory = tmp_path_factory.mktemp("kept") / "run"
    with one_device():
        small(steps=6, checkpoint=directory, save_every=3)
    return directory


@pytest.fixture
def copy(kept, tmp_path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "copy"))


def model(**change: Any) -> dict[str, Any]:
    return {"model": {"w": jnp.ones((40, 50)), "b": jnp.ones(4)} | change}


OTHERS = {
    "wider model": (
        model(b=jnp.ones(5)),
        ["model['b']", "float32[4] in the checkpoint", "float32[5] here"],
    ),
    "more leaves": (
        model(a=jnp.ones(5)),
        ["model['a']", "absent in the checkpoint", "float32[5] here"],
    ),
    "fewer leaves": (
        {"model": {"b": jnp.ones(4)}},
        ["model['w']", "float32[40,50] in the checkpoint", "absent here"],
    ),
    "narrow dtype": (
        model(b=jnp.ones(4, jnp.bfloat16)),
        ["model['b']", "float32[4] in the checkpoint", "bfloat16[4] here"],
    ),
    "other optimizer": (
        {"optimizer": optax.adam(0.1)},
        ["opt_state[0].count", "absent in the checkpoint", "int32[] here"],
    ),
    "no momentum": (
        {"optimizer": optax.sgd(0.1)},
        ["opt_state[0].trace['b']", "float32[4] in the checkpoint and absent here"],
    ),
    "global batch": ({"global_batch": 12}, ["global_batch 8", "12"]),
    "rows": ({"data": np.ones(50, np.float32)}, ["rows 60", "50"]),
    "shuffle": ({"shuffle": False}, ["shuffle True", "False"]),
    "remainder": ({"drop_remainder": True}, ["drop_remainder False", "True"]),
    "loader": ({"data": Loader()}, ["rows 60", "None"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_by_name(name, kept):
    change, parts = OTHERS[name]
    before = contents(kept)
    with pytest.raises(eqaccum.InputError) as caught:
        small(steps=7, checkpoint=kept, resume=True, **change)
    for part in [str(kept / "6"), *parts]:
        assert part in str(caught.value)
    assert contents(kept) == before


def test_a_run_is_not_overwritten(kept, finished):
    before = contents(kept)
    for more in ({}, {"resume": finished}):
        with pytest.raises(eqaccum.InputError) as caught:
            small(steps=6, checkpoint=kept, **more)
        for part in (str(kept), "newest checkpoint: 6", "resume=True"):
            assert part in str(caught.value)
    assert contents(kept) == before


def damage(file: Path, how: str) -> None:
    whole = file.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    if how == "gone":
        file.unlink()
    else:
        ways = {"empty": b"", "half": whole[:middle], "flipped": flipped}
        file.write_bytes(ways[how])


def test_a_damaged_checkpoint_is_refused_by_name(kept, copy, finished):
    """Each file of it, gone, cut or with one bit flipped: never other numbers."""
    refused = set()
    for file in sorted(f for f in (copy / "6").rglob("*") if f.is_file()):
        for how in ("gone", "empty", "half", "flipped"):
            damage(file, how)
            try:
                loaded = eqaccum.load(copy, model()["model"])
            except eqaccum.CheckpointError as error:
                refused.add((file.relative_to(copy / "6").parts[0], how))
                assert str(copy / "6") in str(error)
                if "no checkpoint of eqaccum's" not in str(error):
                    assert "is damaged" in str(error)
                    assert f"before it, {copy / '3'}, is untouched" in str(error)
            else:  # a file that only other tools of Orbax's read
                assert_trees_equal(loaded, finished.model)
            file.write_bytes((kept / file.relative_to(copy)).read_bytes())
    ways = {"gone", "empty", "half", "flipped"}
    assert {how for part, how in refused if part == "arrays"} == ways
    assert {how for part, how in refused if part == "record"} == ways


def test_the_one_before_a_damaged_checkpoint_is_good(copy, finished):
    numbers = max((copy / "6").rglob("*"), key=lambda file: file.stat().st_size)
    damage(numbers, "flipped")
    with pytest.raises(eqaccum.CheckpointError, match="another checksum") as caught:
        small(steps=6, checkpoint=copy, resume=True)
    assert f"remove {copy / '6'} to go on" in str(caught.value)
    shutil.rmtree(copy / "6")
    assert_same_run(small(steps=6, checkpoint=copy, resume=True), finished)


def test_a_foreign_directory_is_refused(tmp_path):
    (tmp_path / "logs").mkdir()
    with pytest.raises(eqaccum.CheckpointError, match="it holds logs"):
        eqaccum.load(tmp_path, model()["model"])
    with pytest.raises(eqaccum.CheckpointError, match="there is no directory"):
        eqaccum.load(tmp_path / "missing", model()["model"])
    small(steps=1, checkpoint=tmp_path, resume=True)  # other files are no obstacle
    record = tmp_path / "1" / "record" / "record.json"
    text = record.read_text()
    for new, part in (
        (text.replace('"version": 1', '"version": 9', 1), "version 9"),
        (text.replace("eqaccum.checkpoint", "other"), "is not 'eqaccum.checkpoint'"),
        (text.replace('"rows": 60', '"rows": 61'), "record.json has another checksum"),
        ("[]", "is not 'eqaccum.checkpoint'"),
    ):
        assert new != text
        record.write_text(new)
        with pytest.raises(eqaccum.CheckpointError, match=part):
            small(steps=1, checkpoint=tmp_path, resume=True)
        with pytest.raises(eqaccum.CheckpointError, match=part):
            eqaccum.load(tmp_path, model()["model"])
    (tmp_path / "7").mkdir()
    with pytest.raises(eqaccum.CheckpointError, match="it has no record.json"):
        small(steps=1, checkpoint=tmp_path, resume=True)


@contextlib.contextmanager
def no_larger_files_than(size: int) -> Iterator[None]:
    """A disk that is full, as far as this process can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_and_the_older_checkpoint_stays_good(tmp_path, finished):
    small(steps=2, checkpoint=tmp_path, save_every=2)
    before = contents(tmp_path)
    with no_larger_files_than(4_000):  # w alone has 8,000 bytes
        with pytest.raises(eqaccum.CheckpointError) as caught:
            small(steps=6, checkpoint=tmp_path, save_every=2, resume=True)
    for part in ("File too large", str(tmp_path), f"{tmp_path / '2'}; it was not"):
        assert part in str(caught.value)
    assert caught.value.result.train.step > 2
    assert contents(tmp_path) == before  # what was half written is gone
    assert_same_run(small(steps=6, checkpoint=tmp_path, resume=True), finished)


def test_a_part_that_is_still_written_when_a_save_has_failed(tmp_path):
    """Orbax's threads make a folder anew that was removed under them."""
    from eqaccum._fit import _orbax

    folder = tmp_path / "4.orbax-checkpoint-tmp" / "arrays"
    folder.mkdir(parents=True)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest").write_text("late")

    late = threading.Timer(0.02, write)
    late.start()
    _orbax._clear_away(tmp_path)
    late.join()
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Root may write anywhere: become nobody for a moment."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_read_only_directory_is_refused_before_anything_runs():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        with not_root(), pytest.raises(eqaccum.CheckpointError) as caught:
            small(steps=1, checkpoint=folder, callbacks=[lambda info: pytest.fail()])
        assert folder in str(caught.value)
        assert "Permission denied" in str(caught.value)
        file = Path(folder) / "file"
        os.chmod(folder, 0o755)
        file.write_text("")
        with pytest.raises(eqaccum.CheckpointError, match="Not a directory"):
            small(steps=1, checkpoint=file)


@pytest.mark.parametrize(
    "more, parts",
    [
        ({"resume": "yes", "checkpoint": "x"}, ["resume='yes'", "FitResult"]),
        ({"resume": True}, ["resume=True", "without checkpoint="]),
        ({"save_every": 5}, ["save_every=5", "without checkpoint="]),
        ({"save_every": 0, "checkpoint": "x"}, ["save_every=0"]),
        ({"checkpoint": 3}, ["checkpoint=3", "path of a directory"]),
    ],
)
def test_arguments_that_cannot_work(more, parts):
    with pytest.raises(eqaccum.InputError) as caught:
        small(steps=1, **more)
    for part in parts:
        assert part in str(caught.value)


def test_without_orbax_the_command_that_installs_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(eqaccum.CheckpointError) as caught:
        small(steps=1, checkpoint=tmp_path / "run")
    assert 'pip install "eqaccum[checkpoint]"' in str(caught.value)


# --- for inference, and loops of one's own --------------------------------------


def test_a_model_is_loaded_for_inference(kept, finished):
    like = model()["model"] | {"name": "kept as it is"}
    loaded = eqaccum.load(str(kept), like)
    assert loaded["name"] is like["name"]
    assert_trees_equal(eqaccum.load(kept, model()["model"]), finished.model)
    assert_trees_equal(like["w"], np.ones((40, 50), np.float32))
    shapes = jax.eval_shape(lambda: model()["model"])
    assert_trees_equal(eqaccum.load(kept, shapes), finished.model)
    assert_trees_equal(eqaccum.load(kept / "3", shapes), small(steps=3).model)
    for change, parts in list(OTHERS.values())[:4]:
        with pytest.raises(eqaccum.InputError) as caught:
            eqaccum.load(kept, change["model"])
        for part in [str(kept / "6"), *parts]:
            assert part in str(caught.value)


def test_every_kind_of_leaf_comes_back(tmp_path):
    model = {
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "eighth": jnp.ones(2, jnp.float8_e4m3fn),
        "complex": jnp.array([1 + 2j]),
        "none": jnp.zeros((0, 3)),
        "bits": jnp.array([True, False]),
        "key": jax.random.key(3),
        "table": np.arange(4, dtype=np.int8),
        "number": 2.5,
        "scalar": jnp.float32(7),
        "not a/path[0].x": jnp.array([np.nan, -0.0, np.inf]),
    }

    def loss(model, example, key):
        return jnp.real(jnp.sum(model["complex"])) * example

    step = eqaccum.make_step(
        loss,
        optax.adam(0.1),
        global_batch=2,
        ema=0.9,
        trainable={n: n in ("half", "complex", "none", "scalar") for n in model},
    )
    train, _ = step(step.init(model), np.ones(2, np.float32))
    eqaccum.save(tmp_path / "own", train)
    like = step.init(jax.tree.map(lambda leaf: leaf, model))
    back = eqaccum.restore(tmp_path / "own", like=like)
    assert_trees_equal(back, train)
    assert_trees_equal(eqaccum.load(tmp_path / "own", model), train.model)
    step(back, np.ones(2, np.float32))
    with pytest.raises(eqaccum.CheckpointError, match="written by eqaccum.save"):
        eqaccum.fit(
            model,
            np.ones(2, np.float32),
            loss=loss,
            global_batch=2,
            checkpoint=tmp_path / "own",
            resume=True,
        )


def test_a_loop_of_ones_own_is_saved_and_restored(tmp_path):
    step = eqaccum.make_step(
        lambda model, example, key: jnp.sum((model - example) ** 2),
        optax.adam(0.1),
        global_batch=4,
    )
    batches = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)
    train = step.init(jnp.ones(3))
    for batch in batches[:3]:
        eqaccum.save(tmp_path / "own", train)
        old = train
        train, _ = step(train, batch)
    eqaccum.save(tmp_path / "own", train)
    assert checkpoints(tmp_path / "own") == [3]  # only the newest is kept
    for batch in batches[3:]:
        train, _ = step(train, batch)
    back = eqaccum.restore(tmp_path / "own", like=old)  # consumed, but of this shape
    assert (back.step, back.batch_index) == (3, 3)
    for batch in batches[3:]:
        back, _ = step(back, batch)
    assert_trees_equal(back, train)
    with pytest.raises(eqaccum.InputError, match="TrainState was expected"):
        eqaccum.save(tmp_path / "own", {"w": 1})
    with pytest.raises(eqaccum.InputError, match="TrainState was expected"):
        eqaccum.restore(tmp_path / "own", like={"w": 1})


def test_a_fits_directory_is_restored_but_not_mixed_with(kept, finished):
    sgd = optax.sgd(0.1, momentum=0.9)
    step = eqaccum.make_step(small_loss, sgd, global_batch=8, microbatch=4)
    like = step.init(model()["model"])
    assert_trees_equal(eqaccum.restore(kept, like=like), finished.train)
    with pytest.raises(eqaccum.InputError, match="the checkpoints of a fit"):
        eqaccum.save(kept, like)


def test_a_memory_bank_is_saved(tmp_path):
    def embed(model, example, key):
        return model["q"] @ example, model["p"] @ example

    def head(model, embeddings, weights):
        return eqaccum.losses.info_nce(*embeddings, weights=weights)

    draw = np.random.default_rng(0)
    step = eqaccum.make_step(
        eqaccum.coupled(embed, head, group=4, bank=eqaccum.MemoryBank(8)),
        optax.sgd(0.1),
        global_batch=8,
    )
    model = {"q": jnp.eye(3), "p": jnp.ones((3, 3))}
    batches = draw.normal(size=(4, 8, 3)).astype(np.float32)
    like = step.init(model)  # no plan yet, so no rows of the bank
    train, _ = step(step.init(model), batches[0])
    train, _ = step(train, batches[1])
    eqaccum.save(tmp_path, train)
    back = eqaccum.restore(tmp_path, like=like)
    assert len(back.bank_leaves) > 0
    for batch in batches[2:]:
        train, _ = step(train, batch)
        back, _ = step(back, batch)
    assert_trees_equal(back, train)
