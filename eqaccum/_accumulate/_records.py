"""The records that pass between a loss's form, the loop over passes and the step."""

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from .._tree import record
from ._aux import AuxSpec
from ._jaxpr import Left


@record
class Arguments:
    """The arrays of a pass that are the same for all rows."""

    trainable: list[Any]
    frozen: list[Any]
    loss: list[Any]
    whole: list[Any]


@record
class Batch:
    """Rows as the program takes them: slot (k D + d) n + j on device d.

    `rows` have shape (K, n, ...) on each device and `weights` (K, n). `key` and
    `batch_index` give the keys; `bound` is the number of passes to run, None for all.
    Of a global batch that is fed in windows these are the rows of one: `start` is its
    first position, and `fresh` is whether the sums begin with it. `step` counts the
    updates so far; only a loss with a memory bank is told.
    """

    rows: list[Any]
    weights: Any
    key: Any
    batch_index: Any
    bound: Any = None
    start: Any = None
    fresh: Any = None
    step: Any = None


@record
class PassInputs:
    """All arrays of one pass. `ratios` are there for a sum of several `Mean`s only."""

    arguments: Arguments
    state: list[Any]
    rows: list[Any]
    weights: Any  # (n,) float32
    positions: Any  # (n,) int32, in the global batch
    rows_key: Any  # key data, or None
    shared_key: Any
    ratios: list[Any]


@record
class PassOutputs:
    """What one pass adds up (totals, weights, sums), carries on and lays down.

    `spread` is there where the gradient's noise is asked for.
    """

    totals: list[Any]
    weights: list[Any]
    state: list[Any]
    aux_sums: list[Any]
    aux_rows: list[Any]
    spread: Any = None  # a `Spread` in one array


@record
class Sums:
    """What the passes of a global batch add up to."""

    gradients: list[Any]
    outputs: PassOutputs


@dataclass(frozen=True)
class Cut:
    """How the global batch is cut: W windows of K passes of n rows on D devices.

    There is one window unless the rows do not fit beside the activations. Where
    `group` consecutive rows belong together, a pass holds several groups, or a group
    takes several passes in a row on one device, filled up where it does not divide.

    Where each of several processes gives its own rows, `shares` is their number: the
    devices of one hold consecutive positions of the global batch, `rows` / `shares` of
    them, and deal those out among themselves.
    """

    num_microbatches: int  # of one window
    microbatch: int
    devices: int
    axis_name: str | None  # of the devices; None outside of a mesh
    windows: int = 1
    group: int | None = None
    shares: int = 1
    rows: int = 0  # of the global batch, where there are several shares

    @property
    def window(self) -> int:
        """Slots of one window."""
        return self.num_microbatches * self.devices * self.microbatch

    @property
    def capacity(self) -> int:
        """Slots for rows, those of padding included."""
        return self.windows * self.window

    def passes(self, last: int) -> int:
        """Passes to run so that the rows below `last` are covered."""
        several = self._passes_of_group
        if self.group is None or several == 1:
            return -(-last * self.shares // (self.devices * self.microbatch))
        return several * -(-last // (self.devices * self.group))

    @functools.cached_property
    def places(self) -> np.ndarray | None:
        """The row that each slot holds, those beyond the rows for padding.

        None: each slot the row of its own number.
        """
        several = self._passes_of_group
        filled = self.group is not None and several * self.microbatch == self.group
        if self.group is None or several == 1 or (filled and self.devices == 1):
            return None
        slots = (self.num_microbatches, self.devices, self.microbatch)
        k, device, j = (index.ravel() for index in np.indices(slots))
        group = k // several * self.devices + device
        row = k % several * self.microbatch + j
        places = group * self.group + row
        padding = row >= self.group
        rows = self.capacity - int(padding.sum())
        places[padding] = np.arange(rows, self.capacity)
        return places

    def in_order(self, leaf: Any, counts: Sequence[int]) -> Any:
        """What is listed for each slot, listed for each row.

        `counts` are the rows of each share; one number where they are not shared.
        """
        if self.shares > 1:
            slots = self._slots_by_share
            taken = [own[:count] for own, count in zip(slots, counts, strict=True)]
            return leaf[np.concatenate(taken)]
        order = leaf if self.places is None else leaf[np.argsort(self.places)]
        return order[: counts[0]]

    @property
    def _slots_by_share(self) -> np.ndarray:
        """The slots that hold the rows of each share, in order: (shares, ...)."""
        passes = self.windows * self.num_microbatches
        slots = np.arange(self.capacity).reshape(passes, self.shares, -1)
        return slots.transpose(1, 0, 2).reshape(self.shares, -1)

    @property
    def independent(self) -> int:
        """How many parts of the global batch have a gradient of their own."""
        rounds = self.num_microbatches // self._passes_of_group
        return self.windows * self.devices * rounds

    @property
    def _passes_of_group(self) -> int:
        return 1 if self.group is None else max(1, -(-self.group // self.microbatch))


def even_cut(
    num_microbatches: int, rows: int, devices: int, axis_name: str | None
) -> Cut:
    """So many passes of as few rows as that allows."""
    microbatch = -(-rows // (devices * num_microbatches))
    return Cut(num_microbatches, microbatch, devices, axis_name)


@dataclass(frozen=True)
class Passes(abc.ABC):
    """A loss's form, traced: what the step knows of it, and how its passes add up.

    `outputs` and the lists are structs. `captured` are the arrays that the loss
    captured, to be passed as arguments; `jaxprs` are for reading only.
    """

    parameters: list[jax.ShapeDtypeStruct]
    gradient_structs: list[jax.ShapeDtypeStruct]
    outputs: PassOutputs
    aux_spec: AuxSpec
    captured: tuple[Any, ...]
    jaxprs: tuple[Any, ...]
    left: tuple[Left, ...]

    # Whether passes that hold only padding may be left out.
    ends_early: bool = True
    # Whether the global batch may be fed in windows.
    windowed: bool = True
    # Whether rows of weight 0 occur whatever the batch is.
    fills_up: bool = False
    # Rows kept from step to step, carried behind the state.
    bank: Sequence[jax.ShapeDtypeStruct] = ()

    @property
    def num_terms(self) -> int:
        """How many `Mean`s the loss adds up."""
        return len(self.outputs.totals)

    @abc.abstractmethod
    def accumulate(
        self,
        cut: Cut,
        *,
        captured: list[Array],
        arguments: Arguments,
        state: list[Array],
        batch: Batch,
        ratios: list[Array],
        before: Sums | None = None,
    ) -> Sums:
        """Runs all passes and adds up; inside the program, on one device's rows.

        `before` are the sums of the windows before, where there are several.
        """

    @abc.abstractmethod
    def weigh(
        self,
        cut: Cut,
        *,
        captured: list[Array],
        arguments: Arguments,
        state: list[Array],
        batch: Batch,
        before: list[Array] | None = None,
    ) -> PassOutputs:
        """The weight of each `Mean` over this device's rows, the state after them, and
        nothing else."""

    @abc.abstractmethod
    def forward_only(self) -> "Passes":
        """The same passes without a gradient: its `gradient_structs` are empty."""

    def check_zero_weights(
        self, *, captured: list[Array], arguments: Arguments
    ) -> None:
        """Refuses a loss that counts rows of weight 0, before such a row is passed.

        An additive loss cannot count them: its rows are multiplied by their weights.
        """
        return None


class Form(eqx.Module):
    """A loss whose passes are not those of a sum over examples.

    The step knows forms by this interface alone.
    """

    @property
    @abc.abstractmethod
    def sequential(self) -> bool:
        """Whether its passes must run one after the other, on one device, and step
        after step: what earlier ones computed is read by later ones."""

    @property
    @abc.abstractmethod
    def shares_rows(self) -> bool:
        """Whether the processes may give consecutive rows of the global batch each."""

    @abc.abstractmethod
    def check_batch(self, *, rows: int, devices: int) -> None:
        """Refuses a global batch and devices that it cannot be trained with."""

    @abc.abstractmethod
    def passes(self, *, rows: int, devices: int) -> Sequence[int] | None:
        """The numbers of passes that make a cut, increasing; None: every number."""

    @abc.abstractmethod
    def cut(
        self, num_microbatches: int, *, rows: int, devices: int, axis_name: str | None
    ) -> Cut:
        """How so many passes cut the global batch."""

    @abc.abstractmethod
    def check_noise_scale(self) -> None:
        """Refuses to tell the gradient's noise where its passes are not independent."""

    @abc.abstractmethod
    def check_arguments(self, *, has_state: bool) -> None:
        """Refuses functions that cannot be called with their form's arguments."""

    @abc.abstractmethod
    def trace(
        self, spec: Any, inputs: PassInputs, *, rows: int, **options: Any
    ) -> Passes:
        """The passes for microbatches as in `inputs`, of a global batch of `rows`.

        `spec` is a `LossSpec`; `options` are those of `trace_additive`.
        """
