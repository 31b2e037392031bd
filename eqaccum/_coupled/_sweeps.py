"""Both sweeps over the microbatches of a block of rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._accumulate import PassInputs
from ._embed import linearised
from ._records import Embedded, Gradients, PullInputs


@dataclass(frozen=True)
class Swept:
    """K microbatches embedded, ready to be pulled back."""

    embedded: Embedded  # leaves (K, n, ...)
    # cotangents of the inexact leaves (K, n, ...), their scale, the sum so far
    pull: Callable[[list[Array], Any, Gradients], Gradients]


def sweep(
    embed: Callable[[PassInputs], Embedded],
    again: Callable[[PassInputs], Embedded],
    pull_back: Callable[[PullInputs], tuple[Gradients, list[Array]]],
    at: Callable[[Int[Array, ""], list[Array]], PassInputs],
    *,
    state: list[Array],
    passes: int,
) -> Swept:
    """The first sweep; its `pull` is the second one.

    Both begin with the same state. One pass alone is embedded once: what its transpose
    needs is kept instead of being computed again. `again` is `embed`, recomputed in its
    gradient where that was asked for.
    """
    if passes == 1:
        return _once(again, at, state)
    steps = jnp.arange(passes, dtype=jnp.int32)

    def forward(
        state: list[Array], k: Int[Array, ""]
    ) -> tuple[list[Array], list[Array]]:
        with jax.named_scope("eqaccum/embed"):
            out = embed(at(k, state))
        return out.state, out.leaves

    after, leaves = jax.lax.scan(forward, state, steps)

    def pull(cotangents: list[Array], scale: Any, start: Gradients) -> Gradients:
        def back(
            carry: tuple[Gradients, list[Array]],
            xs: tuple[Int[Array, ""], list[Array]],
        ) -> tuple[tuple[Gradients, list[Array]], None]:
            sums, state = carry
            k, cotangents = xs
            with jax.named_scope("eqaccum/pull_back"):
                given = PullInputs(at(k, state), cotangents, scale)
                gradient, state = pull_back(given)
            return (added(sums, gradient), state), None

        (sums, _), _ = jax.lax.scan(back, (start, state), (steps, cotangents))
        return sums

    return Swept(Embedded(leaves, after), pull)


def _once(
    embed: Callable[[PassInputs], Embedded],
    at: Callable[[Int[Array, ""], list[Array]], PassInputs],
    state: list[Array],
) -> Swept:
    with jax.named_scope("eqaccum/embed"):
        taken = linearised(embed, at(jnp.zeros((), jnp.int32), state))

    def pull(cotangents: list[Array], scale: Any, start: Gradients) -> Gradients:
        with jax.named_scope("eqaccum/pull_back"):
            return added(start, taken.pull([leaf[0] for leaf in cotangents], scale))

    leaves = [leaf[None] for leaf in taken.embedded.leaves]
    return Swept(Embedded(leaves, taken.embedded.state), pull)


def added(sums: Gradients, gradient: Gradients) -> Gradients:
    return [a + g for a, g in zip(sums, gradient, strict=True)]
