"""The command line: `python -m eqaccum plan`, `check` and `doctor`."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import REPOSITORY

import eqaccum
from eqaccum._cli import main

TRAIN = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax

model = eqx.nn.MLP(16, 4, 16, 1, key=jax.random.key(0))
data = (np.ones((64, 16), np.float32), np.zeros(64, np.int32))

def loss(model, example, key):
    x, y = example
    return jnp.sum(model(x) ** 2)

def setup():
    return {"model": model, "data": data, "loss": loss, "epochs": 3,
            "checkpoint": "runs/never", "microbatch": "fastest"}

def shapes():
    struct = jax.ShapeDtypeStruct
    return {"model": eqx.filter_eval_shape(lambda: model), "loss": loss,
            "data": (struct((4096, 16), "float32"), struct((4096,), "int32")),
            "global_batch": 4096, "optimizer": lambda steps: optax.sgd(1e-2)}

def random_loss(model, example, key):
    x, y = example
    return jnp.sum(model(x + jax.random.normal(jax.random.key(0), x.shape)) ** 2)

def wrong():
    return {**setup(), "loss": random_loss}

def number():
    return 3

def incomplete():
    return {"model": model, "batch_size": 3}

def raises():
    return helper()

def helper():
    raise RuntimeError("no such data set")

def loss_that_raises(model, example, key):
    return jnp.ones(3) + jnp.ones(4)

def bad_loss():
    return {**setup(), "loss": loss_that_raises}
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """The name of the user's module, in the folder where the command runs."""
    (tmp_path / "usertrain.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    yield "usertrain"
    sys.modules.pop("usertrain", None)


def test_plan_is_printed(train, capsys, tmp_path):
    assert main(["plan", f"{train}:setup", "--global-batch", "64"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("64 = ") and "activations" in out and err == ""
    assert (
        os.listdir(tmp_path) == ["usertrain.py", "__pycache__"]
        or not (tmp_path / "runs").exists()
    )


def test_plan_as_json_is_the_plan(train, capsys):
    command = ["plan", f"{train}:shapes", "--global-batch", "1024", "--memory", "64KiB"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["global_batch"], told["limit_bytes"]) == (1024, 2**16)
    assert told["num_microbatches"] * told["microbatch"] >= 1024
    assert told["num_microbatches"] > 1 and told["predicted_bytes"] <= 2**16
    # It is the plan of the same call in Python.
    arguments = sys.modules[train].shapes() | {"global_batch": 1024}
    plan = eqaccum.plan(**arguments, memory_limit="64KiB")
    assert eqaccum.Plan.from_dict(told).microbatch == plan.microbatch
    assert told["parts"] == plan.to_dict()["parts"]


def test_plan_is_drawn(train, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["plan", f"{train}:shapes", "--plot", "plan.svg"]) == 0
    drawn = (tmp_path / "plan.svg").read_text()
    assert "<svg" in drawn
    assert main(["plan", f"{train}:shapes", "--plot", "no/plan.svg"]) == 2
    assert "--plot no/plan.svg cannot be written" in capsys.readouterr().err


def test_memory_in_bytes_alone(train, capsys):
    assert main(["plan", f"{train}:shapes", "--memory", "2000000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limit_bytes"] == 2_000_000


def test_check_says_what_is_wrong(train, capsys):
    assert main(["check", f"{train}:setup"]) == 0
    assert "nothing wrong was found" in capsys.readouterr().out
    assert main(["check", f"{train}:wrong", "--json", "--examples", "3"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert "random bits that do not come from key" in told["causes"][0]
    assert told["remedies"] and told["errors"] and told["cuts"]


@pytest.mark.devices(3)
def test_doctor_tells_what_there_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EQACCUM_CACHE_DIR", str(tmp_path))
    (tmp_path / "entry.json").write_text("12345")
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo")
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["devices"]) == 3 and "cpu" in told["devices"][0]
    assert told["versions"]["jax"] == jax.__version__
    assert told["versions"]["numpy"] == np.__version__
    assert told["limit_bytes"] > 0 and "3 CPU devices" in told["limit_source"]
    assert (told["cache_entries"], told["cache_bytes"]) == (1, 5)
    assert told["settings"]["XLA_FLAGS"] == "--xla_foo"
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"jax {jax.__version__}" in text and str(tmp_path) in text
    monkeypatch.setenv("EQACCUM_CACHE", "0")
    assert main(["doctor"]) == 0
    assert "off: in each process only" in capsys.readouterr().out


REFUSED = {
    "no colon": ("{train}", "expected module:function"),
    "a file": ("usertrain.py:setup", "no module usertrain.py"),
    "a path": ("./usertrain:setup", "expected module:function"),
    "no module": ("nothere:setup", "no module nothere"),
    "no function": ("{train}:setpu", "its functions are: loss, setup, shapes"),
    "no dict": ("{train}:number", "returned 3 (int)"),
    "other names": ("{train}:incomplete", "no data; and what fit does not know: batch"),
    "no global batch": ("{train}:setup", "returned no global_batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_one_line(name, train, capsys):
    target, text = REFUSED[name]
    assert main(["plan", target.format(train=train)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("eqaccum: error: ") and err.count("\n") == 1
    assert text in err, err


@pytest.mark.parametrize("memory", ["much", "-3", "1GiBB"])
def test_memory_that_is_none(memory, train, capsys):
    command = ["plan", f"{train}:shapes", f"--memory={memory}"]
    assert main(command) == 2
    assert f"{memory!r}" in capsys.readouterr().err


def test_no_plan_that_fits_is_an_error_with_figures(train, capsys):
    command = ["plan", f"{train}:setup", "--global-batch", "2"]
    assert main([*command, "--memory", "3KiB"]) == 2
    assert "3.0 KiB" in capsys.readouterr().err


def test_the_users_own_exceptions_are_shown_from_their_code_on(train, capsys):
    assert main(["plan", f"{train}:raises", "--global-batch", "8"]) == 1
    err = capsys.readouterr().err
    files = [line for line in err.splitlines() if line.startswith("  File")]
    assert len(files) == 2 and all("usertrain.py" in line for line in files), err
    assert err.endswith("RuntimeError: no such data set\n")


def test_options_are_explained(capsys):
    for command in ([], ["plan"], ["check"], ["doctor"]):
        with pytest.raises(SystemExit) as done:
            main([*command, "--help"])
        assert done.value.code == 0
        text = capsys.readouterr().out
        assert "usage: python -m eqaccum" in text
    with pytest.raises(SystemExit) as done:
        main(["train"])
    assert done.value.code == 2
    assert "plan" in capsys.readouterr().err


def test_it_runs_as_a_module(train, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "eqaccum", "plan", f"{train}:shapes", "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["global_batch"] == 4096
