"""`noise_scale=True`: what the passes tell of the gradient's noise, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum
from eqaccum._data import batch_of

RNG = np.random.default_rng(0)
N = 10
X = RNG.normal(size=(N, 3)).astype(np.float32) + 1
W = RNG.uniform(0.5, 2, N).astype(np.float32)
TOKENS = RNG.integers(1, 6, N).astype(np.int32)


def linear(w, x, key):
    return x @ w + w[0] ** 2


def by_tokens(w, example, key):
    x, tokens = example
    return eqaccum.Mean(tokens * linear(w, x, key), tokens)


def units(rows, microbatch, devices=1):
    """The rows of each pass on each device, by the documented order of slots."""
    order = np.arange(rows)
    return [order[i : i + microbatch] for i in range(0, rows, microbatch)]


def by_hand(parts, slopes, values, row_weights, denominators):
    """The estimates in float64, from the cross terms of every pair of passes.

    Row i's gradient is slopes[i], its weight in the loss `denominators[i]`.
    """
    slopes, values = np.asarray(slopes, np.float64), np.asarray(values, np.float64)
    u = np.asarray(denominators, np.float64)
    G = [u[p] @ slopes[p] for p in parts]
    V = [u[p].sum() for p in parts]
    pairs = [(j, k) for j in range(len(G)) for k in range(len(G)) if j != k]
    square = sum(G[j] @ G[k] for j, k in pairs) / sum(V[j] * V[k] for j, k in pairs)
    g = u @ slopes / u.sum()
    rows = np.asarray(row_weights, np.float64)
    variance = (g @ g - square) * rows.sum() ** 2 / (rows**2).sum()
    losses = np.array([u[p] @ values[p] / u[p].sum() for p in parts])
    mean = u @ values / u.sum()
    return {
        "grad_square": square,
        "grad_variance": variance,
        "loss_spread": np.sqrt(np.average((losses - mean) ** 2, weights=V)),
    }


def check(metrics, want, rtol=2e-5):
    for name, value in want.items():
        got = getattr(metrics, name)
        np.testing.assert_allclose(got, value, rtol, atol=2e-5, err_msg=name)


def slopes_at(w, x):
    slopes = np.array(x, np.float64)
    slopes[:, 0] += 2 * w[0]
    return slopes, np.asarray(x, np.float64) @ w + w[0] ** 2


def make(loss=linear, optimizer=None, **options):
    options = {"global_batch": N, "microbatch": 4} | options
    return eqaccum.make_step(
        loss, optimizer or optax.sgd(0.1), noise_scale=True, **options
    )


START = np.array([0.5, -1, 2])


def once(step, batch, weights=None):
    return step(step.init(jnp.array(START, jnp.float32)), batch, weights=weights)[1]


@pytest.mark.parametrize("rows", [N, 7, 6])  # 6: an empty pass, by the bounded program
@pytest.mark.parametrize("weighted", [False, True])
def test_passes_of_unequal_weight(rows, weighted):
    """4 + 4 + 2 rows, a short batch, and weights of the examples."""
    weights = W[:rows] if weighted else np.ones(rows)
    metrics = once(make(microbatch=3), X[:rows], weights if weighted else None)
    slopes, values = slopes_at(START, X[:rows])
    check(metrics, by_hand(units(rows, 3), slopes, values, weights, weights))


def test_rows_of_weight_zero_do_not_count():
    weights = W * (np.arange(N) % 3 > 0)
    metrics = once(make(), X, weights)
    slopes, values = slopes_at(START, X)
    check(metrics, by_hand(units(N, 4), slopes, values, weights, weights))


def test_a_loss_by_tokens():
    metrics = once(make(by_tokens), (X, TOKENS), W)
    slopes, values = slopes_at(START, X)
    check(metrics, by_hand(units(N, 4), slopes, values, W, W * TOKENS))


def test_a_sum_of_means():
    def loss(w, example, key):
        x, tokens = example
        return eqaccum.Mean(tokens * (x @ w), tokens) + eqaccum.Mean(w[0] ** 2, 1)

    metrics = once(make(loss), (X, TOKENS))
    share = TOKENS.mean() / TOKENS  # of a row: its own weight is its tokens
    slopes, values = np.array(X, np.float64), X @ START + share * START[0] ** 2
    slopes[:, 0] += share * 2 * START[0]
    check(metrics, by_hand(units(N, 4), slopes, values, np.ones(N), TOKENS))


def test_passes_of_one_size_as_published():
    """Equations of appendix A.1: |G|^2 and S from a small and a big batch."""
    big, small = 8, 2
    metrics = once(make(global_batch=8, microbatch=2), X[:8])
    slopes, _ = slopes_at(START, X[:8])
    norm_big = np.sum(slopes.mean(axis=0) ** 2)
    norm_small = np.mean(np.sum(slopes.reshape(4, 2, 3).mean(axis=1) ** 2, axis=1))
    square = (big * norm_big - small * norm_small) / (big - small)
    variance = (norm_small - norm_big) / (1 / small - 1 / big)
    check(metrics, {"grad_square": square, "grad_variance": variance})
    check(metrics, {"noise_scale": variance / square}, rtol=1e-4)


def test_unbiased_with_ragged_passes_and_weights():
    """Over many batches the means are those of the distribution."""
    rng = np.random.default_rng(1)
    mean, scale = np.array([0.3, -0.2, 0.1]), np.array([1.0, 2.0, 0.5])
    step = make(lambda w, x, key: x @ w, global_batch=5, microbatch=2)
    train = step.init(jnp.zeros(3))
    got = []
    for _ in range(400):
        x = (mean + scale * rng.normal(size=(5, 3))).astype(np.float32)
        train, metrics = step(train, x, weights=np.array([1, 2, 0.5, 1, 3]))
        got.append([metrics.grad_square, metrics.grad_variance])
    got = np.array(got, np.float64)
    error = got.std(axis=0) / np.sqrt(len(got))
    assert np.all(np.abs(got.mean(axis=0) - [mean @ mean, scale @ scale]) < 3 * error)


def test_smoothed_apart_and_corrected():
    """The averages of numerator and denominator, each with its bias correction."""
    step = make(optimizer=optax.sgd(0.3))
    train = step.init(jnp.array(START, jnp.float32))
    averages, decay = np.zeros(2), 0.99
    for t in range(1, 6):
        x = RNG.normal(size=(N, 3)).astype(np.float32) + 1
        train, metrics = step(train, x)
        new = np.array([metrics.grad_variance, metrics.grad_square], np.float64)
        averages = decay * averages + (1 - decay) * new
        variance, square = averages / (1 - decay**t)
        np.testing.assert_allclose(metrics.noise_scale, variance / square, rtol=1e-4)
    np.testing.assert_allclose(train.noise_leaves[0], averages[::-1], rtol=1e-5)


@pytest.mark.devices(3)
def test_each_pass_of_each_device_is_one_part():
    slots = np.arange(12).reshape(2, 3, 2)  # pass, device, row
    parts = [p[p < N] for p in slots.reshape(-1, 2)]
    metrics = once(make(microbatch=2), X, W)
    slopes, values = slopes_at(START, X)
    want = by_hand([p for p in parts if len(p)], slopes, values, W, W)
    check(metrics, want)
    # one pass on each of three devices is enough
    whole = once(make(microbatch=N), X, W)
    parts = [np.arange(N)[i : i + 4] for i in (0, 4, 8)]
    check(whole, by_hand(parts, slopes, values, W, W))


def test_in_windows():
    rows, width = 240, 96
    x = RNG.normal(size=(rows, width)).astype(np.float32)
    weights = RNG.uniform(0.5, 2, rows)
    step = eqaccum.make_step(
        lambda w, x, key: (x @ w - 1) ** 2,
        optax.sgd(0.1),
        global_batch=rows,
        memory_limit=x.nbytes // 4,
        noise_scale=True,
    )
    w = np.full(width, 0.1)
    _, metrics = step(step.init(jnp.array(w, jnp.float32)), x, weights=weights)
    assert step.plan.windows > 1
    off = x @ w - 1
    parts = units(rows, step.plan.microbatch)
    check(metrics, by_hand(parts, 2 * off[:, None] * x, off**2, weights, weights))


def test_groups_are_independent_parts():
    """A head over each group: its gradient is one part, whatever the microbatch."""
    loss = eqaccum.coupled(
        lambda w, x, key: x @ w,
        lambda w, z, weights: jnp.sum(z) ** 2 / 4,
        group=2,
    )
    sums = X[:8].reshape(4, 2, 3).sum(axis=1).astype(np.float64)
    values = (sums @ START) ** 2 / 4
    slopes = (sums @ START)[:, None] * sums / 2
    parts, ones = [np.array([i]) for i in range(4)], np.ones(4)
    want = by_hand(parts, slopes, values, np.full(8, 1.0), ones)
    for microbatch in (1, 2):
        metrics = once(make(loss, global_batch=8, microbatch=microbatch), X[:8])
        want["grad_variance"] = (
            2 * by_hand(parts, slopes, values, ones, ones)["grad_variance"]
        )
        check(metrics, want, rtol=1e-4)


def test_no_penalty_in_it():
    bare, more = make(), make(penalty=lambda w: 5 * jnp.sum(w**2))
    one, other = once(bare, X), once(more, X)
    assert float(one.grad_norm) != float(other.grad_norm)
    check(one, {n: getattr(other, n) for n in ("grad_square", "grad_variance")})


def test_at_least_two_passes_are_planned():
    step = make(microbatch="largest")
    metrics = once(step, X)
    assert step.plan.num_microbatches == 2
    assert np.isfinite(float(metrics.grad_square))


def test_nothing_to_compare_is_said_once(capsys):
    step = make(microbatch=N)
    train = step.init(jnp.array(START, jnp.float32))
    for _ in range(2):
        train, metrics = step(train, X)
    told = [m for m in capsys.readouterr().err.splitlines() if "noise_scale" in m]
    assert len(told) == 1 and "at least two passes" in told[0]
    names = ("noise_scale", "grad_square", "grad_variance")
    assert all(np.isnan(float(getattr(metrics, name))) for name in names)
    assert float(metrics.loss_spread) == 0
    np.testing.assert_array_equal(train.noise_leaves, [[0, 0]])


def test_off_by_default():
    step = eqaccum.make_step(linear, optax.sgd(0.1), global_batch=N, microbatch=4)
    train = step.init(jnp.array(START, jnp.float32))
    train, metrics = step(train, X)
    assert metrics.noise_scale is metrics.loss_spread is None
    assert train.noise_leaves == []


def test_complex_and_narrow_parameters():
    params = {"c": jnp.array([1 + 2j, 0.5j]), "h": jnp.ones(2, jnp.bfloat16)}

    def loss(params, x, key):
        out = x[0] * params["c"].real @ jnp.ones(2) - x[1] * params["c"].imag[0]
        return out + x[2] * jnp.sum(params["h"].astype(jnp.float32))

    step = make(loss)
    _, metrics = step(step.init(params), X)
    zero = np.zeros(N)
    slopes = np.stack([X[:, 0], X[:, 0], X[:, 1], zero, X[:, 2], X[:, 2]], axis=1)
    want = by_hand(units(N, 4), slopes, zero, np.ones(N), np.ones(N))
    del want["loss_spread"]
    check(metrics, want, rtol=1e-2)  # a pass's gradient is rounded to bfloat16


def test_a_skipped_batch_leaves_the_averages():
    step = make(nonfinite="skip")
    train, _ = step(step.init(jnp.array(START, jnp.float32)), X)
    before = np.array(train.noise_leaves)
    train, metrics = step(train, np.full_like(X, np.nan))
    assert metrics.skipped
    np.testing.assert_array_equal(train.noise_leaves, before)


def fit(folder=None, **options):
    options = {"noise_scale": True, "steps": 4, "microbatch": 2} | options
    return eqaccum.fit(
        jnp.array(START, jnp.float32),
        X,
        global_batch=5,
        loss=linear,
        optimizer=optax.sgd(0.1),
        progress=False,
        checkpoint=folder,
        **options,
    )


def test_history_and_resume(tmp_path):
    whole = fit()
    names = {"noise_scale", "grad_variance", "grad_square", "loss_spread"}
    assert names <= set(whole.history)
    fit(tmp_path, steps=2)
    resumed = fit(tmp_path, steps=4, resume=True)
    for name in names:
        np.testing.assert_array_equal(resumed.history[name], whole.history[name])
    again = fit(resume=fit(steps=2))
    np.testing.assert_array_equal(again.train.noise_leaves, whole.train.noise_leaves)


def test_asked_for_later_or_no_longer(tmp_path):
    fit(tmp_path, steps=2, noise_scale=False)
    later = fit(tmp_path, steps=3, resume=True)
    assert len(later.history["noise_scale"]) == 1 and later.train.step == 3
    assert np.all(np.array(later.train.noise_leaves) != 0)
    without = fit(tmp_path, steps=4, resume=True, noise_scale=False)
    assert without.train.noise_leaves == [] and without.train.step == 4


def test_refused():
    whole = eqaccum.coupled(lambda w, x, key: x @ w, lambda w, z, weights: jnp.sum(z))
    with pytest.raises(eqaccum.InputError, match="every pass depends on the others"):
        make(whole)
    bank = eqaccum.coupled(
        lambda w, x, key: (x @ w,),
        lambda w, z, weights: jnp.sum(z[0]),
        group=2,
        bank=eqaccum.MemoryBank(4),
    )
    with pytest.raises(eqaccum.InputError, match="MemoryBank"):
        make(bank)
    with pytest.raises(eqaccum.InputError, match="expected bool: True or False"):
        eqaccum.make_step(linear, optax.sgd(0.1), global_batch=N, noise_scale=0.9)


def test_off_costs_nothing():
    """Neither a byte nor an output."""

    def ready(noise):
        step = eqaccum.make_step(
            linear, optax.sgd(0.1), global_batch=N, microbatch=4, noise_scale=noise
        )
        step.describe(jnp.array(START, jnp.float32))
        return step.prepare(batch_of(X, in_axes=0, weights=None).layout)

    off, on = ready(False), ready(True)
    assert jax.tree.leaves(off.traced.outputs.spread) == []
    assert off.accumulate.bytes < on.accumulate.bytes
    assert off.finish.bytes < on.finish.bytes
