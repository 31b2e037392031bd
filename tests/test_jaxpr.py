"""Captured arrays become inputs, at every depth, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.extend.core import check_jaxpr

A = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
B = jnp.array([0.5, 2.0, -1.0, 3.0])
X = jnp.array([0.1, 0.2, -0.3, 0.4])


@jax.custom_vjp
def vjp_ruled(x):
    return jnp.sin(x) * A


vjp_ruled.defvjp(lambda x: (jnp.sin(x) * A, x), lambda x, g: (7 * g * x * A * B,))


@jax.custom_jvp
def jvp_ruled(x):
    return jnp.cos(x) * B


jvp_ruled.defjvp(lambda p, t: (jvp_ruled(p[0]), 5 * t[0] * A * B))


def in_jit_in_scan_in_jit(x):
    inner = jax.jit(lambda c: jnp.sin(c) * A + B)
    scan = jax.jit(lambda x: jax.lax.scan(lambda c, _: (inner(c), c), x, length=3))
    last, all_ = scan(x)
    return last + all_.sum(0) * B


def in_cond(x):
    branches = (
        lambda x: jax.jit(lambda x: x * A)(x),
        lambda x: jax.jit(lambda x: x * B + x * A)(x),
        lambda x: x,
    )
    return sum(jax.lax.switch(i + jnp.int32(x[0] > 9), branches, x) for i in range(3))


def in_while(x):
    def condition(c):
        return jax.jit(lambda c: jnp.sum(c * jnp.square(A)) < 60)(c)

    def body(c):
        return jax.jit(lambda c: c + jnp.abs(B))(c)

    # No reverse-mode derivative exists: the value must not depend on the input.
    stopped = jax.lax.stop_gradient(x)
    return x * jax.lax.while_loop(condition, body, stopped)


def in_checkpoint(x):
    return jax.checkpoint(lambda x: jax.jit(lambda x: jnp.sin(x * A))(x) * B)(x)


def in_linear_solve(x):
    def solve(matvec, b):
        return jax.jit(lambda b: b / (jnp.square(A) + 1))(b)

    def matvec(v):
        return jax.jit(lambda v: v * (jnp.square(A) + 1))(v)

    return jax.lax.custom_linear_solve(matvec, x * B, solve, symmetric=True)


def in_root(x):
    return jax.lax.custom_root(
        lambda z: jax.jit(lambda z: z - x * A)(z),
        jnp.zeros(4),
        lambda f, start: jax.jit(lambda x: x * A)(x),
        lambda g, y: y / g(jnp.ones(4)),
    )


def with_custom_rules(x):
    return jax.jit(lambda x: vjp_ruled(x) + jvp_ruled(x) * A)(x)


def rules_without_derivative(x):
    constant = jax.lax.stop_gradient(x)
    return x * (jax.jit(vjp_ruled)(constant) + jax.jit(jvp_ruled)(constant))


def under_vmap(x):
    row = jax.jit(lambda x: jnp.dot(x * A, B))
    return x * jax.vmap(row)(x[None] * jnp.ones((4, 1)))


FUNCTIONS = [
    in_jit_in_scan_in_jit,
    in_cond,
    in_while,
    in_checkpoint,
    in_linear_solve,
    in_root,
    with_custom_rules,
    rules_without_derivative,
    under_vmap,
]


def total(fn):
    return lambda x: jnp.sum(fn(x) * A)


def modules():
    from eqaccum._accumulate import _jaxpr

    return _jaxpr


def constants(jaxpr):
    """All arrays held at any depth, found without the module under test."""
    found = list(getattr(jaxpr, "consts", ()))
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple) else (value,):
                if hasattr(item, "eqns"):
                    found += constants(item)
    return found


def evaluate(hoisted, consts, *args):
    return eval_jaxpr(hoisted.jaxpr.jaxpr, hoisted.jaxpr.consts, *consts, *args)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_gradient_takes_its_arrays(fn):
    plain = jax.value_and_grad(total(fn))
    closed = jax.make_jaxpr(plain)(X)
    assert constants(closed)
    hoisted = modules().hoist(closed)
    assert not constants(hoisted.jaxpr) and hoisted.left == ()
    check_jaxpr(hoisted.jaxpr.jaxpr)
    value, grad = jax.jit(lambda *a: evaluate(hoisted, *a))(hoisted.consts, X)
    expected_value, expected_grad = plain(X)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-6)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_forward_is_differentiated_afterwards(fn):
    hoisted = modules().hoist(jax.make_jaxpr(fn)(X))
    assert not constants(hoisted.jaxpr)
    value, pullback = jax.vjp(lambda x: evaluate(hoisted, hoisted.consts, x)[0], X)
    expected, expected_pullback = jax.vjp(fn, X)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(pullback(B)[0], expected_pullback(B)[0], rtol=1e-6)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_arrays_are_really_read_from_the_inputs(fn):
    # Doubling an input must change the result: it is not baked in somewhere as well.
    hoisted = modules().hoist(jax.make_jaxpr(fn)(X))
    before = evaluate(hoisted, hoisted.consts, X)[0]
    for i, const in enumerate(hoisted.consts):
        changed = list(hoisted.consts)
        changed[i] = np.asarray(const) + np.ones((), const.dtype)
        assert not np.allclose(before, evaluate(hoisted, changed, X)[0])
