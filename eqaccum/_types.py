"""The words of the library: what a loss returns and what a step gives back."""

import functools
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from . import _errors
from ._tree import Partition

if TYPE_CHECKING:
    from typing import Annotated as Own
else:

    class Own:
        """`Own[int | None, ...]`: a type that eqaccum checks itself, in its own words.

        A type checker reads the type; at run time everything is let through to there.
        """

        def __class_getitem__(cls, types: Any) -> Any:
            return Any


# The user's own type of model: what goes in comes out again.
Model = TypeVar("Model")


class Mean(eqx.Module):
    """A sum and what to divide it by: `sum(total) / sum(weight)`.

    A loss returns it when its examples do not all count the same (tokens, valid
    pixels). Over a global batch with example weights `w` the loss is
    `sum_i w_i total_i / sum_i w_i weight_i`: sums inside, one division at the end.
    Means add and scale; each one in a sum is divided by its own global weight.

    **Arguments:**

    - `total`: the sum of one example, a scalar (inside `batched`: one per row).
    - `weight`: how much it weighs (its tokens), a scalar, not negative. Integers
        and booleans become float32. It is data: no gradient flows through it.

    !!! Example

        ```python
        def loss(model, example, key):
            tokens, mask = example
            nll = token_losses(model(tokens[:-1]), tokens[1:])
            return eqaccum.Mean(jnp.sum(nll, where=mask[1:]), jnp.sum(mask[1:]))
        ```
    """

    total: Any
    weight: Any

    def __add__(self, other: Any) -> "Means":
        return Means((self,)) + other

    def __radd__(self, other: Any) -> "Means":
        return Means((self,)) + other

    def __sub__(self, other: Any) -> "Means":
        return Means((self,)) + (-other)

    def __mul__(self, factor: Any) -> "Mean":
        if isinstance(factor, Mean | Means):
            raise _errors.mean_times_mean()
        return Mean(self.total * factor, self.weight)

    def __rmul__(self, factor: Any) -> "Mean":
        return self * factor

    def __truediv__(self, divisor: Any) -> "Mean":
        return self * (1 / divisor)

    def __neg__(self) -> "Mean":
        return self * -1


class Means(eqx.Module):
    """A sum of `Mean`s, each to be divided by its own global weight."""

    terms: tuple[Mean, ...]

    def __add__(self, other: Any) -> "Means":
        if isinstance(other, Mean):
            return Means((*self.terms, other))
        if isinstance(other, Means):
            return Means((*self.terms, *other.terms))
        if isinstance(other, int) and other == 0:  # the start of Python's sum()
            return self
        raise _errors.mean_plus_other(other)

    def __radd__(self, other: Any) -> "Means":
        return self + other

    def __sub__(self, other: Any) -> "Means":
        return self + (-other)

    def __mul__(self, factor: Any) -> "Means":
        return Means(tuple(term * factor for term in self.terms))

    def __rmul__(self, factor: Any) -> "Means":
        return self * factor

    def __truediv__(self, divisor: Any) -> "Means":
        return self * (1 / divisor)

    def __neg__(self) -> "Means":
        return self * -1


class Sum(eqx.Module):
    """An auxiliary value that is summed over the global batch, integers exactly.

    Rows of weight 0 are left out; other weights do not scale it.

    **Arguments:**

    - `value`: the value of one example, an array of any shape.

    !!! Example

        ```python
        return value, {"correct": eqaccum.Sum(jnp.argmax(logits) == y)}
        ```
    """

    value: Any


class Metrics(eqx.Module):
    """What one step measured, as device values.

    **Attributes:**

    - `loss`: the mean loss of the global batch, the penalty not included.
    - `penalty`: the penalty, 0 where there is none.
    - `grad_norm`: the norm of the finished gradient over all trainable leaves, the
        penalty's part included, before any clipping.
    - `weight`: what the loss was divided by (of a sum of `Mean`s, the first one's).
    - `examples`: rows in this batch.
    - `skipped`: whether the update was left out (`nonfinite="skip"`).
    - `aux`: the auxiliary outputs, reduced, or None.
    - `grad_metrics`: what `grad_metrics=` returned for the finished gradient, or None.

    With `noise_scale=True`, else None; nan where one pass holds the whole batch:

    - `noise_scale`: the batch size, in examples, at which the gradient's noise is as
        large as the gradient itself: `grad_variance / grad_square`, each averaged over
        the steps so far (decay 0.99, kept in `TrainState`). It is nan while the average
        of the second is not positive.
    - `grad_variance`: of this step alone, an unbiased estimate of the trace of the
        covariance of one example's gradient; can be negative where the passes weigh
        unequally.
    - `grad_square`: an unbiased estimate of the squared norm of the expected gradient;
        negative in many steps where noise dominates.
    - `loss_spread`: the standard deviation of the passes' losses, by their weights.

    !!! Example

        ```python
        train, metrics = step(train, batch)
        print(float(metrics.loss), float(metrics.grad_norm))
        ```
    """

    loss: Any
    penalty: Any
    grad_norm: Any
    weight: Any
    examples: int
    skipped: bool
    aux: Any
    grad_metrics: Any = None
    noise_scale: Any = None
    grad_variance: Any = None
    grad_square: Any = None
    loss_spread: Any = None


class Averaged(eqx.Module):
    """An optimizer's state and, beside it, the moving average of the parameters."""

    inner: Any
    average: Any


class Structure(eqx.Module):
    """How the flat leaves of a `TrainState` make up the user's objects."""

    model: Partition = eqx.field(static=True)
    state: Partition | None = eqx.field(static=True)
    optimizer: Partition = eqx.field(static=True)


class TrainState(eqx.Module, Generic[Model]):
    """Everything that a step carries.

    It is a pytree of arrays, so `eqx.tree_serialise_leaves` saves it. A step consumes
    the state it is given; the properties build the user's own objects when asked.

    **Attributes:**

    - `model`, `state`, `opt_state`: the model, its `eqx.nn.State` (or None) and the
        optimizer's state.
    - `bank_leaves`: the rows of a `MemoryBank`, there from the first step on (or from
        `init`, where a plan is made already); empty without one.
    - `ema`: the model with the averaged parameters, None without `ema=`.
    - `noise_leaves`: with `noise_scale=True` the moving averages of `grad_square` and
        `grad_variance`, in one array that begins at 0; else empty.
    - `step`: completed updates; `batch_index`: batches seen, skipped ones too.
    - `key`: the run's PRNG key, as key data.

    !!! Example

        ```python
        train = step.init(model, jax.random.key(0))
        train, metrics = step(train, batch)
        model = train.model
        ```
    """

    trainable_leaves: list[Array]
    frozen_leaves: list[Array]
    state_leaves: list[Array]
    opt_leaves: list[Array]
    bank_leaves: list[Array]
    key: np.ndarray
    step_count: np.ndarray
    batch_count: np.ndarray
    noise_leaves: list[Array]
    structure: Structure

    @property
    def model(self) -> Model:
        return self.structure.model.join(self.trainable_leaves, self.frozen_leaves)

    @property
    def state(self) -> eqx.nn.State | None:
        if self.structure.state is None:
            return None
        return self.structure.state.join([], self.state_leaves)

    @property
    def opt_state(self) -> Any:
        state = self._optimizer_state
        return state.inner if isinstance(state, Averaged) else state

    @property
    def ema(self) -> Any:
        """The model with the averaged parameters (`ema=`), None without."""
        state = self._optimizer_state
        if not isinstance(state, Averaged):
            return None
        average = [
            mean.astype(leaf.dtype)
            for mean, leaf in zip(
                jax.tree.leaves(state.average), self.trainable_leaves, strict=True
            )
        ]
        return self.structure.model.join(average, self.frozen_leaves)

    @property
    def _optimizer_state(self) -> Any:
        return self.structure.optimizer.join([], self.opt_leaves)

    @property
    def step(self) -> int:
        return int(self.step_count)

    @property
    def batch_index(self) -> int:
        return int(self.batch_count)

    def __repr__(self) -> str:
        parameters = sum(leaf.size for leaf in self.trainable_leaves)
        return (
            f"TrainState(step={self.step}, batch_index={self.batch_index}, "
            f"parameters={parameters:,}, frozen={len(self.frozen_leaves)} leaves)"
        )


def accumulator_dtype(dtype: Any) -> np.dtype:
    """float32 for narrower floats, the dtype itself for wider ones and complex."""
    return wider(dtype, np.float32)


def wider(*dtypes: Any) -> np.dtype:
    """The dtype that JAX promotes to, also where implicit promotion is forbidden."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jax.numpy.promote_types, dtypes)
