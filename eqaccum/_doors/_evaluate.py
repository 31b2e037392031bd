"""`evaluate` and `predict`: forward only, planned as training is, in inference mode."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .. import _errors
from .._accumulate import Form, accepts_key, check_labels, narrowed
from .._data import Batch, Source, open_source
from .._mesh import on_host, placement_on
from .._step import (
    Forward,
    Settings,
    check_global_batch,
    check_settings,
    check_values,
)
from ._at_the_door import Own, at_the_door
from ._plan import prepare_loss, rows_per_step

# Rows that are looked at together where the caller does not say.
_ROWS = 4096


@at_the_door
def evaluate(
    model: PyTree,
    data: Any,
    *,
    loss: Any = None,
    key: Any = None,
    state: Any = None,
    global_batch: Own[int | None, ...] = None,
    example_weights: Any = None,
    in_axes: PyTree = 0,
    has_aux: bool = False,
    microbatch: Own[int | str, ...] = "largest",
    memory_limit: Own[int | str | None, ...] = None,
    compute_dtype: Any = None,
    axis_name: str = "batch",
    mesh: Mesh | None = None,
    inference: bool = True,
) -> dict[str, float]:
    """The mean loss over data, and the auxiliary outputs that are numbers.

    Each mean is one division of the sums over all rows. The model is put into
    inference mode (`eqx.nn.inference_mode`), the one passed in is untouched.

    **Arguments:**

    - `model`, `data`, `loss`, `state`, `example_weights`, `in_axes`, `has_aux`,
        `microbatch`, `memory_limit`, `compute_dtype`, `axis_name`, `mesh`: as in
        `fit`.
    - `key`: a PRNG key; None is `jax.random.key(0)`: the same keys each time.
    - `global_batch`: rows that are looked at together; a `coupled` loss needs it, and
        its values are averaged by rows. Other losses do not depend on it.
    - `inference`: False leaves the model's mode as it is.

    **Returns:**

    A dict of floats: `"loss"`, and the names of the auxiliary outputs.

    **Raises:**

    `InputError` where an argument cannot work, `DoesNotFit` where one example is over
    the limit.

    !!! Example

        ```python
        eqaccum.evaluate(result.model, (x, y), state=result.state)["loss"]
        ```
    """
    check_values(model, state)
    _refuse_fastest("evaluate", microbatch)
    source = open_source(data, in_axes=in_axes, example_weights=example_weights)
    if not source.has_values:
        raise _errors.only_shapes()
    if global_batch is None and isinstance(loss, Form):
        raise _errors.evaluate_needs_global_batch()
    rows = _rows(global_batch, source)
    evaluation = Evaluation(
        model,
        state,
        source,
        loss=loss,
        global_batch=rows,
        has_aux=has_aux,
        microbatch=microbatch,
        memory_limit=memory_limit,
        compute_dtype=compute_dtype,
        axis_name=axis_name,
        inference=inference,
        mesh=mesh,
    )
    return evaluation(model, state, key=key)


class Evaluation:
    """An evaluation that can be run again as the model changes, compiled once."""

    def __init__(
        self,
        model: PyTree,
        state: Any,
        source: Source,
        *,
        loss: Any,
        global_batch: int,
        has_aux: bool,
        microbatch: Any,
        memory_limit: Any,
        compute_dtype: Any,
        axis_name: str,
        inference: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        if source.kind == "iterable" and placement_on(mesh).is_shared:
            raise _errors.iterable_in_processes("evaluate or validation=")
        self._source = source
        self._rows = global_batch
        self._inference = inference
        moded = self._moded(model)
        chosen = prepare_loss(
            loss,
            moded,
            state,
            source,
            compute_dtype=compute_dtype,
            axis_name=axis_name,
        )
        if chosen.classes is not None and source.kind == "columns":
            last = len(source.layout.row_structs) - 1
            check_labels(source.column_chunks(last), chosen.classes)
        self._forward = _forward(
            chosen.fn,
            global_batch=global_batch,
            has_aux=has_aux,
            microbatch=microbatch,
            memory_limit=memory_limit,
            compute_dtype=compute_dtype,
            axis_name=axis_name,
            mesh=mesh,
        )

    def prepare(self, model: PyTree, state: Any) -> None:
        """Plans and compiles, so that what cannot work fails before training."""
        self._forward.prepare(self._moded(model), state, self._source.layout)

    def __call__(
        self, model: PyTree, state: Any, *, key: Any = None
    ) -> dict[str, float]:
        batches = self._source.epoch(0, global_batch=self._rows)
        totals = self._forward.totals(self._moded(model), state, batches, key=key)
        out = {"loss": totals.loss}
        for path, value in jax.tree_util.tree_leaves_with_path(totals.metrics):
            if np.ndim(value) == 0:
                name = jax.tree_util.keystr(path, simple=True, separator=".") or "aux"
                out[f"aux.{name}" if name in out else name] = float(value)
        return out

    def _moded(self, model: PyTree) -> PyTree:
        return eqx.nn.inference_mode(model) if self._inference else model


@at_the_door
def predict(
    model: Own[Callable, ...],
    x: Any,
    *,
    key: Any = None,
    state: Any = None,
    in_axes: PyTree = 0,
    global_batch: Own[int | None, ...] = None,
    microbatch: Own[int | str, ...] = "largest",
    memory_limit: Own[int | str | None, ...] = None,
    compute_dtype: Any = None,
    axis_name: str = "batch",
    mesh: Mesh | None = None,
    inference: bool = True,
) -> Any:
    """The model's outputs for all rows, in order, as numpy arrays.

    **Arguments:**

    - `model`: any callable pytree, called as `model(x)` for one row; `key=` and the
        state are passed if it accepts them. It may be a part, such as `model.query`.
    - `x`: as `data` in `fit`: a pytree of arrays, a data set, or an iterable.
    - `key`, `state`, `in_axes`, `global_batch`, `microbatch`, `memory_limit`,
        `compute_dtype`, `axis_name`, `mesh`, `inference`: as in `evaluate`.

    **Returns:**

    A pytree of numpy arrays of shape (rows, ...), of the structure of one output.

    **Raises:**

    `InputError` where an argument cannot work, `DoesNotFit` where one row is over the
    limit.

    !!! Example

        ```python
        logits = eqaccum.predict(result.model, x)
        ```
    """
    if not callable(model):
        raise _errors.nothing_to_call(model)
    check_values(model, state)
    _refuse_fastest("predict", microbatch)
    source = open_source(x, in_axes=in_axes)
    if not source.has_values:
        raise _errors.only_shapes()
    if source.kind == "iterable" and placement_on(mesh).is_shared:
        raise _errors.iterable_in_processes("predict")
    rows = _rows(global_batch, source)
    forward = _forward(
        _Prediction(accepts_key(model), state is not None, compute_dtype),
        global_batch=rows,
        has_aux=True,
        microbatch=microbatch,
        memory_limit=memory_limit,
        compute_dtype=compute_dtype,
        axis_name=axis_name,
        mesh=mesh,
    )
    moded = eqx.nn.inference_mode(model) if inference else model
    batches = source.epoch(0, global_batch=rows)
    parts = list(_outputs(forward, moded, state, batches, key))
    if not parts:
        raise _errors.nothing_to_predict()
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _outputs(
    forward: Forward, model: Any, state: Any, batches: Iterator[Batch], key: Any
) -> Iterator[PyTree]:
    for ready, batch, out in forward.run(model, state, batches, key=key):
        rows = [
            on_host(leaf).reshape(-1, *leaf.shape[2:])[: batch.count]
            for leaf in out.aux_rows
        ]
        boxed = ready.traced.aux_spec.assemble([], rows)
        yield jax.tree.map(
            lambda leaf: leaf.value[:, 0] if leaf.scalar else leaf.value,
            boxed,
            is_leaf=lambda node: isinstance(node, _Row),
        )


class _Row(eqx.Module):
    """An output of one row; a scalar travels as an array of one element."""

    value: Any
    scalar: bool = eqx.field(static=True)


class _Prediction(eqx.Module):
    """The model's output as auxiliary rows of a loss that is always 0."""

    takes_key: bool = eqx.field(static=True)
    has_state: bool = eqx.field(static=True)
    compute_dtype: Any = eqx.field(static=True)

    def __call__(self, model: Any, *rest: Any) -> Any:
        *state, example, key = rest
        example = narrowed(example, self.compute_dtype)
        named = {"key": key} if self.takes_key else {}
        out = model(example, *state, **named)
        if self.has_state:
            return jnp.zeros(()), out[1], _boxed(out[0])
        return jnp.zeros(()), _boxed(out)


def _forward(
    loss: Any,
    *,
    global_batch: int,
    has_aux: bool,
    microbatch: Any,
    memory_limit: Any,
    compute_dtype: Any,
    axis_name: str,
    mesh: Mesh | None,
) -> Forward:
    placement = placement_on(mesh)
    check_settings(
        loss=loss,
        global_batch=global_batch,
        placement=placement,
        microbatch=microbatch,
        memory_limit=memory_limit,
        compute_dtype=compute_dtype,
    )
    return Forward(
        Settings(
            loss=loss,
            optimizer=optax.identity(),
            global_batch=global_batch,
            placement=placement,
            has_aux=has_aux,
            trainable=True,
            microbatch=microbatch,
            memory_limit=memory_limit,
            compute_dtype=compute_dtype,
            axis_name=axis_name,
        )
    )


def _boxed(out: PyTree) -> PyTree:
    return jax.tree.map(lambda a: _Row(jnp.atleast_1d(a), jnp.ndim(a) == 0), out)


def _rows(global_batch: Any, source: Source) -> int:
    if global_batch is not None:
        check_global_batch(global_batch)
    return rows_per_step(_ROWS if global_batch is None else global_batch, source)


def _refuse_fastest(door: str, microbatch: Any) -> None:
    if microbatch == "fastest":
        raise _errors.fastest_only_in_training(door)
