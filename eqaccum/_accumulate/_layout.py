"""How equations act on arrays whose axes lie in another order.

A permutation `p` says where the axes of a value lie in an array that holds it: axis `i`
of the value is axis `p[i]` of the array, so `value = transpose(array, p)`. A rule takes
an equation and the permutation of its operands, and says what the same equation does to
the arrays: its new parameters, and the permutation of what comes out. None where it
needs the value as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

Permutation = tuple[int, ...]


@dataclass(frozen=True)
class OnArrays:
    """An equation on arrays: its parameters, and how its outputs lie."""

    params: dict[str, Any]
    out: Permutation


Rule = Callable[[JaxprEqn, Permutation], OnArrays | None]


def inverse(permutation: Sequence[int]) -> Permutation:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


def is_identity(permutation: Sequence[int]) -> bool:
    return list(permutation) == list(range(len(permutation)))


def laid_out(values: Sequence[Any], permutation: Permutation) -> tuple[Any, ...]:
    """What is listed for each axis of a value, listed for each axis of its array."""
    return tuple(values[axis] for axis in inverse(permutation))


def without(axes: Sequence[int], permutation: Permutation) -> Permutation:
    """The permutation that remains when axes of the value are gone."""
    kept = [place for axis, place in enumerate(permutation) if axis not in axes]
    return inverse(inverse(kept))


def _elementwise(eqn: JaxprEqn, permutation: Permutation) -> OnArrays:
    return OnArrays(eqn.params, permutation)


def _per_axis(*names: str) -> Rule:
    """Parameters that have one entry for each axis."""

    def rule(eqn: JaxprEqn, permutation: Permutation) -> OnArrays:
        given = {name: eqn.params.get(name) for name in names}
        new = {k: laid_out(v, permutation) for k, v in given.items() if v is not None}
        return OnArrays(eqn.params | new, permutation)

    return rule


def _along(name: str) -> Rule:
    """A parameter that names one axis or several."""

    def rule(eqn: JaxprEqn, permutation: Permutation) -> OnArrays:
        axes = eqn.params[name]
        several = isinstance(axes, tuple | list)
        new = tuple(permutation[a] for a in axes) if several else permutation[axes]
        return OnArrays(eqn.params | {name: new}, permutation)

    return rule


def _drops(name: str) -> Rule:
    """Axes that the output does not have."""

    def rule(eqn: JaxprEqn, permutation: Permutation) -> OnArrays:
        axes = [int(axis) for axis in eqn.params[name]]  # vmap leaves numpy integers
        new = tuple(sorted(permutation[axis] for axis in axes))
        return OnArrays(eqn.params | {name: new}, without(axes, permutation))

    return rule


def _reshape(eqn: JaxprEqn, permutation: Permutation) -> OnArrays | None:
    """Axes of one element may come and go, an axis may be split, and neighbours merged
    where they are neighbours in the array too."""
    if eqn.params["dimensions"] is not None:
        return None
    (operand,) = eqn.invars
    old = operand.aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    new = eqn.params["new_sizes"]
    groups = _matching_axes(old, new)
    if groups is None:
        return None
    order = [axis for axis in inverse(permutation) if old[axis] != 1]
    new_order = [axis for axis, size in enumerate(new) if size == 1]
    while order:
        # Axes that are merged must follow each other in the array as in the value.
        old_axes, new_axes = groups.get(order[0], ([], []))
        if not old_axes or order[: len(old_axes)] != old_axes:
            return None
        new_order += new_axes
        order = order[len(old_axes) :]
    params = eqn.params | {"new_sizes": tuple(new[axis] for axis in new_order)}
    return OnArrays(params, inverse(new_order))


def _matching_axes(
    old: Sequence[int], new: Sequence[int]
) -> dict[int, tuple[list[int], list[int]]] | None:
    """Which axes become which in a reshape, keyed by the first of the old ones."""
    if 0 in old:
        return None
    old_left = [axis for axis, size in enumerate(old) if size != 1]
    new_left = [axis for axis, size in enumerate(new) if size != 1]
    groups: dict[int, tuple[list[int], list[int]]] = {}
    while old_left:
        old_axes, new_axes = [old_left.pop(0)], [new_left.pop(0)]
        old_size, new_size = old[old_axes[0]], new[new_axes[0]]
        while old_size != new_size:
            if old_size < new_size:
                old_axes.append(old_left.pop(0))
                old_size *= old[old_axes[-1]]
            else:
                new_axes.append(new_left.pop(0))
                new_size *= new[new_axes[-1]]
        groups[old_axes[0]] = old_axes, new_axes
    return groups


def _broadcast(eqn: JaxprEqn, permutation: Permutation) -> OnArrays | None:
    """New axes go to the front of the array, so they must be of one element, or be in
    front of the value already."""
    shape = eqn.params["shape"]
    # JAX leaves numpy integers here where it batches.
    places = [int(place) for place in eqn.params["broadcast_dimensions"]]
    added = [axis for axis in range(len(shape)) if axis not in places]
    if any(shape[axis] != 1 and axis > min(places) for axis in added):
        return None
    order = [*added, *(places[axis] for axis in inverse(permutation))]
    params = eqn.params | {
        "shape": tuple(shape[axis] for axis in order),
        "broadcast_dimensions": tuple(range(len(added), len(shape))),
    }
    return OnArrays(params, inverse(order))


_WINDOW = ("window_dimensions", "window_strides", "padding")
_DILATIONS = ("base_dilation", "window_dilation")

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy cos cosh digamma div eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg
    nextafter not or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(
        (
            "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or "
            "reduce_xor argmax argmin"
        ).split(),
        _drops("axes"),
    ),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        _per_axis(*_WINDOW, *_DILATIONS),
    ),
    **dict.fromkeys(
        ("select_and_scatter_add", "select_and_gather_add"),
        _per_axis(*_WINDOW, *_DILATIONS),
    ),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(), _along("axis")
    ),
    "squeeze": _drops("dimensions"),
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "pad": _per_axis("padding_config"),
    "slice": _per_axis("start_indices", "limit_indices", "strides"),
    "rev": _along("dimensions"),
    "concatenate": _along("dimension"),
    "split": _along("axis"),
}
