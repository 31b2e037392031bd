"""`coupled`: a loss of many examples' embeddings together, exact in any microbatch."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import numpy as np

from .. import _errors
from .._accumulate import (
    Cut,
    Form,
    LossSpec,
    Passes,
    PassInputs,
    SharedKey,
    even_cut,
    signature_accepts,
)
from .._plan import distinct_passes
from .._types import Own
from ._bank import MemoryBank
from ._groups import trace_groups
from ._whole import trace_whole


class Coupled(Form):
    """An embedding of each example and a head over them; see `coupled`."""

    embed: Any
    head: Any
    group: int | None = eqx.field(static=True)
    bank: MemoryBank | None = eqx.field(static=True)

    @property
    def sequential(self) -> bool:
        return self.bank is not None

    def check_arguments(self, *, has_state: bool) -> None:
        names = ["model", "state"] if has_state else ["model"]
        signature_accepts(self.embed, [*names, "example", "key"], has_state=has_state)
        signature_accepts(
            self.head, ["model", "embeddings", "weights"], has_state=False
        )

    @property
    def shares_rows(self) -> bool:
        return self.group is None

    def check_batch(self, *, rows: int, devices: int) -> None:
        if self.group is not None and self.group > rows:
            raise _errors.group_above_batch(self.group, rows)
        if self.bank is not None and devices > 1:
            raise _errors.bank_on_devices(devices)

    def check_noise_scale(self) -> None:
        if self.group is None:
            raise _errors.noise_of_whole_batch()
        if self.bank is not None:
            raise _errors.noise_with_bank()

    def passes(self, *, rows: int, devices: int) -> Sequence[int] | None:
        if self.group is None:
            return None
        groups = self._groups_of_device(rows, devices)
        together = [] if self.sequential else distinct_passes(groups)
        _, *several = distinct_passes(self.group)
        return [*(together or [groups]), *(groups * s for s in several)]

    def cut(
        self, num_microbatches: int, *, rows: int, devices: int, axis_name: str | None
    ) -> Cut:
        if self.group is None:
            return even_cut(num_microbatches, rows, devices, axis_name)
        groups = self._groups_of_device(rows, devices)
        if num_microbatches <= groups:
            microbatch = -(-groups // num_microbatches) * self.group
        else:
            microbatch = -(-self.group // (num_microbatches // groups))
        return Cut(num_microbatches, microbatch, devices, axis_name, group=self.group)

    def _groups_of_device(self, rows: int, devices: int) -> int:
        assert self.group is not None
        return -(-rows // (self.group * devices))

    def trace(
        self, spec: LossSpec, inputs: PassInputs, *, rows: int, **options: Any
    ) -> Passes:
        if self.group is None:
            return trace_whole(spec, inputs, rows=rows, **options)
        return trace_groups(
            spec, inputs, rows=rows, group=self.group, memory=self.bank, **options
        )


def coupled(
    embed: Own[Callable, ...],
    head: Own[Callable, ...],
    *,
    group: Own[int | None, ...] = None,
    bank: Own[MemoryBank | None, ...] = None,
) -> Coupled:
    """A loss that couples the examples of the global batch, such as a contrastive one.

    The gradient is that of the whole global batch, whatever the microbatch: all
    examples are embedded by microbatches, the head's gradient is taken once at the
    embeddings, and a second sweep pulls it back through the encoder (gradient caching,
    Gao et al. 2021, arXiv:2101.06983). Both sweeps use the same keys and start from the
    same state; the first one's state is kept. With one pass there is no second sweep.

    With `group` the head sees so many consecutive examples at a time instead, and the
    loss is the mean of the groups by the weights of their examples: the meaning of the
    published baselines, where the group belongs to the experiment (GradAccum without a
    bank, ContAccum with one: Kim et al. 2024, arXiv:2406.12356). The microbatch changes
    nothing in either.

    **Arguments:**

    - `embed`: `(model, example, key)`, with `state` after the model where there is
        one; returns a pytree of arrays, or `(embeddings, state)`. No gradient flows to
        integers and booleans among them, such as labels.
    - `head`: `(model, embeddings, weights)`; each embedding has the global batch in
        front, (N, ...), `weights` is float32 (N,). Returns a float scalar, with
        `has_aux` `(scalar, aux)`. Rows of weight 0 (the missing rows of a short batch,
        filled with copies) must not count. The model's parameters that the head uses
        get their gradient once.
    - `group`: the head sees so many examples: embeddings (group, ...), `weights`
        (group,). The rows that the last group lacks have weight 0.
    - `bank`: a `MemoryBank` whose rows the head sees behind the group's. The embeddings
        are a tuple whose first entry is the queries; with `queries=False` that one
        stays (group, ...), the others are (group + rows, ...). `weights` has
        group + rows entries, its first ones the queries'. Groups run in order, on one
        device.

    **Returns:**

    A loss for `fit`, `make_step`, `plan`, `evaluate` (without its bank) and, without a
    bank, `value_and_grad`.

    **Raises:**

    `InputError` where an argument cannot work.

    !!! Example

        ```python
        def embed(model, example, key):
            query, passage = example
            return model.query(query), model.passage(passage)

        def head(model, embeddings, weights):
            q, p = embeddings
            return eqaccum.losses.info_nce(q, p, weights=weights)

        eqaccum.fit(model, pairs, global_batch=8192, loss=eqaccum.coupled(embed, head))
        ```
    """
    for fn in (embed, head):
        if not callable(fn.fn if isinstance(fn, SharedKey) else fn):
            raise _errors.loss_not_callable(fn)
    if group is not None:
        whole = isinstance(group, int | np.integer) and not isinstance(group, bool)
        if not whole or group < 1:
            raise _errors.bad_group(group)
        group = int(group)
    if bank is not None:
        if not isinstance(bank, MemoryBank):
            raise _errors.not_a_bank(bank)
        if group is None:
            raise _errors.bank_needs_group()
    return Coupled(embed, head, group, bank)
