"""Rewritten convolutions give the same numbers, wherever they are."""

import re

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from jax import lax
from jax.extend.core import check_jaxpr


def channels_last(closed):
    from eqaccum._accumulate._conv import channels_last

    return channels_last(closed)


def rewritten(fn, *args):
    """`fn` through its rewritten jaxpr, with the same arguments and leaves."""
    closed = channels_last(jax.make_jaxpr(fn)(*args))
    check_jaxpr(closed.jaxpr)

    def run(*args):
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(args))

    return run


# What is compared is what the program computes, not how fast.
QUICK = {"xla_backend_optimization_level": 0}


def assert_same(fn, *args, rtol):
    """Equal to rounding, relative to the largest entry of each result.

    The reference is the unrewritten function in float64: in float32 XLA:CPU computes
    some convolutions with negative padding wrongly.
    """
    got = jax.jit(rewritten(fn, *args))(*args)
    structs = jax.tree.leaves(jax.eval_shape(fn, *args))
    with jax.enable_x64(True):
        args = jax.tree.map(in_float64, args)
        want = jax.tree.leaves(jax.jit(fn, compiler_options=QUICK)(*args))
    assert len(got) == len(want)
    for g, w, struct in zip(got, want, structs, strict=True):
        assert (g.shape, g.dtype) == (struct.shape, struct.dtype)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g, w, rtol=0, atol=rtol * np.abs(w).max(initial=0))


def assert_same_in_float64(fn, *args):
    """Both in float64: nothing is lost to the function's own conditioning."""
    with jax.enable_x64(True):
        args = jax.tree.map(in_float64, args)
        run = rewritten(fn, *args)
        # One program: half of the time, and both take the same way through XLA.
        both = jax.jit(
            lambda *args: (jax.tree.leaves(fn(*args)), run(*args)),
            compiler_options=QUICK,
        )
        want, got = both(*args)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        scale = np.abs(w).max(initial=0)
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-12 * scale)


def in_float64(leaf):
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return np.asarray(leaf, np.float64) if is_float else leaf


def equations(jaxpr, name):
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found += [eqn] if eqn.primitive.name == name else []
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple) else (value,):
                found += equations(item, name) if hasattr(item, "eqns") else []
    return found


def numbers(rank, layout="first"):
    spatial = "DHW"[-(rank - 2) :]
    if layout == "first":
        return ("NC" + spatial, "OI" + spatial, "NC" + spatial)
    return ("N" + spatial + "C", spatial + "IO", "N" + spatial + "C")


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def value_and_gradients(convolve, x, kernel):
    """The convolution and both of its gradients, all three linear in the data."""
    out = jax.eval_shape(convolve, x, kernel)
    cotangent = jnp.asarray(normal(*out.shape, seed=2), out.dtype)

    def fn(x, kernel, cotangent):
        out, pullback = jax.vjp(convolve, x, kernel)
        return out, pullback(cotangent)

    return fn, x, kernel, cotangent


CONVOLUTIONS = {
    "plain": dict(x=(2, 3, 6, 7), kernel=(4, 3, 3, 2)),
    "strides": dict(x=(2, 8, 7, 6), kernel=(4, 8, 3, 3), window_strides=(2, 3)),
    "same": dict(x=(2, 5, 6, 6), kernel=(4, 5, 3, 3), padding="SAME"),
    "explicit": dict(x=(2, 5, 6, 6), kernel=(4, 5, 3, 3), padding=((3, 0), (1, 2))),
    "negative": dict(x=(2, 5, 8, 8), kernel=(4, 5, 3, 3), padding=((-2, 1), (0, -1))),
    "rhs_dilation": dict(x=(2, 5, 9, 9), kernel=(4, 5, 3, 2), rhs_dilation=(2, 3)),
    "lhs_dilation": dict(
        x=(2, 8, 4, 5), kernel=(4, 8, 3, 3), lhs_dilation=(2, 3), padding=((2, 2),) * 2
    ),
    "long_window": dict(x=(2, 9, 3, 3), kernel=(4, 9, 5, 4), padding=((2, 3), (2, 2))),
    "one_by_one": dict(x=(2, 5, 4, 4), kernel=(3, 5, 1, 1)),
    "one_channel": dict(x=(2, 1, 8, 8), kernel=(5, 1, 3, 3), padding="SAME"),
    "groups": dict(x=(2, 12, 6, 6), kernel=(6, 4, 3, 3), feature_group_count=3),
    "wide_groups": dict(x=(2, 36, 5, 5), kernel=(4, 18, 3, 3), feature_group_count=2),
    "depthwise": dict(
        x=(2, 40, 6, 6), kernel=(80, 1, 3, 3), feature_group_count=40, padding="SAME"
    ),
    "batch_groups": dict(x=(6, 4, 5, 5), kernel=(9, 4, 3, 3), batch_group_count=3),
    "1d": dict(x=(2, 5, 9), kernel=(4, 5, 3), padding="SAME", window_strides=(2,)),
    "1d_depthwise": dict(x=(2, 6, 9), kernel=(6, 1, 3), feature_group_count=6),
    "3d": dict(
        x=(2, 3, 7, 5, 4),
        kernel=(4, 3, 3, 2, 2),
        padding="SAME",
        window_strides=(2, 1, 1),
    ),
    "3d_dilations": dict(
        x=(2, 3, 4, 5, 4),
        kernel=(4, 3, 2, 2, 2),
        lhs_dilation=(2, 1, 2),
        rhs_dilation=(2, 2, 1),
        padding=((1, 2), (1, 1), (0, -1)),
    ),
    "3d_groups": dict(x=(2, 4, 5, 4, 4), kernel=(4, 2, 2, 2, 2), feature_group_count=2),
}


def convolution_of(case):
    options = {"window_strides": None, "padding": "VALID"} | case
    x, kernel = options.pop("x"), options.pop("kernel")
    options["window_strides"] = options["window_strides"] or (1,) * (len(x) - 2)

    def convolve(lhs, rhs):
        return lax.conv_general_dilated(
            lhs, rhs, dimension_numbers=numbers(len(x)), **options
        )

    return convolve, x, kernel


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_value_and_gradients_in_float32(name):
    convolve, x, kernel = convolution_of(CONVOLUTIONS[name])
    case = value_and_gradients(convolve, normal(*x), normal(*kernel, seed=1))
    assert_same(*case, rtol=1e-6)


@pytest.mark.parametrize("name", ["lhs_dilation", "depthwise", "3d"])
def test_value_and_gradients_in_bfloat16(name):
    convolve, x, kernel = convolution_of(CONVOLUTIONS[name])
    x, kernel = (jnp.asarray(normal(*s), jnp.bfloat16) for s in (x, kernel))
    # What is stored has 8 bits of mantissa.
    assert_same(*value_and_gradients(convolve, x, kernel), rtol=2**-8)


@pytest.mark.parametrize("name", ["plain", "one_channel", "groups", "3d"])
def test_preferred_element_type(name):
    x, kernel = (
        jnp.asarray(normal(*CONVOLUTIONS[name][part]), jnp.bfloat16)
        for part in ("x", "kernel")
    )
    asked = {"preferred_element_type": jnp.float32}
    convolve, *_ = convolution_of(CONVOLUTIONS[name] | asked)
    wide, *_ = convolution_of(CONVOLUTIONS[name])
    (got,) = jax.jit(rewritten(convolve, x, kernel))(x, kernel)
    want = wide(x.astype(jnp.float32), kernel.astype(jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@st.composite
def any_convolution(draw):
    """Layouts, windows, dilations, paddings and groups of every sort."""
    rank = draw(st.integers(1, 3))
    pick = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
    each = lambda *choices: tuple(pick(*choices) for _ in range(rank))  # noqa: E731
    feature_groups, batch_groups = pick((1, 1), (1, 1), (2, 1), (6, 1), (1, 2), (1, 6))
    features, out_features = pick(1, 2, 5), pick(1, 2, 33)
    batch, spatial, window = pick(1, 2), each(3, 4, 6), each(1, 2, 3, 4)
    specs = [draw(st.permutations(range(rank + 2))) for _ in range(3)]
    sizes = [
        (batch * batch_groups, features * feature_groups, *spatial),
        (out_features * feature_groups * batch_groups, features, *window),
    ]
    shapes = []
    for spec, size in zip(specs, sizes, strict=False):
        by_axis = dict(zip(spec, size, strict=True))
        shapes.append(tuple(by_axis[axis] for axis in range(rank + 2)))
    options = dict(
        window_strides=each(1, 2, 3),
        padding=tuple(zip(each(-1, 0, 1, 2), each(-1, 0, 1, 3), strict=True)),
        lhs_dilation=each(1, 1, 2),
        rhs_dilation=each(1, 1, 2),
        dimension_numbers=lax.ConvDimensionNumbers(*map(tuple, specs)),
        feature_group_count=feature_groups,
        batch_group_count=batch_groups,
    )
    return shapes, options


class Windows:
    """A convolution by index arrays, in NumPy: which input each window reads."""

    def __init__(self, shapes, options):
        (lhs, rhs, out), n = options["dimension_numbers"], len(shapes[0])
        self.to_lhs, self.to_rhs, self.to_out = lhs, rhs, np.argsort(out)
        self.groups = options["feature_group_count"], options["batch_group_count"]
        self.places, self.valid, self.counts = [], [], []
        for i in range(n - 2):
            length, size = shapes[0][lhs[i + 2]], shapes[1][rhs[i + 2]]
            low, high = options["padding"][i]
            spread, gap = options["lhs_dilation"][i], options["rhs_dilation"][i]
            total = (length - 1) * spread + 1 + low + high
            count = (total - (size - 1) * gap - 1) // options["window_strides"][i] + 1
            starts = np.arange(count) * options["window_strides"][i] - low
            at = starts[:, None] + np.arange(size) * gap
            self.valid.append((at >= 0) & (at % spread == 0) & (at < length * spread))
            self.places.append(np.where(self.valid[-1], at // spread, 0))
            self.counts.append(count)

    def patches(self, x):
        """(batch, features, count, size, count, size, ...)"""
        for i, (places, valid) in enumerate(zip(self.places, self.valid, strict=True)):
            axis = 2 + 2 * i
            taken = np.take(x, places, axis)
            x = taken * valid.reshape(*valid.shape, *[1] * (taken.ndim - axis - 2))
        spatial = x.ndim - 2
        order = (0, 1, *range(2, 2 + spatial, 2), *range(3, 2 + spatial, 2))
        x = x.transpose(order)
        rank = spatial // 2
        positions, taps = np.prod(x.shape[2 : 2 + rank]), np.prod(x.shape[2 + rank :])
        return x.reshape(*x.shape[:2], int(positions), int(taps))

    def __call__(self, x, kernel):
        x, kernel = x.transpose(self.to_lhs), kernel.transpose(self.to_rhs)
        by_feature, by_batch = self.groups
        groups = by_feature * by_batch
        patches = self.patches(x)
        kernels = np.split(kernel.reshape(*kernel.shape[:2], -1), groups)
        parts = np.split(patches, by_feature, 1) if by_feature > 1 else None
        parts = parts or np.split(patches, by_batch, 0)
        outs = [
            np.einsum("bfpt,oft->bop", part, kernel)
            for part, kernel in zip(parts, kernels, strict=True)
        ]
        out = np.concatenate(outs, 1)
        return out.reshape(*out.shape[:2], *self.counts).transpose(self.to_out)


@given(any_convolution())
def test_any_convolution_in_float64(drawn):
    """The reference is NumPy: XLA's compiler aborts on some of these as they are."""
    shapes, options = drawn
    x, kernel = (normal(*s, seed=i, dtype=float) for i, s in enumerate(shapes))
    reference = Windows(shapes, options)
    assume(min(reference.counts) > 0)
    with jax.enable_x64(True):

        def convolve(x, kernel):
            return lax.conv_general_dilated(x, kernel, **options)

        fn, *args = value_and_gradients(convolve, x, kernel)
        run = jax.jit(rewritten(fn, *args), compiler_options=QUICK)
        out, dx, dkernel = run(*args)
    want = reference(x, kernel)
    close = dict(rtol=0, atol=1e-12 * np.abs(want).max(initial=0))
    np.testing.assert_allclose(out, want, **close)
    # A gradient is right if it gives the derivative in every direction: here in two
    # random ones, one of which moves a single entry.
    cotangent = np.asarray(args[2])
    for seed in (3, 4):
        for grad, point, at in (
            (dx, x, lambda x: reference(x, kernel)),
            (dkernel, kernel, lambda k: reference(x, k)),
        ):
            direction = normal(*point.shape, seed=seed, dtype=float)
            if seed == 4:
                single = np.zeros(point.size)
                single[seed * 7 % point.size] = 1
                direction = single.reshape(point.shape)
            want = np.vdot(cotangent, at(direction))
            size = np.vdot(np.abs(cotangent), np.abs(at(np.abs(direction)))) + 1
            assert abs(np.vdot(grad, direction) - want) <= 1e-12 * size


# --- what may stand around a convolution


def convolve(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers(4)
    )


def in_jit(x, kernel):
    return jax.jit(lambda x: jax.nn.relu(convolve(x, kernel)))(x)


def in_checkpoint(x, kernel):
    return jax.checkpoint(lambda x: jnp.sin(convolve(jnp.sin(x), kernel)))(x)


def in_scan(x, kernel):
    return lax.scan(lambda c, _: (jnp.tanh(convolve(c, kernel)), c), x, length=3)[1]


def in_cond(x, kernel):
    return lax.cond(x[0, 0, 0, 0] > -9, lambda x: convolve(x, kernel), jnp.sin, x)


def in_while(x, kernel):
    def body(state):
        i, c = state
        return i + 1, jnp.tanh(convolve(c, kernel))

    # Loops of unknown length have no reverse-mode derivative.
    kernel, stopped = lax.stop_gradient((kernel, x))
    return x * lax.while_loop(lambda s: s[0] < 3, body, (0, stopped))[1]


@jax.custom_vjp
def ruled(x, kernel):
    return convolve(x, kernel)


ruled.defvjp(
    lambda x, kernel: (convolve(x, kernel), (x, kernel)),
    lambda saved, g: (convolve(g, saved[1]), 3.0 * saved[1]),
)


def in_custom_vjp(x, kernel):
    return ruled(jax.nn.relu(convolve(x, kernel)), kernel)


def with_custom_jvp(x, kernel):
    return jax.nn.gelu(jax.nn.silu(jax.nn.relu6(convolve(x, kernel))))


def of_batched_kernels(x, kernel):
    kernels = jnp.stack([kernel, 2 * kernel, jnp.sin(kernel)])
    return jax.vmap(convolve, (None, 0))(x, kernels), jax.vmap(convolve, (0, None))(
        x[None], kernel
    )


@pytest.mark.parametrize(
    "fn",
    [
        in_jit,
        in_checkpoint,
        in_scan,
        in_cond,
        in_while,
        in_custom_vjp,
        with_custom_jvp,
        of_batched_kernels,
    ],
    ids=lambda fn: fn.__name__,
)
def test_inside(fn):
    def loss(x, kernel):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(x, kernel)))

    gradient = jax.value_and_grad(loss, (0, 1))
    x, kernel = normal(2, 6, 5, 5), 0.3 * normal(6, 6, 3, 3, seed=1)
    assert_same_in_float64(gradient, x, kernel)
    new = channels_last(jax.make_jaxpr(gradient)(x, kernel))
    found = equations(new, "conv_general_dilated")
    last = lax.conv_dimension_numbers((2,) * 4, (2,) * 4, numbers(4, "last"))
    assert found and all(e.params["dimension_numbers"] == last for e in found)


def batch_norm(h):
    mean = jnp.mean(h, (0, 2, 3), keepdims=True)
    return (h - mean) * lax.rsqrt(jnp.var(h, (0, 2, 3), keepdims=True) + 1e-5)


def group_norm(h):
    grouped = h.reshape(h.shape[0], 2, -1)
    normal = grouped - jnp.mean(grouped, -1, keepdims=True)
    return normal.reshape(h.shape)


AFTERWARDS = {
    "bias": lambda h: h + jnp.arange(6.0)[None, :, None, None],
    "residual": lambda h: h + 2 * jnp.cos(h) + jnp.ones_like(h),
    "scalars": lambda h: jnp.clip(jnp.where(h > 0.5, h, 0.1 * h), -1, 1) ** 3,
    "channel_mean": lambda h: jnp.sum(h, 1) * jnp.max(h, (0, 3))[:, 0, None][None, :5],
    "arg": lambda h: h * jnp.argmax(h, 1)[:, None].astype(h.dtype),
    "softmax": lambda h: jax.nn.softmax(h, 1),
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "flatten": lambda h: h.reshape(h.shape[0], -1) @ jnp.ones((150, 3)),
    "merge_neighbours": lambda h: jnp.cumsum(h.reshape(2, 6, 25), -1),
    "split_channels": lambda h: jnp.sin(h.reshape(2, 3, 2, 5, 5)).sum(1),
    "unit_axes": lambda h: jnp.squeeze(jnp.sin(h[:, None, ..., None]), (1, 5)),
    "transpose": lambda h: jnp.sin(jnp.transpose(h, (2, 3, 0, 1))) + 1,
    "to_last_and_back": lambda h: jnp.moveaxis(jnp.sin(jnp.moveaxis(h, 1, -1)), -1, 1),
    "pool_max": lambda h: lax.reduce_window(
        h, -jnp.inf, lax.max, (1, 1, 2, 3), (1, 1, 2, 1), "SAME"
    ),
    "pool_mean": lambda h: lax.reduce_window(
        h, 0.0, lax.add, (1, 1, 3, 2), (1, 1, 1, 2), "VALID"
    ),
    "pad": lambda h: jnp.pad(h, ((0, 0), (1, 0), (2, 1), (0, 3))),
    "slice": lambda h: h[:, 1:5, ::2, 1:],
    "flip": lambda h: h[:, ::-1, :, ::-1],
    "concatenate": lambda h: jnp.concatenate([h, jnp.sin(h), h[:, :2]], 1),
    "split": lambda h: jnp.stack(jnp.split(h, 3, 1)).prod(0),
    "cumsum": lambda h: jnp.cumsum(h, 3),
    "sort": lambda h: jnp.sort(h, 2),
    "gather": lambda h: h[:, jnp.array([2, 0, 1])],
    "dot": lambda h: jnp.einsum("nchw,cd->ndhw", h, jnp.ones((6, 4))),
    "cond": lambda h: lax.cond(h.sum() > 0, jnp.sin, jnp.cos, h),
    "convert": lambda h: h.astype(jnp.float32).astype(h.dtype),
    "upsample": lambda h: jax.image.resize(h, (2, 6, 10, 10), "nearest"),
    "nothing": lambda h: h,
    "twice": lambda h: (h, h),
    "constant": lambda h: 0 * h[:1] + jnp.broadcast_to(jnp.arange(5.0), h.shape),
    "outer": lambda h: jnp.broadcast_to(h[None], (3, *h.shape)).sum(2),
    "spread": lambda h: jnp.broadcast_to(h[:, :, None], (2, 6, 4, 5, 5)).max(1),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_followed_by(name):
    def loss(x, kernel):
        out = AFTERWARDS[name](convolve(x, kernel))
        ramps = [
            jnp.sin(jnp.arange(o.size)).reshape(o.shape) for o in jax.tree.leaves(out)
        ]
        return sum(map(jnp.vdot, jax.tree.leaves(out), ramps)), out

    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    assert_same_in_float64(gradient, normal(2, 6, 5, 5), normal(6, 6, 3, 3, seed=1))


@pytest.mark.parametrize(
    "layer, shape",
    [
        (eqx.nn.Conv1d(3, 4, 3, stride=2, padding=1, key=jax.random.key(0)), (3, 8)),
        (eqx.nn.Conv2d(4, 6, 3, groups=2, key=jax.random.key(0)), (4, 6, 6)),
        (eqx.nn.Conv3d(2, 3, 2, dilation=2, key=jax.random.key(0)), (2, 5, 4, 4)),
        (
            eqx.nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, key=jax.random.key(0)),
            (3, 4, 4),
        ),
        (eqx.nn.ConvTranspose1d(4, 4, 3, groups=2, key=jax.random.key(0)), (4, 5)),
        (
            eqx.nn.Sequential(
                [
                    eqx.nn.Conv2d(3, 8, 3, padding="SAME", key=jax.random.key(0)),
                    eqx.nn.GroupNorm(2, 8),
                    eqx.nn.Lambda(jax.nn.elu),
                    eqx.nn.MaxPool2d(2, 2),
                    eqx.nn.Conv2d(8, 8, 3, groups=8, key=jax.random.key(1)),
                    eqx.nn.AvgPool2d(2, 1),
                    eqx.nn.Lambda(jnp.ravel),
                    eqx.nn.Linear(8, 3, key=jax.random.key(2)),
                ]
            ),
            (3, 8, 8),
        ),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, eqx.Module) else None,
)
def test_equinox_layers(layer, shape):
    arrays, static = eqx.partition(layer, eqx.is_inexact_array)

    def loss(arrays, x):
        out = jax.vmap(eqx.combine(arrays, static))(x)
        return jnp.sum(jnp.sin(3 * out))

    assert_same_in_float64(jax.value_and_grad(loss), arrays, normal(2, *shape))


# --- what is left alone, and what comes out of the compiler


def test_without_a_convolution_the_same_object_comes_back():
    def fn(x):
        return lax.scan(lambda c, _: (jax.jit(jnp.sin)(c).T @ c, None), x, length=2)

    closed = jax.make_jaxpr(jax.vmap(fn))(np.ones((2, 3, 3), np.float32))
    assert channels_last(closed) is closed


def test_channels_last_convolutions_are_untouched():
    def fn(x, kernel):
        out = lax.conv_general_dilated(
            x, kernel, (2, 1), "SAME", dimension_numbers=numbers(4, "last")
        )
        return jnp.transpose(jax.nn.relu(out), (0, 3, 1, 2))

    x, kernel = np.ones((2, 8, 8, 5), np.float32), np.ones((3, 3, 5, 4), np.float32)
    closed = jax.make_jaxpr(fn)(x, kernel)
    assert channels_last(closed) is closed


def test_a_chain_turns_its_input_and_its_output_only():
    def chain(x, kernel, bias):
        for _ in range(4):
            h = convolve(x, kernel) + bias[None, :, None, None]
            x = jax.nn.relu(h) + jnp.mean(h, (2, 3), keepdims=True)
        return x

    x, kernel = normal(2, 8, 5, 5), normal(8, 8, 3, 3)
    new = channels_last(jax.make_jaxpr(chain)(x, kernel, normal(8)))
    turned = [
        eqn
        for eqn in equations(new, "transpose")
        if sorted(eqn.invars[0].aval.shape) == sorted(x.shape)
    ]
    assert len(turned) == 2
    # One kernel is turned once for all four.
    kernels = [
        eqn
        for eqn in equations(new, "transpose")
        if eqn.invars[0].aval.shape == kernel.shape
    ]
    assert len(kernels) == 1


def test_names_are_kept():
    def fn(x, kernel):
        with jax.named_scope("tower"):
            return jax.nn.relu(convolve(x, kernel))

    new = channels_last(jax.make_jaxpr(fn)(normal(1, 8, 4, 4), normal(8, 8, 3, 3)))
    for name in ("conv_general_dilated", "transpose"):
        stacks = [str(e.source_info.name_stack) for e in equations(new, name)]
        assert stacks and "tower" in stacks[0]


def test_infinities_stay_in_their_group():
    def fn(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=numbers(4),
            feature_group_count=3,
        )

    kernel = normal(3, 1, 3, 3)
    kernel[1] = np.inf
    x = np.ones((1, 3, 4, 4), np.float32)
    (got,) = rewritten(fn, x, kernel)(x, kernel)
    np.testing.assert_allclose(got[0, ::2], fn(x, kernel)[0, ::2], atol=1e-6)
    assert not np.isfinite(got[0, 1]).any()


def test_a_rewritten_rule_is_not_differentiated():
    from eqaccum._errors import InputError

    x, kernel = normal(1, 8, 4, 4), normal(8, 8, 3, 3)
    run = rewritten(lambda x, k: jnp.sum(jax.nn.relu(convolve(x, k))), x, kernel)
    with pytest.raises(InputError, match="differentiated once more"):
        jax.grad(lambda x: run(x, kernel)[0])(x)


@pytest.mark.parametrize("groups", [1, 8])
def test_in_a_loop_the_compiler_keeps_the_fast_layout(groups):
    """What the module is for, read from the compiled program."""

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=numbers(4),
            feature_group_count=groups,
        )

    def gradient(x, kernel):
        return jax.grad(lambda k: jnp.sum(jnp.sin(convolve(x, k))))(kernel)

    def compiled(gradient):
        def step(xs, kernel):
            def body(total, x):
                return total + gradient(x, kernel), None

            return lax.scan(body, jnp.zeros_like(kernel), xs)[0]

        text = jax.jit(step).lower(xs, kernel).compile().as_text() or ""
        return re.findall(r" convolution\(.*?dim_labels=(\w+->\w+)(.*)", text)

    xs, kernel = normal(3, 2, 16, 8, 8), normal(32, 16 // groups, 3, 3)
    fast = "b01f_01io->b01f"
    assert not all(labels == fast for labels, _ in compiled(gradient))
    run = rewritten(gradient, xs[0], kernel)
    found = compiled(lambda x, k: run(x, k)[0])
    assert found
    for labels, rest in found:
        assert labels == fast and "group_count" not in rest
