"""The user's `embed` over one microbatch, and its transpose."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import _errors
from .._accumulate import (
    LossSpec,
    PassInputs,
    SharedKey,
    example_keys,
    model_of,
    state_leaves,
    widened,
    wrap_key,
)
from ._records import Embedded, Gradients, PullInputs


@dataclass
class Embedding:
    """`embed` of each row, to be traced; notes the embeddings' structure."""

    spec: LossSpec
    structure: Any = None
    in_first: int = 0  # leaves of the first entry, where the embeddings are a tuple

    def __call__(self, captured: list[Array], inputs: PassInputs) -> Embedded:
        spec = self.spec
        embed = spec.loss.join([], inputs.arguments.loss).embed
        model = model_of(spec, inputs.arguments)
        keys = shared = None
        if spec.with_key:
            keys = example_keys(wrap_key(inputs.rows_key), inputs.positions)
            shared = wrap_key(inputs.shared_key)

        def one(leaves: list[Array], key: Any) -> dict[str, list[Array]]:
            example = spec.unflatten(leaves, inputs.arguments.whole)
            args: list[Any] = [model]
            if spec.state is not None:  # a clone: a consumed State raises
                args.append(spec.state.join([], inputs.state))
            args += [example, key]
            if isinstance(embed, SharedKey):
                return self._read(embed.fn(*args, shared), inputs.state)
            return self._read(embed(*args), inputs.state)

        axes = {"leaves": 0, "state": None}
        mapped = jax.vmap(one, out_axes=axes, axis_name=spec.options.axis_name)
        try:
            return Embedded(**mapped(inputs.rows, keys))
        except ValueError as error:
            if "out_axes" in str(error) and spec.state is not None:
                raise _errors.state_differs(error) from error
            raise

    def _read(self, out: Any, state: list[Array]) -> dict[str, list[Array]]:
        """One example's embeddings and state, checked."""
        after: list[Array] = []
        if self.spec.state is not None:
            if not isinstance(out, tuple) or len(out) != 2:
                raise _errors.embed_results(out)
            out, new = out
            after = state_leaves(self.spec.state, state, new)
        arrays, self.structure = jax.tree.flatten(out)
        if isinstance(out, tuple) and out:
            self.in_first = len(jax.tree.leaves(out[0]))
        if not arrays or not all(eqx.is_array_like(a) for a in arrays):
            raise _errors.embed_results(out)
        return {"leaves": [jnp.asarray(a) for a in arrays], "state": after}


def pull_back(
    embed: Callable[[PassInputs], Embedded], given: PullInputs
) -> tuple[Gradients, list[Array]]:
    """The gradient of one microbatch out of its embeddings' cotangents; its state."""
    transposed = linearised(embed, given.inputs)
    return transposed.pull(given.cotangents, given.scale), transposed.embedded.state


@dataclass(frozen=True)
class Linearised:
    """A microbatch embedded once, ready to be pulled back."""

    embedded: Embedded
    pull: Callable[[list[Array], Any], Gradients]  # cotangents, their scale


def linearised(
    embed: Callable[[PassInputs], Embedded], inputs: PassInputs
) -> Linearised:
    """Runs `embed` forward; what its transpose needs is kept."""

    def moving(trainable: list[Array]) -> tuple[list[Array], Embedded]:
        out = embed(eqx.tree_at(lambda i: i.arguments.trainable, inputs, trainable))
        return [leaf for leaf in out.leaves if is_inexact(leaf)], out

    _, back, embedded = jax.vjp(moving, inputs.arguments.trainable, has_aux=True)

    def pull(cotangents: list[Array], scale: Any) -> Gradients:
        (gradient,) = back(cotangents)
        return [widened(g, scale) for g in gradient]

    return Linearised(embedded, pull)


def is_inexact(leaf: Any) -> bool:
    """Whether a gradient flows to an embedding; labels and masks may be among them."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
