"""Whoever makes a mistake is led to their own code, and not through eqaccum's."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import REPOSITORY

import eqaccum

X = np.ones((8, 3), np.float32)
Y = np.zeros(8, np.int32)
MODEL = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
ARGUMENTS: dict[str, Any] = {"global_batch": 4, "progress": False}


def broken_loss(model, example, key):
    return two_calls_down(model(example[0]))


def two_calls_down(logits):
    return jnp.sum(logits + jnp.ones(7))


def good_loss(model, example, key):
    return jnp.sum(model(example[0]) ** 2)


def times_mean(model, example, key):
    return eqaccum.Mean(1.0, 1.0) * eqaccum.Mean(1.0, 1.0)


def broken_callback(info):
    raise ValueError("mine")


class BrokenDataset:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise OSError("the file is gone")
        return X[index], Y[index]


class BrokenModel(eqx.Module):
    weight: Any

    def __call__(self, x):
        return self.weight @ x[:2]


def broken_batches():
    yield X[:4], Y[:4]
    raise OSError("the file is gone")


def fit(**changed: Any) -> Any:
    arguments = {"model": MODEL, "data": (X, Y), **ARGUMENTS}
    return eqaccum.fit(**(arguments | changed))


def step(batch: Any, **changed: Any) -> Any:
    arguments = {"loss": good_loss, "optimizer": optax.sgd(0.1), "global_batch": 4}
    made = eqaccum.make_step(**(arguments | changed))
    return made(made.init(MODEL), batch)


# What is called, and the user's functions that the traceback must end with.
MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a loss": (
        lambda: fit(loss=broken_loss),
        ("fit", "broken_loss", "two_calls_down"),
    ),
    "a loss of means": (lambda: fit(loss=times_mean), ("fit", "times_mean")),
    "a loss for a step": (
        lambda: step((X[:4], Y[:4]), loss=broken_loss),
        ("step", "broken_loss", "two_calls_down"),
    ),
    "a loss for value_and_grad": (
        lambda: eqaccum.value_and_grad(broken_loss, microbatch=2)(MODEL, (X, Y)),
        ("<lambda>", "broken_loss", "two_calls_down"),
    ),
    "a loss for check": (
        lambda: eqaccum.check(MODEL, (X, Y), broken_loss),
        ("<lambda>", "broken_loss", "two_calls_down"),
    ),
    "a loss for plan": (
        lambda: eqaccum.plan(MODEL, (X, Y), global_batch=4, loss=broken_loss),
        ("<lambda>", "broken_loss", "two_calls_down"),
    ),
    "a loss for evaluate": (
        lambda: eqaccum.evaluate(MODEL, (X, Y), loss=broken_loss),
        ("<lambda>", "broken_loss", "two_calls_down"),
    ),
    "a model": (
        lambda: fit(model=BrokenModel(jnp.ones((2, 3)))),
        ("fit", "__call__"),
    ),
    "a callback": (
        lambda: fit(callbacks=[broken_callback]),
        ("fit", "broken_callback"),
    ),
    "a data set": (lambda: fit(data=BrokenDataset()), ("fit", "__getitem__")),
    "an iterable": (lambda: fit(data=broken_batches()), ("fit", "broken_batches")),
    "a list": (lambda: fit(data=[X, Y]), ("fit",)),
    "labels": (lambda: fit(data=(X, Y + 5)), ("fit",)),
    "an optimizer": (lambda: fit(optimizer=optax.adam), ("fit",)),
    "a limit": (lambda: fit(memory_limit="1KiB"), ("fit",)),
    "a batch": (lambda: step((X, Y)), ("step",)),
    "a callback's argument": (
        lambda: eqaccum.callbacks.CSV("log.csv", every=0),
        ("<lambda>",),
    ),
    "a path": (lambda: eqaccum.callbacks.BestCheckpoint(3), ("<lambda>",)),
    "no plan": (lambda: eqaccum.Plan.from_dict({}), ("<lambda>",)),
    "rows of a ready-made loss": (
        lambda: eqaccum.losses.info_nce(jnp.ones((3, 2)), jnp.ones((4, 5))),
        ("<lambda>",),
    ),
    "a type": (lambda: fit(shuffle="yes"), ("fit",)),
}


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def of_eqaccum(error: BaseException) -> list[str]:
    package = REPOSITORY / "eqaccum"
    return [f.name for f in frames(error) if package in Path(f.filename).parents]


def caught(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as info:
        call()
    return info.value


@pytest.mark.parametrize("name", MISTAKES)
def test_a_traceback_leads_to_the_mistake(name):
    call, ends_with = MISTAKES[name]
    error = caught(call)
    mine = [f.name for f in frames(error) if f.filename == __file__]
    assert mine[-len(ends_with) :] == list(ends_with)
    assert len(of_eqaccum(error)) <= 1
    # What would be printed before it leads nowhere else.
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback (most recent call last)") == 1, shown
    assert "eqaccum._errors" not in shown


def test_everything_is_shown_when_jax_is_asked_to():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = caught(lambda: fit(loss=broken_loss))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert len(of_eqaccum(error)) > 5


def test_a_fault_of_eqaccum_itself_is_shown_whole(monkeypatch):
    # No frame of the user's is below the call: 1 / 0 inside of `fit`.
    monkeypatch.setattr("eqaccum._fit._fit._say_start", 0)
    error = caught(lambda: fit())
    assert type(error) is TypeError
    assert "fit" in of_eqaccum(error)


def test_exceptions_have_the_names_that_users_import():
    for name in ("InputError", "DoesNotFit", "EqaccumWarning", "StepError"):
        assert getattr(eqaccum, name).__module__ == "eqaccum"
