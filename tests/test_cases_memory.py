"""What a step is said to need, what follows from it, and what probing leaves."""

import dataclasses
import gc
import inspect
import re
import threading
import typing
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compilations

import eqaccum
from eqaccum._step import _compile, forget

SGD = optax.sgd(0.1)
WIDTH = 16
X = np.random.default_rng(0).normal(size=(12, WIDTH)).astype(np.float32)
MODEL = jnp.full((WIDTH, WIDTH), 0.1)


@pytest.fixture(autouse=True)
def no_figures_kept(tmp_path, monkeypatch):
    """No figure of an earlier run answers."""
    monkeypatch.setenv("EQACCUM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("eqaccum._plan._cache._process", {})


@pytest.fixture
def nothing_kept():
    """Nor does a program of an earlier test, or one of this test later."""
    forget()
    yield
    forget()


def loss(w, x, key):
    """Holds 256 numbers for each row and layer: as many as there are parameters."""
    table = jnp.outer(x, x)
    for _ in range(2):
        table = jnp.tanh(w @ table)
    return jnp.sum(table)


def plan(**more: Any) -> eqaccum.Plan:
    arguments = {"global_batch": 12, "loss": loss, "optimizer": SGD} | more
    return eqaccum.plan(MODEL, X, **arguments)


def fit(**more: Any) -> eqaccum.FitResult:
    arguments = {"global_batch": 12, "loss": loss, "optimizer": SGD} | more
    return eqaccum.fit(MODEL, X, **arguments)


def programs() -> dict[str, Any]:
    """The compiled programs of the last step, by name."""
    return {p.name: p.compiled for p in _compile._programs.values()}


# --- no usable figures ------------------------------------------------------------


class Analysis:
    def __init__(self, **sizes: int):
        for name, size in sizes.items():
            setattr(self, f"{name}_size_in_bytes", size)


UNUSABLE = {
    "none": None,
    "zeros": Analysis(argument=0, output=0, alias=0, temp=0),
    "negative": Analysis(argument=-1, output=-1, alias=-1, temp=-1),
    "no temporaries": Analysis(argument=100, output=100, alias=0),
    "no arguments": Analysis(argument=0, output=100, alias=0, temp=100),
}


class Compiled:
    def __init__(self, analysis: Any):
        self.memory_analysis = lambda: analysis

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a plan runs nothing")


@pytest.mark.parametrize("name", UNUSABLE)
def test_figures_that_cannot_be_used_never_fit(name, monkeypatch, nothing_kept):
    compiled = Compiled(UNUSABLE[name])
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: compiled)
    with pytest.raises(eqaccum.CannotTell) as caught:
        plan(memory_limit="1GiB", global_batch=2)
    text = str(caught.value)
    assert "no usable memory figures" in text and "microbatch=" in text
    # A size that was asked for needs no figures.
    pinned = plan(microbatch=4)
    assert (pinned.num_microbatches, pinned.microbatch) == (3, 4)
    assert pinned.predicted_bytes is None
    assert "no figures" in str(pinned) and "unknown" in str(pinned)


# --- what is counted ----------------------------------------------------------------


def test_donated_buffers_count_once():
    adam = optax.adam(0.1)
    result = fit(microbatch=4, optimizer=adam)
    made, sizes = programs(), {}
    for name, compiled in made.items():
        sizes[name] = compiled.memory_analysis()
    parameters = MODEL.nbytes
    # The outputs take the place of what was donated, as the compiler itself reports.
    assert sizes["accumulate"].alias_size_in_bytes == parameters
    assert sizes["finish"].alias_size_in_bytes == parameters
    assert sizes["update"].alias_size_in_bytes == 3 * parameters + 4  # and the count
    need = {
        name: s.argument_size_in_bytes
        + s.output_size_in_bytes
        - s.alias_size_in_bytes
        + s.temp_size_in_bytes
        for name, s in sizes.items()
    }
    # Resident beside accumulate: adam's state, the next batch, and what CPU programs
    # take when they are called: finish behind it, the update of the step before.
    state, rows = 2 * parameters + 4, X.nbytes + 4 * len(X)
    called = sum(
        size.output_size_in_bytes - size.alias_size_in_bytes + size.temp_size_in_bytes
        for size in (sizes["finish"], sizes["update"])
    )
    beside = {
        "accumulate": state + rows + called,
        "finish": state + parameters + 2 * rows,
        "update": 2 * rows,
    }
    expected = max(need[name] + more for name, more in beside.items())
    assert result.plan.predicted_bytes == expected
    assert result.plan.parts.total == expected
    assert result.plan.parts.optimizer == state


class Captured(eqx.Module):
    table: jax.Array

    def __call__(self, w, x, key):
        return jnp.sum(w @ x) * jnp.sum(self.table @ x)


def test_arrays_that_a_loss_captured_are_counted():
    table = jnp.ones((1 << 16, WIDTH))  # as text some megabytes
    inner = jax.jit(lambda x: table @ x)

    def closure(w, x, key):
        return jnp.sum(w @ x) * jnp.sum(table @ x)

    def nested(w, x, key):
        return jnp.sum(w @ x) * jnp.sum(inner(x))

    plans = {}
    for name, fn in (
        ("closure", closure),
        ("nested", nested),
        ("leaf", Captured(table)),
    ):
        plans[name] = plan(loss=fn, microbatch=4)
        accumulate = programs()["accumulate"]
        # The table is an argument and not baked in.
        arguments = accumulate.memory_analysis().argument_size_in_bytes
        assert arguments >= table.nbytes + 2 * MODEL.nbytes + X.nbytes
        assert len(accumulate.as_text()) < 10**6
    for made in plans.values():
        assert made.parts.frozen == table.nbytes
        assert made.predicted_bytes == plans["leaf"].predicted_bytes
        assert made.notes == ()
    assert plan(microbatch=4).parts.frozen == 0


# --- failures while compiling ---------------------------------------------------------


class Calls(list):
    """The microbatch of each compilation (None but for accumulate) and its options."""

    limit = 0

    def compile(self, lowered, original, options, **more):
        text = lowered.as_text()
        rows = None
        if "@jit_eqaccum_accumulate" in text:
            (found,) = set(re.findall(rf"%arg\d+: tensor<\d+x(\d+)x{WIDTH}xf32>", text))
            rows = int(found)
        self.append((rows, options))
        if self.limit and rows is not None and rows > self.limit:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: compiling took it all"
            )
        return original(lowered, compiler_options=options, **more)


@pytest.fixture
def calls(monkeypatch):
    calls, original = Calls(), jax.stages.Lowered.compile

    def compile(self, compiler_options=None, **more):
        return calls.compile(self, original, compiler_options, **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    return calls


def test_out_of_memory_while_compiling_means_that_it_does_not_fit(calls, nothing_kept):
    calls.limit = 5
    made = plan(memory_limit="1GiB")
    assert (made.num_microbatches, made.microbatch) == (3, 4)
    notes = {probe.microbatch: probe.note for probe in made.probes}
    assert notes[12] == "out of memory while compiling"
    assert notes[4] == "compiled"
    assert "out of memory while compiling" in str(made)
    with pytest.raises(eqaccum.DoesNotFit, match="microbatch=12 needs more than could"):
        plan(microbatch=12)


def test_compiler_options_are_those_of_every_program(calls, nothing_kept):
    options = {"xla_llvm_disable_expensive_passes": True}
    fit(microbatch=4, compiler_options=options)
    assert [given for _, given in calls] == [options] * 4
    # Other options are another program.
    with compilations() as names:
        fit(microbatch=4)
    assert len(names) == 4


def test_the_users_exceptions_pass_at_once():
    sizes = []

    def at_most_eight(w, batch, keys):
        sizes.append(len(batch))
        if len(batch) > 8:
            raise ValueError("only eight at a time")
        return jnp.sum(batch @ w, axis=1)

    with compilations() as names:
        with pytest.raises(ValueError) as caught:
            plan(loss=eqaccum.batched(at_most_eight), memory_limit="1GiB")
    assert str(caught.value) == "only eight at a time"
    assert (sizes, names) == ([12], [])


# --- the limit ----------------------------------------------------------------------


def test_a_given_limit_is_taken_as_it_is():
    made = plan(memory_limit="1GiB")
    assert made.limit_bytes == 2**30
    assert made.limit_source == "given: memory_limit='1GiB'"
    exact = plan(memory_limit=made.predicted_bytes)
    assert exact.num_microbatches == 1
    more = plan(memory_limit=made.predicted_bytes - 1)
    assert more.num_microbatches > 1
    assert more.predicted_bytes <= more.limit_bytes


def test_without_a_limit_the_machine_is_asked():
    made = plan(microbatch=4)
    assert made.limit_bytes is not None and 2**20 < made.limit_bytes < 2**50
    assert "less a margin of 5 %" in made.limit_source


def test_a_device_that_tells_nothing(monkeypatch):
    def cannot_tell(*_, **__):
        raise eqaccum.CannotTell("no statistics")

    monkeypatch.setattr("eqaccum._step._agree.read_limit", cannot_tell)
    with pytest.raises(eqaccum.CannotTell):
        plan()
    made = plan(microbatch=4)
    assert made.limit_bytes is None and made.predicted_bytes > 0
    assert "unknown" in str(made)


# --- what probing leaves --------------------------------------------------------------


def resident() -> tuple[int, int]:
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def test_planning_allocates_nothing_and_leaves_nothing():
    model = jax.ShapeDtypeStruct(MODEL.shape, MODEL.dtype)
    data = jax.ShapeDtypeStruct((10**9, WIDTH), np.float32)
    arguments = {"global_batch": 48, "loss": loss, "optimizer": SGD}
    before, threads = resident(), threading.active_count()
    made = eqaccum.plan(model, data, **arguments, memory_limit="100kB")
    assert len(made.probes) >= 2
    assert resident() == before
    assert threading.active_count() == threads


def test_at_most_one_step_is_kept(nothing_kept):
    plan(microbatch=4)
    assert sorted(programs()) == ["accumulate", "finish", "update"]
    (program, *_) = _compile._programs.values()
    for number in range(20):
        _compile.keep(dataclasses.replace(program, key=str(number)))
    # A step has up to seven.
    assert 7 <= len(_compile._programs) <= 8
    before = resident()
    forget()
    assert len(_compile._programs) == 0
    assert resident() == before


def test_the_plan_measured_the_programs_that_run(nothing_kept):
    made = plan(optimizer=optax.adam(0.1), microbatch=4)
    texts = {name: compiled.as_text() for name, compiled in programs().items()}
    with compilations() as names:
        result = fit(optimizer=optax.adam(0.1), microbatch=4)
    assert names == ["jit(eqaccum_init)"]
    assert result.plan.predicted_bytes == made.predicted_bytes
    after = {name: compiled.as_text() for name, compiled in programs().items()}
    assert {name: after[name] for name in texts} == texts
    # It is the training step: it holds this optimizer's state.
    sgd = plan(microbatch=4)
    assert made.parts.optimizer - sgd.parts.optimizer == 2 * MODEL.nbytes + 4


def test_a_plan_made_in_the_middle_of_training_is_the_same():
    first = plan(microbatch=4)
    step = eqaccum.make_step(loss, SGD, global_batch=12, plan=first)
    train = step.init(MODEL)
    for _ in range(3):
        train, _ = step(train, X)
    arguments = {"global_batch": 12, "loss": loss, "optimizer": SGD, "microbatch": 4}
    second = eqaccum.plan(train.model, X, **arguments)
    assert second.num_microbatches == step.plan.num_microbatches == 3
    assert second.predicted_bytes == step.plan.predicted_bytes == first.predicted_bytes


# --- the search does not change the work ----------------------------------------------


def test_the_fewest_passes_that_fit():
    # Against other numbers of passes, each compiled on its own.
    needs = {}
    for passes in (1, 2, 3, 12):
        made = plan(microbatch=12 // passes)
        assert made.num_microbatches == passes
        needs[passes] = made.predicted_bytes
    assert needs[12] < needs[3] < needs[1]
    assert needs[3] < needs[2]
    assert plan(memory_limit=needs[3]).num_microbatches == 3
    with pytest.raises(eqaccum.DoesNotFit) as caught:
        plan(memory_limit=needs[12] - 1)
    text = str(caught.value)
    assert f"{needs[12]:,} bytes) at microbatch 1" in text
    assert f"({needs[12] - 1:,} bytes)" in text


def weighed(model, example, key):
    x, weight = example
    return weight * model["b"] + 0 * loss(model["a"], x, key)


def test_every_row_counts_once_where_only_single_rows_fit():
    model = {"a": MODEL, "b": jnp.zeros(())}
    data = (np.ones((16, WIDTH), np.float32), 2.0 ** np.arange(16))
    arguments = {"global_batch": 16, "loss": weighed, "optimizer": optax.sgd(1.0)}
    one = eqaccum.plan(model, data, **arguments, microbatch=1).predicted_bytes
    result = eqaccum.fit(model, data, **arguments, memory_limit=one)
    assert (result.plan.num_microbatches, result.plan.microbatch) == (16, 1)
    np.testing.assert_allclose(result.model["b"], -65535 / 16, rtol=1e-6)


def test_planning_changes_nothing_of_the_users():
    numpy_state = np.random.get_state()
    model = eqx.nn.Dropout(0.5), jnp.ones(WIDTH)

    def dropped(model, x, key):
        return jnp.sum(model[0](model[1] * x, key=key))

    key = jax.random.key(0)
    eqaccum.plan(model, X, global_batch=12, loss=dropped, key=key, microbatch=4)
    for new, old in zip(np.random.get_state(), numpy_state, strict=True):
        np.testing.assert_array_equal(new, old)
    assert model[0].inference is False
    assert not key.is_deleted() and not model[1].is_deleted()


def sequences(hint: Any) -> bool:
    """Whether a hint asks for the items of a sequence, somewhere in it."""
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return True
    return any(map(sequences, typing.get_args(hint)))


def test_the_doors_do_not_draw_from_pythons_random_numbers():
    # beartype looks at one random item of a sequence, which moves `random`'s state.
    assert sequences(list[int] | None) and not sequences(dict[str, int])
    names = "fit make_step plan value_and_grad evaluate predict".split()
    for door in (getattr(eqaccum, name) for name in names):
        hints = inspect.unwrap(door).__annotations__
        assert [name for name, hint in hints.items() if sequences(hint)] == []


def test_planning_on_an_iterator_says_what_it_took():
    batches = iter([X, X])
    with pytest.warns(eqaccum.EqaccumWarning, match="first batch"):
        eqaccum.plan(MODEL, batches, global_batch=12, loss=loss, microbatch=4)
    assert len(list(batches)) == 1
