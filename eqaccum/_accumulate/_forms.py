"""The forms of a loss, brought to one: a microbatch's totals and weights."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from .. import _errors
from .._tree import Partition
from .._types import Mean, Means, Own, accumulator_dtype, wider
from . import _aux
from ._records import Form


class Batched(eqx.Module):
    fn: Any
    weighted: bool = eqx.field(static=True)


class SharedKey(eqx.Module):
    fn: Any


def batched(fn: Own[Callable, ...], *, weighted: bool = False) -> Batched:
    """A loss that is written for a whole microbatch instead of one example.

    It still must be a sum over rows: what a row contributes may not depend on the
    other rows, for how many there are is eqaccum's choice.

    **Arguments:**

    - `fn`: called as `fn(model, batch, keys)`, with `state` after the model where
        there is one; batch leaves have shape (n, ...), `keys` shape (n,). Returns
        values of shape (n,), or a `Mean` of two (n,) arrays.
    - `weighted`: `fn` takes the rows' weights, float32 (n,), last. It may then also
        return one scalar `Mean` in which the weights are already in.

    **Returns:**

    A loss for `fit`, `make_step`, `value_and_grad`, `evaluate` and `check`.

    **Raises:**

    `InputError` if `fn` cannot be called; what it returns is checked when it is traced,
    before anything runs.

    !!! Example

        ```python
        def per_row(model, batch, keys):
            x, y = batch
            return jnp.mean((jax.vmap(model)(x) - y) ** 2, axis=-1)

        eqaccum.fit(model, data, global_batch=512, loss=eqaccum.batched(per_row))
        ```
    """
    if not callable(fn):
        raise _errors.loss_not_callable(fn)
    return Batched(fn, weighted)


def shared_key(fn: Own[Callable, ...]) -> Any:
    """A loss that also takes a key shared by all examples of the step, last.

    **Arguments:**

    - `fn`: a loss, or a `batched` one. The step's key does not depend on the
        microbatch, so noise drawn from it is the same for the whole global batch.

    **Returns:**

    What `fn` is, a loss or a `batched` one.

    **Raises:**

    `InputError` if `fn` cannot be called.

    !!! Example

        ```python
        def loss(model, example, key, step_key):
            direction = jax.random.normal(step_key, example.shape)
            return jnp.sum(model(example + direction) ** 2)

        eqaccum.fit(model, data, global_batch=512, loss=eqaccum.shared_key(loss))
        ```
    """
    if isinstance(fn, Batched):
        return Batched(SharedKey(fn.fn), fn.weighted)
    if not callable(fn):
        raise _errors.loss_not_callable(fn)
    return SharedKey(fn)


@dataclass(frozen=True)
class Options:
    """What the user said about the loss's arguments and results."""

    has_aux: bool
    axis_name: Any


@dataclass(frozen=True)
class Terms:
    """What one microbatch adds: one total and weight for each `Mean` of the loss."""

    totals: list[Float[Array, ""]]
    weights: list[Float[Array, ""]]
    state: list[Array]
    aux: _aux.AuxTotals
    aux_spec: _aux.AuxSpec


@dataclass(frozen=True)
class Rows:
    """The rows of one microbatch, as the user's loss will see them."""

    leaves: list[Array]
    keys: Key[Array, "n"] | None
    shared: Key[Array, ""] | None
    weights: Float[Array, "n"]
    example: Callable[[list[Array]], PyTree]  # row leaves -> the user's structure


@dataclass(frozen=True)
class _Output:
    """One call's results: arrays of one example, or of n with the axis in front."""

    totals: list[Array]
    weights: list[Array]
    state: list[Array]
    aux: list[Array]
    aux_spec: _aux.AuxSpec


def evaluate(
    loss: Any,
    model: PyTree,
    state: list[Array],
    rows: Rows,
    *,
    options: Options,
    state_partition: Partition | None,
) -> Terms:
    """The totals of one microbatch, under whatever form the loss has."""
    caller = _Caller(loss, model, state, rows, options, state_partition)
    if isinstance(loss, Batched):
        return _add_up(caller.batch(loss), rows.weights, weighted=loss.weighted)
    return _add_up(caller.examples(), rows.weights, weighted=False)


@dataclass(frozen=True)
class _Caller:
    loss: Any
    model: PyTree
    state: list[Array]
    rows: Rows
    options: Options
    state_partition: Partition | None

    def examples(self) -> _Output:
        spec: list[_aux.AuxSpec] = []

        def one(leaves: list[Array], key: Any) -> dict[str, list[Array]]:
            args = [self.rows.example(leaves), key]
            out = self._unpack(self._call(self.loss, args, ()), row_axis=False)
            spec.append(out.aux_spec)
            return {
                "totals": out.totals,
                "weights": out.weights,
                "state": out.state,
                "aux": out.aux,
            }

        axes = {"totals": 0, "weights": 0, "aux": 0, "state": None}
        mapped = jax.vmap(
            one, in_axes=(0, 0), out_axes=axes, axis_name=self.options.axis_name
        )
        try:
            out = mapped(self.rows.leaves, self.rows.keys)
        except ValueError as error:
            if "out_axes" in str(error) and self.state_partition is not None:
                raise _errors.state_differs(error) from error
            self._explain(error)
            raise
        except Exception as error:
            self._explain(error)
            raise
        return _Output(**out, aux_spec=spec[-1])

    def batch(self, loss: Batched) -> _Output:
        last = (self.rows.weights,) if loss.weighted else ()
        args = [self.rows.example(self.rows.leaves), self.rows.keys]
        return self._unpack(self._call(loss.fn, args, last), row_axis=True)

    def _call(self, fn: Any, args: list[Any], last: tuple[Any, ...]) -> Any:
        head = [self.model]
        if self.state_partition is not None:  # a clone: a consumed State raises
            head.append(self.state_partition.join([], self.state))
        if isinstance(fn, SharedKey):
            return fn.fn(*head, *args, *last, self.rows.shared)
        return fn(*head, *args, *last)

    def _unpack(self, out: Any, *, row_axis: bool) -> _Output:
        value, state, aux = self._sorted(out)
        means = _means(value, row_axis=row_axis)
        leaves = _aux.read_aux(
            aux,
            rows=self.rows.weights.shape[0] if row_axis else None,
            summed=row_axis and means[0].total.ndim == 0,
        )
        new_state: list[Array] = []
        if self.state_partition is not None:
            new_state = state_leaves(self.state_partition, self.state, state)
        return _Output(
            [mean.total for mean in means],
            [mean.weight for mean in means],
            new_state,
            leaves.arrays,
            leaves.spec,
        )

    def _sorted(self, out: Any) -> tuple[Any, Any, Any]:
        """(value, state, aux) out of what the loss returned."""
        has_aux, has_state = self.options.has_aux, self.state_partition is not None
        expected = 1 + has_aux + has_state
        got = len(out) if isinstance(out, tuple) else 1
        if got != expected:
            raise _errors.loss_results(out, has_aux=has_aux, has_state=has_state)
        if has_state and has_aux:
            return out[0], out[1], out[2]
        if has_state:
            return out[0], out[1], None
        if has_aux:
            if isinstance(out[1], eqx.nn.State):
                raise _errors.state_not_passed()
            return out[0], None, out[1]
        return out, None, None

    def _explain(self, error: Exception) -> None:
        """Raises the reason behind the error if the loss was written for a batch."""
        if isinstance(error, _errors.EqaccumError) and not isinstance(
            error, _errors.LossShapeError
        ):
            return
        rows = self.rows

        def whole() -> Any:
            out = self._call(self.loss, [rows.example(rows.leaves), rows.keys], ())
            return self._sorted(out)[0]

        try:
            value = jax.eval_shape(whole)
        except Exception:  # it fails on a batch as well: the user's error stands
            return
        if isinstance(value, Mean | Means) or getattr(value, "ndim", 2) <= 1:
            raise _errors.written_for_batch(self.loss, error) from error


def state_leaves(partition: Partition, old: list[Array], state: Any) -> list[Array]:
    """The leaves of a state that the user's function returned, checked."""
    if jax.tree.structure(state) != partition.treedef:
        raise _errors.state_structure(partition.treedef, jax.tree.structure(state))
    new = [jnp.asarray(leaf) for leaf in partition.split(state).frozen]
    for leaf, was, value in zip(partition.leaves, old, new, strict=True):
        if value.shape != was.shape or value.dtype != was.dtype:
            raise _errors.state_leaf(leaf.path, was, value)
    return [value.astype(value.dtype) for value in new]  # no weak types


def check_loss(loss: Any) -> None:
    """Refuses what is not a loss of any form."""
    if not isinstance(loss, Batched | SharedKey | Form) and not callable(loss):
        raise _errors.loss_not_callable(loss)


def check_arguments(loss: Any, *, has_state: bool) -> None:
    """Refuses a loss that cannot be called with the arguments of its form."""
    if isinstance(loss, Form):
        return loss.check_arguments(has_state=has_state)
    fn, names = loss, ["model"]
    if has_state:
        names.append("state")
    if isinstance(fn, Batched):
        names += ["batch", "keys"] + (["weights"] if fn.weighted else [])
        fn = fn.fn
    else:
        names += ["example", "key"]
    signature_accepts(fn, names, has_state=has_state)


def signature_accepts(fn: Any, names: list[str], *, has_state: bool) -> None:
    """Refuses a function that cannot be called with these positional arguments."""
    if isinstance(fn, SharedKey):
        names = [*names, "step_key"]
        fn = fn.fn
    check_loss(fn)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins tell nothing
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise _errors.loss_arguments(fn, signature, names, has_state) from error


def _means(value: Any, *, row_axis: bool) -> list[Mean]:
    """The loss as a list of `Mean`s with float totals and constant weights."""
    terms = list(value.terms) if isinstance(value, Means) else [value]
    out = []
    for term in terms:
        if isinstance(term, Mean):
            total = _total(term.total, row_axis=row_axis)
            weight = _weight(term.weight, total)
        else:
            total = _total(term, row_axis=row_axis)
            if row_axis and total.ndim == 0:
                raise _errors.batched_scalar()
            weight = jnp.ones(total.shape, total.dtype)
        out.append(Mean(total, weight))
    return out


def _total(value: Any, *, row_axis: bool) -> Array:
    if not isinstance(value, jax.Array | float) and not hasattr(value, "dtype"):
        raise _errors.loss_value(value)
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise _errors.loss_dtype(array.dtype)
    if array.ndim > (1 if row_axis else 0):
        raise _errors.loss_shape(array.shape, row_axis=row_axis)
    return array.astype(accumulator_dtype(array.dtype))


def _weight(value: Any, total: Array) -> Array:
    weight = jax.lax.stop_gradient(jnp.asarray(value))
    if jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise _errors.loss_dtype(weight.dtype)
    if weight.shape != total.shape:
        raise _errors.mean_shapes(total.shape, weight.shape)
    # As wide as the total: what is divided by is summed as exactly as what is divided.
    return weight.astype(wider(total.dtype, weight.dtype))


def _add_up(out: _Output, weights: Array, *, weighted: bool) -> Terms:
    totals, sums = [], []
    for total, weight in zip(out.totals, out.weights, strict=True):
        if total.ndim == 0:  # the weights are already in
            if not weighted:
                raise _errors.batched_scalar()
            totals.append(total)
            sums.append(weight)
            continue
        if total.shape != weights.shape:
            raise _errors.batched_rows(total.shape, weights.shape)
        totals.append(jnp.sum(total * weights.astype(total.dtype)))
        sums.append(jnp.sum(weight * weights.astype(weight.dtype)))
    first = out.weights[0]
    scale = first if first.ndim else jnp.ones_like(weights)
    loss_weights = weights.astype(scale.dtype) * scale
    aux = _aux.total(out.aux_spec, out.aux, weights=weights, loss_weights=loss_weights)
    return Terms(totals, sums, out.state, aux, out.aux_spec)
