"""The gradient is that of the full batch, for every cut, weights, form and dtype."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import (
    KINDS,
    TOLERANCE,
    WEIGHTS,
    assert_same_kind,
    batch_of,
    distinct_cuts,
    error,
    full_batch,
    make,
    recorder,
    weights_of,
)

import eqaccum

KEY = jax.random.key(11)


def value_and_grad(kind, model, state, batch, *, microbatch, weights=None, key=KEY):
    fn = eqaccum.value_and_grad(kind.loss, microbatch=microbatch, has_aux=kind.has_aux)
    out, grads = fn(model, batch, key=key, weights=weights, state=state)
    value = out[0] if kind.has_aux or kind.has_state else out
    return value, grads


def check(kind, rows, microbatch, *, weights=WEIGHTS, dtype=jnp.float32):
    model, state = make(kind, dtype)
    batch = batch_of(rows, dtype)
    for name in weights:
        w = weights_of(rows, name)
        value, grads = value_and_grad(
            kind, model, state, batch, microbatch=microbatch, weights=w
        )
        want, want_grads = full_batch(kind, model, batch, w, KEY)
        tolerance = TOLERANCE[jnp.dtype(dtype).name]
        assert_same_kind(grads, want_grads)
        assert error(grads, want_grads) <= tolerance, name
        assert abs(value - want) <= tolerance * abs(want), name


@pytest.mark.parametrize(
    "rows,microbatch",
    [(rows, n) for rows in (1, 7, 8, 10) for n in distinct_cuts(rows)]
    + [(64, n) for n in (64, 63, 32, 22, 16, 7, 3, 1)],
)
def test_every_cut(rows, microbatch):
    check(KINDS["scalar"], rows, microbatch)


@pytest.mark.parametrize("rows,microbatch", [(1, 1), (7, 7), (10, 3), (64, 7)])
def test_several_means_with_state_and_aux(rows, microbatch):
    check(KINDS["state_means_aux"], rows, microbatch)


@pytest.mark.parametrize("name", ["means", "aux", "weighted", "shared_key", "complex"])
def test_other_kinds(name):
    """All of them, in `make_step`: test_exact_step.py."""
    check(KINDS[name], 10, 4)


# --- dtypes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,rows,microbatch",
    [
        ("scalar", 64, 7),
        ("weighted", 10, 4),
        ("dropout", 10, 3),
        ("state_means_aux", 7, 7),
    ],
)
def test_float64(name, rows, microbatch):
    with jax.enable_x64(True):
        check(KINDS[name], rows, microbatch, dtype=jnp.float64)


def test_example_weights_are_float32():
    """float64 weights are rounded to it, and nothing else is."""
    weights = np.random.default_rng(0).uniform(0.1, 2, 10)
    with jax.enable_x64(True):
        kind = KINDS["scalar"]
        (model, state), batch = make(kind, jnp.float64), batch_of(10, jnp.float64)
        got, grads = value_and_grad(
            kind, model, state, batch, microbatch=4, weights=weights
        )
        rounded = weights.astype(np.float32).astype(np.float64)
        want, want_grads = full_batch(kind, model, batch, rounded, KEY)
        assert error(grads, want_grads) <= 1e-12
        assert abs(got - want) <= 1e-12 * abs(want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name,rows,microbatch", [("scalar", 64, 7), ("means", 10, 1)])
def test_narrow_parameters(name, rows, microbatch, dtype):
    """At most twice the error of the full batch in that dtype, over some batches."""
    kind = KINDS[name]
    model, _ = make(kind, dtype)
    errors = {"ours": [], "full": []}
    for seed, weights in itertools.product(range(4), WEIGHTS):
        batch = batch_of(rows, dtype, seed)
        w = weights_of(rows, weights)
        ours = value_and_grad(
            kind, model, None, batch, microbatch=microbatch, weights=w
        )
        full = full_batch(kind, model, batch, w, KEY)
        with jax.enable_x64(True):
            exact = full_batch(kind, widened(model), widened(batch), w, KEY)
        assert_same_kind(ours[1], full[1])
        for name, got in (("ours", ours), ("full", full)):
            pairs = zip(got, exact, strict=True)
            errors[name].append([error(*pair) for pair in pairs])
    rms = {k: np.sqrt(np.mean(np.square(v), axis=0)) for k, v in errors.items()}
    assert np.all(rms["ours"] <= 2 * rms["full"] + 1e-6), rms


def widened(tree):
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float64) if is_floating(x) else x, tree
    )


def is_floating(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


@pytest.mark.parametrize("microbatch", [1, 100, 512])
def test_bfloat16_sums_do_not_stop_growing(microbatch):
    """Summed in bfloat16, 512 ones stop at 256."""
    fn = eqaccum.value_and_grad(lambda w, x, key: w * x, microbatch=microbatch)
    value, gradient = fn(jnp.bfloat16(1), np.ones(512, np.float32))
    assert gradient.dtype == jnp.bfloat16
    assert (float(value), float(gradient)) == (1, 1)


@pytest.mark.parametrize("microbatch", [1, 100, 512])
def test_float16_sums_do_not_overflow(microbatch):
    """512 gradients of 1024 sum to 524,288; float16 ends at 65,504."""
    fn = eqaccum.value_and_grad(lambda w, x, key: w * x, microbatch=microbatch)
    value, gradient = fn(jnp.float16(1), np.full(512, 1024, np.float16))
    assert gradient.dtype == jnp.float16
    assert (float(value), float(gradient)) == (1024, 1024)


@pytest.mark.parametrize("microbatch", [100, 512])
def test_float16_computation_does_not_overflow(microbatch):
    """The same where only the computation is in float16."""
    step = eqaccum.make_step(
        lambda w, x, key: (w * x).astype(jnp.float32),
        optax.sgd(1.0),
        global_batch=512,
        microbatch=microbatch,
        compute_dtype=jnp.float16,
    )
    train = step.init(jnp.float32(0))
    train, metrics = step(train, np.full(512, 1024, np.float16))
    assert float(metrics.grad_norm) == 1024
    assert (train.model.dtype, float(train.model)) == (jnp.float32, -1024)


def test_where_implicit_promotion_is_forbidden():
    """The library's own arithmetic promotes nothing implicitly; Optax's may."""

    def loss(weight, example, key):
        x, number = example
        total = jnp.sum(weight * x)
        aux = {"sum": eqaccum.Sum(jnp.max(number)), "sign": total > 0, "total": total}
        half = eqaccum.Mean(total, jnp.sum(number))
        return half + eqaccum.Mean(total.astype(jnp.float32), True), aux

    x = np.arange(30, dtype=np.float32).reshape(10, 3).astype(jnp.bfloat16)
    batch = (x, np.full((10, 3), 2, np.uint8))
    with jax.numpy_dtype_promotion("strict"):
        step = eqaccum.make_step(
            loss,
            optax.adamw(1e-3),
            global_batch=10,
            microbatch=4,
            has_aux=True,
            penalty=lambda weight: jnp.sum(weight),
        )
        train, metrics = step(step.init(jnp.ones(3, jnp.bfloat16)), batch)
    assert train.model.dtype == jnp.bfloat16
    assert float(metrics.loss) == np.float32(435 / 60) + np.float32(435 / 10)
    assert {name: float(value) for name, value in metrics.aux.items()} == {
        "sum": 20,
        "sign": 1,
        "total": 7.25 * 6,
    }


# --- what a loss may be made of --------------------------------------------------


@jax.custom_vjp
def doubled_back(x):
    return jnp.sin(x)


doubled_back.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def of_many_parts(captured):
    """A loss of one sequence: captured arrays, loops, branches, derivative rules."""

    @jax.jit
    def look_up(i):
        return captured[i]

    def loss(model, example, key):
        x, i = example
        kernel, start, mix = model["kernel"], model["start"], model["mix"]

        @jax.checkpoint
        def cell(h, row):
            h = jnp.tanh(mix @ h + row)
            return h, jnp.sum(h)

        h, sums = jax.lax.scan(cell, start, x)
        h = jax.lax.cond(i > 1, lambda h: jax.nn.relu(h), lambda h: h * captured[0], h)
        steps = jax.lax.while_loop(lambda s: s < i, lambda s: s + 1, 0)
        out = jax.lax.conv_general_dilated(x.T[None], kernel, (1,), "SAME")[0]
        spread = jnp.zeros(5).at[i].add(h[0]).at[i + 1].mul(2.0)
        solved = jnp.linalg.solve(jnp.eye(3) + 0.1 * mix, h)
        parts = (
            jax.nn.logsumexp(sums),
            jnp.sum(doubled_back(out)),
            jnp.max(jnp.sort(spread)),
            jnp.sum(solved * look_up(i)) * steps,
            jnp.sum(jnp.cumsum(h) * jax.lax.stop_gradient(h)),
        )
        return sum(parts)

    return loss


@pytest.mark.parametrize("microbatch", [3])
def test_a_loss_of_many_parts(microbatch):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    model = {"kernel": draw(2, 3, 3), "start": draw(3), "mix": draw(3, 3)}
    model = jax.tree.map(jnp.asarray, model)
    batch = (draw(7, 5, 3), rng.integers(0, 4, 7).astype(np.int32))
    loss = of_many_parts(jnp.asarray(draw(4, 3)))
    weights = weights_of(7, "random")
    value, grads = eqaccum.value_and_grad(loss, microbatch=microbatch)(
        model, batch, weights=weights
    )

    @jax.jit
    @jax.value_and_grad
    def reference(model):
        losses = jax.vmap(lambda *example: loss(model, example, None))(*batch)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    want, want_grads = reference(model)
    assert error(grads, want_grads) <= 1e-6
    assert error(value, want) <= 1e-6


def test_a_loss_that_does_not_depend_on_the_model():
    for value in (0.0, 2.5):
        fn = eqaccum.value_and_grad(lambda w, x, key, v=value: v, microbatch=2)
        got, gradient = fn(jnp.ones(2), np.ones(3, np.float32))
        assert float(got) == value
        np.testing.assert_array_equal(gradient, [0, 0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_compute_dtype(dtype):
    """The gradient in float32 of the model cast once; no worse than cast by hand."""
    kind = KINDS["scalar"]
    model, _ = make(kind)
    step = eqaccum.make_step(
        kind.loss, recorder(), global_batch=10, microbatch=4, compute_dtype=dtype
    )
    train = step.init(model, KEY)
    cast = eqx.filter_jit(
        eqx.filter_value_and_grad(
            lambda model, batch, w: by_hand(
                jax.tree.map(lambda x: x.astype(dtype) if is_floating(x) else x, model),
                batch,
                w,
            )
        )
    )

    def by_hand(model, batch, weights):
        losses = jax.vmap(lambda e: kind.loss(model, e, None))(batch)
        wide = losses.astype(jnp.float32)
        return jnp.sum(wide * weights) / jnp.sum(weights)

    ours, theirs = [], []
    for seed in range(4):
        batch, weights = batch_of(10, dtype, seed), weights_of(10, "random")
        train, metrics = step(train, batch, weights=weights)
        value, gradient = cast(model, batch, weights)
        assert_same_kind(train.opt_state, gradient)
        with jax.enable_x64(True):
            exact = full_batch(
                kind, widened(model), widened(batch), weights, jax.random.key(0)
            )
        ours.append([error(metrics.loss, exact[0]), error(train.opt_state, exact[1])])
        theirs.append([error(value, exact[0]), error(gradient, exact[1])])
    ours, theirs = (np.sqrt(np.mean(np.square(x), axis=0)) for x in (ours, theirs))
    assert np.all(ours <= 2 * theirs), (ours, theirs)
