"""Epochs that do not divide, tails, and batches that are not all arrays of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum

SGD = optax.sgd(0.1)
ROWS = 10
Y = (np.arange(ROWS) ** 2).astype(np.float32)
BITS = 2 ** np.arange(ROWS)


# --- epochs that do not divide ------------------------------------------------------


def loss(model, example, key):
    """Squared error; the sum of the rows' bits tells which rows a batch had."""
    y, bit = example
    return (model - y) ** 2, {"rows": eqaccum.Sum(bit)}


def fit(data: Any = (Y, BITS), **more: Any) -> eqaccum.FitResult:
    arguments = {"global_batch": 4, "loss": loss, "optimizer": SGD, "has_aux": True}
    return eqaccum.fit(jnp.float32(0.0), data, **(arguments | more))


def rows_of(sums: np.ndarray) -> list[list[int]]:
    return [[row for row in range(ROWS) if int(bits) >> row & 1] for bits in sums]


def by_hand(batches: list[list[int]]) -> float:
    w = 0.0
    for rows in batches:
        w -= 0.1 * float(np.mean([2 * (w - Y[row]) for row in rows]))
    return w


@pytest.mark.parametrize("drop", [False, True])
def test_every_row_once_in_each_epoch(drop):
    key = jax.random.key(1)
    runs = [
        fit(epochs=3, microbatch=n, key=key, drop_remainder=drop) for n in (1, 2, 4)
    ]
    per_epoch = 2 if drop else 3
    batches = rows_of(runs[0].history["rows"])
    assert len(batches) == 3 * per_epoch
    for epoch in range(3):
        seen = sum(batches[per_epoch * epoch :][:per_epoch], [])
        assert len(seen) == len(set(seen)) == (8 if drop else 10)
    for run in runs:
        # The order and what was learnt depend on the key and the epoch, never on n.
        assert rows_of(run.history["rows"]) == batches
        np.testing.assert_allclose(run.model, by_hand(batches), rtol=1e-5)
        sizes = [4, 4] if drop else [4, 4, 2]
        np.testing.assert_array_equal(run.history["examples"], sizes * 3)


def test_fewer_rows_than_the_global_batch_are_one_step():
    for drop in (False, True):
        result = fit((Y[:3], BITS[:3]), epochs=2, drop_remainder=drop)
        assert result.train.step == 2
        assert rows_of(result.history["rows"]) == [[0, 1, 2]] * 2
        np.testing.assert_allclose(result.model, by_hand([[0, 1, 2]] * 2), rtol=1e-5)


# --- the tail ---------------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [1, 2, 3])
def test_the_tail_is_averaged_over_its_own_rows(microbatch):
    traces = []

    def counted(model, example, key):
        traces.append(1)
        return (model - example) ** 2

    result = fit(
        Y,
        loss=counted,
        has_aux=False,
        shuffle=False,
        epochs=3,
        microbatch=microbatch,
    )
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 3
    np.testing.assert_allclose(result.model, by_hand(batches), rtol=1e-5)
    means = [np.mean((by_hand(batches[:k]) - Y[b]) ** 2) for k, b in enumerate(batches)]
    np.testing.assert_allclose(result.history["loss"], means, rtol=1e-5)
    assert len(traces) == 1


def test_padding_is_never_the_users_rows_of_zeros():
    # A row of zeros would give log(0) = -inf, and 0 * inf is NaN.
    def fn(model, example, key):
        return model * jnp.log(example)

    rows = np.full(5, np.e, np.float32)
    result = fit(rows, loss=fn, has_aux=False, epochs=2, microbatch=2)
    np.testing.assert_allclose(result.model, -0.1 * 4, rtol=1e-5)


def test_ids_of_padding_train_nothing():
    # Unmasked padding with id 0 would give row 0 of the table a gradient.
    def fn(table, token, key):
        return jnp.sum(table[token])

    ids = np.array([1, 2, 3])
    step = eqaccum.make_step(fn, optax.sgd(1.0), global_batch=4, microbatch=2)
    train, _ = step(step.init(jnp.zeros((4, 2))), ids)
    expected = -np.array([0, 1, 1, 1])[:, None] / 3 * np.ones(2)
    np.testing.assert_allclose(train.model, expected, rtol=1e-6)


# --- batches that are not all arrays of rows ----------------------------------------

ADJ = np.arange(25, dtype=np.float32).reshape(5, 5)
X = np.arange(24, dtype=np.float32).reshape(8, 3)
AXES = {"x": 0, "y": 0, "scale": None, "kind": None, "opt": None, "adj": None}


def mixed(**changed: Any) -> dict[str, Any]:
    batch = {"x": X, "y": Y[:8], "scale": 0.5, "kind": "text", "opt": None, "adj": ADJ}
    return batch | changed


def mixed_loss(model, example, key):
    assert example["x"].shape == (3,) and example["y"].shape == ()
    assert type(example["scale"]) is float
    assert example["kind"] in ("text", "double")
    assert example["opt"] is None
    assert example["adj"].shape in ((5, 5), (8,))
    factor = example["scale"] * (2 if example["kind"] == "double" else 1)
    prediction = model * jnp.sum(example["x"]) * factor + jnp.sum(example["adj"])
    return (prediction - example["y"]) ** 2


def mean_loss(batch: dict[str, Any]) -> float:
    """The loss at w = 1, in numpy."""
    factor = batch["scale"] * (2 if batch["kind"] == "double" else 1)
    prediction = batch["x"].sum(1) * factor + batch["adj"].sum()
    return float(np.mean((prediction - batch["y"]) ** 2))


def evaluate(door: str, batch: dict[str, Any], in_axes: Any) -> float:
    """The loss at w = 1 by one of the doors."""
    model, more = jnp.float32(1.0), {"microbatch": 2, "in_axes": in_axes}
    if door == "value_and_grad":
        return float(eqaccum.value_and_grad(mixed_loss, **more)(model, batch)[0])
    more |= {"global_batch": 8}
    if door == "make_step":
        step = eqaccum.make_step(mixed_loss, SGD, **more)
        return float(step(step.init(model), batch)[1].loss)
    data = iter([batch]) if door == "iterable" else batch
    result = eqaccum.fit(model, data, loss=mixed_loss, optimizer=SGD, **more)
    return float(result.history["loss"][0])


DOORS = ["fit", "iterable", "make_step", "value_and_grad"]


@pytest.mark.parametrize("door", DOORS)
def test_scalars_text_and_none_reach_every_pass_whole(door):
    assert evaluate(door, mixed(), AXES) == pytest.approx(mean_loss(mixed()))


@pytest.mark.parametrize("door", DOORS)
def test_an_array_of_another_length_is_named(door):
    with pytest.raises(eqaccum.InputError) as caught:
        evaluate(door, mixed(), 0)
    text = str(caught.value)
    assert "['adj'] has 5" in text and "['x'] has 8" in text and "`in_axes`" in text


def test_an_array_with_as_many_entries_as_rows_can_be_marked():
    batch = mixed(adj=np.arange(8, dtype=np.float32))
    assert evaluate("fit", batch, AXES) == pytest.approx(mean_loss(batch))


def test_rows_are_never_cut_off():
    with pytest.raises(eqaccum.InputError, match=r"\['x'\] has 8, \['y'\] has 6"):
        evaluate("fit", mixed(y=Y[:6]), AXES)


def test_values_that_are_part_of_the_program_may_change_between_steps():
    step = eqaccum.make_step(
        mixed_loss, optax.sgd(0.0), global_batch=8, microbatch=2, in_axes=AXES
    )
    train = step.init(jnp.float32(1.0))
    for changed in ({}, {"kind": "double"}, {"scale": 2.0}, {"adj": ADJ + 1}, {}):
        train, metrics = step(train, mixed(**changed))
        assert float(metrics.loss) == pytest.approx(mean_loss(mixed(**changed)))


def test_integers_and_booleans_keep_their_dtype():
    columns = {
        name: np.arange(8).astype(name)
        for name in ("uint8", "int16", "int32", "bool", "float16", "int64", "float64")
    }
    seen = {}

    def fn(model, example, key):
        seen.update({name: str(leaf.dtype) for name, leaf in example.items()})
        return model * sum(leaf.astype(jnp.float32) for leaf in example.values())

    eqaccum.plan(jnp.float32(1.0), columns, global_batch=4, loss=fn, microbatch=2)
    wide = {"int64": "int32", "float64": "float32"}
    assert seen == {name: wide.get(name, name) for name in columns}


def test_several_shapes_of_batches_in_one_run():
    # A new trailing shape is another program, in which nothing else differs.
    def fn(model, example, key):
        return jnp.mean((model - example) ** 2)

    def batches():
        for width in (2, 3, 2, 5):
            yield np.full((4, width), width, np.float32)

    result = fit(batches(), loss=fn, has_aux=False, microbatch=2)
    w, losses = 0.0, []
    for width in (2, 3, 2, 5):
        losses.append((w - width) ** 2)
        w -= 0.2 * (w - width)
    np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(result.model, w, rtol=1e-5)
