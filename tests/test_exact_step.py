"""The gradient and the metrics of `make_step`, one step object for many weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import (
    KINDS,
    WEIGHTS,
    assert_same_kind,
    batch_of,
    error,
    flat,
    full_batch,
    make,
    penalty,
    recorder,
    weights_of,
)

import eqaccum

KEY = jax.random.key(5)
COUNTED_BY_ITEMS = ("mean", "means", "state_means_aux", "batched_mean", "weighted")


def make_step(kind, rows, microbatch, optimizer=None, **options):
    return eqaccum.make_step(
        kind.loss,
        optimizer or recorder(),
        global_batch=rows,
        microbatch=microbatch,
        has_aux=kind.has_aux,
        **options,
    )


def copied(tree):
    return jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, tree)


def first_rows(batch, rows):
    return jax.tree.map(lambda x: x[:rows], batch)


def check(kind, train, metrics, model, batch, weights, *, penalised=False, rows=None):
    """The recorded gradient and the metrics against all rows at once."""
    key = jax.random.fold_in(KEY, train.batch_index - 1)
    rows = rows or len(weights)
    want, gradient = full_batch(kind, model, batch, weights, key, penalised=penalised)
    got = jax.tree.map(jnp.conj, train.opt_state)  # Optax takes conj(jax.grad)
    assert_same_kind(got, gradient)
    assert error(got, gradient) <= 1e-6
    loss = float(metrics.loss) + float(metrics.penalty)
    assert abs(loss - float(want)) <= 1e-6 * abs(float(want))
    assert float(metrics.penalty) == pytest.approx(
        float(penalty(model)) if penalised else 0, rel=1e-6
    )
    norm = np.linalg.norm(flat(gradient))
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-6)
    items = np.ones(len(weights))
    if kind.name in COUNTED_BY_ITEMS:
        items = batch["mask"].sum(axis=1)
    assert float(metrics.weight) == pytest.approx(np.sum(weights * items), rel=1e-6)
    assert (metrics.examples, metrics.skipped) == (rows, False)


@pytest.mark.parametrize(
    "name,microbatch",
    [(name, 4) for name in KINDS if name != "batched"] + [("means", 10)],
)
def test_every_kind(name, microbatch):
    kind = KINDS[name]
    model, state = make(kind)
    step = make_step(kind, 10, microbatch)
    train = step.init(model, KEY, state=state)
    batch = batch_of(10)
    for weights in (weights_of(10, w) for w in WEIGHTS):
        train, metrics = step(train, batch, weights=weights)
        check(kind, train, metrics, model, batch, weights)


@pytest.mark.parametrize("microbatch", [3])
def test_penalty_counts_once(microbatch):
    kind = KINDS["means"]
    model, _ = make(kind)
    step = make_step(kind, 7, microbatch, penalty=penalty)
    train = step.init(model, KEY)
    batch = batch_of(7)
    for weights in (weights_of(7, w) for w in WEIGHTS):
        train, metrics = step(train, batch, weights=weights)
        check(kind, train, metrics, model, batch, weights, penalised=True)


@pytest.mark.parametrize("name", ["dropout", "state_means_aux"])
def test_short_batches(name):
    """Batches of 1 to N rows, full passes and partial ones, in one trace."""
    kind = KINDS[name]
    model, state = make(kind)
    traces = []

    def loss(*args):
        traces.append(1)
        return kind.loss(*args)

    step = eqaccum.make_step(
        loss, recorder(), global_batch=8, microbatch=3, has_aux=kind.has_aux
    )
    train = step.init(model, KEY, state=state)
    whole = batch_of(8)
    whole["mask"][0] = True
    passes = 0
    for rows in (8, 1, 2, 3, 4, 5, 6, 7, 8):
        train, metrics = step(train, first_rows(whole, rows))
        present = (np.arange(8) < rows).astype(np.float32)
        check(kind, train, metrics, model, whole, present, rows=rows)
        passes += -(-rows // 3)
        if state is not None:
            assert int(train.state.get(model.counter.index)) == passes
    assert len(traces) == 1


def test_the_update_is_the_old_minus_the_gradient():
    """The same with a real optimizer: the model moves by the gradient."""
    kind = KINDS["means"]
    model, _ = make(kind)
    step = make_step(kind, 10, 3, optax.sgd(1.0))
    batch = batch_of(10)
    train = step.init(model, KEY)
    for index in range(3):
        before = copied(train.model)  # the step consumes the old one
        train, _ = step(train, batch)
        key = jax.random.fold_in(KEY, index)
        _, gradient = full_batch(kind, before, batch, np.ones(10, np.float32), key)
        moved = flat(before) - flat(train.model)
        assert np.linalg.norm(moved - flat(gradient)) <= 1e-6 * np.linalg.norm(
            flat(gradient)
        )
        assert train.model.activation is model.activation


def test_float64_step():
    kind = KINDS["state_means_aux"]
    with jax.enable_x64(True):
        model, state = make(kind, jnp.float64)
        step = make_step(kind, 10, 4, penalty=lambda m: penalty(m.net))
        train = step.init(model, KEY, state=state)
        batch = batch_of(10, jnp.float64)
        for index, weights in enumerate(weights_of(10, w) for w in WEIGHTS):
            train, metrics = step(train, batch, weights=weights)
            key = jax.random.fold_in(KEY, index)
            want, gradient = full_batch(
                kind, model, batch, weights, key, penalised=True
            )
            assert error(train.opt_state, gradient) <= 1e-12
            assert error(metrics.loss + metrics.penalty, want) <= 1e-12
            assert error(metrics.grad_norm, np.linalg.norm(flat(gradient))) <= 1e-12


def test_leaves_without_elements():
    """A layer of no outputs has leaves of no elements; the norm is of the others."""
    model = {"w": jnp.float32(1), "empty": jnp.zeros((0, 3))}
    step = eqaccum.make_step(
        lambda m, y, key: jnp.sum(m["empty"]) + (m["w"] - y) ** 2,
        optax.adamw(1.0),
        global_batch=3,
        microbatch=2,
    )
    train, metrics = step(step.init(model, KEY), np.array([1, 2, 3], np.float32))
    assert float(metrics.grad_norm) == 2
    assert train.model["empty"].shape == (0, 3)


def test_frozen_leaves_stay_bit_for_bit():
    """No decay, no optimizer slot, no accumulator; and functions are the same ones."""
    kind = KINDS["scalar"]
    model, _ = make(kind)
    step = make_step(
        kind,
        10,
        4,
        optax.adamw(0.1, weight_decay=0.1),
        trainable=eqx.tree_at(
            lambda m: m.layer.weight, jax.tree.map(lambda _: False, model), True
        ),
    )
    train = step.init(model, KEY)
    assert step.plan is None
    batch = batch_of(10)
    train, _ = step(train, batch)
    weight = model.layer.weight
    assert step.plan.parts.accumulator == step.plan.parts.parameters == weight.nbytes
    slots = [leaf for leaf in jax.tree.leaves(train.opt_state) if leaf.ndim]
    assert [leaf.shape for leaf in slots] == [weight.shape] * 2
    after = train.model
    assert not np.array_equal(after.layer.weight, weight)
    np.testing.assert_array_equal(after.table, model.table)
    np.testing.assert_array_equal(after.layer.bias, model.layer.bias)
    assert after.activation is model.activation


def test_metrics_can_be_kept():
    """Nothing of a step is given to a later one: read at the end they are the same."""
    kind = KINDS["aux"]
    model, _ = make(kind)
    step = make_step(kind, 7, 3, optax.adam(0.1), penalty=penalty)
    train = step.init(model, KEY)
    kept, read = [], []
    for seed in range(4):
        train, metrics = step(train, batch_of(7, seed=seed))
        kept.append(metrics)
        read.append(jax.tree.map(np.array, metrics))
    for metrics, values in zip(kept, read, strict=True):
        for late, early in zip(
            jax.tree.leaves(metrics), jax.tree.leaves(values), strict=True
        ):
            np.testing.assert_array_equal(late, early)


@pytest.mark.parametrize("name,microbatch", [("dropout", 3), ("means", 4)])
def test_fit_is_the_training_on_whole_batches(name, microbatch):
    """Two epochs with a short batch, weights, a penalty and adamw, against a loop."""
    kind = KINDS[name]
    model, _ = make(kind)
    batch, weights = batch_of(10), weights_of(10, "zeros")
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05, eps=1e-3))
    result = eqaccum.fit(
        model,
        batch,
        global_batch=4,
        loss=kind.loss,
        optimizer=optimizer,
        epochs=2,
        key=KEY,
        shuffle=False,
        example_weights=weights,
        penalty=penalty,
        microbatch=microbatch,
    )
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)
    state = optimizer.init(parameters)
    update = jax.jit(optimizer.update)
    losses = []
    for index, start in enumerate([0, 4, 8] * 2):
        at = np.arange(start, start + 4) % 10  # the short batch: two rows of weight 0
        value, gradient = full_batch(
            kind,
            eqx.combine(parameters, rest),
            jax.tree.map(lambda x, at=at: x[at], batch),
            np.where(np.arange(start, start + 4) < 10, weights[at], 0),
            jax.random.fold_in(KEY, index),
            penalised=True,
        )
        losses.append(float(value))
        updates, state = update(gradient, state, parameters)
        parameters = eqx.apply_updates(parameters, updates)
    trained = eqx.filter(result.model, eqx.is_inexact_array)
    assert error(trained, parameters) <= 2e-6
    got = result.history["loss"] + result.history["penalty"]
    np.testing.assert_allclose(got, losses, rtol=5e-6)
    assert list(result.history["examples"]) == [4, 4, 2] * 2
