"""Convolutions that stay fast inside of a loop on CPU.

XLA:CPU has fast convolutions for channels-last arrays. Passes of its compiler give
arrays that layout, but look at the entry computation only: inside of the `while` that
`lax.scan` becomes, a convolution takes the slow generic path (jax-ml/jax#12868).
`channels_last` does what those passes would have done, on the jaxpr.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    new_jaxpr_eqn,
    no_effects,
)
from jax.extend.core.primitives import transpose_p
from jax.extend.linear_util import wrap_init

from .. import _errors
from ._convolve import Convolution, channels_last_numbers
from ._jaxpr import AnyJaxpr, map_subjaxprs, open_jaxpr, plain_jit_params
from ._layout import RULES, Permutation, inverse, is_identity, laid_out


def channels_last(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites the convolutions of a jaxpr, at any depth, to channels-last arrays.

    What comes out of a convolution stays channels-last through elementwise operations,
    reductions, pooling and the like, and is transposed back where it must be as it was.
    Inputs and outputs are those of the given jaxpr, and the values are the same to
    rounding.

    The new jaxpr is for running: rewrite a gradient's jaxpr, not one that is still to
    be differentiated. Where a rule of `jax.custom_jvp` or `jax.custom_vjp` no longer
    fits, differentiating raises an error.

    **Arguments:**

    - `closed`: any closed jaxpr.

    **Returns:**

    The new jaxpr; the one that was given where there is nothing to rewrite.
    """
    return _Rewriter().rewrite_inside(closed)


@dataclass(frozen=True)
class _Rewritten:
    """A jaxpr, and how the arrays that it returns hold its outputs."""

    jaxpr: Any
    outs: tuple[Permutation | None, ...]


class _Rewriter:
    def __init__(self):
        # A jaxpr that is called many times stays one object, so that it is compiled
        # once. The jaxpr itself is kept too, so that its id is not used again.
        self._seen: dict[Any, tuple[AnyJaxpr, _Rewritten]] = {}

    def rewrite_inside(self, jaxpr: Any) -> Any:
        """The jaxpr with inputs and outputs as they were."""
        nowhere = (None,) * len(open_jaxpr(jaxpr).invars)
        return self.rewrite(jaxpr, nowhere, keep_outputs=True).jaxpr

    def rewrite(
        self,
        jaxpr: AnyJaxpr,
        homes: tuple[Permutation | None, ...],
        *,
        keep_outputs: bool,
    ) -> _Rewritten:
        """The jaxpr for inputs that are held in arrays of the orders given.

        With `keep_outputs` it returns the outputs as they were.
        """
        key = id(jaxpr), homes, keep_outputs
        if key not in self._seen:
            self._seen[key] = jaxpr, self._rewrite(jaxpr, homes, keep_outputs)
        return self._seen[key][1]

    def _rewrite(
        self,
        given: AnyJaxpr,
        homes: tuple[Permutation | None, ...],
        keep_outputs: bool,
    ) -> _Rewritten:
        jaxpr, scope = open_jaxpr(given), _Scope(self)
        invars = [
            var if home is None else scope.new_array(var, home)
            for var, home in zip(jaxpr.invars, homes, strict=True)
        ]
        for eqn in jaxpr.eqns:
            scope.add(eqn)
        outs = [None if keep_outputs else scope.home(v) for v in jaxpr.outvars]
        outvars = [
            scope.value(var) if home is None else scope.array(var, home)
            for var, home in zip(jaxpr.outvars, outs, strict=True)
        ]
        if _same(invars, jaxpr.invars) and _same(scope.eqns, jaxpr.eqns):
            return _Rewritten(given, tuple(outs))
        new = jaxpr.replace(invars=invars, outvars=outvars, eqns=scope.eqns)
        if isinstance(given, ClosedJaxpr):
            return _Rewritten(ClosedJaxpr(new, given.consts), tuple(outs))
        return _Rewritten(new, tuple(outs))


def _same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))


@dataclass
class _Scope:
    """One jaxpr as it is written anew.

    A variable of the old jaxpr is there as it was, or at home in an array with its axes
    in another order. Where the other form is asked for it is made, once.
    """

    rewriter: _Rewriter
    eqns: list[JaxprEqn] = field(default_factory=list)
    _homes: dict[Var, Permutation] = field(default_factory=dict)
    _arrays: dict[tuple[Var, Permutation], Any] = field(default_factory=dict)
    _values: dict[Var, Any] = field(default_factory=dict)
    _broadcasts: dict[Var, JaxprEqn] = field(default_factory=dict)
    _current: Any = None

    def home(self, atom: Any) -> Permutation | None:
        """How the axes of a variable lie; None where it is there as it was."""
        return None if isinstance(atom, Literal) else self._homes.get(atom)

    def new_array(self, var: Var, permutation: Permutation) -> Var:
        """Declares that a variable is at home in an array of this order."""
        array = _new_var(var, permutation)
        self._homes[var] = permutation
        self._arrays[var, permutation] = array
        return array

    def value(self, atom: Any) -> Any:
        """What holds a variable with its axes as they were."""
        if isinstance(atom, Literal) or atom in self._values:
            return atom if isinstance(atom, Literal) else self._values[atom]
        home = self._homes.get(atom)
        if home is not None:
            self._emit_transpose(self._arrays[atom, home], home, atom)
        self._values[atom] = atom
        return atom

    def array(self, atom: Any, permutation: Permutation) -> Any:
        """What holds a variable with its axes in the order asked for."""
        if is_identity(permutation):
            return self.value(atom)
        if isinstance(atom, Literal):
            return self._make_array(atom, permutation)
        if (atom, permutation) not in self._arrays:
            self._arrays[atom, permutation] = self._make_array(atom, permutation)
        return self._arrays[atom, permutation]

    def _make_array(self, atom: Any, permutation: Permutation) -> Var:
        array = _new_var(atom, permutation)
        broadcast = None if isinstance(atom, Literal) else self._broadcasts.get(atom)
        home = self.home(atom)
        if broadcast is not None:
            self._emit_broadcast(broadcast, permutation, array)
        elif home is not None:
            between = tuple(home[axis] for axis in inverse(permutation))
            self._emit_transpose(self.array(atom, home), between, array)
        else:
            self._emit_transpose(self.value(atom), inverse(permutation), array)
        return array

    def add(self, eqn: JaxprEqn) -> None:
        """Writes an equation of the old jaxpr."""
        self._current = eqn
        name = eqn.primitive.name
        homes = (self.home(atom) for atom in eqn.invars)
        home = next((home for home in homes if home is not None), None)
        if name == "conv_general_dilated":
            self._add_convolution(eqn)
        elif name in _CALLS and _may_move(eqn):
            self._add_call(eqn)
        elif home is None or not _may_move(eqn):
            self._add_as_it_is(eqn)
        elif name == "transpose":
            self._add_alias(eqn, home)
        else:
            rule = RULES.get(name)
            on_arrays = None if rule is None else rule(eqn, home)
            if on_arrays is None:
                self._add_as_it_is(eqn)
            else:
                invars = [
                    self.array(atom, home) if _rank(atom) else atom
                    for atom in eqn.invars
                ]
                outs = [on_arrays.out] * len(eqn.outvars)
                self._emit(eqn, invars, outs, on_arrays.params)

    def _add_as_it_is(self, eqn: JaxprEqn) -> None:
        eqn = map_subjaxprs(eqn, self.rewriter.rewrite_inside)
        nowhere = [None] * len(eqn.outvars)
        self._emit(eqn, [self.value(v) for v in eqn.invars], nowhere, eqn.params)
        if eqn.primitive.name == "broadcast_in_dim" and _may_move(eqn):
            self._broadcasts[eqn.outvars[0]] = eqn

    def _add_convolution(self, eqn: JaxprEqn) -> None:
        numbers, rank = eqn.params["dimension_numbers"], _rank(eqn.invars[0])
        lhs, out = (
            inverse((spec[0], *spec[2:], spec[1]))
            for spec in (numbers.lhs_spec, numbers.out_spec)
        )
        kernel = inverse((*numbers.rhs_spec[2:], *numbers.rhs_spec[1::-1]))
        invars = [self.array(eqn.invars[0], lhs), self.array(eqn.invars[1], kernel)]
        convolution = Convolution.of(eqn.params)
        if convolution.is_plain(*(atom.aval.shape for atom in invars)):
            new = {"dimension_numbers": channels_last_numbers(rank)}
            self._emit(eqn, invars, [out], eqn.params | new)
        else:
            outvars = self._outvars(eqn, [out])
            self.eqns += _traced_in_place_of(eqn, convolution, invars, outvars)

    def _add_call(self, eqn: JaxprEqn) -> None:
        homes = tuple(self.home(atom) for atom in eqn.invars)
        outs: tuple[Permutation | None, ...] = ()

        def rewrite(jaxpr: AnyJaxpr) -> AnyJaxpr:
            nonlocal outs
            new = self.rewriter.rewrite(jaxpr, homes, keep_outputs=False)
            outs = new.outs
            return new.jaxpr

        new = map_subjaxprs(eqn, rewrite)
        moved = any(home is not None for home in (*homes, *outs))
        params = _without_rules(new.params) if moved else new.params
        invars = [
            self.value(atom) if home is None else self.array(atom, home)
            for atom, home in zip(eqn.invars, homes, strict=True)
        ]
        self._emit(new, invars, outs, params)

    def _add_alias(self, eqn: JaxprEqn, home: Permutation) -> None:
        """A transpose moves nothing: it only says otherwise how the axes lie."""
        (old,), (new,) = eqn.invars, eqn.outvars
        array = self.array(old, home)
        permutation = tuple(home[axis] for axis in eqn.params["permutation"])
        if is_identity(permutation):
            self._values[new] = array
        else:
            self._homes[new] = permutation
            self._arrays[new, permutation] = array

    def _emit(
        self,
        eqn: JaxprEqn,
        invars: Sequence[Any],
        outs: Sequence[Permutation | None],
        params: dict[str, Any],
    ) -> None:
        outvars = self._outvars(eqn, outs)
        kept = _same(invars, eqn.invars) and _same(outvars, eqn.outvars)
        if not kept or params != eqn.params:
            eqn = eqn.replace(invars=list(invars), outvars=outvars, params=params)
        self.eqns.append(eqn)

    def _outvars(self, eqn: JaxprEqn, outs: Sequence[Permutation | None]) -> list[Var]:
        return [
            var if out is None or is_identity(out) else self.new_array(var, out)
            for var, out in zip(eqn.outvars, outs, strict=True)
        ]

    def _emit_transpose(self, source: Any, permutation: Permutation, out: Var) -> None:
        params = {"permutation": tuple(permutation)}
        source_info, ctx = self._current.source_info, self._current.ctx
        self.eqns.append(
            new_jaxpr_eqn(
                [source], [out], transpose_p, params, no_effects, source_info, ctx
            )
        )

    def _emit_broadcast(
        self, eqn: JaxprEqn, permutation: Permutation, out: Var
    ) -> None:
        """The same broadcast into another order: less to move than its result."""
        places = [permutation[axis] for axis in eqn.params["broadcast_dimensions"]]
        order = sorted(range(len(places)), key=places.__getitem__)
        params = eqn.params | {
            "shape": out.aval.shape,  # pyright: ignore[reportAttributeAccessIssue]
            "broadcast_dimensions": tuple(sorted(places)),
        }
        operand = self.array(eqn.invars[0], inverse(order))
        self.eqns.append(eqn.replace(invars=[operand], outvars=[out], params=params))


def _rank(atom: Any) -> int:
    return len(atom.aval.shape)


def _new_var(atom: Any, permutation: Permutation) -> Var:
    return Var(atom.aval.update(shape=laid_out(atom.aval.shape, permutation)))


def _traced_in_place_of(
    eqn: JaxprEqn,
    fn: Callable[..., Any],
    invars: Sequence[Any],
    outvars: Sequence[Var],
) -> list[JaxprEqn]:
    """The equations of `fn`, for these variables, under the name of `eqn`."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
    jaxpr = jax.make_jaxpr(fn)(*structs).jaxpr
    outer = dict(zip(jaxpr.invars, invars, strict=True))
    outer |= zip(jaxpr.outvars, outvars, strict=True)

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [a if isinstance(a, Literal) else outer.get(a, a) for a in atoms]

    return [
        new.replace(
            invars=renamed(new.invars),
            outvars=renamed(new.outvars),
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
        for new in jaxpr.eqns
    ]


# Equations that run one jaxpr on all of their inputs and return what it returns.
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
}


def _may_move(eqn: JaxprEqn) -> bool:
    """Whether nothing but shapes says how the axes of an equation lie."""
    shardings = ("sharding", "out_sharding")
    if eqn.effects or any(eqn.params.get(name) is not None for name in shardings):
        return False
    plain = plain_jit_params()
    return all(
        item == plain[name][0]
        for name in ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
        for item in eqn.params.get(name, ())
    )


def _without_rules(params: dict[str, Any]) -> dict[str, Any]:
    """Derivative rules were traced for the old order of axes: they must not be used."""

    def refuse(*_: Any) -> Any:
        raise _errors.rewritten_for_running()

    return params | {
        name: wrap_init(refuse, debug_info=params[name].debug_info)
        for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")
        if name in params
    }
