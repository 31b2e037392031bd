"""How the page on scale counts: bytes in a ring, products by the lengths of loops."""

import jax
import jax.numpy as jnp
import scale

ONCE = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: f32[4]) -> f32[4] {
  ROOT %inner = f32[4]{0} all-gather(%p), dimensions={0}
}

ENTRY %main (p: f32[8,2]) -> f32[8,2] {
  %whole = f32[8,2]{1,0} all-reduce(%p), to_apply=%add
  %pair = (bf16[4]{0}, f32[4]{0}) all-reduce(%q, %r), to_apply=%add
  %part = f32[2,2]{1,0} reduce-scatter(%p), dimensions={0}, to_apply=%add
  ROOT %all = f32[8,2]{1,0} all-gather(%part), dimensions={0}
}
"""


def test_bytes_in_a_ring():
    once, looped = scale.bytes_moved(ONCE, 4)
    summed = 2 * 3 / 4 * (16 * 4 + 4 * 2 + 4 * 4)
    scattered, gathered = 3 * (4 * 4), 3 / 4 * (16 * 4)
    assert once == summed + scattered + gathered
    assert looped == 3 / 4 * (4 * 4)


def test_products_of_a_loop():
    def fn(x, stack):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        y, _ = jax.lax.scan(jax.checkpoint(layer), x, stack)
        return jnp.sum(y @ stack[0])

    x, stack = jnp.ones((3, 5)), jnp.ones((7, 5, 5))
    one = 2 * 3 * 5 * 5
    assert scale.products(jax.make_jaxpr(fn)(x, stack).jaxpr) == 8 * one
    backward = jax.make_jaxpr(jax.grad(fn, argnums=1))(x, stack)
    # forward and again, and two products for each of them: the last needs no second
    assert scale.products(backward.jaxpr) == (7 + 7 + 2 * 7 + 1 + 2) * one
