"""Jaxprs as data: reading them at every depth, and giving them their arrays.

An array that a function captured is a constant of its jaxpr, or of a jaxpr inside it.
A program built from it bakes the array in, where neither the argument count nor the
memory analysis of the program shows it. `hoist` turns every one into an input.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

AnyJaxpr = Jaxpr | ClosedJaxpr


@dataclass(frozen=True)
class Left:
    """Something that stayed inside of a jaxpr, and how large it is."""

    description: str
    nbytes: int


@dataclass(frozen=True)
class Hoisted:
    """A jaxpr that takes its arrays, `jaxpr(*consts, *args)`, and the arrays."""

    jaxpr: ClosedJaxpr
    consts: tuple[Any, ...]
    left: tuple[Left, ...]


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """The jaxpr itself, without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def subjaxprs(eqn: JaxprEqn) -> Iterator[AnyJaxpr]:
    """The jaxprs directly inside an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, AnyJaxpr):
                yield item


def walk(jaxpr: AnyJaxpr) -> Iterator[JaxprEqn]:
    """Every equation, those of the jaxprs inside included, outermost first.

    A jaxpr that is called twice is walked twice. The rules of `jax.custom_jvp` and
    `jax.custom_vjp` are functions, not jaxprs, and are not entered.
    """
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from walk(inner)


def map_subjaxprs(eqn: JaxprEqn, fn: Callable[[AnyJaxpr], AnyJaxpr]) -> JaxprEqn:
    """The same equation with each jaxpr directly inside it replaced by `fn` of it.

    Names, source lines and effects are kept. Where `fn` returns what it was given the
    very same equation comes back.
    """
    changed = False

    def visit(value):
        nonlocal changed
        if isinstance(value, AnyJaxpr):
            new = fn(value)
            changed = changed or new is not value
            return new
        if isinstance(value, tuple | list) and any(
            isinstance(item, AnyJaxpr) for item in value
        ):
            items = [visit(item) for item in value]
            is_record = hasattr(value, "_fields")  # a NamedTuple takes its items apart
            return type(value)(*items) if is_record else type(value)(items)
        return value

    params = {name: visit(value) for name, value in eqn.params.items()}
    return eqn.replace(params=params) if changed else eqn


@cache
def plain_jit_params() -> dict[str, Any]:
    """The parameters of a `jit` with one input and one output, nothing said of either.

    What an unstated sharding or layout looks like is JAX's own business: it is read
    from an equation of that sort.
    """
    return jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].params


def hoist(closed: ClosedJaxpr) -> Hoisted:
    """Makes the arrays that a jaxpr holds, at any depth, its leading inputs.

    Arrays are told apart by identity: one that is captured in many places is one input.
    Typed keys are passed as key data. Numbers that JAX writes into an equation stay
    there. Custom derivative rules keep working; what they capture is not seen, since
    they are functions and not jaxprs. It is in the gradient's jaxpr once they have been
    used: hoist that one too.

    **Arguments:**

    - `closed`: any closed jaxpr, one that is a gradient or one that is still to be
        differentiated.

    **Returns:**

    A `Hoisted`. `left` names what could not be moved: mutable references, and arrays in
    equations of a kind that is not known here.
    """
    lifter = _Lifter()
    lifted = lifter.lift(closed)
    unwrapped = _without_keys(lifted.jaxpr, tuple(lifted.arrays.values()))
    jaxpr, consts = unwrapped
    return Hoisted(jaxpr=jaxpr, consts=consts, left=tuple(lifter.left.values()))


@dataclass(frozen=True)
class _Lifted:
    """A jaxpr whose leading inputs are `arrays`, by their identity."""

    jaxpr: Any  # of the kind that was given: open or closed
    arrays: dict[Hashable, Any]


@dataclass
class _Scope:
    """The variables that stand for arrays in one jaxpr."""

    variables: dict[Hashable, Var] = field(default_factory=dict)
    arrays: dict[Hashable, Any] = field(default_factory=dict)
    renamed: dict[Var, Var] = field(default_factory=dict)

    def variable(self, array, aval) -> Var:
        key = _identity(array, aval)
        if key not in self.variables:
            self.variables[key] = Var(aval)
            self.arrays[key] = array
        return self.variables[key]

    def atom(self, atom):
        if isinstance(atom, Literal):
            return self.variable(atom.val, atom.aval) if np.ndim(atom.val) else atom
        return self.renamed.get(atom, atom)

    def atoms(self, atoms) -> list:
        return [self.atom(atom) for atom in atoms]


def _identity(array, aval) -> Hashable:
    # NumPy constants are views that JAX made: what they share is the memory.
    if isinstance(array, np.ndarray):
        where = array.__array_interface__["data"][0], array.strides
    else:
        where = id(array)
    return where, aval.shape, aval.dtype, getattr(aval, "weak_type", False)


def _is_array(aval) -> bool:
    return isinstance(aval, ShapedArray)


def _nbytes(what: Any) -> int:
    """The bytes of an array, a reference or a variable's type; zero if unknown."""
    shape, dtype = getattr(what, "shape", ()), getattr(what, "dtype", None)
    return prod(shape) * getattr(dtype, "itemsize", 0)


class _Lifter:
    def __init__(self):
        self.left: dict[Hashable, Left] = {}
        # A jaxpr that is called many times stays one object, so that it is compiled
        # once. The jaxpr itself is kept too, so that its id is not used again.
        self._seen: dict[int, tuple[AnyJaxpr, _Lifted]] = {}

    def lift(self, jaxpr: AnyJaxpr) -> _Lifted:
        if id(jaxpr) not in self._seen:
            self._seen[id(jaxpr)] = jaxpr, self._lift(jaxpr)
        return self._seen[id(jaxpr)][1]

    def _lift(self, given: AnyJaxpr) -> _Lifted:
        jaxpr, scope = open_jaxpr(given), _Scope()
        kept_vars, kept_consts = [], []
        consts = given.consts if isinstance(given, ClosedJaxpr) else ()
        for var, const in zip(jaxpr.constvars, consts, strict=False):
            if _is_array(var.aval):
                scope.renamed[var] = scope.variable(const, var.aval)
            else:
                kept_vars.append(var)
                kept_consts.append(const)
                self._leave(id(const), f"a captured {var.aval}", _nbytes(var.aval))
        eqns = [self._lift_eqn(eqn, scope) for eqn in jaxpr.eqns]
        outvars = scope.atoms(jaxpr.outvars)
        if not scope.arrays and all(
            a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)
        ):
            return _Lifted(given, {})
        new = jaxpr.replace(
            constvars=kept_vars if isinstance(given, ClosedJaxpr) else jaxpr.constvars,
            invars=[*scope.variables.values(), *jaxpr.invars],
            outvars=outvars,
            eqns=eqns,
        )
        if isinstance(given, ClosedJaxpr):
            new = ClosedJaxpr(new, kept_consts)
        return _Lifted(new, scope.arrays)

    def _lift_eqn(self, eqn: JaxprEqn, scope: _Scope) -> JaxprEqn:
        invars = scope.atoms(eqn.invars)
        if any(a is not b for a, b in zip(invars, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=invars)
        if next(subjaxprs(eqn), None) is None:
            return eqn
        inner: list[_Lifted] = []

        def lift(jaxpr):
            inner.append(self.lift(jaxpr))
            return inner[-1].jaxpr

        new = map_subjaxprs(eqn, lift)
        if not any(lifted.arrays for lifted in inner):
            return new
        widen = _WIDEN.get(eqn.primitive.name)
        if widen is None or _has_positional_effect(eqn):
            for lifted in inner:
                for key, array in lifted.arrays.items():
                    name = f"an array inside of {eqn.primitive.name}"
                    self._leave(key, name, _nbytes(array))
            return eqn
        return widen(new, inner, scope)

    def _leave(self, key: Hashable, description: str, nbytes: int) -> None:
        self.left[key] = Left(description, nbytes)


def _has_positional_effect(eqn: JaxprEqn) -> bool:
    """Whether an effect names an input by its place, which more inputs would shift."""
    names = ("input", "input_index")
    return any(
        isinstance(getattr(effect, name, None), int)
        for effect in eqn.effects
        for name in names
    )


# --- How each kind of equation takes more inputs. Each function gets the equation with
# its jaxprs already widened by their own arrays, and returns it with inputs to match.


def _given(lifted: _Lifted, scope: _Scope) -> list[Var]:
    """The variables in the outer jaxpr for the arrays that an inner one takes."""
    inner = open_jaxpr(lifted.jaxpr).invars
    return [
        scope.variable(array, var.aval)
        for array, var in zip(lifted.arrays.values(), inner, strict=False)
    ]


def _widen_call(eqn: JaxprEqn, inner: list[_Lifted], scope: _Scope) -> JaxprEqn:
    (lifted,) = inner
    return eqn.replace(invars=[*_given(lifted, scope), *eqn.invars])


def _widen_jit(eqn: JaxprEqn, inner: list[_Lifted], scope: _Scope) -> JaxprEqn:
    more = len(inner[0].arrays)
    plain = plain_jit_params()
    names = ("in_shardings", "in_layouts", "donated_invars")
    params = {
        name: (*plain[name] * more, *eqn.params[name])
        for name in names
        if name in eqn.params
    }
    return _widen_call(eqn.replace(params=eqn.params | params), inner, scope)


def _widen_scan(eqn: JaxprEqn, inner: list[_Lifted], scope: _Scope) -> JaxprEqn:
    num_consts = eqn.params["num_consts"] + len(inner[0].arrays)
    params = eqn.params | {"num_consts": num_consts}
    if "linear" in eqn.params:  # gone from newer versions of JAX
        more = (False,) * len(inner[0].arrays)
        params["linear"] = (*more, *eqn.params["linear"])
    return _widen_call(eqn.replace(params=params), inner, scope)


def _widen_while(eqn: JaxprEqn, inner: list[_Lifted], scope: _Scope) -> JaxprEqn:
    # The order of `inner` is that of the parameters, which is not ours to rely on.
    by_jaxpr = {id(lifted.jaxpr): lifted for lifted in inner}
    params, invars, start = dict(eqn.params), [], 0
    for part in ("cond", "body"):
        lifted = by_jaxpr[id(params[f"{part}_jaxpr"])]
        old = params[f"{part}_nconsts"]
        invars += [*_given(lifted, scope), *eqn.invars[start : start + old]]
        params[f"{part}_nconsts"] = old + len(lifted.arrays)
        start += old
    return eqn.replace(params=params, invars=[*invars, *eqn.invars[start:]])


def _widen_cond(eqn: JaxprEqn, inner: list[_Lifted], scope: _Scope) -> JaxprEqn:
    """All branches take the arrays of each."""
    given = [_given(lifted, scope) for lifted in inner]
    union = list(dict.fromkeys(var for variables in given for var in variables))

    def widened(lifted: _Lifted, variables: list[Var]) -> ClosedJaxpr:
        jaxpr = lifted.jaxpr.jaxpr
        own = dict(zip(variables, jaxpr.invars, strict=False))
        leading = [own.get(var) or Var(var.aval) for var in union]
        invars = [*leading, *jaxpr.invars[len(variables) :]]
        return ClosedJaxpr(jaxpr.replace(invars=invars), lifted.jaxpr.consts)

    branches = tuple(map(widened, inner, given))
    index, *operands = eqn.invars
    return eqn.replace(
        params=eqn.params | {"branches": branches}, invars=[index, *union, *operands]
    )


def _widen_solve(eqn: JaxprEqn, inner: list[_Lifted], scope: _Scope) -> JaxprEqn:
    by_jaxpr = {id(lifted.jaxpr): lifted for lifted in inner}
    lengths, invars, start = [], [], 0
    jaxprs, old_lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    for jaxpr, old in zip(jaxprs, old_lengths, strict=True):
        more = [] if jaxpr is None else _given(by_jaxpr[id(jaxpr)], scope)
        invars += [*more, *eqn.invars[start : start + old]]
        lengths.append(old + len(more))
        start += old
    params = eqn.params | {"const_lengths": type(old_lengths)(*lengths)}
    return eqn.replace(params=params, invars=[*invars, *eqn.invars[start:]])


def _widen_custom_jvp(eqn: JaxprEqn, inner: list[_Lifted], scope: _Scope) -> JaxprEqn:
    # The leading `num_consts` inputs go to the function alone: the rule captures its
    # own, and no derivative is taken in their direction.
    num_consts = eqn.params["num_consts"] + len(inner[0].arrays)
    params = eqn.params | {"num_consts": num_consts}
    return _widen_call(eqn.replace(params=params), inner, scope)


def _widen_custom_vjp(eqn: JaxprEqn, inner: list[_Lifted], scope: _Scope) -> JaxprEqn:
    more = len(inner[0].arrays)
    out_trees = eqn.params["out_trees"]

    def shifted_out_trees():
        # Residuals that are inputs are named by their place among the inputs.
        out_tree, residual_tree, *forwarded = out_trees()
        shifted = [
            [None if place is None else place + more for place in places]
            for places in forwarded
        ]
        return out_tree, residual_tree, *shifted

    eqn = eqn.replace(params=eqn.params | {"out_trees": shifted_out_trees})
    return _widen_custom_jvp(eqn, inner, scope)


_WIDEN = {
    "jit": _widen_jit,
    "pjit": _widen_jit,  # its name in older versions of JAX
    "closed_call": _widen_call,
    "core_call": _widen_call,
    "remat2": _widen_call,
    "checkpoint": _widen_call,
    "scan": _widen_scan,
    "while": _widen_while,
    "cond": _widen_cond,
    "custom_linear_solve": _widen_solve,
    "custom_jvp_call": _widen_custom_jvp,
    "custom_vjp_call": _widen_custom_vjp,
}


def _without_keys(
    closed: ClosedJaxpr, consts: tuple[Any, ...]
) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
    """The same jaxpr with key data in the place of those leading inputs that are keys.

    A program that is given typed keys is called through JAX's slow path.
    """
    jaxpr = closed.jaxpr
    invars, eqns, data = list(jaxpr.invars), [], list(consts)
    for i, const in enumerate(consts):
        if not jnp.issubdtype(invars[i].aval.dtype, jax.dtypes.prng_key):
            continue
        data[i] = jax.random.key_data(const)
        wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(const))
        (eqn,) = jax.make_jaxpr(wrap)(data[i]).eqns
        eqns.append(eqn.replace(outvars=[invars[i]]))
        invars[i] = eqn.invars[0]
    if not eqns:
        return closed, consts
    new = jaxpr.replace(invars=invars, eqns=[*eqns, *jaxpr.eqns])
    return ClosedJaxpr(new, closed.consts), tuple(data)
