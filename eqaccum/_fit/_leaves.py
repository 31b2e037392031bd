"""The leaves of a `TrainState` by name: compared with saved ones and put back."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _errors
from .._tree import Role, partition, struct
from .._types import TrainState

_BANK = "bank_leaves"
_NOISE = "noise_leaves"


@dataclass(frozen=True)
class Spec:
    """What a leaf must be to take the place of another."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def spec_of(leaf: Any) -> Spec:
    """The spec of an array or struct."""
    return Spec(tuple(leaf.shape), str(leaf.dtype))


def specs_of(prefix: str, tree: PyTree) -> dict[str, Spec]:
    """The array leaves of a model or state by name, as the programs see them."""
    parts = partition(tree)
    leaves = parts.split(tree).frozen
    return {
        prefix + path: spec_of(struct(leaf))
        for path, leaf in zip(parts.paths(Role.FROZEN), leaves, strict=True)
    }


def named_leaves(train: TrainState) -> dict[str, Any]:
    """Every leaf of a `TrainState` under the name that its user knows it by."""
    return dict(zip(_names(train), jax.tree.leaves(train), strict=True))


def _names(train: TrainState) -> list[str]:
    """The names, in the order of `jax.tree.leaves`."""
    structure = train.structure
    state = () if structure.state is None else structure.state.paths(Role.FROZEN)
    known = {
        "trainable_leaves": ("model", structure.model.paths(Role.TRAINABLE)),
        "frozen_leaves": ("model", structure.model.paths(Role.FROZEN)),
        "state_leaves": ("state", state),
        "opt_leaves": ("opt_state", structure.optimizer.paths(Role.FROZEN)),
    }
    names: list[str] = []
    for field in dataclasses.fields(train):
        prefix, paths = known.get(field.name, (field.name, None))
        if paths is None:
            value = getattr(train, field.name)
            with_paths = jax.tree_util.tree_leaves_with_path(value)
            paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
        names += [prefix + path for path in paths]
    return names


def check_same(
    here: Mapping[str, Spec], saved: Mapping[str, Spec], *, where: str
) -> None:
    """Refuses saved leaves that are not those of here, by the first that differs."""
    for name, spec in here.items():
        if name not in saved:
            raise _errors.other_leaf(where, name, "absent", str(spec))
        if saved[name] != spec:
            raise _errors.other_leaf(where, name, str(saved[name]), str(spec))
    for name, spec in saved.items():
        if name not in here:
            raise _errors.other_leaf(where, name, str(spec), "absent")


def check_train(like: TrainState, saved: Mapping[str, Spec], *, where: str) -> None:
    """`check_same` for a whole state.

    A bank may be empty: it begins so. The averages of the gradient's noise may be
    asked for from here on, or no longer.
    """
    here = {name: spec_of(leaf) for name, leaf in named_leaves(like).items()}
    both = all(any(map(_in_bank, names)) for names in (here, saved))

    def compared(specs: Mapping[str, Spec]) -> dict[str, Spec]:
        names = [n for n in specs if not _of_noise(n) and (both or not _in_bank(n))]
        return {name: specs[name] for name in names}

    check_same(compared(here), compared(saved), where=where)


def put_back(like: TrainState, values: Mapping[str, np.ndarray]) -> TrainState:
    """A state of these values, each placed where the leaf of `like` is.

    `like` gives structure and placement only; its own values may be gone already.
    """
    bank = [leaf for name, leaf in values.items() if _in_bank(name)]
    first = like.trainable_leaves[0]
    noise = [
        placed_like(values.get(name, np.zeros(leaf.shape, leaf.dtype)), leaf)
        for name, leaf in named_leaves(like).items()
        if _of_noise(name)
    ]
    like = dataclasses.replace(like, bank_leaves=[], noise_leaves=[])
    leaves = [
        placed_like(values[name], leaf) for name, leaf in named_leaves(like).items()
    ]
    train = jax.tree.unflatten(jax.tree.structure(like), leaves)
    bank = [placed_like(leaf, first) for leaf in bank]
    return dataclasses.replace(train, bank_leaves=bank, noise_leaves=noise)


def placed_like(value: np.ndarray, like: Any) -> Any:
    """A copy of the value on the devices of `like`; numpy where that is numpy."""
    if not isinstance(like, jax.Array):
        return np.asarray(value)
    sharding = like.sharding
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding, may_alias=False)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index]
    )


def discard(train: TrainState) -> None:
    """Frees the arrays of a state that nobody else holds; their shapes stay known."""
    for leaf in jax.tree.leaves(train):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def is_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of the leaves was consumed by a step."""
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


def _in_bank(name: str) -> bool:
    return name.startswith(_BANK + "[")


def _of_noise(name: str) -> bool:
    return name.startswith(_NOISE + "[")
