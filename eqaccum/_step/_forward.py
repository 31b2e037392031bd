"""The loss without its gradient, over any number of batches."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from .._accumulate import Arguments, AuxSpec, Batch as Slots, Kind, run_key
from .._data import Batch, Layout, slots
from .._plan import Plan
from .._tree import partition
from ._buffers import Buffers
from ._planner import ForwardPlanner, Ready
from ._programs import Builder
from ._settings import Settings, Skeleton, batch_norms, skeleton


@dataclass
class Totals:
    """Sums over all batches, in float64 on the host: one division at the end."""

    terms: np.ndarray | None = None  # (number of Means, 2): totals and weights
    aux: list[np.ndarray] | None = None
    spec: AuxSpec | None = None

    def add(self, spec: AuxSpec, outputs: Any) -> None:
        terms = np.stack(
            [
                np.asarray(outputs.totals, np.float64),
                np.asarray(outputs.weights, np.float64),
            ],
            axis=-1,
        )
        aux = [_wide(value) for value in outputs.aux_sums]
        if self.terms is None or self.aux is None:
            self.terms, self.aux, self.spec = terms, aux, spec
            return
        self.terms = self.terms + terms
        self.aux = [old + new for old, new in zip(self.aux, aux, strict=True)]

    @property
    def loss(self) -> float:
        assert self.terms is not None
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(np.sum(self.terms[:, 0] / self.terms[:, 1]))

    @property
    def metrics(self) -> PyTree:
        """The auxiliary outputs, reduced; arrays of each example are left out."""
        assert self.terms is not None and self.aux is not None
        assert self.spec is not None
        values, stream = [], iter(self.aux)
        for kind in self.spec.kinds:
            if kind is Kind.ROWS:
                values.append(None)
            elif kind is Kind.SUM:
                values.append(next(stream))
            else:
                total = next(stream)
                weight = self.terms[0, 1] if kind is Kind.AVERAGE else next(stream)
                with np.errstate(invalid="ignore", divide="ignore"):
                    values.append(total / weight)
        return jax.tree.unflatten(self.spec.treedef, values)


class Forward:
    """The loss of batches, planned and compiled once for each layout."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._buffers = Buffers(settings.placement)
        self._skeleton: Skeleton | None = None
        self._ready: dict[Layout, Ready] = {}
        self.plan: Plan | None = None

    def run(
        self, model: PyTree, state: Any, batches: Iterable[Batch], *, key: Any = None
    ) -> Iterable[tuple[Ready, Batch, Any]]:
        """The outputs of each batch, in order; a batch is placed while one runs."""
        self._describe(model, state)
        assert self._skeleton is not None
        data = run_key(key)
        place = self._settings.placement.place
        split = self._skeleton.model.split(model)
        read = self._skeleton
        leaves = (
            place(split.trainable, read.parameter_specs),
            place(split.frozen, read.frozen_specs),
        )
        states: list[Any] = []
        if self._skeleton.state is not None:
            states = place(self._skeleton.state.split(state).frozen)
        waiting: tuple[Ready, Batch, Any] | None = None
        for number, batch in enumerate(batches):
            ready = self._prepare(batch.layout)
            started = self._start(ready, batch, leaves, states, data, number)
            if waiting is not None:
                yield waiting
            waiting = (ready, batch, started)
        if waiting is not None:
            yield waiting

    def prepare(self, model: PyTree, state: Any, layout: Layout) -> None:
        """Plans and compiles for batches of this layout; nothing runs."""
        self._describe(model, state)
        self._prepare(layout)

    def totals(
        self, model: PyTree, state: Any, batches: Iterable[Batch], *, key: Any = None
    ) -> Totals:
        """The sums over all batches."""
        totals = Totals()
        for ready, _, outputs in self.run(model, state, batches, key=key):
            totals.add(ready.traced.aux_spec, outputs)
        return totals

    def _start(
        self,
        ready: Ready,
        batch: Batch,
        leaves: tuple[list[Any], list[Any]],
        state: list[Any],
        key: np.ndarray,
        number: int,
    ) -> Any:
        cut = ready.cut
        laid = slots(batch.count, batch.weights, capacity=cut.capacity)
        passes, placement = cut.num_microbatches, self._settings.placement
        places = np.arange(cut.capacity) if cut.places is None else cut.places
        places = placement.slots_here(places, passes)
        taken, place = batch.take(laid.order[places]), placement.place_rows
        rows = place([leaf.reshape(passes, -1, *leaf.shape[1:]) for leaf in taken])
        (weights,) = place([laid.weights[places].reshape(passes, -1)])
        arguments = Arguments(
            *leaves,
            self._buffers.captured(ready.builder.skeleton.loss_arrays),
            self._buffers.whole(batch.whole),
        )
        given = Slots(rows, weights, key, np.asarray(number, np.int32))
        captured = self._buffers.captured(ready.traced.captured)
        _, outputs = ready.accumulate(captured, arguments, state, given, [], [], None)
        return outputs

    def _describe(self, model: PyTree, state: Any) -> None:
        read = skeleton(self._settings, model, state, forward=True)
        if not read.same(self._skeleton):
            self._skeleton = read
            self._batch_norms = batch_norms(model)
            self._ready.clear()

    def _prepare(self, layout: Layout) -> Ready:
        if layout not in self._ready:
            assert self._skeleton is not None
            optimizer = optax.with_extra_args_support(optax.identity())
            builder = Builder(
                self._settings,
                self._skeleton,
                layout,
                optimizer,
                partition(()),
                [],
                [],  # in inference mode batch statistics do not depend on the cut
                forward=True,
            )
            self._ready[layout] = ForwardPlanner(builder).make()
            self.plan = self.plan or self._ready[layout].plan
        return self._ready[layout]


def _wide(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float64)
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array
