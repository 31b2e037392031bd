"""Whatever goes wrong while running, nothing that was trained is lost."""

import contextlib
import dataclasses
import functools
import os
import signal
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal

import eqaccum

ADAM = optax.adam(0.1)
GOOD = np.arange(4, dtype=np.float32)
NAN = np.array([1, 2, np.nan, 4], np.float32)


def loss(model, example, key):
    return jnp.sum((model["w"] - example) ** 2)


def model() -> dict[str, Any]:
    return {"w": jnp.ones(2), "frozen": np.arange(3)}


def make_step(fn=loss, optimizer=ADAM, **more: Any) -> eqaccum.Step:
    arguments = {"global_batch": 4, "microbatch": 2} | more
    return eqaccum.make_step(fn, optimizer, **arguments)


def fit(data: Any, fn=loss, **more: Any) -> eqaccum.FitResult:
    arguments = {
        "global_batch": 4,
        "microbatch": 2,
        "loss": fn,
        "optimizer": ADAM,
        "shuffle": False,
    }
    return eqaccum.fit(model(), data, **(arguments | more))


@functools.cache
def trained(steps: int) -> eqaccum.FitResult:
    """A run of so many good steps, to compare with."""
    return fit(np.tile(GOOD, steps))


def copied(tree: Any) -> Any:
    return jax.tree.map(np.array, eqx.filter(tree, eqx.is_array))


def replace_program(step: eqaccum.Step, name: str, fail: Any) -> None:
    """Puts `fail` in the place of a compiled program; it gets the one replaced."""
    ((layout, ready),) = step._ready.items()
    program = getattr(ready, name)
    failing = dataclasses.replace(
        program, compiled=lambda *args: fail(program.compiled, *args)
    )
    step._ready[layout] = dataclasses.replace(ready, **{name: failing})


# --- not finite -----------------------------------------------------------------


def finite_loss_only(model, example, key):
    # The gradient of sqrt at 0 is infinite, and 0 * inf is NaN.
    return jnp.sum(jnp.sqrt(model["w"] * 0.0)) + example


def huge(model, example, key):
    return jnp.sum(model["w"]) * 3e38 * (example + 1)


BROKEN = {
    "the loss is nan": (loss, NAN, {}),
    "the loss is inf": (huge, GOOD, {}),
    "the loss is finite but its gradient is not": (finite_loss_only, GOOD, {}),
    "the penalty is not finite": (
        loss,
        GOOD,
        {"penalty": lambda m: jnp.log(jnp.sum(m["w"]) - 2)},
    ),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_step_that_is_not_finite_changes_nothing(text):
    fn, batch, more = BROKEN[text]
    step = make_step(fn, **more)
    train = step.init(model())
    before = copied((train.model, train.opt_state))
    with pytest.raises(eqaccum.NonFiniteError, match=f"step 1: {text}") as caught:
        step(train, batch)
    assert "Nothing was updated" in str(caught.value)
    assert 'nonfinite="skip"' in str(caught.value)
    assert_trees_equal((train.model, train.opt_state), before)


def test_after_a_nan_batch_training_goes_on_bit_for_bit():
    step = make_step()
    train, _ = step(step.init(model()), GOOD)
    with pytest.raises(eqaccum.NonFiniteError, match="step 2"):
        step(train, NAN)
    with pytest.raises(eqaccum.NonFiniteError, match="weights .* add up to 0"):
        step(train, GOOD, weights=np.zeros(4))
    train, _ = step(train, GOOD)
    expected = trained(2)
    assert_trees_equal(
        (train.model, train.opt_state), (expected.model, expected.opt_state)
    )


def test_fit_hands_over_what_was_trained_before_a_nan():
    data = np.concatenate([GOOD, GOOD, NAN, GOOD])
    with pytest.raises(
        eqaccum.NonFiniteError, match="step 3: the loss is nan"
    ) as caught:
        fit(data)
    result = caught.value.result
    expected = trained(2)
    assert result.train.step == 2
    assert_trees_equal(
        (result.model, result.opt_state), (expected.model, expected.opt_state)
    )
    np.testing.assert_array_equal(result.history["loss"], expected.history["loss"])
    assert any(".result" in note for note in caught.value.__notes__)


def test_a_failure_at_the_first_step_has_no_result():
    with pytest.raises(eqaccum.NonFiniteError, match="step 1") as caught:
        fit(NAN)
    assert caught.value.result is None


class Counter(eqx.Module):
    """A state that counts passes."""

    w: jax.Array
    index: eqx.nn.StateIndex

    def __init__(self):
        self.w = jnp.ones(2)
        self.index = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))


def counting(model, state, example, key):
    state = state.set(model.index, state.get(model.index) + 1)
    return jnp.sum((model.w - example) ** 2), state


def test_skipping_leaves_everything_as_it_was():
    counter, state = eqx.nn.make_with_state(Counter)()
    step = make_step(counting, nonfinite="skip")
    train, _ = step(step.init(counter, state=state), GOOD)
    before = copied((train.model, train.opt_state, train.state))
    train, metrics = step(train, NAN)
    assert metrics.skipped
    assert_trees_equal((train.model, train.opt_state, train.state), before)
    assert (train.step, train.batch_index) == (1, 2)
    train, metrics = step(train, GOOD)
    assert not metrics.skipped
    assert (train.step, train.batch_index) == (2, 3)
    assert int(train.state.get(counter.index)) == 4


def test_skipped_batches_do_not_count_as_steps():
    data = np.concatenate([GOOD, NAN, GOOD, GOOD])
    result = fit(data, nonfinite="skip", steps=3)
    expected = trained(3)
    np.testing.assert_array_equal(
        result.history["skipped"], [False, True] + [False] * 2
    )
    np.testing.assert_array_equal(result.history["step"], [1, 1, 2, 3])
    assert_trees_equal(result.model, expected.model)
    assert (result.train.step, result.train.batch_index) == (3, 4)


def test_twenty_skipped_in_a_row_are_an_error():
    data = np.concatenate([GOOD] + [NAN] * 19 + [GOOD] + [NAN] * 30)
    with pytest.raises(eqaccum.NonFiniteError, match="20 steps in a row") as caught:
        fit(data, nonfinite="skip")
    assert caught.value.result.train.step == 2
    assert len(caught.value.result.history["loss"]) == 41
    # A model that never had a finite loss ends as well, though it has no result.
    with pytest.raises(eqaccum.NonFiniteError, match="20 steps in a row"):
        fit(np.tile(NAN, 30), nonfinite="skip")


def test_ignoring_goes_on():
    result = fit(np.concatenate([GOOD, NAN]), nonfinite="ignore")
    assert result.train.step == 2
    assert np.isnan(result.model["w"]).all()


# --- failures of the device -------------------------------------------------------


def raises(compiled, *args):
    raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")


def runs_then_raises(compiled, *args):
    compiled(*args)  # takes what it was given
    raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")


@pytest.mark.parametrize("fail", [raises, runs_then_raises])
@pytest.mark.parametrize("name", ["accumulate", "finish"])
def test_a_failure_before_the_update_changes_nothing(name, fail):
    step = make_step()
    train, _ = step(step.init(model()), GOOD)
    before = copied((train.model, train.opt_state))
    working = dict(step._ready)
    replace_program(step, name, fail)
    with pytest.raises(eqaccum.StepError, match="fell over") as caught:
        step(train, GOOD)
    assert "accumulate or finish" in str(caught.value)
    assert "still valid" in str(caught.value)
    assert_trees_equal((train.model, train.opt_state), before)
    step._ready.update(working)  # the device is well again
    train, _ = step(train, GOOD)
    assert_trees_equal(train.model, trained(2).model)


def test_a_failed_update_says_what_is_lost():
    step = make_step()
    train, _ = step(step.init(model()), GOOD)
    replace_program(step, "update", runs_then_raises)
    with pytest.raises(eqaccum.StepError, match="failed in update") as caught:
        step(train, GOOD)
    assert "lost" in str(caught.value) and "checkpoint" in str(caught.value)
    with pytest.raises(eqaccum.InputError, match="consumed"):
        step(train, GOOD)


def test_an_update_that_never_began_loses_nothing():
    step = make_step()
    train, _ = step(step.init(model()), GOOD)
    working = dict(step._ready)
    replace_program(step, "update", raises)
    with pytest.raises(eqaccum.StepError, match="still valid"):
        step(train, GOOD)
    step._ready.update(working)
    train, _ = step(train, GOOD)
    assert_trees_equal(train.model, trained(2).model)


class Trap:
    """A loss whose host callback raises at the example 7."""

    def __init__(self, text):
        self.text = text

    def check(self, example):
        if self.text and example == 7:
            raise RuntimeError(self.text)
        return np.float32(1)

    def __call__(self, model, example, key):
        one = jax.pure_callback(
            self.check,
            jax.ShapeDtypeStruct((), jnp.float32),
            jax.lax.stop_gradient(example),
            vmap_method="sequential",
        )
        return loss(model, example, key) * one


EIGHT = np.arange(8, dtype=np.float32)


def test_an_exception_inside_the_compiled_step_is_named():
    with pytest.raises(eqaccum.StepError, match="RuntimeError: no sevens") as caught:
        fit(EIGHT, Trap("no sevens"))
    assert caught.value.result.train.step == 1
    assert_trees_equal(caught.value.result.model, trained(1).model)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_out_of_memory_inside_the_compiled_step_takes_more_passes():
    trap = Trap("RESOURCE_EXHAUSTED: no room")
    tried = []

    def check(example, check=trap.check):
        if example == 7:
            tried.append(1)
            trap.text = trap.text if len(tried) == 1 else ""
        return check(example)

    trap.check = check
    with pytest.warns(eqaccum.EqaccumWarning, match="out of memory with 4 = 1 pass"):
        result = fit(EIGHT, trap, microbatch=4)
    assert result.plan.num_microbatches == 2
    assert len(tried) == 2
    expected = fit(EIGHT, microbatch=4)
    np.testing.assert_allclose(result.model["w"], expected.model["w"], rtol=1e-5)
    np.testing.assert_allclose(
        result.history["loss"], expected.history["loss"], rtol=1e-6
    )


def memory_hog(model, example, key):
    """Needs terabytes for wide examples, which makes a real failure at run time."""
    value = jnp.mean((model["w"][0] - example) ** 2)
    if example.shape[-1] == 3:
        table = model["w"][0] * jnp.arange(2**31, dtype=jnp.float32).reshape(2**11, -1)
        table = jnp.sort(jnp.broadcast_to(table, (2**10, *table.shape)), axis=-1)
        value = value + table[0, 0, 0]
    return value


def widening():
    yield np.ones((2, 2), np.float32)
    yield np.ones((2, 3), np.float32)


def test_a_real_lack_of_memory_changes_nothing():
    step = make_step(memory_hog, global_batch=2, microbatch=1)
    narrow, wide = widening()
    train, _ = step(step.init(model()), narrow)
    before = copied((train.model, train.opt_state))
    with pytest.warns(eqaccum.EqaccumWarning, match="microbatch=1 needs"):
        with pytest.raises(eqaccum.StepError, match="out of memory") as caught:
            step(train, wide)
    assert "still valid" in str(caught.value)
    assert "allocating" in str(caught.value)
    assert_trees_equal((train.model, train.opt_state), before)
    train, _ = step(train, narrow)
    assert train.step == 2


def test_a_later_shape_that_does_not_fit_loses_nothing():
    with pytest.raises(eqaccum.DoesNotFit, match="at microbatch 1") as caught:
        fit(widening(), memory_hog, global_batch=2, microbatch="largest")
    assert caught.value.result.train.step == 1


def hungry() -> optax.GradientTransformation:
    """SGD whose update needs terabytes: it fails after it has taken the parameters."""

    def update(updates, state, params=None):
        def waste(g):
            table = g[0] * jnp.arange(2**31, dtype=jnp.float32).reshape(2**11, -1)
            table = jnp.sort(jnp.broadcast_to(table, (2**10, *table.shape)), axis=-1)
            return -0.1 * g + 0 * table[0, 0, 0]

        return jax.tree.map(waste, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_real_failure_of_the_update_is_not_handed_over_as_a_result(steps):
    # It shows at the next wait only, when `train` is the new one already.
    with pytest.warns(eqaccum.EqaccumWarning, match="microbatch=2 needs"):
        with pytest.raises(eqaccum.StepError, match="the update before") as caught:
            fit(np.tile(GOOD, steps), optimizer=hungry())
    assert "lost" in str(caught.value)
    assert caught.value.result is None


# --- the user's own exceptions ------------------------------------------------------


class Mine(Exception):
    pass


class WithResult(Exception):
    result = "the user's own"


def breaking(after: int, error: BaseException):
    for _ in range(after):
        yield GOOD
    raise error


@pytest.mark.parametrize("after", [1, 3])
def test_exceptions_from_data_pass_with_what_was_trained(after):
    error = Mine("the disk is gone")
    with pytest.raises(Mine) as caught:
        fit(breaking(after, error))
    assert caught.value is error
    # The step under way was completed.
    assert error.result.train.step == after
    assert_trees_equal(error.result.model, trained(after).model)
    assert f"{after} step" in error.__notes__[0] and ".result" in error.__notes__[0]


def test_exceptions_before_training_pass_unchanged():
    error = Mine("no disk")
    with pytest.raises(Mine) as caught:
        fit(breaking(0, error))
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def test_a_result_that_an_exception_already_has_is_left():
    error = WithResult()
    with pytest.raises(WithResult):
        fit(breaking(2, error))
    assert error.result == "the user's own"


def test_exceptions_from_a_data_set_pass():
    error = Mine()

    class Broken:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if index == 9:
                raise error
            return GOOD[index % 4]

    with pytest.raises(Mine) as caught:
        fit(Broken())
    assert caught.value is error
    assert error.result.train.step == 2


def test_an_iterator_that_ends_too_soon():
    with pytest.raises(eqaccum.InputError, match="can be read once") as caught:
        fit(iter([GOOD, GOOD]), steps=5)
    assert caught.value.result.train.step == 2
    assert_trees_equal(caught.value.result.model, trained(2).model)


@pytest.mark.parametrize("where", ["loss", "penalty", "optimizer", "trainable"])
def test_exceptions_from_the_users_functions_pass(where):
    error = ValueError("out of ideas")

    def fail(*_):
        raise error

    function = {
        "loss": {"fn": lambda model, example, key: fail()},
        "penalty": {"penalty": lambda model: fail()},
        "optimizer": {"optimizer": optax.GradientTransformation(fail, fail)},
        "trainable": {"trainable": lambda leaf: fail()},
    }[where]
    with pytest.raises(ValueError) as caught:
        fit(GOOD, **function)
    assert caught.value is error


@pytest.mark.parametrize("after", [1, 2])
def test_exceptions_from_callbacks_pass_with_what_was_trained(after):
    error = Mine("no space for the log")

    def callback(info):
        if info.step == after:
            raise error

    with pytest.raises(Mine) as caught:
        fit(np.tile(GOOD, 4), callbacks=[callback])
    assert caught.value is error
    assert error.result.train.step == after
    assert_trees_equal(error.result.model, trained(after).model)


def test_a_validation_that_cannot_work_fails_before_the_first_step(capsys):
    def pair(model, example, key):
        x, y = example
        return jnp.sum((model["w"] - x) ** 2) + 0 * y

    with pytest.raises(ValueError, match="unpack") as caught:
        fit((GOOD, GOOD), pair, validation=(GOOD, GOOD, GOOD))
    assert not hasattr(caught.value, "result")
    assert capsys.readouterr().err == ""


# --- Ctrl-C ---------------------------------------------------------------------


def interrupted(presses: int, *, at: int = 3, total: int = 10):
    """Batches; Ctrl-C is pressed while batch number `at` is made."""
    for number in range(total):
        if number == at:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
        yield GOOD


def test_ctrl_c_finishes_the_step_and_returns(capsys):
    result = fit(interrupted(1))
    assert result.train.step == 3
    assert_trees_equal(result.model, trained(3).model)
    assert len(result.history["loss"]) == 3
    said = capsys.readouterr().err
    assert "interrupted: finishing this step" in said
    assert "stopped after step 3" in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once():
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(interrupted(2))
    # Step 3 was under way.
    assert caught.value.result.train.step == 2
    assert_trees_equal(caught.value.result.model, trained(2).model)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_stays():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        assert fit(interrupted(2, total=4)).train.step == 4
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(pressed) == 2


# --- what belongs to the user -------------------------------------------------------


@contextlib.contextmanager
def usable(tree: Any):
    """Every array of the tree is as it was, before and after."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
    before = [np.array(array) for array in arrays]
    yield
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_the_model_passed_in_stays_usable():
    counter, state = eqx.nn.make_with_state(Counter)()
    with usable((counter, state)):
        arguments = {"global_batch": 4, "microbatch": 2, "loss": counting}
        for _ in range(2):  # a state can be passed again
            result = eqaccum.fit(counter, GOOD, state=state, **arguments)
        with contextlib.suppress(eqaccum.NonFiniteError):
            eqaccum.fit(counter, NAN, state=state, **arguments)
        step = make_step(counting)
        train = step.init(counter, state=state)
        for _ in range(3):
            train, _ = step(train, GOOD)
    # A result, too, can be trained further without being consumed.
    with usable((result.model, result.state)):
        eqaccum.fit(result.model, GOOD, state=result.state, **arguments)


def test_an_old_train_is_refused_by_name():
    step = make_step()
    first = step.init(model())
    step(first, GOOD)
    with pytest.raises(eqaccum.InputError, match="consumed by an earlier step"):
        step(first, GOOD)


@jax.jit
def late(w):
    """The same, after some tenths of a second."""
    x = jnp.ones(4096) * w[0]
    work = jax.lax.fori_loop(0, 10_000, lambda _, x: jnp.sin(x), x)
    return w + 0 * jnp.sum(work)


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Memory that a CPU device would use without a copy."""
    size = int(np.prod(shape))
    memory = np.zeros(size + 16, np.float32)
    first = -(memory.ctypes.data // 4) % 16
    return memory[first : first + size].reshape(shape)


def test_a_loader_may_use_its_buffer_again():
    rows = np.random.default_rng(0).normal(size=(12, 2048)).astype(np.float32)

    def wide(model, example, key):
        return jnp.mean((model["w"][0] - example) ** 2)

    def loader():
        buffer = aligned((4, 2048))
        for start in range(0, 12, 4):
            buffer[:] = rows[start : start + 4]
            yield buffer
            buffer[:] = np.nan

    # A step waits for the update before, and begins when its buffer has changed.
    slow = optax.stateless(lambda updates, _: jax.tree.map(late, updates))
    optimizer = optax.chain(optax.sgd(0.1), slow)
    expected = fit(rows, wide, optimizer=optimizer)
    result = fit(loader(), wide, optimizer=optimizer)
    np.testing.assert_array_equal(result.history["loss"], expected.history["loss"])


@pytest.mark.parametrize("microbatch", [2, 4])
def test_a_batch_under_way_is_not_changed_by_its_arrays(microbatch):
    from eqaccum._data import batch_of

    def scaled(model, example, key):
        return jnp.mean((model["w"][0] * example["scale"] - example["x"]) ** 2)

    x, scale, weights = aligned((4, 2048)), aligned((2048,)), aligned((4,))
    scale[:], weights[:] = 2, 1
    axes = {"x": 0, "scale": None}
    step = make_step(scaled, in_axes=axes, microbatch=microbatch)

    def batch():
        return batch_of({"x": x, "scale": scale}, in_axes=axes, weights=weights)

    train = step.init(model())
    expected, _ = step(train, {"x": x, "scale": scale}, weights=weights)
    train = step.init(model())
    # The step cannot begin before the arrays have changed.
    late(jnp.ones(2)).block_until_ready()
    waiting = eqx.tree_at(
        lambda t: t.trainable_leaves, train, [late(train.trainable_leaves[0])]
    )
    pending = step.launch(waiting, step.place(batch(), waiting))
    assert not pending.finished.scalars.ok.is_ready()
    x[:], scale[:], weights[:] = np.nan, np.nan, np.nan
    train, metrics = step.complete(waiting, pending)
    assert_trees_equal(train.model, expected.model)
    assert float(metrics.weight) == 4
