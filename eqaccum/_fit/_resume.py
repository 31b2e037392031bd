"""Where a run begins: afresh, at the newest checkpoint, or after a finished fit."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _errors
from .._data import Place, Source
from .._mesh import Placement, on_host
from .._plan import Plan, format_bytes
from .._step import common_limit
from .._types import TrainState
from ._checkpoint import (
    Checkpoints,
    Saved,
    check_writable,
    devices_of,
    directory,
    newest,
)
from ._history import History
from ._leaves import (
    Spec,
    check_same,
    check_train,
    discard,
    is_deleted,
    named_leaves,
    put_back,
    spec_of,
    specs_of,
)
from ._length import Length, count
from ._orbax import newest_folder, orbax
from ._record import Cutting, Position, position_after
from ._result import FitResult

# What trials may have led to a plan that is kept for this microbatch=.
_KEPT_FOR = {"largest": ("none", "settled"), "fastest": ("settled",)}


@dataclass(frozen=True)
class Begun:
    """What the loop starts with."""

    train: TrainState
    history: History
    position: Position


@dataclass(frozen=True)
class Past:
    """What is continued: how far it came, and how its values are read.

    `cutting` and `devices` are None where they are not known (a `FitResult`'s).
    """

    where: str
    step: int
    position: Position
    global_batch: int
    cutting: Cutting | None
    devices: str | None
    plan: Plan
    trial: str
    leaves: dict[str, Spec]
    place: Place | None
    read: Callable[[], tuple[dict[str, np.ndarray], History]]


@dataclass(frozen=True)
class Start:
    """Where a run begins and where its checkpoints go, checked before it is planned."""

    path: Path | None
    every: int | None
    past: Past | None

    def check_seen_by_all(self, placement: Placement) -> None:
        """Refuses a directory in which the processes see different checkpoints."""
        if self.path is None or not placement.is_shared:
            return
        found = newest_folder(self.path)
        told = placement.exchange(-1 if found is None else int(found.name))
        if len(set(told)) > 1:
            raise _errors.checkpoints_differ(self.path, [step for (step,) in told])

    def check_model(self, model: PyTree) -> None:
        """Refuses a model of another structure before anything is compiled for it."""
        if self.past is None:
            return
        saved = {n: s for n, s in self.past.leaves.items() if n.startswith("model")}
        check_same(specs_of("model", model), saved, where=self.past.where)

    def check_data(self, cutting: Cutting, length: Length, source: Source) -> None:
        """Refuses data, or a way to cut it, that would give other batches."""
        past = self.past
        if past is None:
            return
        if past.global_batch != cutting.global_batch:
            _differs(past, "global_batch", past.global_batch, cutting.global_batch)
        if past.cutting is not None:
            for name in ("rows", "shuffle", "drop_remainder"):
                before, now = getattr(past.cutting, name), getattr(cutting, name)
                if before != now:
                    _differs(past, name, before, now)
        if past.place is not None and source.go_on_at(past.place):
            return
        over = length.steps is not None and past.step >= length.steps
        if past.position != Position() and not (source.restartable or over):
            raise _errors.cannot_go_on(
                source.description, past.where, past.position.batch
            )

    def plan(
        self, placement: Placement, microbatch: Any, memory_limit: Any
    ) -> Plan | None:
        """The plan so far, if it fits here: with it, resuming is exact to the bit.

        None where there is none, where it does not fit, and where the user asks for
        another one: an int, or a trial that this plan is not the end of.
        """
        past = self.past
        if past is None or not isinstance(microbatch, str):
            return None
        if past.trial not in _KEPT_FOR.get(microbatch, ()):
            return None
        here = devices_of(placement)
        if past.devices not in (here, None) or past.plan.devices != placement.size:
            before = past.devices or f"{past.plan.devices} devices"
            _errors.say(f"planning anew: {past.where} ran on {before}, this is {here}")
            return None
        need = past.plan.predicted_bytes
        try:
            limit = common_limit(memory_limit, placement)
        except _errors.CannotTell:
            return past.plan
        if need is not None and need > limit.bytes:
            self.say_too_large(limit.bytes)
            return None
        return past.plan

    def say_too_large(self, limit: int | None) -> None:
        assert self.past is not None
        need = self.past.plan.predicted_bytes
        figures = ""
        if need is not None and limit is not None:
            figures = f" ({format_bytes(need)}, now {format_bytes(limit)})"
        _errors.say(
            f"planning anew: the plan of {self.past.where} no longer fits{figures}"
        )

    def begin(self, train: TrainState, length: Length) -> Begun:
        """The state that the run goes on with; `train` is a fresh one."""
        past = self.past
        if past is None:
            return Begun(train, History(), Position())
        check_train(train, past.leaves, where=past.where)
        asked = train.key
        discard(train)  # it was only asked what goes where
        values, history = past.read()
        train = put_back(train, values)
        if not np.array_equal(train.key, asked):
            _errors.say(f"the key of {past.where} goes on, not the one passed")
        position = past.position.within(length.per_epoch)
        _errors.say(f"goes on after step {train.step} of {past.where}, at {position}")
        return Begun(train, history, position)

    def checkpoints(self, cutting: Cutting, placement: Placement) -> Checkpoints | None:
        """The writer of this run's checkpoints, None without `checkpoint=`."""
        if self.path is None:
            return None
        return Checkpoints(self.path, cutting, devices_of(placement), self.every)


def starting_point(*, checkpoint: Any, save_every: Any, resume: Any) -> Start:
    """Reads the arguments, and what is in the directory.

    **Raises:**

    `InputError` for arguments that cannot work and a run that would be overwritten,
    `CheckpointError` for a directory that cannot be written and a checkpoint that is
    foreign or damaged.
    """
    every = count("save_every", save_every)
    if not isinstance(resume, bool | FitResult):
        raise _errors.bad_resume(resume)
    if checkpoint is None:
        if every is not None:
            raise _errors.needs_checkpoint("save_every", every)
        if resume is True:
            raise _errors.needs_checkpoint("resume", resume)
        return Start(None, None, _of_result(resume))
    orbax()  # missing, it is missed now and not after the first epoch
    path = directory("checkpoint", checkpoint)
    saved = newest(path)
    if saved is not None and resume is not True:
        raise _errors.run_exists(path, int(saved.folder.name))
    check_writable(path)
    if resume is not True:
        return Start(path, every, _of_result(resume))
    if saved is None:
        _errors.say(f"no checkpoint in {path} yet: the run starts at step 0")
        return Start(path, every, None)
    return Start(path, every, _of_saved(saved))


def _of_saved(saved: Saved) -> Past:
    reached, where = saved.record.reached, os.fspath(saved.folder)
    if reached is None:
        raise _errors.no_run(where)
    return Past(
        where=where,
        step=reached.step,
        position=reached.position,
        global_batch=reached.cutting.global_batch,
        cutting=reached.cutting,
        devices=reached.devices,
        plan=reached.plan,
        trial=reached.trial,
        leaves=saved.train_leaves,
        place=reached.place,
        read=saved.read,
    )


def _of_result(result: Any) -> Past | None:
    """A finished fit. It is copied, so the result stays as it is."""
    if not isinstance(result, FitResult):
        return None
    leaves = named_leaves(result.train)
    if is_deleted(list(leaves.values())):
        raise _errors.consumed()
    return Past(
        where="the fit before",
        step=result.train.step,
        position=position_after(result.history),
        global_batch=result.plan.global_batch,
        cutting=None,
        devices=None,
        plan=result.plan,
        trial="none",
        leaves={name: spec_of(leaf) for name, leaf in leaves.items()},
        place=None,
        read=lambda: (
            {name: _host(leaf) for name, leaf in leaves.items()},
            History.of(dict(result.history)),
        ),
    )


def _host(leaf: Any) -> np.ndarray:
    return on_host(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _differs(past: Past, what: str, before: Any, now: Any) -> None:
    raise _errors.other_run(past.where, what, before, now)
