"""`load` for inference; `save` and `restore` for loops of one's own."""

import os
from collections.abc import Mapping
from typing import Any, overload

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .. import _errors
from .._doors import at_the_door
from .._tree import Role, partition
from .._types import Model, Own, TrainState
from ._checkpoint import directory, find, save_state
from ._leaves import check_same, check_train, put_back, specs_of


@overload
def load(
    path: Own[str | os.PathLike, ...], model: Model, *, state: None = None
) -> Model: ...


@overload
def load(
    path: Own[str | os.PathLike, ...],
    model: Model,
    *,
    state: Own[eqx.nn.State, ...],
) -> tuple[Model, eqx.nn.State]: ...


@at_the_door
def load(
    path: Own[str | os.PathLike, ...],
    model: Any,
    *,
    state: Own[eqx.nn.State | None, ...] = None,
) -> Any:
    """The model that a run trained, out of its newest checkpoint.

    **Arguments:**

    - `path`: the directory that `fit(checkpoint=...)` or `eqaccum.save` wrote to, or
        the folder of one checkpoint in it.
    - `model`: a model of the same structure, which gives everything but the numbers;
        its arrays may be `jax.ShapeDtypeStruct`s.
    - `state`: the model's `eqx.nn.State`, if it is wanted too.

    **Returns:**

    The model; with `state=`, the pair `(model, state)`. What was passed in stays as it
    is.

    **Raises:**

    `InputError` for a model of another structure, naming the first leaf that differs;
    `CheckpointError` where there is no checkpoint, or it is foreign or damaged.

    !!! Example

        ```python
        model = eqaccum.load("runs/a", model)
        predictions = eqaccum.predict(model, x)
        ```
    """
    saved = find(directory("path", path))
    where = os.fspath(saved.folder)
    if state is not None and not isinstance(state, eqx.nn.State):
        raise _errors.bad_state_to_load(state, where)
    trees = {"model": model} if state is None else {"model": model, "state": state}
    names: list[str] = []
    for prefix, tree in trees.items():
        there = {n: s for n, s in saved.train_leaves.items() if _is_of(prefix, n)}
        check_same(specs_of(prefix, tree), there, where=where)
        names += there
    values = saved.arrays(names)
    filled = [_filled(prefix, tree, values) for prefix, tree in trees.items()]
    return filled[0] if state is None else tuple(filled)


def _is_of(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith((f"{prefix}.", f"{prefix}["))


def _filled(prefix: str, tree: PyTree, values: Mapping[str, np.ndarray]) -> PyTree:
    """The tree with these values, each where its leaf is now."""
    parts = partition(tree)
    leaves = parts.split(tree).frozen
    paths = parts.paths(Role.FROZEN)
    placed = [
        _placed(values[prefix + path], leaf)
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return parts.join([], placed)


def _placed(value: np.ndarray, like: Any) -> jax.Array:
    sharding = getattr(like, "sharding", None)
    return jax.device_put(value, sharding, may_alias=False)


@at_the_door
def save(path: Own[str | os.PathLike, ...], train: Own[TrainState, ...]) -> None:
    """Saves the `TrainState` of a loop of one's own, and returns when it is written.

    What was saved at this path before is replaced, and stays until the new one is
    complete. The place in the data is the loop's to remember: `train.batch_index` is
    the number of batches seen.

    **Arguments:**

    - `path`: a directory, made if need be.
    - `train`: the newest `TrainState`.

    **Raises:**

    `InputError` for something else than a `TrainState`, and for a directory of a fit;
    `CheckpointError` where nothing can be written.

    !!! Example

        ```python
        step = eqaccum.make_step(loss, optimizer, global_batch=4096)
        train = step.init(model, key)
        for batch in batches:
            train, metrics = step(train, batch)
            if train.step % 500 == 0:
                eqaccum.save("runs/own", train)
        ```
    """
    if not isinstance(train, TrainState):
        raise _errors.not_a_train_state(train)
    save_state(directory("path", path), train)


@at_the_door
def restore(
    path: Own[str | os.PathLike, ...], *, like: Own[TrainState[Model], ...]
) -> TrainState[Model]:
    """A `TrainState` as it was saved, bit for bit.

    **Arguments:**

    - `path`: the directory that `eqaccum.save` or `fit(checkpoint=...)` wrote to, or
        the folder of one checkpoint in it.
    - `like`: a `TrainState` of the same structure, such as a fresh `step.init(model)`;
        it says where the arrays go, and may have been consumed.

    **Returns:**

    The `TrainState`, on the devices of `like`.

    **Raises:**

    `InputError` where the structure is another one, naming the first leaf that differs;
    `CheckpointError` where there is no checkpoint, or it is foreign or damaged.

    !!! Example

        ```python
        train = eqaccum.restore("runs/own", like=step.init(model))
        ```
    """
    if not isinstance(like, TrainState):
        raise _errors.not_a_train_state(like)
    saved = find(directory("path", path))
    there = saved.train_leaves
    check_train(like, there, where=os.fspath(saved.folder))
    return put_back(like, saved.arrays(list(there)))
