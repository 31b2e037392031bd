"""Properties of the accumulated gradient, over drawn sizes, weights and losses.

Most losses are quadratic, so the right answer is a line of numpy in float64. The
profile `nightly` (`make test-properties`) draws 2,000 examples of what needs no
compilation and some hundreds of the rest.
"""

import functools
import os
from typing import Any

import contrastive
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh
from reference import (
    KINDS,
    Counter,
    assert_same_kind,
    flat,
    full_batch,
    make,
    recorder,
)

import eqaccum

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
# Draws of tests that compile their programs once; the others take a part of it.
DRAWS = int(os.environ.get("PROPERTY_DRAWS", 2000 if NIGHTLY else 25))
few = hypothesis.settings(max_examples=DRAWS // 4)
fresh = hypothesis.settings(max_examples=max(2, DRAWS // 14))
many = hypothesis.settings(
    max_examples=DRAWS,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
pytestmark = pytest.mark.timeout(7200 if NIGHTLY else 120)

WIDTH = 3
VALUES = st.floats(-4, 4, width=16)
WEIGHTS = st.one_of(st.just(0.0), st.floats(0.125, 4, width=16))


class Model(eqx.Module):
    w: jax.Array
    counter: Counter

    def __init__(self):
        self.w = jnp.array([0.5, -1.0, 2.0])
        self.counter = Counter()


MODEL, STATE = eqx.nn.make_with_state(Model)()
W = np.asarray(MODEL.w, np.float64)


@st.composite
def batches(draw: Any, *, most: int, least: int = 1) -> dict:
    """Rows with items, of which some are masked, and weights, of which one counts."""
    rows = draw(st.integers(least, most))
    weights = draw(
        st.lists(WEIGHTS, min_size=rows, max_size=rows).filter(lambda w: max(w) > 0)
    )
    y = draw(hnp.arrays(np.float32, (rows, WIDTH), elements=VALUES))
    mask = draw(hnp.arrays(bool, (rows, WIDTH)))
    first = int(np.argmax(np.array(weights) > 0))
    mask[first, 0] = True  # one item that counts
    return {"y": y, "mask": mask, "weights": np.array(weights, np.float32)}


def poisoned(batch):
    """The same with what may not be looked at made NaN."""
    y = np.where((batch["weights"] > 0)[:, None], batch["y"], np.nan)
    return {"y": y.astype(np.float32), "mask": batch["mask"]}


# --- three losses, and what they give ----------------------------------------------


def squares(model, example):
    return jnp.where(example["mask"], (model.w - example["y"]) ** 2, 0)


def scalar(model, state, example, key):
    total = jnp.sum(squares(model, example))
    return total, model.counter(state), {"total": total, "row": example["y"]}


def mean(model, state, example, key):
    total, state, aux = scalar(model, state, example, key)
    value = eqaccum.Mean(total, jnp.sum(example["mask"]))
    return value, state, aux | {"total": eqaccum.Mean(total, 1)}


def means(model, state, example, key):
    value, state, aux = mean(model, state, example, key)
    return value - 0.5 * aux["total"], state, aux


LOSSES = {"scalar": scalar, "mean": mean, "means": means}


def answer(name, batch):
    """(loss, gradient, aux mean) in float64."""
    y, w = batch["y"].astype(np.float64), batch["weights"].astype(np.float64)
    mask = batch["mask"]
    total = np.where(mask, (W - y) ** 2, 0).sum(axis=1)
    slope = np.where(mask, 2 * (W - y), 0)
    by_rows = (w @ total / w.sum(), w @ slope / w.sum())
    items = w @ mask.sum(axis=1)
    by_items = (w @ total / items, w @ slope / items)
    return {
        "scalar": by_rows,
        "mean": by_items,
        "means": tuple(a - 0.5 * b for a, b in zip(by_items, by_rows, strict=True)),
    }[name], by_rows[0]


def assert_close(got, want, scale):
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * scale)


def scale_of(batch):
    return 1 + float(np.abs(batch["y"]).max()) ** 2


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


@functools.cache
def step_of(name, rows, microbatch, devices=1):
    """One step for many draws; it does not change the model."""
    return eqaccum.make_step(
        LOSSES[name],
        recorder(),
        global_batch=rows,
        microbatch=microbatch,
        mesh=mesh_of(devices),
        has_aux=True,
    )


# --- the properties ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name,rows,microbatch,devices",
    [
        ("scalar", 9, 2, 1),
        ("mean", 6, 6, 1),
        ("means", 7, 3, 1),
        ("mean", 11, 2, 2),
        ("scalar", 7, 3, 3),
        ("means", 10, 1, 4),
    ],
)
@many
@hypothesis.given(data=st.data())
def test_any_rows_and_weights(name, rows, microbatch, devices, data):
    """Batches of 1 to N rows, any weights, NaN where the weight is 0."""
    batch = data.draw(batches(most=rows))
    step = step_of(name, rows, microbatch, devices)
    train = step.init(MODEL, state=STATE)
    train, metrics = step(train, poisoned(batch), weights=batch["weights"])
    (loss, gradient), total = answer(name, batch)
    scale = scale_of(batch)
    assert_close(train.opt_state.w, gradient, scale)
    assert_close(metrics.loss, loss, scale)
    assert_close(metrics.grad_norm, np.linalg.norm(gradient), scale)
    assert_close(metrics.aux["total"], total, scale)
    present = (batch["weights"] > 0)[:, None]
    np.testing.assert_array_equal(metrics.aux["row"], np.where(present, batch["y"], 0))
    assert metrics.examples == len(batch["y"])
    last = int(np.flatnonzero(batch["weights"])[-1])
    passes = step.plan.num_microbatches
    # Passes after the last row that counts are not run, so they count no call.
    ran = 1 if passes == 1 else last // (devices * step.plan.microbatch) + 1
    assert int(train.state.get(MODEL.counter.index)) == ran


@many
@hypothesis.given(batch=batches(most=7), power=st.integers(-10, 10))
def test_weights_matter_by_their_ratios_alone(batch, power):
    """Times a power of two they give the same bits."""
    step = step_of("means", 7, 3)
    got = []
    for factor in (1, 2.0**power):
        train, metrics = step(
            step.init(MODEL, state=STATE),
            poisoned(batch),
            weights=batch["weights"] * np.float32(factor),
        )
        got.append((np.asarray(train.opt_state.w), float(metrics.loss)))
    np.testing.assert_array_equal(got[0][0], got[1][0])
    assert got[0][1] == got[1][1]


@many
@hypothesis.given(batch=batches(most=4))
def test_a_row_of_weight_two_is_that_row_twice(batch):
    step = step_of("scalar", 9, 2)
    twice = {k: np.repeat(batch[k], 2, axis=0) for k in ("y", "mask")}
    got = []
    for rows, weights in (
        ({k: batch[k] for k in twice}, 2 * batch["weights"]),
        (twice, np.repeat(batch["weights"], 2)),
    ):
        train, metrics = step(step.init(MODEL, state=STATE), rows, weights=weights)
        got.append((np.asarray(train.opt_state.w), float(metrics.weight)))
    assert_close(got[0][0], got[1][0], scale_of(batch))
    assert got[0][1] == pytest.approx(got[1][1])


@few
@hypothesis.given(
    batch=batches(most=20),
    microbatch=st.integers(1, 24),
    name=st.sampled_from([*LOSSES]),
)
def test_any_size_and_microbatch(batch, microbatch, name):
    def loss(w, example, key):
        model = eqx.tree_at(lambda m: m.w, MODEL, w)
        state = jax.tree.map(lambda x: x, STATE)
        return LOSSES[name](model, state, example, key)[0]

    fn = eqaccum.value_and_grad(loss, microbatch=microbatch)
    value, gradient = fn(MODEL.w, poisoned(batch), weights=batch["weights"])
    (want, want_gradient), _ = answer(name, batch)
    assert_close(gradient, want_gradient, scale_of(batch))
    assert_close(value, want, scale_of(batch))


COUPLED = eqaccum.coupled(contrastive.embed_with_dropout, contrastive.head)


@fresh
@hypothesis.given(
    name=st.sampled_from([*KINDS, "coupled"]),
    rows=st.integers(1, 12),
    missing=st.integers(0, 5),
    microbatch=st.integers(1, 12),
    devices=st.integers(1, 4),
    weights=st.sampled_from(reference.WEIGHTS),
    wide=st.booleans(),
)
def test_any_loss_on_any_devices(
    name, rows, missing, microbatch, devices, weights, wide
):
    """Every loss kind, in float32 and float64, also of a short batch."""
    present = max(1, rows - missing)
    w = reference.weights_of(present, weights)
    key = jax.random.key(5)
    dtype = np.float64 if wide else np.float32
    with jax.enable_x64(wide):
        model, state, batch, loss = _of_kind(name, present, dtype)
        step = eqaccum.make_step(
            loss,
            recorder(),
            global_batch=rows,
            microbatch=microbatch,
            mesh=mesh_of(devices),
            has_aux=name in KINDS and KINDS[name].has_aux,
        )
        train = step.init(model, key, state=state)
        train, metrics = step(train, batch, weights=w)
        step_key = jax.random.fold_in(key, 0)
        if name in KINDS:
            want = full_batch(KINDS[name], model, batch, w, step_key)
        else:
            masks = np.asarray(contrastive.dropout_masks(step_key, present))
            want = contrastive.full(model, batch, w, masks=masks)
        tolerance = 1e-12 if wide else 2e-6
        # an optimizer is given the conjugate of JAX's gradient of a complex leaf
        gradient = jax.tree.map(jnp.conj, train.opt_state)
        assert_same_kind(gradient, want[1])
        size = max(np.linalg.norm(flat(want[1])), 1e-3)
        distance = np.linalg.norm(flat(gradient) - flat(want[1]))
        assert distance <= tolerance * size
        assert abs(float(metrics.loss) - float(want[0])) <= tolerance * max(
            abs(float(want[0])), 1
        )


def _of_kind(name, rows, dtype):
    """(model, state, batch, loss)"""
    if name == "coupled":
        model = contrastive.Towers(dtype=dtype)
        return model, None, contrastive.rows_of(rows, dtype), COUPLED
    kind = KINDS[name]
    model_dtype = dtype
    if kind.model is reference.Complex:
        model_dtype = np.complex128 if dtype == np.float64 else np.complex64
    model, state = make(kind, model_dtype)
    return model, state, reference.batch_of(rows, dtype), kind.loss


TERMS = st.tuples(
    st.sampled_from(["one", "items", "weighty"]), st.floats(-2, 2, width=16)
)


@few
@hypothesis.given(
    batch=batches(most=8, least=2),
    terms=st.lists(TERMS, min_size=1, max_size=4),
    factor=st.floats(-2, 2, width=16),
)
def test_sums_and_multiples_of_means(batch, terms, factor):
    """`a + b`, `a - b`, `-a`, `a * c`, `a / c`, `sum([...])`: linear in the means."""

    def parts(example):
        return {
            "one": 1,
            "items": jnp.sum(example["mask"]),
            "weighty": 2.5 + example["y"][0] * 0,
        }

    def loss(w, example, key):
        counts = parts(example)
        total = jnp.sum(jnp.where(example["mask"], (w - example["y"]) ** 2, 0))
        made = [c * eqaccum.Mean(total, counts[name]) for name, c in terms]
        return factor * sum(made) - -(made[0] / 2)

    def answers():
        weights = batch["weights"].astype(np.float64)
        rows, rows_slope = (x * weights.sum() for x in answer("scalar", batch)[0])
        by = {
            "one": weights.sum(),
            "items": weights @ batch["mask"].sum(axis=1),
            "weighty": 2.5 * weights.sum(),
        }
        scales = [factor * c for _, c in terms]
        scales[0] += terms[0][1] / 2
        scale = sum(s / by[name] for s, (name, _) in zip(scales, terms, strict=True))
        return scale * rows, scale * rows_slope

    fn = eqaccum.value_and_grad(loss, microbatch=3)
    value, gradient = fn(MODEL.w, poisoned(batch), weights=batch["weights"])
    want, want_gradient = answers()
    scale = 20 * scale_of(batch)
    assert_close(value, want, scale)
    assert_close(gradient, want_gradient, scale)


LEAVES = st.one_of(
    st.none(),
    st.just("text"),
    st.just(3),
    st.just(jnp.tanh),
    st.tuples(st.just("float"), st.lists(st.integers(0, 3), max_size=2)),
    st.tuples(st.just("int"), st.lists(st.integers(0, 3), max_size=2)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)


@few
@hypothesis.given(tree=TREES, microbatch=st.integers(1, 6))
def test_any_pytree_of_a_model(tree, microbatch):
    """Structure, shapes and dtypes of the gradient; the rest is not touched."""
    is_spec = lambda x: isinstance(x, tuple)  # noqa: E731

    def build(leaf):
        if not is_spec(leaf):
            return leaf
        kind, shape = leaf
        return jnp.ones(shape, jnp.float32 if kind == "float" else jnp.int32)

    model = {"w": jnp.float32(1), "rest": jax.tree.map(build, tree, is_leaf=is_spec)}

    def loss(model, x, key):
        floats = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
        return x * sum(jnp.sum(leaf) for leaf in floats)

    x = np.array([1, 2, 3, 4, 5], np.float32)
    value, grads = eqaccum.value_and_grad(loss, microbatch=microbatch)(model, x)
    floats = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(grads) == jax.tree.structure(floats)
    for grad, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(floats), strict=True):
        np.testing.assert_array_equal(grad, np.full(leaf.shape, 3, np.float32))
    step = eqaccum.make_step(
        loss, optax.sgd(1.0), global_batch=5, microbatch=microbatch
    )
    train = step.init(model)
    after, _ = step(train, x)
    assert jax.tree.structure(after.model) == jax.tree.structure(model)
    for old, new in zip(
        jax.tree.leaves(model), jax.tree.leaves(after.model), strict=True
    ):
        if eqx.is_inexact_array(old):
            np.testing.assert_array_equal(new, np.full(old.shape, -2, np.float32))
        elif eqx.is_array(old):
            np.testing.assert_array_equal(new, old)
        else:
            assert new is old
