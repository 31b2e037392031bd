"""Rematerialisation read off the jaxpr: the loss in segments, recomputed backward.

A `jax.checkpoint` around a whole loss saves nothing: the backward pass recomputes all
of it at once. Cut into about sqrt(L) segments of equal weight, only what crosses a
border is kept, and the inside of one segment at a time (Chen et al. 2016,
arXiv:1604.06174).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array


@dataclass(frozen=True)
class _Segment:
    """Some equations in a row, what they read from before and what is read after."""

    eqns: list[JaxprEqn]
    reads: list[Var]
    gives: list[Var]


def in_segments(closed: ClosedJaxpr) -> Callable:
    """The jaxpr as a function of `once` and flat inputs, rematerialised in segments.

    `once` is an int32 scalar whose value is 1, which the compiler cannot know.
    """
    segments = _segments(closed.jaxpr)

    def call(once: Array, flat: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        values: dict[Var, Any] = dict(zip(jaxpr.invars, flat, strict=True))
        values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        for segment in segments:
            given = [values[v] for v in segment.reads]
            outs = _recomputed(_evaluated(jaxpr, segment), once, given)
            values.update(zip(segment.gives, outs, strict=True))
        return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]

    return call


def _recomputed(fn: Callable, once: Array, given: list[Any]) -> list[Any]:
    """`fn(*given)`, computed again in the backward pass, inside of a loop run once.

    `jax.checkpoint` keeps the two computations apart by barriers, which XLA:CPU drops
    before it merges equal ones: nothing is saved (measured, jaxlib 0.10.2). What
    depends on the index of a loop is never merged with what is outside.
    """
    inexact = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in given]

    def join(moved: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        one, other = iter(moved), iter(kept)
        return [next(one) if is_inexact else next(other) for is_inexact in inexact]

    @jax.custom_vjp
    def call(moved: list[Any], kept: list[Any]) -> list[Any]:
        return fn(*join(moved, kept[1:]))

    def forward(moved: list[Any], kept: list[Any]) -> tuple[list[Any], Any]:
        return call(moved, kept), (moved, kept)

    def backward(saved: Any, cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        moved, (once, *kept) = saved

        def body(index: Array, sums: list[Any]) -> list[Any]:
            # always true; what does not depend on the index is moved out of the loop
            own = [jnp.where(index < once, x, jnp.zeros_like(x)) for x in moved]
            _, pull = jax.vjp(lambda own: fn(*join(own, kept)), own)
            return pull(cotangents)[0]

        zeros = [jnp.zeros_like(x) for x in moved]
        gradients = jax.lax.fori_loop(0, once, body, zeros)
        none = [np.zeros(jnp.shape(x), jax.dtypes.float0) for x in (once, *kept)]
        return gradients, none

    call.defvjp(forward, backward)
    moved = [x for x, is_inexact in zip(given, inexact, strict=True) if is_inexact]
    kept = [x for x, is_inexact in zip(given, inexact, strict=True) if not is_inexact]
    return call(moved, [once, *kept])


def _evaluated(jaxpr: Jaxpr, segment: _Segment) -> Callable:
    # the whole jaxpr's names would not be as many as the segment's variables
    part = jaxpr.replace(
        constvars=[],
        invars=segment.reads,
        outvars=segment.gives,
        eqns=segment.eqns,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )

    def call(*values: Any) -> list[Any]:
        return eval_jaxpr(part, [], *values)

    return call


def _segments(jaxpr: Jaxpr) -> list[_Segment]:
    groups = _cut(jaxpr)
    later: set[Var] = {v for v in jaxpr.outvars if isinstance(v, Var)}
    segments: list[_Segment] = []
    for eqns in reversed(groups):
        made = {v for eqn in eqns for v in eqn.outvars}
        read = _variables(v for eqn in eqns for v in eqn.invars)
        reads = [v for v in read if v not in made]
        gives = [
            v for v in _variables(o for e in eqns for o in e.outvars) if v in later
        ]
        segments.append(_Segment(eqns, reads, gives))
        later |= set(reads)
    return segments[::-1]


def _cut(jaxpr: Jaxpr) -> list[list[JaxprEqn]]:
    """About sqrt(L) groups of equal bytes of results, cut where little crosses."""
    eqns = list(jaxpr.eqns)
    done = np.cumsum([_bytes(eqn.outvars) for eqn in eqns], dtype=float)
    if not eqns or done[-1] == 0:
        return [eqns] if eqns else []
    crossing = _crossing(jaxpr)
    count = max(1, round(math.sqrt(len(eqns))))
    reach = done[-1] / count / 2  # a border may move by half a segment
    borders = {0, len(eqns)}
    for number in range(1, count):
        wanted = done[-1] * number / count
        near = np.flatnonzero(np.abs(done - wanted) <= reach)
        if len(near):
            borders.add(int(near[np.argmin(crossing[near])]) + 1)
    ordered = sorted(borders)
    return [eqns[a:b] for a, b in zip(ordered, ordered[1:], strict=False)]


def _crossing(jaxpr: Jaxpr) -> np.ndarray:
    """Bytes that are made up to each equation and read after it."""
    last: dict[Var, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last.update({v: index for v in eqn.invars if isinstance(v, Var)})
    last.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)})
    changes = np.zeros(len(jaxpr.eqns) + 1)
    for index, eqn in enumerate(jaxpr.eqns):
        for variable in eqn.outvars:
            if last.get(variable, index) > index:
                changes[index] += _bytes([variable])
                changes[last[variable]] -= _bytes([variable])
    return np.cumsum(changes)[:-1]


def _variables(atoms: Any) -> list[Var]:
    return list(dict.fromkeys(v for v in atoms if isinstance(v, Var)))


def _bytes(variables: Sequence[Any]) -> int:
    total = 0
    for variable in variables:
        aval = variable.aval
        if hasattr(aval, "shape") and hasattr(aval.dtype, "itemsize"):
            total += math.prod(aval.shape) * aval.dtype.itemsize
    return total
