"""Losses over the covariance of two views' embeddings, without negatives."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import _errors
from .._types import Own
from ._rows import Rows, Weights, along, checked_rows, ratio, weights_of


@_errors.short_tracebacks
def barlow_twins(
    a: Own[Float[Rows, "n d"], ...],
    b: Own[Float[Rows, "n d"], ...],
    *,
    off_diagonal: float = 5e-3,
    weights: Any = None,
    eps: float = 1e-5,
) -> Float[Array, ""]:
    r"""Barlow Twins: the correlation matrix of two views is driven to the identity.

    $\sum_i (1 - C_{ii})^2 + \lambda \sum_i \sum_{j \neq i} C_{ij}^2$, where $C_{ij}$ is
    the correlation over the batch of feature i of one view with feature j of the other
    (Zbontar et al. 2021, arXiv:2103.03230, equations 1 and 2).

    **Arguments:**

    - `a`, `b`: the embeddings of two views of the same examples.
    - `off_diagonal`: $\lambda$.
    - `weights`: one for each row, in the means over the batch; a row of weight 0 does
        not count.
    - `eps`: added to the variances, so that a constant feature has correlation 0.

    **Returns:**

    A scalar, in float32 or wider.

    **Raises:**

    `InputError` where the shapes do not go together.

    !!! Example

        ```python
        def head(model, embeddings, weights):
            a, b = embeddings
            return eqaccum.losses.barlow_twins(a, b, weights=weights)
        ```
    """
    views = _Views.of("barlow_twins", a, b, weights)
    w = views.weights
    one, other = (_standard(w, view, eps) for view in (views.a, views.b))
    correlation = _products(w, one, other) / _positive(w.total.astype(one.dtype))
    on = jnp.sum(jnp.square(1 - jnp.diagonal(correlation)))
    return on + off_diagonal * _off_diagonal(correlation)


@_errors.short_tracebacks
def vicreg(
    a: Own[Float[Rows, "n d"], ...],
    b: Own[Float[Rows, "n d"], ...],
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    gamma: float = 1.0,
    weights: Any = None,
    eps: float = 1e-4,
) -> Float[Array, ""]:
    r"""VICReg: views agree, features vary, features do not correlate.

    $\lambda s(a, b) + \mu (v(a) + v(b)) + \nu (c(a) + c(b))$ (Bardes et al. 2022,
    arXiv:2105.04906, equations 1 to 6): $s$ is the mean squared difference, over
    features too as in the paper's algorithm 1,
    $v(z) = \frac{1}{d} \sum_j \max(0, \gamma - \sqrt{Var(z_j) + \epsilon})$ and
    $c(z) = \frac{1}{d} \sum_{i \neq j} Cov(z)_{ij}^2$. Variances and covariances are
    the unbiased ones (divided by n - 1).

    **Arguments:**

    - `a`, `b`: the embeddings of two views of the same examples.
    - `invariance`, `variance`, `covariance`: $\lambda$, $\mu$ and $\nu$.
    - `gamma`: the standard deviation that each feature is to reach.
    - `weights`: one for each row, in the means over the batch; a row of weight 0 does
        not count. They count as to how they relate: all twice as large changes nothing.
    - `eps`: $\epsilon$.

    **Returns:**

    A scalar, in float32 or wider.

    **Raises:**

    `InputError` where the shapes do not go together.

    !!! Example

        ```python
        def head(model, embeddings, weights):
            a, b = embeddings
            return eqaccum.losses.vicreg(a, b, weights=weights)
        ```
    """
    views = _Views.of("vicreg", a, b, weights)
    w = views.weights
    agree = jnp.mean(w.mean(jnp.square(views.a - views.b)))
    spread = relate = jnp.zeros((), agree.dtype)
    for view in (views.a, views.b):
        matrix = _covariance(w, view)
        deviations = jnp.sqrt(jnp.diagonal(matrix) + eps)
        spread += jnp.mean(jnp.maximum(gamma - deviations, 0))
        relate += _off_diagonal(matrix) / view.shape[1]
    return invariance * agree + variance * spread + covariance * relate


@dataclass(frozen=True)
class _Views:
    """Two views of the same rows, checked; rows of weight 0 are zeros."""

    a: Float[Array, "n d"]
    b: Float[Array, "n d"]
    weights: Weights

    @staticmethod
    def of(loss: str, a: Any, b: Any, weights: Any) -> "_Views":
        a, b = checked_rows(loss, a=a, b=b)
        if a.shape != b.shape:
            raise _errors.loss_views(loss, a.shape, b.shape)
        w = weights_of(loss, weights, a.shape[0])
        return _Views(w.clean(a), w.clean(b), w)


def _centred(w: Weights, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    return w.clean(x - w.mean(x)[None, :])


def _standard(w: Weights, x: Float[Array, "n d"], eps: float) -> Float[Array, "n d"]:
    """Features of mean 0 and variance 1 over the batch."""
    centred = _centred(w, x)
    return centred / jnp.sqrt(w.mean(jnp.square(centred)) + eps)[None, :]


def _covariance(w: Weights, x: Float[Array, "n d"]) -> Float[Array, "d d"]:
    """The unbiased covariance; of equal weights it is the sum divided by n - 1."""
    centred = _centred(w, x)
    squares = jnp.sum(jnp.square(w.values))
    freedom = w.total - squares / _positive(w.total)
    return ratio(_products(w, centred, centred), freedom.astype(x.dtype))


def _products(
    w: Weights, x: Float[Array, "n d"], y: Float[Array, "n d"]
) -> Float[Array, "d d"]:
    return (along(w.values.astype(x.dtype), x) * x).T @ y


def _off_diagonal(matrix: Float[Array, "d d"]) -> Float[Array, ""]:
    """The sum of squares beside the diagonal."""
    on = jnp.eye(matrix.shape[0], dtype=bool)
    return jnp.sum(jnp.square(jnp.where(on, jnp.zeros((), matrix.dtype), matrix)))


def _positive(x: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(x > 0, x, jnp.ones_like(x))
