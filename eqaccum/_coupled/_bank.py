"""A memory bank: embeddings of earlier groups, kept from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .. import _errors
from .._types import Own
from ._records import Banked


@dataclass(frozen=True)
class MemoryBank:
    """A bank of embeddings that a grouped head sees behind its own (ContAccum).

    It is a specification; the rows themselves live in the `TrainState`, and so in every
    checkpoint. After each group its embeddings go in, in front, and the oldest go out;
    no gradient flows to them. Empty slots have weight 0, and rows of weight 0 do not go
    in (Kim et al. 2024, arXiv:2406.12356, equations 5 to 7).

    **Arguments:**

    - `rows`: how many rows it holds.
    - `queries`: whether the first embedding, the queries, is banked too. Passages alone
        leave the passage encoder's gradient uncentred.
    - `clear`: empty it after each update, so that all its rows come from the same
        parameters.
    - `start`: the first step that reads it, counted as completed updates. Rows go in
        from the first step on.

    !!! Example

        ```python
        bank = eqaccum.MemoryBank(1024)
        loss = eqaccum.coupled(embed, head, group=8, bank=bank)
        eqaccum.fit(model, pairs, global_batch=128, loss=loss)
        ```
    """

    rows: Own[int, ...]
    queries: Own[bool, ...] = True
    clear: Own[bool, ...] = False
    start: Own[int, ...] = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("start", 0)):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or value < least:
                raise _errors.bad_bank(name, value, f"an int of at least {least}")
        for name in ("queries", "clear"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _errors.bad_bank(name, value, "True or False")

    def structs(
        self, embeddings: Sequence[jax.ShapeDtypeStruct], in_first: int
    ) -> list[jax.ShapeDtypeStruct]:
        """What it holds: (rows, ...) of each embedding that is banked, and weights.

        `in_first` are the leaves of the first entry.
        """
        banked = embeddings if self.queries else embeddings[in_first:]
        return [
            *(jax.ShapeDtypeStruct((self.rows, *s.shape[1:]), s.dtype) for s in banked),
            jax.ShapeDtypeStruct((self.rows,), jnp.float32),
        ]

    def read(self, held: list[Array], step: Int[Array, ""]) -> Banked:
        """The bank as the head sees it in this step."""
        *leaves, weights = held
        if self.start:
            weights = jnp.where(step >= self.start, weights, jnp.zeros_like(weights))
        return Banked(leaves, weights)

    def pushed(
        self, held: list[Array], leaves: list[Array], weights: Float[Array, "g"]
    ) -> list[Array]:
        """The bank with a group's rows in front of the older ones."""
        *old, old_weights = held
        new = leaves[len(leaves) - len(old) :]
        every = jnp.concatenate([weights, old_weights])
        # rows in order, what has weight 0 behind them
        order = jnp.argsort(every <= 0, stable=True)[: self.rows]
        kept = [
            jnp.concatenate([now, before])[order]
            for now, before in zip(new, old, strict=True)
        ]
        return [*kept, every[order]]

    def after_update(self, held: list[Array]) -> list[Array]:
        return [jnp.zeros_like(leaf) for leaf in held] if self.clear else held


def check_tuple(embeddings: Any, in_first: int) -> None:
    """Refuses embeddings of which it is not known what the queries are."""
    if in_first == 0:
        raise _errors.bank_needs_tuple(embeddings)
