"""The structure of a batch, and how a pytree is read into it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.tree_util as jtu
import numpy as np

from .. import _errors
from . import _leaves

Role = Literal["rows", "whole", "static"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a batch.

    `struct` is the shape of one example's part ("rows") or of the array ("whole");
    `value` is the very Python value ("static"). It is compared by type and text:
    1, 1.0 and True are equal in Python and trace differently.
    """

    role: Role
    name: str
    struct: jax.ShapeDtypeStruct | None
    value: Any = dataclasses.field(default=None, compare=False)
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The structure of a batch: hashable, and known without its values.

    Every leaf has one of three roles. "rows": axis 0 counts examples. "whole": an array
    without that axis, passed whole to every pass. "static": strings and Python
    numbers, part of the program; None is structure.
    """

    treedef: Any  # pyright takes no PyTreeDef as a type
    leaves: tuple[Leaf, ...]

    @functools.cached_property
    def row_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and final dtype of one example's part of each row leaf."""
        return tuple(
            x.struct for x in self.leaves if x.role == "rows" and x.struct is not None
        )

    @functools.cached_property
    def whole_structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and final dtype of each array without an example axis."""
        return tuple(
            x.struct for x in self.leaves if x.role == "whole" and x.struct is not None
        )

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Where each row leaf is in the pytree."""
        return tuple(x.name for x in self.leaves if x.role == "rows")

    def unflatten(self, row_leaves: Sequence[Any], whole_leaves: Sequence[Any]) -> Any:
        """The pytree with these leaves: of a batch, or of one example."""
        rows, whole = iter(row_leaves), iter(whole_leaves)
        leaves = [
            leaf.value
            if leaf.role == "static"
            else next(rows if leaf.role == "rows" else whole)
            for leaf in self.leaves
        ]
        return self.treedef.unflatten(leaves)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # A layout is looked up at every step.
        return hash((self.treedef, self.leaves))


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A pytree that was read: its layout, and its leaves by role.

    `rows` share the user's memory; `whole` are copies.
    """

    layout: Layout
    count: int
    rows: list[Any]
    whole: list[Any]

    @property
    def has_values(self) -> bool:
        """Whether there is more than shapes."""
        return not any(
            isinstance(x, jax.ShapeDtypeStruct) for x in (*self.rows, *self.whole)
        )


def read(tree: Any, *, in_axes: Any, what: str, may_be_empty: bool = False) -> Flat:
    """Reads a pytree of arrays whose axis 0 counts examples.

    `what` is what a message calls it. Traced arrays are read as others are.
    """
    tree = plain_mapping(tree)
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=_leaves.is_number_list)
    axes = _axes(in_axes, leaves, treedef, what)
    names = leaf_names(treedef)
    rows, whole, specs = [], [], []
    for name, leaf, axis in zip(names, leaves, axes, strict=True):
        if not (_leaves.is_array(leaf) or isinstance(leaf, list)):
            specs.append(_static(leaf, name, what))
            continue
        array = _leaves.as_array(leaf, name=name, what=what)
        final = _leaves.final_dtype(array.dtype, name=name, what=what)
        _leaves.check_range(array, final, name=name, what=what)
        if axis == 0 and array.shape:
            specs.append(("rows", array.shape[1:], final))
            rows.append(array)
        else:
            specs.append(("whole", array.shape, final))
            shapes_only = isinstance(array, jax.ShapeDtypeStruct)
            whole.append(array if shapes_only else _leaves.copy(array, final))
    layout = layout_of(treedef, tuple(specs))
    if not rows:
        raise _errors.no_rows(what, in_axes)
    count = rows[0].shape[0]
    if any(x.shape[0] != count for x in rows):
        lengths = [(n, x.shape[0]) for n, x in zip(layout.paths, rows, strict=True)]
        raise _errors.lengths_differ(lengths, what)
    if count == 0 and not may_be_empty:
        raise _errors.empty_data(what)
    return Flat(layout, count, rows, whole)


def plain_mapping(tree: Any) -> Any:
    """A mapping that JAX does not know (an `.npz` file, a tokeniser's) as a dict."""
    if isinstance(tree, Mapping) and jtu.all_leaves([tree]):
        return dict(tree)
    return tree


@functools.lru_cache(maxsize=512)
def layout_of(treedef: Any, specs: tuple[Any, ...]) -> Layout:
    """The one layout of this structure and these (role, shape, dtype)."""
    leaves = []
    for name, spec in zip(leaf_names(treedef), specs, strict=True):
        if isinstance(spec, _Static):
            leaves.append(Leaf("static", name, None, spec.value, spec.text))
        else:
            role, shape, dtype = spec
            leaves.append(Leaf(role, name, jax.ShapeDtypeStruct(shape, dtype)))
    return Layout(treedef, tuple(leaves))


@functools.lru_cache(maxsize=512)
def leaf_names(treedef: Any) -> tuple[str, ...]:
    """What to call each leaf in a message."""
    tree = treedef.unflatten(range(treedef.num_leaves))
    paths, _ = jtu.tree_flatten_with_path(tree)
    return tuple(jtu.keystr(path) or _errors.THE_ARRAY for path, _ in paths)


@dataclasses.dataclass(frozen=True)
class _Static:
    value: Any = dataclasses.field(compare=False)
    text: str


def _static(leaf: Any, name: str, what: str) -> _Static:
    if not isinstance(leaf, (str, bytes, bool, int, float, complex)):
        raise _errors.not_an_array(name, leaf, what)
    return _Static(leaf, f"{type(leaf).__name__} {leaf!r}")


# `in_axes` under a name of its own: None is no leaf of a pytree.
_WHOLE = -1


def _axes(in_axes: Any, leaves: list[Any], treedef: Any, what: str) -> Sequence[int]:
    """The axis of each leaf, from a pytree prefix as in `jax.vmap`."""
    if type(in_axes) is int and in_axes == 0:
        return (0,) * len(leaves)
    prefix = _prefix(in_axes)
    tree = treedef.unflatten(range(len(leaves)))
    try:
        return jtu.tree_leaves(jax.tree.broadcast(prefix, tree))
    except ValueError:
        raise _errors.in_axes_structure(in_axes, treedef, what) from None


def marks_whole(in_axes: Any) -> bool:
    """Whether `in_axes` marks anything as having no example axis."""
    return _WHOLE in jtu.tree_leaves(_prefix(in_axes))


def _prefix(in_axes: Any) -> Any:
    return jtu.tree_map(_axis, in_axes, is_leaf=lambda axis: axis is None)


def _axis(axis: Any) -> int:
    if axis is None:
        return _WHOLE
    if isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) and axis == 0:
        return 0
    raise _errors.in_axes_value(axis)
