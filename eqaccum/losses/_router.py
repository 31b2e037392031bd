"""The balance of a mixture of experts over the tokens of the global batch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from .. import _errors
from .._types import Own, accumulator_dtype
from ._rows import Rows, Weights, weights_of


@_errors.short_tracebacks
def load_balance(
    probabilities: Own[Float[Rows, "n *tokens experts"], ...],
    assigned: Own[Shaped[Rows, "n *tokens experts"] | None, ...] = None,
    *,
    top_k: Own[int, ...] = 1,
    weights: Any = None,
) -> Float[Array, ""]:
    r"""The router's balance loss: tokens and probability spread evenly over experts.

    $E \sum_i f_i P_i$ (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, without
    their factor $\alpha$), where $f_i$ is the share of tokens sent to expert i of E and
    $P_i$ the mean probability of expert i. It is 1 where both are even. The product of
    the two means couples the batch: means of microbatches do not add up.

    **Arguments:**

    - `probabilities`: the router's softmax, experts last; any axes between the examples
        and the experts count tokens.
    - `assigned`: which experts a token went to: 1 and 0, or shares, of the same shape.
        None: the `top_k` most probable ones. No gradient flows through it. To keep few
        embeddings, let `embed` return the means over an example's tokens of both.
    - `top_k`: how many experts a token is sent to, each counted as 1 / k.
    - `weights`: one for each example, (n,), or one for each token, (n, *tokens), 0 for
        padding. What has weight 0 does not count.

    **Returns:**

    A scalar, in float32 or wider.

    **Raises:**

    `InputError` where the shapes do not go together.

    !!! Example

        ```python
        def head(model, embeddings, weights):
            return 0.01 * eqaccum.losses.load_balance(embeddings, weights=weights)
        ```
    """
    shape = jnp.shape(probabilities)
    dtype = jnp.result_type(probabilities)
    if len(shape) < 2 or not jnp.issubdtype(dtype, jnp.floating):
        raise _errors.loss_probabilities(shape, dtype)
    *tokens, experts = shape
    w = _token_weights(weights, tuple(tokens))
    rows = (math.prod(tokens), experts)
    p = w.clean(jnp.asarray(probabilities).reshape(rows))
    if assigned is None:
        share = _most_probable(p, top_k)
    elif jnp.shape(assigned) != shape:
        raise _errors.loss_assigned(jnp.shape(assigned), shape)
    else:
        given = jnp.asarray(assigned).reshape(rows).astype(p.dtype)
        share = jax.lax.stop_gradient(w.clean(given))
    return experts * jnp.sum(w.mean(share) * w.mean(p))


def _token_weights(weights: Any, tokens: tuple[int, ...]) -> Weights:
    """One weight for each token out of those of examples or of tokens."""
    count = math.prod(tokens)
    if weights is None or jnp.shape(weights) != tokens:
        examples = weights_of("load_balance", weights, tokens[0]).values
        each = count // max(tokens[0], 1)
        return Weights(jnp.repeat(examples, each))
    return weights_of("load_balance", jnp.reshape(weights, count), count)


def _most_probable(p: Float[Array, "t e"], top_k: int) -> Float[Array, "t e"]:
    experts = p.shape[1]
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise _errors.bad_top_k(top_k, experts)
    if top_k > experts:
        raise _errors.bad_top_k(top_k, experts)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(p), top_k)
    dtype = accumulator_dtype(p.dtype)
    return jnp.sum(jax.nn.one_hot(chosen, experts, dtype=dtype), axis=1) / top_k
