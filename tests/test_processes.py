"""Several processes of one job, against one process with as many devices.

All but the first are slow: `make test-processes`.
"""

import re
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest
from helpers import REPOSITORY
from jax.sharding import Mesh
from processes import (
    DEVICES,
    GLOBAL_BATCH,
    HEARTBEAT,
    coupled,
    loss,
    run_processes,
    told,
    trained,
    wide,
)

import eqaccum

# One job runs them all: most of the time goes into starting it and compiling.
TOGETHER = (
    "limits,plain,gathered,sharded,skipping,stopping,raising,terminated,"
    "short_of_memory,own_rows,resuming,door"
)


def apart(one: Any, other: Any) -> float:
    one, other = (np.concatenate(x["parameters"]) for x in (one, other))
    return float(np.linalg.norm(one - other) / np.linalg.norm(one))


def alone(devices: int, **options: Any) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    return told(trained(mesh=mesh, **options))


def results(done: Any) -> list[dict[str, Any]]:
    for process in done:
        assert process.code == 0 and process.told is not None, process.said
    return [process.told for process in done]


def check_same(several: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """The same run in every process, and as in one process, to rounding."""
    for process in several:
        assert process["parameters"] == several[0]["parameters"]
        assert process["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert process["validation"] == pytest.approx(one["validation"], rel=1e-6)
        assert apart(process, one) < 1e-6


@pytest.mark.timeout(300)  # some ten seconds on two cores that have nothing else to do
def test_the_least_limit_decides(tmp_path):
    """Two processes with unequal limits make the plan of the poorer one."""
    first, second = (
        process["limits"] for process in results(run_processes("limits", 2, tmp_path))
    )
    one = alone(4, **wide(), microbatch="largest", memory_limit="700KiB")
    for process in (first, second):
        assert process["limit"] == 700 * 2**10
        assert process["passes"] == one["passes"] > 1
        assert process["devices"] == 4
    check_same([first, second], one)


@pytest.fixture(scope="module", params=[2, 3])
def job(request, tmp_path_factory):
    """What the processes of a job of two, and one of three, told."""
    folder = tmp_path_factory.mktemp("job")
    done = run_processes(TOGETHER, request.param, folder, timeout=1000)
    return results(done)


def of(job: Any, scenario: str) -> list[dict[str, Any]]:
    return [process[scenario] for process in job]


def slow(test):
    return pytest.mark.slow(pytest.mark.timeout(1200)(test))


@pytest.fixture(scope="module")
def calm():
    return alone(DEVICES)


@slow
def test_limits(job):
    for process in of(job, "limits"):
        assert process["limit"] == 700 * 2**10


@slow
def test_plain(job, calm):
    check_same(of(job, "plain"), calm)
    masks = [process["masks"] for process in of(job, "plain")]
    expected: list[Any] = []
    trained(callbacks=[lambda info: expected.append(info.metrics.aux["mask"])])
    bits = [int(np.packbits(mask).astype(int).sum()) for mask in expected]
    assert all(mask == bits for mask in masks)


@slow
def test_coupled(job):
    check_same(of(job, "gathered"), alone(DEVICES, **coupled()))


@slow
def test_shard_optimizer(job, calm):
    check_same(of(job, "sharded"), calm)
    devices = DEVICES * len(job)
    shape = [16 // devices, 6] if 16 % devices == 0 else [16, 6 // devices]
    assert all(process["moment"] == shape for process in of(job, "sharded"))


@slow
def test_skips_are_agreed(job):
    for process in of(job, "skipping"):
        assert process["skipped"] == [True, False, False, True, False]
        assert process["parameters"] == of(job, "skipping")[0]["parameters"]


@slow
def test_one_process_stops_all(job):
    assert all(process["step"] == 3 for process in of(job, "stopping"))


@slow
def test_an_exception_in_one_process_stops_all(job, calm):
    errors = [process["error"] for process in of(job, "raising")]
    assert errors[1] == "OSError: the disk of process 1"
    for error in (*errors[:1], *errors[2:]):
        assert error.startswith("StepError: process 1 stopped with an exception")
    check_same(of(job, "raising"), calm)  # saved at that step, and gone on


@slow
def test_sigterm_in_one_process_saves_in_all(job, calm):
    assert all(process["code"] == 143 for process in of(job, "terminated"))
    check_same(of(job, "terminated"), calm)


@slow
def test_out_of_memory_in_one_process_is_answered_by_all(job, calm):
    for process in of(job, "short_of_memory"):
        assert process["warned"] == 1
        assert process["passes"] > -(-GLOBAL_BATCH // (6 * DEVICES * len(job)))
    check_same(of(job, "short_of_memory"), calm)


@slow
def test_each_process_gives_rows_of_its_own(job):
    """The same examples at the same places, so the same masks: as from columns."""
    from processes import columns

    check_same(
        of(job, "own_rows"), alone(DEVICES, data=columns(64), shuffle=False, epochs=2)
    )


@slow
def test_checkpoints_with_a_sharded_optimizer(job, calm):
    check_same(of(job, "resuming"), calm)


@slow
def test_doors(job):
    from processes import Net, columns

    x, y = columns()
    import optax

    step = eqaccum.make_step(
        loss, optax.sgd(0.1), global_batch=GLOBAL_BATCH, has_aux=True
    )
    train = step.init(Net())
    train, metrics = step(train, (x[:20], y[:20]))
    scores = eqaccum.predict(train.model, x)
    validation = eqaccum.evaluate(train.model, (x, y))["loss"]
    for process in of(job, "door"):
        assert process["same"]
        assert process["loss"] == pytest.approx(float(metrics.loss), rel=1e-6)
        assert process["validation"] == pytest.approx(validation, rel=1e-6)
        np.testing.assert_allclose(process["scores"], scores, rtol=1e-5, atol=1e-6)
        assert np.array_equal(process["mask"], metrics.aux["mask"])


@slow
@pytest.mark.parametrize("processes", [2, 3])
def test_a_killed_process_stops_the_others(processes, tmp_path):
    done = run_processes("dying", processes, tmp_path, timeout=200)
    ended = time.time()
    killed = float((tmp_path / "dying" / "alive1").read_text())
    assert done[1].code == -9
    assert all(process.code != 0 for process in done)
    assert ended - killed < 3 * HEARTBEAT


@slow
def test_one_run_on_changing_machines():
    """One device, four, two processes, less memory: the losses of one undisturbed."""
    done = subprocess.run(
        [sys.executable, "benchmarks/elastic.py", "--tiny"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    apart = re.findall(r"\| ([\d.]+e[+-]\d+) \|$", done.stdout, re.MULTILINE)
    assert len(apart) == 4 and all(float(one) < 1e-5 for one in apart)
    (norm,) = re.findall(r"at the end: (\S+) apart", done.stdout)
    assert float(norm) < 1e-5
