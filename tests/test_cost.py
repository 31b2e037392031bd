"""What the compiled step costs beside the same step written by hand, by XLA's count.

Counts, not times: a step that begins to compute or move a tenth more than it did when
the figures below were taken fails here, on every machine.
"""

import _models
import _rivals
import jax
import pytest
from _rivals import Setting

import eqaccum
from eqaccum._data import batch_of

ROWS, MICROBATCH = 1024, 128

# (workload, flops, bytes moved): eqaccum's three programs over one program with
# `lax.scan`. They move the gradient once more (finish apart from accumulate), which
# shows where parameters weigh much; convolutions are laid out with the channels last,
# which moves more and is faster in a loop.
CASES = {
    "MLP": (
        _models.mlp(features=32, width=64, depth=3, classes=10),
        1.01,
        1.12,
    ),
    "LM": (
        _models.language_model(vocabulary=64, length=16, width=32, depth=1, heads=2),
        1.00,
        1.01,
    ),
    "CNN": (_models.cnn(size=8, widths=(8, 16), blocks=1), 1.07, 1.28),
}


def costs(compiled) -> dict[str, float]:
    told = compiled.cost_analysis()
    return {name: told[name] for name in ("flops", "bytes accessed")}


def by_hand(setting: Setting) -> dict[str, float]:
    jitted = _rivals.scan_program(setting)
    return costs(jitted.lower(setting.fresh(), setting.batch).compile())


def ours(setting: Setting) -> dict[str, float]:
    step = eqaccum.make_step(
        setting.workload.loss,
        _rivals.OPTIMIZER,
        global_batch=ROWS,
        microbatch=MICROBATCH,
    )
    train = step.init(setting.workload.model)
    batch = batch_of(setting.batch, in_axes=0, weights=None)
    ready = step.place(batch, train).ready
    programs = (ready.accumulate, ready.finish, ready.update)
    each = [costs(program.compiled) for program in programs]
    return {name: sum(cost[name] for cost in each) for name in each[0]}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="figures of XLA:CPU")
@pytest.mark.parametrize("name", CASES)
def test_a_step_costs_what_it_did(name):
    workload, flops, moved = CASES[name]
    setting = Setting(workload, ROWS, MICROBATCH)
    mine, theirs = ours(setting), by_hand(setting)
    assert mine["flops"] <= 1.1 * flops * theirs["flops"]
    assert mine["bytes accessed"] <= 1.1 * moved * theirs["bytes accessed"]
