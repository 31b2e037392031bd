"""The records that pass between the sweeps over the rows and the head."""

from typing import Any

import equinox as eqx

from .._accumulate import Arguments, PassInputs


class Embedded(eqx.Module):
    """Embeddings of some rows, and the state after them."""

    leaves: list[Any]  # (n, ...)
    state: list[Any]


class PullInputs(eqx.Module):
    """One microbatch of the second sweep; cotangents of the inexact leaves only."""

    inputs: PassInputs
    cotangents: list[Any]  # (n, ...)
    scale: Any  # of the cotangents; None is 1


class Banked(eqx.Module):
    """Rows of earlier groups, newest first; what is empty has weight 0."""

    leaves: list[Any]  # (m, ...)
    weights: Any  # (m,)


class HeadInputs(eqx.Module):
    """What the head is called with: c groups of g rows. A whole batch is one group."""

    arguments: Arguments
    embeddings: list[Any]  # (c, g, ...)
    weights: Any  # (c, g) float32
    banked: Banked | None
    shared_key: Any
    scale: Any  # of the cotangents of the embeddings; None is 1


class HeadOutputs(eqx.Module):
    """Sums over the groups by the weight of their rows, and their gradient."""

    total: Any
    weight: Any
    aux_sums: list[Any]
    aux_rows: list[Any]  # (c, g, ...)
    parameters: list[Any]  # in the accumulator's dtype
    embeddings: list[Any]  # (c, g, ...), of the inexact leaves


Gradients = list[Any]
