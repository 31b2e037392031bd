"""Checkpoints of one directory: the newest is read, new ones are written."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _errors
from .._data import Place
from .._mesh import Placement
from .._plan import Plan
from .._types import TrainState
from ._history import History
from ._leaves import Spec, named_leaves, spec_of
from ._orbax import (
    RECORD,
    RECORD_FILE,
    Writer,
    checksum,
    folders,
    newest_folder,
    orbax,
    read_arrays,
    short,
)
from ._record import Cutting, Reached, Record, position_after, read_record

# The newest, and the one before it: should the newest be damaged, little is lost.
_KEPT = 2
_HISTORY = "history."


@dataclass(frozen=True)
class Saved:
    """One complete checkpoint, of which only the record was read so far."""

    folder: Path
    record: Record
    older: Path | None = None

    @property
    def train_leaves(self) -> dict[str, Spec]:
        """The leaves of the `TrainState`."""
        leaves = self.record.leaves.items()
        return {name: spec for name, spec in leaves if not _is_history(name)}

    def read(self) -> tuple[dict[str, np.ndarray], History]:
        """The values of the `TrainState`'s leaves, and the history."""
        arrays = self.arrays(list(self.record.leaves))
        history = {
            name.removeprefix(_HISTORY): array
            for name, array in arrays.items()
            if _is_history(name)
        }
        values = {n: array for n, array in arrays.items() if not _is_history(n)}
        return values, History.of(history)

    def arrays(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Those arrays on the host, each compared with its checksum.

        **Raises:**

        `CheckpointError` where one cannot be read, or is not what was saved.
        """
        specs = self.record.leaves
        numbers = {name: number for number, name in enumerate(specs)}
        filled = [name for name in names if specs[name].size]
        try:
            read = read_arrays(self.folder, [numbers[name] for name in filled])
        except _errors.CheckpointError:
            raise
        except Exception as error:
            raise self._damaged(short(error)) from error
        found = dict(zip(filled, read, strict=True))
        for name, array in found.items():
            self._check(name, array)
        empty = {
            name: np.zeros(specs[name].shape, jnp.dtype(specs[name].dtype))
            for name in names
            if not specs[name].size
        }
        return {name: (found | empty)[name] for name in names}

    def _check(self, name: str, array: Any) -> None:
        spec, expected = self.record.leaves[name], self.record.checksums[name]
        if not isinstance(array, np.ndarray):  # Orbax leaves out what it cannot find
            raise self._damaged(f"{name} is missing")
        if array.shape != spec.shape or str(array.dtype) != spec.dtype:
            raise self._damaged(f"{name} is {array.dtype}{list(array.shape)}")
        if expected is not None and checksum(array) != expected:
            raise self._damaged(f"{name} has another checksum than when it was saved")

    def _damaged(self, problem: str) -> Exception:
        return _errors.damaged_checkpoint(str(self.folder), problem, self.older)


def read_folder(folder: Path, *, older: Path | None = None) -> Saved:
    file = folder / RECORD / RECORD_FILE
    return Saved(folder, read_record(file, older=older), older)


def newest(path: Path) -> Saved | None:
    """The newest complete checkpoint of a directory, None where there is none."""
    found = folders(path)
    if not found:
        return None
    return read_folder(found[-1], older=found[-2] if len(found) > 1 else None)


def find(path: Path) -> Saved:
    """The newest checkpoint of a directory, or the one that `path` itself is.

    **Raises:**

    `CheckpointError` where there is none.
    """
    if (path / RECORD / RECORD_FILE).is_file():
        return read_folder(path)
    if not path.is_dir():
        raise _errors.no_directory(path)
    saved = newest(path)
    if saved is None:
        entries = sorted(entry.name for entry in path.iterdir())
        raise _errors.no_checkpoint(path, entries[:5])
    return saved


def directory(argument: str, path: Any) -> Path:
    """The path that a user gave."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise _errors.bad_path(argument, path)
    return Path(os.fsdecode(path)).expanduser().absolute()


def check_writable(path: Path) -> None:
    """Makes the directory, and refuses one that no file can be made in."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        problem = error.strerror or str(error)
        raise _errors.cannot_write_checkpoint(
            path, problem, newest_folder(path)
        ) from error


def devices_of(placement: Placement) -> str:
    """The devices in words, equal where a plan of the one is one of the other."""
    kind = placement.devices[0].device_kind
    return f"{placement.size} x {placement.backend} ({kind})"


@dataclass
class Checkpoints:
    """Writes the checkpoints of one run, in the background.

    Their folders are named by the batches seen, skipped ones included.
    """

    path: Path
    cutting: Cutting
    devices: str
    every: int | None
    _writer: Writer = field(init=False)
    _last: int | None = None

    def __post_init__(self) -> None:
        self._writer = Writer(self.path, keep=_KEPT)
        found = newest_folder(self.path)
        self._last = None if found is None else int(found.name)

    def is_due(self, step: int, *, skipped: bool, epoch_ended: bool) -> bool:
        if self.every is None:
            return epoch_ended
        return step % self.every == 0 and not skipped

    def save(
        self,
        train: TrainState,
        history: History,
        plan: Plan,
        trial: str,
        place: Place | None = None,
    ) -> None:
        """Takes a checkpoint, unless this very batch has one, and returns.

        **Raises:**

        `CheckpointError` where it, or the one before, could not be written.
        """
        if train.batch_index == self._last:
            return
        arrays = named_leaves(train) | _named_history(history)
        reached = Reached(
            step=train.step,
            position=position_after(history),
            cutting=self.cutting,
            devices=self.devices,
            plan=plan,
            trial=trial,
            place=place,
        )
        record = Record({name: spec_of(a) for name, a in arrays.items()}, reached)
        self._writer.save(train.batch_index, record, arrays)
        self._last = train.batch_index

    def check(self) -> None:
        """Raises what a save in the background has met."""
        self._writer.check()

    def wait(self) -> None:
        """Returns when all that was taken is on the disk."""
        self._writer.wait()

    def close(self) -> None:
        self._writer.close()

    @property
    def newest(self) -> Path | None:
        return newest_folder(self.path)


def _is_history(name: str) -> bool:
    return name.startswith(_HISTORY)


def _named_history(history: History) -> dict[str, Any]:
    return {_HISTORY + name: array for name, array in history.items()}


def check_save_path(path: Any) -> Path:
    """The directory for `TrainState`s that a user gave.

    **Raises:**

    `InputError` for no path and for the directory of a fit, `CheckpointError` where
    Orbax is missing or nothing can be written.
    """
    orbax()
    path = directory("path", path)
    _newest_state(path)
    check_writable(path)
    return path


def _newest_state(path: Path) -> Saved | None:
    found = newest(path)
    if found is not None and found.record.reached is not None:
        raise _errors.holds_run(path)
    return found


def save_state(path: Path, train: TrainState) -> None:
    """Saves a `TrainState` alone, and returns when it is on the disk."""
    found = _newest_state(path)
    check_writable(path)
    number = 0 if found is None else int(found.folder.name) + 1
    arrays = named_leaves(train)
    record = Record({name: spec_of(a) for name, a in arrays.items()}, None)
    writer = Writer(path, keep=1)
    try:
        writer.save(number, record, arrays)
        writer.wait()
    finally:
        writer.close()
