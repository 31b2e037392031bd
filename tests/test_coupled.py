"""A head over the whole global batch: its gradient is that of all rows at once.

The reference is written by hand in numpy, in float64 (`contrastive.py`).
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contrastive import (
    DIM,
    Towers,
    dropout_masks,
    embed,
    embed_with_dropout,
    full,
    head,
    rows_of,
)
from jax.sharding import Mesh
from reference import assert_same_kind, error, example_keys, flat, recorder

import eqaccum

KEY = jax.random.key(3)


@dataclass(frozen=True)
class Variant:
    embed: Callable = embed
    tied: bool = False
    symmetric: bool = False
    hard: bool = True

    @property
    def loss(self):
        named = {"symmetric": self.symmetric, "hard": self.hard}
        return eqaccum.coupled(self.embed, functools.partial(head, **named))

    def full(self, model, batch, weights, key):
        masks = None
        if self.embed is embed_with_dropout:
            masks = np.asarray(dropout_masks(key, len(weights)), np.float64)
        named = {"symmetric": self.symmetric, "hard": self.hard}
        return full(model, batch, weights, masks=masks, **named)


VARIANTS = {
    "one direction, dropout": Variant(embed_with_dropout, hard=False),
    "two directions, tied": Variant(symmetric=True, tied=True),
    "hard negatives": Variant(),
}
WEIGHTS = {
    "ones": lambda n: np.ones(n, np.float32),
    "zeros": lambda n: np.where(np.arange(n) % 3 == 1, 0, 1 + np.arange(n)).astype(
        np.float32
    ),
}


@pytest.mark.parametrize(
    "name, microbatch",
    [
        *(("one direction, dropout", n) for n in (1, 3, 7)),
        ("two directions, tied", 3),
        ("hard negatives", 2),
    ],
)
def test_gradient_is_that_of_the_whole_batch(name, microbatch):
    variant = VARIANTS[name]
    with jax.enable_x64(True):
        model = Towers(tied=variant.tied, dtype=jnp.float64)
        batch = rows_of(7, np.float64)
        loss_and_grad = eqaccum.value_and_grad(variant.loss, microbatch=microbatch)
        for weights in (make(7) for make in WEIGHTS.values()):
            value, grads = loss_and_grad(model, batch, key=KEY, weights=weights)
            want, want_grads = variant.full(model, batch, weights, KEY)
            assert_same_kind(grads, want_grads)
            assert error(grads, want_grads) < 1e-12
            assert float(value) == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize("microbatch", [2, 4])
def test_published_case(microbatch):
    x = np.array([[1, 0], [0, 1], [1, 1], [1, -1.0]])
    y = np.array([[1, 0.5], [0.5, 1], [1, 1], [0.5, -1]])

    def both(model, example, key):
        return example[0] @ model[0], example[1] @ model[1]

    def loss(model, embeddings, weights):
        return eqaccum.losses.info_nce(*embeddings, weights=weights)

    with jax.enable_x64(True):
        identity = (jnp.eye(2), jnp.eye(2))
        exact = eqaccum.value_and_grad(
            eqaccum.coupled(both, loss), microbatch=microbatch
        )
        value, grads = exact(identity, (x, y))
        np.testing.assert_allclose(value, 0.888166, atol=5e-7)
        want = [[-0.041903, 0.124529], [-0.007057, -0.286980]]
        np.testing.assert_allclose(grads[0], want, atol=5e-7)
        value, grads = exact(identity, (x[:3], y[:3]))  # a short last batch

        def three(model):
            u, v = x[:3] @ model[0], y[:3] @ model[1]
            return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(u @ v.T)))

        want_value, want = jax.jit(jax.value_and_grad(three))(identity)
        np.testing.assert_allclose(value, want_value, rtol=1e-12)
        assert error(grads, want) < 1e-12


# --- the step --------------------------------------------------------------------


def make_step(loss, rows, microbatch, **options):
    return eqaccum.make_step(
        loss, recorder(), global_batch=rows, microbatch=microbatch, **options
    )


def penalty(model):
    return 0.1 * jnp.sum(model.log_t**2)


@pytest.mark.parametrize("microbatch", [3, 8])
def test_steps_with_short_batches_weights_and_a_penalty(microbatch):
    model = Towers()
    step = make_step(VARIANTS["hard negatives"].loss, 8, microbatch, penalty=penalty)
    train = step.init(model, KEY)
    for rows, kind in ((8, "ones"), (5, "ones"), (8, "zeros"), (2, "zeros")):
        batch, weights = rows_of(rows), WEIGHTS[kind](rows)
        train, metrics = step(train, batch, weights=weights)
        want, gradient = full(model, batch, weights)
        gradient = eqx.tree_at(
            lambda m: m.log_t, gradient, replace_fn=lambda g: g + 0.2 * model.log_t
        )
        assert_same_kind(train.opt_state, gradient)
        assert error(train.opt_state, gradient) < 1e-6
        assert float(metrics.loss) == pytest.approx(float(want), rel=1e-6)
        assert float(metrics.penalty) == pytest.approx(float(penalty(model)))
        assert float(metrics.weight) == pytest.approx(np.sum(weights))
        norm = np.linalg.norm(flat(gradient))
        assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert step.plan.microbatch == microbatch


@pytest.mark.parametrize("devices, microbatch", [(4, 2), (2, 5)])
def test_several_devices(devices, microbatch):
    model = Towers()
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    variant = VARIANTS["one direction, dropout"]
    step = make_step(variant.loss, 10, microbatch, mesh=mesh)
    train = step.init(model, KEY)
    assert step.init(model).model.log_t == model.log_t
    for rows in (10, 7):
        batch, weights = rows_of(rows), WEIGHTS["ones"](rows)
        key = jax.random.fold_in(KEY, train.batch_index)
        train, metrics = step(train, batch, weights=weights)
        want, gradient = variant.full(model, batch, weights, key)
        assert error(train.opt_state, gradient) < 1e-6
        assert float(metrics.loss) == pytest.approx(float(want), rel=1e-6)
        assert float(metrics.weight) == rows
    assert step.plan.devices == devices


def flops(step):
    (ready,) = step._ready.values()
    return ready.accumulate.compiled.cost_analysis()["flops"]


def test_one_pass_embeds_once():
    """The forward pass is not run a second time where its results can be kept."""
    width, rows = 32, 64

    class Deep(eqx.Module):
        mlp: eqx.nn.MLP

        def __init__(self):
            self.mlp = eqx.nn.MLP(width, width, width, 3, key=jax.random.key(0))

    def one(model, example, key):
        return model.mlp(example[0]), model.mlp(example[1])

    def top(model, embeddings, weights):
        q, p = embeddings
        return jnp.mean(jnp.sum((q - p) ** 2, axis=1))

    rng = np.random.default_rng(0)
    batch = tuple(rng.normal(size=(rows, width)).astype(np.float32) for _ in range(2))
    model = Deep()
    arrays, static = eqx.partition(model, eqx.is_array)

    def direct(arrays, batch):
        model = eqx.combine(arrays, static)
        return top(model, jax.vmap(lambda e: one(model, e, None))(batch), None)

    lowered = jax.jit(jax.value_and_grad(direct)).lower(arrays, batch)
    once = lowered.compile().cost_analysis()["flops"]
    for microbatch, at_most in ((rows, 1.02), (rows // 2, 1.6)):
        step = make_step(eqaccum.coupled(one, top), rows, microbatch)
        train = step.init(model, KEY)
        step(train, batch)
        passes = step.plan.num_microbatches
        # a loop's body is counted once
        assert flops(step) * passes < at_most * once
    assert passes == 2


# --- what else a head and an embed may do ----------------------------------------


def test_state_of_the_first_sweep_is_kept():
    class Normed(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.linear = eqx.nn.Linear(3, DIM, key=key)
            self.norm = eqx.nn.BatchNorm(DIM, "batch", mode="batch")

    def one(model, state, example, key):
        q, state = model.norm(model.linear(example[0]), state)
        return (q, model.linear(example[1])), state

    def top(model, embeddings, weights):
        return eqaccum.losses.info_nce(*embeddings, weights=weights)

    model, state = eqx.nn.make_with_state(Normed)(jax.random.key(1))
    batch = rows_of(8)[:2]
    step = make_step(eqaccum.coupled(one, top), 8, 4)
    with pytest.warns(eqaccum.EqaccumWarning, match="BatchNorm"):
        train, _ = step(step.init(model, KEY, state=state), batch)

    def forward(model):
        """Two microbatches in turn, each with its own statistics."""
        parts, now = [], state
        for half in (slice(0, 4), slice(4, 8)):
            part = jax.tree.map(lambda x, half=half: x[half], batch)
            out, now = jax.vmap(
                lambda e, now=now: one(model, now, e, None),
                axis_name="batch",
                out_axes=(0, None),
            )(part)
            parts.append(out)
        q, p = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(q @ p.T))), now

    gradient, after = eqx.filter_jit(eqx.filter_grad(forward, has_aux=True))(model)
    assert error(train.opt_state, gradient) < 1e-6
    np.testing.assert_allclose(flat(train.state), flat(after), rtol=1e-6)


@pytest.mark.parametrize("microbatch", [3, 8])
def test_auxiliary_outputs(microbatch):
    def top(model, embeddings, weights):
        q, p, _ = embeddings
        scores = q @ p.T
        there = jnp.where(weights > 0, 0.0, -jnp.inf)
        hit = jnp.argmax(scores + there[None, :], axis=1) == jnp.arange(len(q))
        w = weights / jnp.sum(weights)
        aux = {
            "accuracy": jnp.sum(w * hit),
            "all": jnp.all(hit | (weights == 0)),
            "ratio": eqaccum.Mean(jnp.sum(weights * hit), jnp.sum(weights)),
            "count": eqaccum.Sum(jnp.sum(hit & (weights > 0))),
            "rank": jnp.where(hit, 7, 8),
        }
        return eqaccum.losses.info_nce(q, p, weights=weights), aux

    model = Towers()
    step = make_step(eqaccum.coupled(embed, top), 8, microbatch, has_aux=True)
    train = step.init(model, KEY)
    for rows in (8, 5):
        batch = rows_of(rows)
        train, metrics = step(train, batch)
        q, p, _ = jax.vmap(lambda e: embed(model, e, None))(batch)
        hit = np.argmax(np.asarray(q @ p.T), axis=1) == np.arange(rows)
        aux = metrics.aux
        assert float(aux["accuracy"]) == pytest.approx(hit.mean())
        assert float(aux["ratio"]) == pytest.approx(hit.mean())
        assert float(aux["all"]) == float(hit.all())
        assert (int(aux["count"]), aux["count"].dtype) == (hit.sum(), jnp.int32)
        np.testing.assert_array_equal(aux["rank"], np.where(hit, 7, 8))


def test_labels_among_the_embeddings():
    """Integers and booleans reach the head; no gradient is asked of them."""

    def one(model, example, key):
        x, label, seen = example
        return {"z": model(x), "label": label, "seen": seen}

    def top(model, out, weights):
        same = (out["label"][:, None] == out["label"][None, :]) & out["seen"][None, :]
        w = weights[:, None] * weights[None, :]
        return jnp.sum(w * jnp.where(same, out["z"] @ out["z"].T, 0)) / jnp.sum(w)

    model = eqx.nn.Linear(3, DIM, key=jax.random.key(0))
    x = rows_of(6)[0]
    label, seen = np.arange(6, dtype=np.int32) % 2, np.arange(6) < 4

    def direct(model):
        z = jax.vmap(model)(x)
        mask = (label[:, None] == label[None, :]) & seen[None, :]
        return jnp.mean(jnp.where(mask, z @ z.T, 0))

    want, gradient = eqx.filter_jit(eqx.filter_value_and_grad(direct))(model)
    loss = eqaccum.coupled(one, top)
    loss_and_grad = eqaccum.value_and_grad(loss, microbatch=4)
    value, grads = loss_and_grad(model, (x, label, seen))
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert error(grads, gradient) < 1e-6
    # and the test of the head before a short batch understands them
    step = make_step(loss, 8, 4)
    _, metrics = step(step.init(model, KEY), (x, label, seen))
    assert float(metrics.loss) == pytest.approx(float(want), rel=1e-6)


def test_shared_key_reaches_embed_and_head():
    def one(model, example, key, step_key):
        q, p, h = embed(model, example, key)
        return q + jax.random.normal(step_key, (DIM,)), p, h

    def top(model, embeddings, weights, step_key):
        return jax.random.uniform(step_key) * head(model, embeddings, weights)

    model, batch = Towers(), rows_of(7)
    loss = eqaccum.coupled(eqaccum.shared_key(one), eqaccum.shared_key(top))
    _, shared = example_keys(KEY, 7)

    @jax.jit
    def direct(arrays, batch):
        model = eqx.combine(arrays, eqx.filter(Towers(), eqx.is_array, inverse=True))
        q, p, h = jax.vmap(lambda e: one(model, e, None, shared))(batch)
        scores = q @ jnp.concatenate([p, h]).T / jnp.exp(model.log_t)
        logs = jnp.diagonal(jax.nn.log_softmax(scores))
        return -jax.random.uniform(shared) * jnp.mean(logs)

    arrays = eqx.filter(model, eqx.is_array)
    want, gradient = jax.value_and_grad(direct)(arrays, batch)
    loss_and_grad = eqaccum.value_and_grad(loss, microbatch=3)
    value, grads = loss_and_grad(model, batch, key=KEY)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert error(grads, gradient) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_parameters(dtype):
    """As near to float64 as the dtype allows, and no sum overflows."""
    wide = Towers()
    model = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, wide)
    batch = tuple(x.astype(jnp.dtype(dtype)) for x in rows_of(64))
    weights = np.full(64, 500, np.float32)  # 32,000 in sum: half of float16's largest

    _, exact = full(wide, batch, weights, hard=False)
    top = functools.partial(head, hard=False)
    for group in (None, 16) if dtype == jnp.float16 else (None,):
        loss = eqaccum.coupled(embed, top, group=group)
        loss_and_grad = eqaccum.value_and_grad(loss, microbatch=16)
        _, grads = loss_and_grad(model, batch, weights=weights)
        assert np.isfinite(flat(grads)).all()
        if group is None:
            assert error(grads, exact) < 8 * float(jnp.finfo(dtype).eps)


def test_evaluate_averages_by_rows():
    model, batch = Towers(), rows_of(10)
    values = [
        full(model, tuple(x[part] for x in batch), np.ones(n))[0]
        for part, n in ((slice(0, 6), 6), (slice(6, 10), 4))
    ]
    got = eqaccum.evaluate(
        model, batch, loss=VARIANTS["hard negatives"].loss, global_batch=6
    )
    want = (6 * float(values[0]) + 4 * float(values[1])) / 10
    assert got["loss"] == pytest.approx(want, rel=1e-6)


@pytest.mark.devices(3)
def test_evaluate_on_several_devices():
    """Batches of 6 and 4 rows, of which no device has a third."""
    model, batch = Towers(), rows_of(10)
    got = eqaccum.evaluate(
        model, batch, loss=VARIANTS["hard negatives"].loss, global_batch=6, microbatch=1
    )
    first, second = (
        full(model, tuple(x[part] for x in batch), np.ones(n))[0]
        for part, n in ((slice(0, 6), 6), (slice(6, 10), 4))
    )
    want = (6 * float(first) + 4 * float(second)) / 10
    assert got["loss"] == pytest.approx(want, rel=1e-6)


# --- heads that cannot work ------------------------------------------------------


def careless(model, embeddings, weights):
    q, p, _ = embeddings
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(q @ p.T)))


def nan_at_padding(model, embeddings, weights):
    q, p, _ = embeddings
    distances = jnp.sqrt(weights * jnp.sum((q - p) ** 2, axis=1))  # not at 0
    return jnp.sum(distances) / jnp.sum(weights)


@pytest.mark.parametrize(
    "top, message",
    [
        (careless, "head ignores weights: its value moved"),
        (nan_at_padding, "head ignores weights: its gradient is not finite"),
    ],
)
def test_a_head_that_counts_padding_is_refused(top, message):
    step = make_step(eqaccum.coupled(embed, top), 8, 4)
    train = step.init(Towers(), KEY)
    train, _ = step(train, rows_of(8))  # full batches do not hold such rows
    with pytest.raises(eqaccum.InputError, match=message):
        step(train, rows_of(7))
    train, _ = step(train, rows_of(8))


def test_a_head_that_is_no_test_of_itself_is_let_through():
    """Not finite on random embeddings: nothing is known, so nothing is refused."""

    def one(model, example, key):
        return jnp.exp(model(example[0]))

    def top(model, z, weights):
        return jnp.sum(weights[:, None] * jnp.log(z)) / jnp.sum(weights)

    model = eqx.nn.Linear(3, DIM, key=jax.random.key(0))
    step = make_step(eqaccum.coupled(one, top), 8, 4)
    _, metrics = step(step.init(model, KEY), rows_of(5))
    want = jnp.sum(jax.vmap(model)(rows_of(5)[0])) / 5
    assert float(metrics.loss) == pytest.approx(float(want), rel=1e-5)


REFUSED = {
    "a vector": (
        embed,
        lambda model, e, w: w,
        r"the head returned an array of shape \(8,\); expected a float scalar",
    ),
    "aux unasked": (embed, lambda model, e, w: (jnp.sum(w), w), "returned a tuple"),
    "an integer": (embed, lambda model, e, w: jnp.argmax(w), "returned dtype int32"),
    "nothing embedded": (lambda m, e, k: None, head, "embed returned a NoneType"),
    "text embedded": (lambda m, e, k: "q", head, "embed returned a str"),
    "arguments": (embed, lambda e, w: 0.0, "cannot be called with"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    one, top, message = REFUSED[name]
    step_of = functools.partial(make_step, eqaccum.coupled(one, top), 8, 4)
    with pytest.raises(eqaccum.InputError, match=message):
        step = step_of()
        step(step.init(Towers(), KEY), rows_of(8))


def test_aux_of_another_length_is_refused():
    def top(model, embeddings, weights):
        return jnp.sum(embeddings[0]), jnp.zeros((3, 2))

    step = make_step(eqaccum.coupled(embed, top), 8, 4, has_aux=True)
    with pytest.raises(eqaccum.InputError, match=re.escape("an array of shape (3, 2)")):
        step(step.init(Towers(), KEY), rows_of(8))


def test_fit_trains_the_whole_batch_alike_for_every_microbatch():
    losses = []
    for microbatch in (3, 16):
        result = eqaccum.fit(
            Towers(),
            rows_of(40),
            global_batch=16,
            loss=VARIANTS["hard negatives"].loss,
            optimizer=optax.sgd(0.1),
            epochs=2,
            microbatch=microbatch,
            key=KEY,
        )
        losses.append(result.history["loss"])
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
