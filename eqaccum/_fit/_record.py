"""What a checkpoint says about itself, in `record.json` beside its arrays."""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import _errors
from .._data import Place
from .._plan import Plan
from ._history import History
from ._leaves import Spec

_KIND = "eqaccum.checkpoint"
_VERSION = 1


@dataclass(frozen=True)
class Position:
    """The place in the data: the batch that comes next, and its epoch."""

    epoch: int = 0
    batch: int = 0

    def within(self, per_epoch: int | None) -> "Position":
        """The same place, the end of an epoch as the start of the next."""
        if per_epoch is not None and self.batch >= per_epoch:
            return Position(self.epoch + 1, 0)
        return self

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"


def position_after(history: History) -> Position:
    """The place in the data after the batches of a history."""
    if not len(history):
        return Position()
    epochs = history["epoch"]
    last = int(epochs[-1])
    return Position(last, int(np.sum(epochs == last)))


@dataclass(frozen=True)
class Cutting:
    """What decides which examples a batch holds: all of it must stay as it was."""

    global_batch: int
    rows: int | None
    shuffle: bool
    drop_remainder: bool


@dataclass(frozen=True)
class Reached:
    """How far a run came: updates, the place in the data, and how it was planned.

    `trial` is how far `microbatch="fastest"` was: "none", "under way" or "settled".
    `place` is what an iterator says of the position, None where it cannot say.
    """

    step: int
    position: Position
    cutting: Cutting
    devices: str
    plan: Plan
    trial: str
    place: Place | None = None


@dataclass(frozen=True)
class Record:
    """The names of a checkpoint's arrays in order, and how far the run came.

    `reached` is None for a `TrainState` that a loop of one's own saved. A checksum is
    None where no process held the whole array.
    """

    leaves: Mapping[str, Spec]
    reached: Reached | None
    checksums: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        leaves = [
            {
                "name": name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "crc32": self.checksums.get(name),
            }
            for name, spec in self.leaves.items()
        ]
        data = {
            "kind": _KIND,
            "version": _VERSION,
            "reached": _reached_dict(self.reached),
            "leaves": leaves,
        }
        return json.dumps(data | {"crc32": _checksum(data)}, indent=1)


def _reached_dict(reached: Reached | None) -> dict[str, Any] | None:
    if reached is None:
        return None
    return {
        "step": reached.step,
        "position": asdict(reached.position),
        "cutting": asdict(reached.cutting),
        "devices": reached.devices,
        "plan": reached.plan.to_dict(),
        "trial": reached.trial,
        "place": None if reached.place is None else asdict(reached.place),
    }


def read_record(file: Path, *, older: Path | None) -> Record:
    """Reads a record.

    **Raises:**

    `CheckpointError` where the file is missing, foreign, of another version or damaged.
    """
    where = str(file.parent.parent)
    try:
        text = file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise _errors.foreign_checkpoint(where, f"it has no {file.name}") from None
    except OSError as error:
        raise _errors.damaged_checkpoint(where, str(error), older) from error
    try:
        data = json.loads(text)
    except ValueError as error:
        problem = f"{file.name} is no JSON ({error})"
        raise _errors.damaged_checkpoint(where, problem, older) from error
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise _errors.foreign_checkpoint(
            where, f"the kind in {file.name} is not {_KIND!r}"
        )
    if data.get("version") != _VERSION:
        raise _errors.other_checkpoint_version(where, data.get("version"), _VERSION)
    if data.pop("crc32", None) != _checksum(data):
        problem = f"{file.name} has another checksum than when it was saved"
        raise _errors.damaged_checkpoint(where, problem, older)
    try:
        return _record(data)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{file.name} cannot be read ({type(error).__name__}: {error})"
        raise _errors.damaged_checkpoint(where, problem, older) from error


def _checksum(data: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())


def _record(data: dict[str, Any]) -> Record:
    leaves = {
        leaf["name"]: Spec(tuple(map(int, leaf["shape"])), str(leaf["dtype"]))
        for leaf in data["leaves"]
    }
    checksums = {leaf["name"]: leaf["crc32"] for leaf in data["leaves"]}
    return Record(leaves, _reached(data["reached"]), checksums)


def _reached(data: dict[str, Any] | None) -> Reached | None:
    if data is None:
        return None
    return Reached(
        step=int(data["step"]),
        position=Position(**data["position"]),
        cutting=Cutting(**data["cutting"]),
        devices=str(data["devices"]),
        plan=Plan.from_dict(data["plan"]),
        trial=str(data["trial"]),
        place=_place(data.get("place")),
    )


def _place(data: dict[str, Any] | None) -> Place | None:
    return None if data is None else Place(str(data["state"]), int(data["used"]))
