"""The user's `head` over groups of rows: its value and its gradient."""

from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from .. import _errors
from .._accumulate import (
    AuxLeaves,
    AuxSpec,
    Kind,
    LossSpec,
    PassInputs,
    SharedKey,
    Traced,
    holds_float16,
    model_of,
    read_aux,
    widened,
    wrap_key,
)
from .._types import Mean, Means, accumulator_dtype
from ._embed import is_inexact
from ._records import Banked, Embedded, HeadInputs, HeadOutputs


@dataclass(frozen=True)
class Heading:
    """`head` of each group and its gradient, to be traced; notes the aux's structure.

    A group's value counts by the weight of its rows. One without any is computed with
    weights of 1, so that it is finite, and counts 0.
    """

    spec: LossSpec
    structure: Any  # of the embeddings
    found: list[AuxSpec] = field(default_factory=list)

    @property
    def aux_spec(self) -> AuxSpec:
        return self.found[-1]

    def __call__(self, captured: list[Array], inputs: HeadInputs) -> HeadOutputs:
        embeddings = inputs.embeddings
        moving = [leaf for leaf in embeddings if is_inexact(leaf)]

        def objective(
            trainable: list[Array], moving: list[Array]
        ) -> tuple[Array, tuple[Array, list[Array], list[Array]]]:
            moved = iter(moving)
            leaves = [next(moved) if is_inexact(x) else x for x in embeddings]
            arguments = eqx.tree_at(lambda a: a.trainable, inputs.arguments, trainable)
            return self._sums(
                eqx.tree_at(
                    lambda i: (i.arguments, i.embeddings), inputs, (arguments, leaves)
                )
            )

        total, back, (weight, aux_sums, aux_rows) = jax.vjp(
            objective, inputs.arguments.trainable, moving, has_aux=True
        )
        scale = inputs.scale
        seed = jnp.ones_like(total) if scale is None else scale.astype(total.dtype)
        parameters, cotangents = back(seed)
        parameters = [widened(g, scale) for g in parameters]
        return HeadOutputs(total, weight, aux_sums, aux_rows, parameters, cotangents)

    def _sums(
        self, inputs: HeadInputs
    ) -> tuple[Array, tuple[Array, list[Array], list[Array]]]:
        """The total over all groups; its weight and the auxiliary outputs beside it."""
        weights = inputs.weights
        there = jnp.sum(weights, axis=1) > 0
        safe = jnp.where(there[:, None], weights, jnp.ones_like(weights))

        def one(leaves: list[Array], weights: Array) -> tuple[Array, list[Array]]:
            return self._group(inputs, leaves, weights)

        if weights.shape[0] == 1:
            out = one([leaf[0] for leaf in inputs.embeddings], safe[0])
            values, aux = jax.tree.map(lambda x: x[None], out)
        else:
            values, aux = jax.vmap(one)(inputs.embeddings, safe)
        by_group = jnp.sum(weights.astype(values.dtype), axis=1)
        sums, rows = _aux_totals(self.aux_spec, aux, weights)
        return jnp.sum(by_group * values), (jnp.sum(by_group), sums, rows)

    def _group(
        self, inputs: HeadInputs, leaves: list[Array], weights: Float[Array, "g"]
    ) -> tuple[Float[Array, ""], list[Array]]:
        """The value of one group, the bank's rows behind its own."""
        spec, arguments, banked = self.spec, inputs.arguments, inputs.banked
        rows = weights.shape[0]
        if banked is not None:
            leaves = joined(leaves, banked)
            weights = jnp.concatenate([weights, banked.weights])
        head = spec.loss.join([], arguments.loss).head
        args = (
            model_of(spec, arguments),
            jax.tree.unflatten(self.structure, leaves),
            weights,
        )
        if isinstance(head, SharedKey):
            shared = None if inputs.shared_key is None else wrap_key(inputs.shared_key)
            out = head.fn(*args, shared)
        else:
            out = head(*args)
        value, aux = self._read(out)
        read = _read_aux(aux, rows, weights.shape[0])
        self.found.append(read.spec)
        return value, read.arrays

    def _read(self, out: Any) -> tuple[Float[Array, ""], PyTree]:
        has_aux, aux = self.spec.options.has_aux, None
        if has_aux:
            if not isinstance(out, tuple) or len(out) != 2:
                raise _errors.head_results(out, has_aux=True)
            out, aux = out
        if isinstance(out, tuple | Mean | Means) or jnp.shape(out) != ():
            raise _errors.head_results(out, has_aux=has_aux)
        value = jnp.asarray(out)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise _errors.loss_dtype(value.dtype)
        return value.astype(accumulator_dtype(value.dtype)), aux


def joined(leaves: list[Array], banked: Banked) -> list[Array]:
    """The banked rows behind the current ones; leaves that are not banked stay short.

    Those are the first ones: the queries.
    """
    short = len(leaves) - len(banked.leaves)
    behind = [
        jnp.concatenate([now, jax.lax.stop_gradient(old)])
        for now, old in zip(leaves[short:], banked.leaves, strict=True)
    ]
    return [*leaves[:short], *behind]


def _read_aux(aux: PyTree, rows: int, with_bank: int) -> AuxLeaves:
    """The head's auxiliary outputs; arrays need a row for each current example."""
    read = read_aux(aux, rows=None)
    arrays, stream = [], iter(read.arrays)
    for kind in read.spec.kinds:
        array = next(stream)
        if kind is Kind.ROWS:
            if array.shape[0] not in (rows, with_bank):
                raise _errors.head_aux_rows(array.shape, rows)
            array = array[:rows]
        arrays.append(array)
        if kind is Kind.MEAN:
            arrays.append(next(stream))
    return AuxLeaves(read.spec, arrays)


def _aux_totals(
    spec: AuxSpec, arrays: list[Array], weights: Float[Array, "c g"]
) -> tuple[list[Array], list[Array]]:
    """Sums over the groups, and rows with zeros where nothing counts.

    The head has weighed its rows already: what it averaged counts by its group's
    weight, what it summed as it is.
    """
    by_group = jnp.sum(weights, axis=1)
    there: Bool[Array, " c"] = by_group > 0
    sums, rows = [], []
    stream = iter(arrays)
    for kind in spec.kinds:
        value = next(stream)
        if kind is Kind.ROWS:
            rows.append(_kept(weights > 0, value))
            continue
        if kind is Kind.AVERAGE:
            value = value * _along(by_group, value).astype(value.dtype)
        sums.append(jnp.sum(_kept(there, value), axis=0, dtype=value.dtype))
        if kind is Kind.MEAN:
            sums.append(jnp.sum(_kept(there, next(stream)), axis=0))
    return sums, rows


def _kept(mask: Bool[Array, "..."], value: Array) -> Array:
    return jnp.where(_along(mask, value), value, jnp.zeros((), value.dtype))


def _along(values: Array, like: Array) -> Array:
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def head_structs(
    inputs: PassInputs,
    embedded: Embedded,
    *,
    groups: int,
    rows: int,
    scale: jax.ShapeDtypeStruct | None,
    banked: Banked | None = None,
) -> HeadInputs:
    """The structs of a head's inputs, out of those of one microbatch's embeddings."""
    leaves = [
        jax.ShapeDtypeStruct((groups, rows, *s.shape[1:]), s.dtype)
        for s in embedded.leaves
    ]
    weights = jax.ShapeDtypeStruct((groups, rows), jnp.float32)
    return HeadInputs(
        inputs.arguments, leaves, weights, banked, inputs.shared_key, scale
    )


def scale_struct(embed: Traced) -> jax.ShapeDtypeStruct | None:
    """Cotangents are scaled where they go through float16, which overflows."""
    narrow = holds_float16(embed.jaxpr)
    return jax.ShapeDtypeStruct((), jnp.float32) if narrow else None
