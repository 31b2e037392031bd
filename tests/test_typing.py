"""A user's program under pyright: what goes in as their model comes out as it."""

import json
import subprocess
import sys

import pytest
from helpers import REPOSITORY

PROGRAM = """
from typing import assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqaccum


class Net(eqx.Module):
    weight: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight @ x

    def query(self, x: jax.Array) -> jax.Array:
        return self(x)


def loss(model: Net, example: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.sum(model(example) ** 2)


def stop(info: eqaccum.Info) -> bool:
    return float(info.metrics.loss) < 1e-3


net = Net(jnp.ones((2, 3)))
x = np.ones((8, 3), np.float32)
result = eqaccum.fit(
    net,
    x,
    global_batch=4,
    loss=loss,
    optimizer=lambda steps: optax.adamw(optax.cosine_decay_schedule(1e-3, steps)),
    memory_limit="1GiB",
    callbacks=[stop, eqaccum.callbacks.EarlyStopping("loss"), print],
    checkpoint="runs/a",
)
assert_type(result, eqaccum.FitResult[Net])
assert_type(result.model, Net)
result.model.query(x[0])
assert_type(result.history["loss"], np.ndarray)
assert_type(result.plan, eqaccum.Plan)

step = eqaccum.make_step(loss, optax.sgd(0.1), global_batch=4)
train = step.init(net, jax.random.key(0))
assert_type(train, eqaccum.TrainState[Net])
train, metrics = step(train, x)
assert_type(train.model, Net)
assert_type(metrics, eqaccum.Metrics)
assert_type(eqaccum.restore("runs/own", like=train).model, Net)

assert_type(eqaccum.load("runs/a", net), Net)
_, state = eqx.nn.make_with_state(Net)(jnp.ones((2, 3)))
assert_type(eqaccum.load("runs/a", net, state=state), tuple[Net, eqx.nn.State])
assert_type(eqaccum.evaluate(net, x, loss=loss), dict[str, float])
assert_type(eqaccum.check(net, x, loss).ok, bool)
assert_type(eqaccum.plan(net, x, global_batch=4, loss=loss).microbatch, int)
"""

WRONG = {
    "eqaccum.fit(net, x)": "global_batch",
    "eqaccum.fit(net, x, global_batch=4, batch_size=3)": "batch_size",
    'eqaccum.fit(net, x, global_batch="4096")': "global_batch",
    "result.model.passage(x[0])": "passage",
    "step(net, x)": "TrainState",
}


@pytest.mark.slow
def test_a_users_program_type_checks(tmp_path):
    wrong = "\n".join(WRONG)
    (tmp_path / "right.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(f"from right import *\n{wrong}\n")
    config = {
        "include": ["."],
        "extraPaths": [str(REPOSITORY)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = ["-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]

    def messages(file, line=None):
        return [
            f["message"]
            for f in found
            if f["file"].endswith(file) and line in (None, f["range"]["start"]["line"])
        ]

    assert messages("right.py") == []
    # The guard can fail: each wrong line is seen, and what is wrong in it.
    for line, (call, name) in enumerate(WRONG.items(), 1):
        told = messages("wrong.py", line)
        assert any(name in message for message in told), (call, told)
