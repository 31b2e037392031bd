"""The ready-made losses against loops in numpy, and against what weight 0 must mean."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqaccum
from eqaccum import losses

ROWS, DIM = 6, 4


def rows(seed: int, count: int = ROWS, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim))


# --- the same formulas, written as loops over pairs ------------------------------


def slow_info_nce(q, p, w, *, tau=1.0, hard=None, symmetric=False):
    """One query, one candidate at a time; rows of weight 0 are not there at all."""
    total = sum(w[i] for i in range(len(q)))
    candidates = [p[j] for j in range(len(p)) if w[j] > 0]
    if hard is not None:
        hard = hard.reshape(len(p), -1, p.shape[1])
        candidates += [h for j in range(len(p)) if w[j] > 0 for h in hard[j]]

    def one(vector, own, others):
        exps = [math.exp(np.dot(vector, other) / tau) for other in others]
        return -math.log(math.exp(np.dot(vector, own) / tau) / sum(exps))

    present = [i for i in range(len(q)) if w[i] > 0]
    there = sum(w[i] * one(q[i], p[i], candidates) for i in present) / total
    if not symmetric:
        return there
    queries = [q[i] for i in present]
    back = sum(w[i] * one(p[i], q[i], queries) for i in present) / total
    return (there + back) / 2


def slow_sigmoid(q, p, w, *, tau=0.1, bias=-10.0):
    value = 0.0
    for i in range(len(q)):
        for j in range(len(p)):
            if w[i] > 0 and w[j] > 0:
                z = 1 if i == j else -1
                score = z * (np.dot(q[i], p[j]) / tau + bias)
                value += w[i] * math.log1p(math.exp(-score))
    return value / sum(w[: len(q)])


def slow_barlow(a, b, w, *, off_diagonal=5e-3, eps=1e-5):
    def standard(x):
        mean = sum(w[n] * x[n] for n in range(len(x))) / sum(w)
        var = sum(w[n] * (x[n] - mean) ** 2 for n in range(len(x))) / sum(w)
        return (x - mean) / np.sqrt(var + eps)

    a, b = standard(a), standard(b)
    value = 0.0
    for i in range(a.shape[1]):
        for j in range(a.shape[1]):
            c = sum(w[n] * a[n, i] * b[n, j] for n in range(len(a))) / sum(w)
            value += (1 - c) ** 2 if i == j else off_diagonal * c**2
    return value


def slow_vicreg(a, b, w):
    there = [n for n in range(len(a)) if w[n] > 0]
    value = 25 * np.average(np.mean((a - b)[there] ** 2, axis=1), weights=w[there])
    for z in (a, b):
        cov = np.cov(z[there].T, aweights=w[there])  # numpy's own, divided by n - 1
        value += 25 * np.mean(np.maximum(0, 1 - np.sqrt(np.diag(cov) + 1e-4)))
        value += np.sum((cov - np.diag(np.diag(cov))) ** 2) / z.shape[1]
    return value


def slow_load_balance(probabilities, w):
    """Switch Transformer, equations 4 to 6; (n, tokens, experts)."""
    experts = probabilities.shape[-1]
    sent, mass, total = np.zeros(experts), np.zeros(experts), 0.0
    for example, weight in zip(probabilities, w, strict=True):
        for token in example:
            sent[np.argmax(token)] += weight
            mass += weight * token
            total += weight
    return experts * np.sum(sent / total * mass / total)


class Case(NamedTuple):
    fast: Callable[..., Any]  # (arrays, weights)
    slow: Callable[..., float]
    arrays: tuple[np.ndarray, ...]  # with rows in front


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


Q, P, HARD = rows(0), rows(1), np.stack([rows(2), rows(3)], axis=1)
ROUTER = softmax(np.stack([rows(4), rows(5), rows(6)], axis=1))
CASES = {
    "info_nce": Case(
        lambda q, p, w: losses.info_nce(q, p, weights=w), slow_info_nce, (Q, P)
    ),
    "info_nce, all of it": Case(
        lambda q, p, h, w: losses.info_nce(
            q, p, temperature=0.7, weights=w, hard_negatives=h, symmetric=True
        ),
        lambda q, p, h, w: slow_info_nce(q, p, w, tau=0.7, hard=h, symmetric=True),
        (Q, P, HARD),
    ),
    "info_nce, one hard negative": Case(
        lambda q, p, h, w: losses.info_nce(q, p, weights=w, hard_negatives=h),
        lambda q, p, h, w: slow_info_nce(q, p, w, hard=h),
        (Q, P, HARD[:, 0]),
    ),
    "info_nce, by blocks": Case(
        lambda q, p, h, w: losses.info_nce(
            q, p, weights=w, hard_negatives=h, symmetric=True, block_rows=4
        ),
        lambda q, p, h, w: slow_info_nce(q, p, w, hard=h, symmetric=True),
        (Q, P, HARD),
    ),
    "sigmoid": Case(
        lambda q, p, w: losses.sigmoid_contrastive(q, p, weights=w),
        slow_sigmoid,
        (Q / 3, P / 3),
    ),
    "sigmoid, by blocks": Case(
        lambda q, p, w: losses.sigmoid_contrastive(
            q, p, temperature=0.5, bias=-1.0, weights=w, block_rows=5
        ),
        lambda q, p, w: slow_sigmoid(q, p, w, tau=0.5, bias=-1.0),
        (Q, P),
    ),
    "barlow": Case(
        lambda a, b, w: losses.barlow_twins(a, b, weights=w), slow_barlow, (Q, P)
    ),
    "vicreg": Case(
        lambda a, b, w: losses.vicreg(a, b, weights=w), slow_vicreg, (Q / 2, P / 2)
    ),
    "load_balance": Case(
        lambda x, w: losses.load_balance(x, weights=w), slow_load_balance, (ROUTER,)
    ),
}
WEIGHTS = {
    "ones": np.ones(ROWS),
    "random": np.random.default_rng(7).uniform(0.5, 2, ROWS),
    "zeros": np.array([1.0, 0, 2, 1, 0, 0.5]),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def compiled(name: str) -> Callable:
    fast = CASES[name].fast
    return jax.jit(jax.value_and_grad(lambda arrays, w: fast(*arrays, w)))


def value_and_grads(name: str, arrays, weights):
    return compiled(name)(tuple(arrays), weights)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_loops(name, weights):
    case, w = CASES[name], WEIGHTS[weights]
    value, grads = value_and_grads(name, case.arrays, w)
    assert value.dtype == jnp.float64
    np.testing.assert_allclose(value, case.slow(*case.arrays, w), rtol=1e-10)
    # The gradient along one direction, by central differences of the loops.
    directions = [np.cos(1.3 * np.arange(a.size)).reshape(a.shape) for a in case.arrays]
    ahead, behind = (
        [a + h * d for a, d in zip(case.arrays, directions, strict=True)]
        for h in (1e-5, -1e-5)
    )
    slope = (case.slow(*ahead, w) - case.slow(*behind, w)) / 2e-5
    got = sum(np.sum(g * d) for g, d in zip(grads, directions, strict=True))
    np.testing.assert_allclose(got, slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("filler", [1e3, np.nan, np.inf])
@pytest.mark.parametrize("name", CASES)
def test_rows_of_weight_zero_are_not_there(name, filler):
    case, w = CASES[name], WEIGHTS["zeros"]
    value, grads = value_and_grads(name, case.arrays, w)
    changed = [a.copy() for a in case.arrays]
    for array in changed:
        array[w == 0] = filler
    same, more = value_and_grads(name, changed, w)
    assert float(same) == float(value)
    for grad, other in zip(grads, more, strict=True):
        np.testing.assert_array_equal(grad, other)
        assert not np.any(np.asarray(grad)[w == 0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("left", [0, 1])
def test_nothing_is_nan_with_no_row_or_one(name, left):
    case, w = CASES[name], np.zeros(ROWS)
    w[:left] = 1
    value, grads = value_and_grads(name, case.arrays, w)
    assert np.isfinite(value)
    assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("name", CASES)
def test_only_the_relation_of_weights_counts(name):
    case, w = CASES[name], WEIGHTS["random"]
    once, _ = value_and_grads(name, case.arrays, w)
    twice, _ = value_and_grads(name, case.arrays, 2 * w)
    np.testing.assert_allclose(once, twice, rtol=1e-12)


# --- rows beyond the queries (a bank of passages alone) --------------------------


@pytest.mark.parametrize("block_rows", [None, 3])
def test_more_passages_than_queries(block_rows):
    q, w = Q[:2], WEIGHTS["zeros"]

    @jax.jit
    def both(q, p, hard):
        more: dict[str, Any] = {"weights": w, "block_rows": block_rows}
        one = losses.info_nce(q, p, hard_negatives=hard, symmetric=True, **more)
        return one, losses.sigmoid_contrastive(q, p, temperature=1.0, **more)

    one, other = both(q, P, HARD)
    want = slow_info_nce(q, P, w, hard=HARD, symmetric=True)
    np.testing.assert_allclose(one, want, rtol=1e-10)
    np.testing.assert_allclose(other, slow_sigmoid(q, P, w, tau=1.0), rtol=1e-10)


# --- blocks ----------------------------------------------------------------------


@pytest.mark.parametrize("block_rows", [4, 100])
def test_blocks_change_nothing(block_rows):
    def loss(q, p, h, tau, block_rows):
        return losses.info_nce(
            q,
            p,
            temperature=tau,
            weights=WEIGHTS["zeros"],
            hard_negatives=h,
            symmetric=True,
            block_rows=block_rows,
        ) + losses.sigmoid_contrastive(q, p, temperature=tau, block_rows=block_rows)

    args = (Q, P, HARD, 0.8)
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)), static_argnums=4)
    whole, cut = gradient(*args, None), gradient(*args, block_rows)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_blocks_keep_memory_linear():
    def temporary(count, block_rows):
        def loss(q, p):
            return losses.info_nce(q, p, symmetric=True, block_rows=block_rows)

        side = jax.ShapeDtypeStruct((count, 8), jnp.float32)
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(side, side).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    square = 4 * 2048**2  # one float32 matrix of all scores
    assert temporary(2048, None) > square
    assert temporary(2048, 64) < square / 4
    growth = temporary(4096, 64) / temporary(2048, 64)
    assert growth < 2.5  # the matrix grows 4-fold


# --- dtypes and other arguments --------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_narrow_embeddings_are_widened(dtype):
    q, p = (x.astype(jnp.dtype(dtype)) for x in (Q, P))
    value, grad = jax.jit(jax.value_and_grad(losses.info_nce))(q, p)
    assert (value.dtype, grad.dtype) == (jnp.float32, dtype)
    want = slow_info_nce(q.astype(float), p.astype(float), np.ones(ROWS))
    np.testing.assert_allclose(value, want, rtol=1e-6)


def test_published_values():
    # GradCache's case: x64, u = X W, v = Y V with W = V = I, mean of four rows.
    x = np.array([[1, 0], [0, 1], [1, 1], [1, -1.0]])
    y = np.array([[1, 0.5], [0.5, 1], [1, 1], [0.5, -1]])
    loss = jax.jit(jax.value_and_grad(lambda w: losses.info_nce(x @ w, y)))
    value, grad = loss(np.eye(2))
    np.testing.assert_allclose(value, 0.888166, atol=5e-7)
    want = [[-0.041903, 0.124529], [-0.007057, -0.286980]]
    np.testing.assert_allclose(grad, want, atol=5e-7)


def test_temperature_is_learnt():
    def loss(t):
        return losses.info_nce(Q, P, temperature=jnp.exp(t))

    got = jax.jit(jax.grad(loss))(0.1)
    tau = [math.exp(0.1 + h) for h in (1e-5, -1e-5)]
    ones = np.ones(ROWS)
    ahead, behind = (slow_info_nce(Q, P, ones, tau=t) for t in tau)
    np.testing.assert_allclose(got, (ahead - behind) / 2e-5, rtol=1e-6)


def test_weights_get_no_gradient():
    def loss(w):
        pairs = losses.info_nce(Q, P, weights=w) + losses.vicreg(Q, P, weights=w)
        return pairs + losses.load_balance(ROUTER, weights=w)

    assert not np.any(jax.jit(jax.grad(loss))(WEIGHTS["random"]))


def test_balance_of_several_experts():
    balance = jax.jit(losses.load_balance, static_argnames="top_k")
    assert balance(np.full((3, 4), 0.25), top_k=4) == 1
    p = softmax(rows(8, 5))
    best = np.argsort(-p, axis=1)[:, :2]
    share = np.bincount(best.ravel(), minlength=4) / best.size
    want = 4 * np.sum(share * p.mean(axis=0))
    np.testing.assert_allclose(balance(p, top_k=2), want, rtol=1e-12)
    # What embed may return instead of all tokens: the means of each example.
    one_hot = np.eye(4)[np.argmax(ROUTER, axis=-1)]
    means = ROUTER.mean(axis=1), one_hot.mean(axis=1)
    np.testing.assert_allclose(balance(*means), balance(ROUTER), rtol=1e-12)
    # Weights of tokens: padding is not there.
    mask = np.array([[1, 1, 0]] * ROWS)
    np.testing.assert_allclose(
        balance(ROUTER, weights=mask),
        balance(ROUTER[:, :2]),
        rtol=1e-12,
    )


REFUSED = {
    "weights": (lambda: losses.info_nce(Q, P, weights=np.ones(5)), r"\(5,\) for 6"),
    "sides": (lambda: losses.info_nce(P, Q[:3]), "at least as many rows in p"),
    "widths": (lambda: losses.info_nce(Q, P[:, :3]), "vectors of one length"),
    "hard": (
        lambda: losses.info_nce(Q, P, hard_negatives=HARD[:5]),
        r"expected \(6, 4\) or \(6, k, 4\)",
    ),
    "block": (lambda: losses.info_nce(Q, P, block_rows=0), "block_rows=0"),
    "views": (lambda: losses.vicreg(Q, P[:3]), "row i of both from one example"),
    "assigned": (lambda: losses.load_balance(Q, P[:3]), r"expected that of .*\(6, 4\)"),
    "top_k": (lambda: losses.load_balance(Q, top_k=5), "from 1 to 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(eqaccum.InputError, match=message):
        call()
