"""Captured arrays become inputs, at every depth, and nothing else changes."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
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

    # What the rules captured is in the gradient's jaxpr, and is hoisted from there.
    def gradient(consts, x):
        return jax.grad(lambda x: jnp.sum(evaluate(hoisted, consts, x)[0]))(x)

    again = modules().hoist(jax.make_jaxpr(gradient)(hoisted.consts, X))
    assert not constants(again.jaxpr) and again.left == ()


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_arrays_are_really_read_from_the_inputs(fn):
    # Doubling an input must change the result: it is not baked in somewhere as well.
    hoisted = modules().hoist(jax.make_jaxpr(fn)(X))
    before = evaluate(hoisted, hoisted.consts, X)[0]
    for i, const in enumerate(hoisted.consts):
        changed = list(hoisted.consts)
        changed[i] = np.asarray(const) + np.ones((), const.dtype)
        assert not np.allclose(before, evaluate(hoisted, changed, X)[0])


# --- any nesting


def jitted(f, array):
    return jax.jit(lambda x: f(x) * array)


def scanned(f, array):
    return lambda x: jax.lax.scan(lambda c, _: (f(c) * array, None), x, length=2)[0]


def branched(f, array):
    def outer(x):
        return jax.lax.cond(x[0] < 9, lambda x: f(x) + array, lambda x: x * array, x)

    return outer


def rematerialised(f, array):
    return jax.checkpoint(lambda x: jnp.sin(f(x) + array))


def ruled(f, array):
    @jax.custom_vjp
    def g(x):
        return f(x) * array

    g.defvjp(lambda x: (f(x) * array, None), lambda _, ct: (ct * jnp.square(array),))
    return g


def looped(f, array):
    def outer(x):
        body = lambda i, c: c + f(jax.lax.stop_gradient(x)) * array  # noqa: E731
        return x * jax.lax.fori_loop(0, jnp.int32(x[1] < 9) + 1, body, array)

    return outer


WRAPPERS = [jitted, scanned, branched, rematerialised, ruled, looped]


@given(st.lists(st.sampled_from(WRAPPERS), min_size=1, max_size=4))
def test_any_nesting(wrappers):
    arrays = [np.float32(1.0) + 0.1 * jnp.arange(4.0) + i for i in range(len(wrappers))]
    fn = jnp.cos
    for wrapper, array in zip(wrappers, arrays, strict=True):
        fn = wrapper(fn, 0.1 * array)
    plain = jax.value_and_grad(lambda x: jnp.sum(fn(x)))
    hoisted = modules().hoist(jax.make_jaxpr(plain)(X))
    assert not constants(hoisted.jaxpr) and hoisted.left == ()
    value, grad = evaluate(hoisted, hoisted.consts, X)
    expected_value, expected_grad = plain(X)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5)


# --- what counts as one array, and what is no array


def test_an_array_captured_in_many_places_is_one_input():
    table, twin = np.ones(4, np.float32), np.ones(4, np.float32)

    def fn(x):
        y = jax.jit(lambda x: x * table + A)(x * table)
        y = jax.lax.cond(y[0] > 0, lambda y: y * table, lambda y: y - B, y)
        return y * B * twin

    hoisted = modules().hoist(jax.make_jaxpr(fn)(X))
    assert len(hoisted.consts) == 4
    np.testing.assert_allclose(
        evaluate(hoisted, hoisted.consts, X)[0], fn(X), rtol=1e-6
    )


def test_inputs_have_the_dtype_of_the_jaxpr():
    wide, counts = np.arange(4.0), np.arange(4)  # float64 and int64
    hoisted = modules().hoist(jax.make_jaxpr(lambda x: x * wide + counts)(X))
    assert [c.dtype for c in hoisted.consts] == [np.float32, np.int32]


def test_numbers_stay_and_a_scalar_of_the_device_is_an_input():
    def fn(x, scalar):
        return jax.jit(lambda x: x * scalar)(x) + 2

    closed = jax.make_jaxpr(lambda x: fn(x, np.float32(3.0)))(X)
    assert modules().hoist(closed).jaxpr is closed
    scalar = jnp.float32(3.0)
    hoisted = modules().hoist(jax.make_jaxpr(lambda x: fn(x, scalar))(X))
    assert [c.shape for c in hoisted.consts] == [()]
    assert not constants(hoisted.jaxpr)


def test_nothing_to_hoist_gives_the_same_object():
    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jax.nn.gelu(x))))(X)
    assert modules().hoist(closed).jaxpr is closed


def test_one_jaxpr_called_twice_stays_one():
    @jax.jit
    def layer(x):
        return jnp.tanh(x * A)

    hoisted = modules().hoist(jax.make_jaxpr(lambda x: layer(layer(x)))(X))
    first, second = hoisted.jaxpr.eqns
    assert first.params["jaxpr"] is second.params["jaxpr"]


def test_keys_become_key_data():
    key, keys = jax.random.key(3), jax.random.split(jax.random.key(4), 4)

    def fn(x):
        noise = jax.jit(lambda: jax.random.normal(key, (4,)))()
        return x * noise + jax.vmap(lambda k: jax.random.uniform(k))(keys)

    hoisted = modules().hoist(jax.make_jaxpr(fn)(X))
    assert {c.dtype for c in hoisted.consts} == {np.dtype(np.uint32)}
    got = jax.jit(lambda *a: evaluate(hoisted, *a))(hoisted.consts, X)[0]
    np.testing.assert_allclose(got, fn(X), rtol=1e-6)


def test_a_reference_stays_and_is_reported():
    reference = jax.new_ref(jnp.ones(4))

    def fn(x):
        return jax.jit(lambda x: x * reference[...] * A)(x)

    hoisted = modules().hoist(jax.make_jaxpr(fn)(X))
    (left,) = hoisted.left
    assert "Ref" in left.description and left.nbytes == 16
    assert len(hoisted.consts) == 1
    np.testing.assert_allclose(evaluate(hoisted, hoisted.consts, X)[0], X * A)


def test_arrays_in_an_unknown_equation_stay_and_are_reported():
    @jax.custom_batching.custom_vmap
    def fn(x):
        return jax.jit(lambda x: x * A)(x)

    fn.def_vmap(lambda size, batched, x: (fn(x), batched[0]))
    closed = jax.make_jaxpr(lambda x: jax.jit(lambda x: fn(x) * B)(x))(X)
    hoisted = modules().hoist(closed)
    (left,) = hoisted.left
    assert left.description == "an array inside of custom_vmap_call"
    assert left.nbytes == 16
    assert len(hoisted.consts) == 1
    np.testing.assert_allclose(evaluate(hoisted, hoisted.consts, X)[0], X * A * B)


def test_the_arrays_are_counted_as_arguments_of_the_program():
    table = jnp.ones((512, 512))

    def fn(x):
        return jax.jit(lambda x: x @ table)(x)

    x = jnp.ones((8, 512))
    captured = jax.jit(fn).lower(x).compile().memory_analysis()
    hoisted = modules().hoist(jax.make_jaxpr(fn)(x))
    lowered = jax.jit(lambda *a: evaluate(hoisted, *a)).lower(hoisted.consts, x)
    passed = lowered.compile().memory_analysis()
    assert captured is not None and passed is not None
    difference = passed.argument_size_in_bytes - captured.argument_size_in_bytes
    assert difference == table.nbytes


# --- reading and mapping


def test_walk_meets_every_equation_at_every_depth():
    def fn(x):
        def body(c, _):
            return jax.lax.cond(c[0] > 0, jax.jit(jnp.sin), jnp.cos, c), None

        return jax.checkpoint(lambda x: jax.lax.scan(body, x, length=2)[0])(x)

    names = [eqn.primitive.name for eqn in modules().walk(jax.make_jaxpr(fn)(X))]
    for name in ("scan", "cond", "sin", "cos", "jit"):
        assert names.count(name) == 1
    assert names.index("scan") < names.index("cond") < names.index("sin")


def test_mapping_nothing_gives_the_same_equation():
    for eqn in jax.make_jaxpr(lambda x: in_cond(in_linear_solve(x)))(X).eqns:
        assert modules().map_subjaxprs(eqn, lambda jaxpr: jaxpr) is eqn


def test_names_and_source_lines_are_kept():
    def fn(x):
        with jax.named_scope("tower"):
            return jax.jit(lambda x: jnp.sin(x * A))(x)

    closed = jax.make_jaxpr(fn)(X)
    hoisted = modules().hoist(closed)
    (old,), (new,) = closed.eqns, hoisted.jaxpr.eqns
    assert new is not old and new.params["name"] == old.params["name"]
    pairs = zip(modules().walk(closed), modules().walk(hoisted.jaxpr), strict=True)
    for a, b in pairs:
        assert a.source_info is b.source_info
    assert "tower" in str(new.source_info.name_stack)
