"""Models of every shape of pytree: functions, frozen leaves, tied weights, types."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from beartype import beartype
from helpers import assert_trees_close, assert_trees_equal
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

import eqaccum

SGD = optax.sgd(0.1)
ADAMW = optax.adamw(0.1, weight_decay=0.1)
X = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def loss(model, example, key):
    x, y = example
    return jnp.mean((model(x) - y) ** 2)


def step_once(model: Any, data: Any, fn: Any, optimizer=SGD, **more: Any):
    """One step over all rows, one row in each pass."""
    arguments = {"global_batch": len(jax.tree.leaves(data)[0]), "microbatch": 1}
    return eqaccum.fit(
        model, data, loss=fn, optimizer=optimizer, **(arguments | more), shuffle=False
    )


def by_hand(model: Any, data: Any, fn: Any, optimizer: Any, steps: int = 1) -> Any:
    """The same with the whole batch at once, filtered as Equinox's pages say."""
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)
    state = optimizer.init(parameters)

    def mean(parameters):
        losses = jax.vmap(lambda e: fn(eqx.combine(parameters, rest), e, None))(data)
        return jnp.mean(losses)

    @jax.jit
    def step(parameters, state):
        updates, state = optimizer.update(jax.grad(mean)(parameters), state, parameters)
        return optax.apply_updates(parameters, updates), state

    for _ in range(steps):
        parameters, state = step(parameters, state)
    return eqx.combine(parameters, rest)


# --- leaves that are no arrays ----------------------------------------------------


class Odd(eqx.Module):
    """Leaves of every kind that is no array."""

    linear: eqx.nn.Linear
    activation: Callable
    name: str
    scale: float
    missing: None
    layers: list[Callable]

    def __call__(self, x):
        assert self.name == "odd" and self.missing is None
        for layer in self.layers:
            x = layer(x)
        return self.activation(self.linear(x)) * self.scale


def odd() -> Odd:
    linear = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    return Odd(linear, lambda x: x * x, "odd", 0.5, None, [jnp.sin, lambda x: 2 * x])


@pytest.mark.parametrize(
    "make", [odd, lambda: eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))]
)
def test_leaves_that_are_no_arrays_stay_the_very_same(make):
    model = make()
    result = step_once(model, (X, Y), loss, ADAMW, epochs=2)
    assert_trees_close(result.model, by_hand(model, (X, Y), loss, ADAMW, 2))
    assert jax.tree.structure(result.model) == jax.tree.structure(model)
    for new, old in zip(*map(jax.tree.leaves, (result.model, model)), strict=True):
        assert eqx.is_array(new) or new is old
    # The optimizer sees none of them.
    for leaf in jax.tree.leaves(result.opt_state):
        assert isinstance(leaf, jax.Array)


# --- frozen, integer and missing leaves ---------------------------------------------


class Buffers(eqx.Module):
    w: jax.Array
    n: jax.Array
    buf: np.ndarray
    key: jax.Array
    flag: np.ndarray
    missing: eqx.nn.Linear | None
    scale: float


def buffers() -> Buffers:
    return Buffers(
        jnp.ones(2),
        jnp.array(3),
        np.array([np.pi, 1.0]),
        jax.random.key(7),
        np.array(True),
        None,
        0.5,
    )


def buffered(model, example, key):
    noise = jax.random.normal(model.key, (2,))
    total = model.w * model.n + model.buf + 0 * noise
    total = jnp.where(model.flag, total, 0) * model.scale
    return jnp.sum((total - example) ** 2)


def trainable_w() -> Buffers:
    spec = jax.tree.map(lambda _: False, buffers())
    return eqx.tree_at(lambda m: m.w, spec, True)


@pytest.mark.parametrize("spec", ["tree", "predicate"])
def test_frozen_leaves_are_untouched(spec):
    trainable = {
        "tree": trainable_w(),
        "predicate": lambda leaf: leaf.dtype == jnp.float32 and leaf.shape == (2,),
    }[spec]
    model = buffers()
    if spec == "predicate":
        model = eqx.tree_at(lambda m: m.buf, model, np.ones(2, np.float16))
    result = step_once(model, X, buffered, ADAMW, trainable=trainable)
    new = result.model
    assert (np.asarray(new.w) != 1).all()
    assert int(new.n) == 3 and new.n.dtype == jnp.int32
    assert type(new.buf) is np.ndarray and new.buf.dtype == model.buf.dtype
    np.testing.assert_array_equal(new.buf, model.buf)  # in all of its bits
    assert new.missing is None
    assert new.scale == 0.5 and type(new.scale) is float
    assert jnp.issubdtype(new.key.dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(*map(jax.random.key_data, (new.key, model.key)))
    # No slot in the optimizer, no accumulator, for any of them.
    moments = [s for s in jax.tree.leaves(result.opt_state) if s.shape != ()]
    assert [m.shape for m in moments] == [(2,), (2,)]
    assert result.plan.parts.parameters == result.plan.parts.accumulator == 8


def test_only_what_is_trained_moves_and_as_by_hand():
    model = buffers()
    result = step_once(model, X, buffered, ADAMW, trainable=trainable_w())

    def of_w(w):
        return eqx.tree_at(lambda m: m.w, model, w)

    def mean(w):
        return jnp.mean(jax.vmap(lambda x: buffered(of_w(w), x, None))(X))

    w = jnp.ones(2)
    updates, _ = ADAMW.update(jax.grad(mean)(w), ADAMW.init(w), w)
    np.testing.assert_allclose(result.model.w, w + updates, rtol=1e-6)


def test_all_inexact_arrays_are_trained_by_default():
    model = eqx.tree_at(lambda m: m.buf, buffers(), np.ones(2, np.float32))
    new = step_once(model, X, buffered).model
    assert (np.asarray(new.buf) != 1).all() and isinstance(new.buf, jax.Array)
    assert int(new.n) == 3 and new.scale == 0.5
    np.testing.assert_array_equal(model.buf, np.ones(2))  # the user's own


def test_a_prefix_of_the_model_is_enough():
    model = {"body": {"a": jnp.ones(()), "b": jnp.ones(())}, "head": jnp.ones(())}

    def fn(model, example, key):
        return (model["body"]["a"] + model["body"]["b"] + model["head"]) * example

    new = step_once(
        model, np.ones(2, np.float32), fn, trainable={"body": False, "head": True}
    ).model
    assert_trees_equal(new["body"], model["body"])
    np.testing.assert_allclose(new["head"], 0.9)


# --- tied weights, one buffer in two places -------------------------------------------


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, embedding: eqx.nn.Embedding, out: eqx.nn.Linear):
        self.shared = eqx.nn.Shared(
            (embedding, out), lambda pair: pair[1].weight, lambda pair: pair[0].weight
        )

    def __call__(self, token):
        embedding, out = self.shared()
        return out(embedding(token))


def test_tied_weights_stay_tied():
    keys = jax.random.split(jax.random.key(0), 2)
    embedding = eqx.nn.Embedding(5, 3, key=keys[0])
    out = eqx.nn.Linear(3, 5, use_bias=False, key=keys[1])
    tokens = np.array([0, 3, 3, 1])

    def fn(model, token, key):
        return -jax.nn.log_softmax(model(token))[(token + 1) % 5]

    result = step_once(Tied(embedding, out), tokens, fn)
    (table,) = jax.tree.leaves(eqx.filter(result.model, eqx.is_array))

    def mean(table):
        logits = jax.nn.log_softmax(table[tokens] @ table.T)
        return -jnp.mean(logits[jnp.arange(4), (tokens + 1) % 5])

    gradient = jax.grad(mean)(embedding.weight)
    np.testing.assert_allclose(table, embedding.weight - 0.1 * gradient, rtol=1e-5)


def cubed(model, example, key):
    a, b = model
    return (3 * a + b) ** 2 * example


def test_tied_by_hand():
    # d/dw (3w + w)**2 = 32 at w = 1; as two leaves 24 and 8.
    ones = np.ones(4, np.float32)
    tied = step_once(jnp.ones(()), ones, lambda w, e, k: cubed((w, w), e, k))
    np.testing.assert_allclose(tied.model, 1 - 3.2, rtol=1e-6)


def test_one_buffer_in_two_places_is_two_leaves():
    w = jnp.ones(())
    model = (w, w)
    result = step_once(model, np.ones(4, np.float32), cubed, optax.adam(1.0), epochs=3)
    assert result.train.step == 3
    once = step_once(model, np.ones(4, np.float32), cubed)
    np.testing.assert_allclose(once.model, [1 - 2.4, 1 - 0.8], rtol=1e-6)
    assert float(w) == 1  # not deleted


def keeping(copies: int) -> optax.GradientTransformation:
    """SGD whose state is the parameters themselves, so many times."""

    def init(params):
        return (params,) * copies

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, updates), state

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("copies", [1, 2])
def test_an_optimizer_that_keeps_the_parameters(copies):
    w = np.ones((), np.float32)
    result = step_once((w, w), np.ones(2, np.float32), cubed, keeping(copies), epochs=2)
    assert_trees_equal(result.opt_state, ((jnp.ones(()), jnp.ones(())),) * copies)
    a, b = 1.0, 1.0
    for _ in range(2):
        a, b = a - 0.6 * (3 * a + b), b - 0.2 * (3 * a + b)
    np.testing.assert_allclose(result.model, [a, b], rtol=1e-5)


def test_schedule_free_sgd():
    # Its state, too, begins as the parameters.
    optimizer = optax.contrib.schedule_free_sgd(0.1)
    ones = np.ones(4, np.float32)
    result = step_once((jnp.ones(()), jnp.ones(())), ones, cubed, optimizer, epochs=2)
    expected = by_hand((jnp.ones(()), jnp.ones(())), ones, cubed, optimizer, 2)
    assert_trees_close(result.model, expected)


# --- run-time type checks of the user's own -------------------------------------

typed = jaxtyped(typechecker=beartype)
W = np.array([1.0, 2.0], np.float32)
ROWS = (X, Y[:, 0])


@typed
def of_example(
    w: Float[Array, " d"], example: tuple[Float[Array, " d"], Float[Array, ""]], key
) -> Float[Array, ""]:
    x, y = example
    return (w @ x - y) ** 2


@typed
def of_batch(
    w: Float[Array, " d"],
    batch: tuple[Float[Array, "batch d"], Float[Array, " batch"]],
    keys,
) -> Float[Array, " batch"]:
    x, y = batch
    return (x @ w - y) ** 2


EXPECTED = ((X @ W - Y[:, 0]) ** 2).mean()


@pytest.mark.parametrize(
    "fn, microbatch",
    [(of_example, 1), (of_example, 4), (eqaccum.batched(of_batch), 2)],
)
def test_typed_losses_work_at_every_size(fn, microbatch):
    result = step_once(jnp.asarray(W), ROWS, fn, microbatch=microbatch)
    np.testing.assert_allclose(result.history["loss"], [EXPECTED], rtol=1e-5)


def test_typed_losses_inside_a_typed_function():
    @typed
    def outer(w: Float[Array, " d"], x: Float[Array, "batch d"]) -> Float[Array, ""]:
        # "batch" is bound to 4 here, and to 2 in the passes.
        f = eqaccum.value_and_grad(eqaccum.batched(of_batch), microbatch=2)
        value, _ = f(w, (x, jnp.asarray(Y[:, 0])))
        result = step_once(w, ROWS, eqaccum.batched(of_batch), microbatch=2)
        np.testing.assert_allclose(result.history["loss"], [EXPECTED], rtol=1e-5)
        return value

    value = outer(jnp.asarray(W), jnp.asarray(X))
    np.testing.assert_allclose(value, EXPECTED, rtol=1e-5)


def test_the_users_own_type_error_passes():
    @typed
    def wrong(w, example, key) -> float:
        return (w @ example[0] - example[1]) ** 2

    with pytest.raises(TypeCheckError, match="return value"):
        step_once(jnp.asarray(W), ROWS, wrong)


def test_shapes_numpy_and_tracers_are_accepted():
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ROWS)
    model = jax.ShapeDtypeStruct((2,), np.float32)
    plan = eqaccum.plan(
        model, structs, global_batch=4, loss=of_example, microbatch=2, optimizer=SGD
    )
    assert plan.num_microbatches == 2
    f = eqaccum.value_and_grad(of_example, microbatch=2)
    for w, rows in ((W, ROWS), jax.tree.map(jnp.asarray, (W, ROWS))):
        value, _ = f(w, rows)
        np.testing.assert_allclose(value, EXPECTED, rtol=1e-5)
    value, gradient = jax.jit(lambda w, rows, weights: f(w, rows, weights=weights))(
        W, ROWS, np.ones(4)
    )
    np.testing.assert_allclose(value, EXPECTED, rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * (X @ W - Y[:, 0]) @ X / 4, rtol=1e-5)


def test_one_step_serves_several_models():
    step = eqaccum.make_step(buffered, SGD, global_batch=4, trainable=trainable_w())
    models = [
        eqx.tree_at(lambda m: m.buf, buffers(), np.array([value, 1.0]))
        for value in (np.pi, np.e)
    ]
    trains = [step.init(model) for model in models]
    for train, model in zip(trains, models, strict=True):
        np.testing.assert_array_equal(train.model.buf, model.buf)
        train, _ = step(train, X)
        np.testing.assert_array_equal(train.model.buf, model.buf)
