"""Convolutions that stay fast inside of a loop on CPU.

XLA:CPU has fast convolutions for channels-last arrays. A pass of its compiler rewrites
others to that layout, but looks at the entry computation only: inside of the `while`
that `lax.scan` becomes they take the slow generic path (jax-ml/jax#12868).
`channels_last` does what the pass would have done, on the jaxpr.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.lax import ConvDimensionNumbers

from ._jaxpr import AnyJaxpr, map_subjaxprs, open_jaxpr


def channels_last(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites the convolutions of a jaxpr, at any depth, to channels-last arrays.

    Each is surrounded by the transposes that keep its inputs and output as they were.
    The values are the same to rounding. The rules of `jax.custom_jvp` and
    `jax.custom_vjp` are functions and stay as they are: rewrite a gradient's jaxpr, not
    one that is still to be differentiated.

    **Arguments:**

    - `closed`: any closed jaxpr.

    **Returns:**

    The new jaxpr; the one that was given where there is nothing to rewrite.
    """
    return _Rewriter().rewrite(closed)


class _Rewriter:
    def __init__(self):
        # A jaxpr that is called many times stays one object, so that it is compiled
        # once. The jaxpr itself is kept too, so that its id is not used again.
        self._seen: dict[int, tuple[AnyJaxpr, AnyJaxpr]] = {}

    def rewrite(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._seen:
            self._seen[id(jaxpr)] = jaxpr, self._rewrite(jaxpr)
        return self._seen[id(jaxpr)][1]

    def _rewrite(self, given: Any) -> Any:
        jaxpr = open_jaxpr(given)
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            if _is_to_be_rewritten(eqn):
                eqns += _rewritten(eqn)
            else:
                eqns.append(map_subjaxprs(eqn, self.rewrite))
        if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=False)):
            return given
        new: Jaxpr = jaxpr.replace(eqns=eqns)
        return ClosedJaxpr(new, given.consts) if isinstance(given, ClosedJaxpr) else new


def _is_to_be_rewritten(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "conv_general_dilated":
        return False
    rank = len(eqn.invars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
    return eqn.params["dimension_numbers"] != _dimension_numbers(rank)


def _dimension_numbers(rank: int) -> ConvDimensionNumbers:
    """`NHWC`, `HWIO`, `NHWC`, for any number of spatial axes."""
    spatial = range(rank - 2)
    ends = (0, rank - 1, *(axis + 1 for axis in spatial))
    return ConvDimensionNumbers(ends, (rank - 1, rank - 2, *spatial), ends)


def _rewritten(eqn: JaxprEqn) -> list[JaxprEqn]:
    numbers = eqn.params["dimension_numbers"]
    batch, feature, *spatial = numbers.lhs_spec
    to_lhs = (batch, *spatial, feature)
    out_features, in_features, *spatial = numbers.rhs_spec
    to_rhs = (*spatial, in_features, out_features)
    batch, feature, *spatial = numbers.out_spec
    from_out = _inverse((batch, *spatial, feature))
    params = eqn.params | {"dimension_numbers": _dimension_numbers(len(to_lhs))}

    def convolve(lhs, rhs):
        lhs, rhs = jax.lax.transpose(lhs, to_lhs), jax.lax.transpose(rhs, to_rhs)
        return jax.lax.transpose(eqn.primitive.bind(lhs, rhs, **params), from_out)

    return _traced_in_place_of(eqn, convolve)


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(permutation.index(axis) for axis in range(len(permutation)))


def _traced_in_place_of(eqn: JaxprEqn, fn) -> list[JaxprEqn]:
    """The equations of `fn`, reading and writing what `eqn` did, under its name."""
    avals = [atom.aval for atom in eqn.invars]
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]  # pyright: ignore[reportAttributeAccessIssue]
    jaxpr = jax.make_jaxpr(fn)(*structs).jaxpr
    (out,) = jaxpr.outvars
    renamed = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    outer = {out: eqn.outvars[0]}

    def renamed_eqn(new: JaxprEqn) -> JaxprEqn:
        return new.replace(
            invars=[renamed.get(v, v) if isinstance(v, Var) else v for v in new.invars],
            outvars=[outer.get(v, v) for v in new.outvars],
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )

    return [renamed_eqn(new) for new in jaxpr.eqns]
