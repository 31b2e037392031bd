"""The one file that speaks to Orbax, which is imported when it is first needed."""

import functools
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import _errors
from ._record import Record

ARRAYS = "arrays"
RECORD = "record"
RECORD_FILE = "record.json"
_TEMPORARY = "*.orbax-checkpoint-tmp"
# How long a background save may take before Orbax gives up on it, in seconds.
_PATIENCE = 6 * 3600
# Looks for what a failed save still writes, and the seconds between them.
_LOOKS, _MOMENT = 40, 0.05


def orbax() -> Any:
    """Orbax, or the command that installs it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise _errors.no_orbax() from error
    return orbax.checkpoint


class Writer:
    """Writes checkpoints into a directory, in the background, whole or not at all.

    Each is a folder that Orbax fills under another name and renames when all of it is
    on the disk; the oldest beyond `keep` are removed after that.
    """

    def __init__(self, path: Path, *, keep: int) -> None:
        ocp = orbax()
        self._path = path
        logging.getLogger("absl").addFilter(_not_from_orbax)
        self._manager = ocp.CheckpointManager(
            path,
            item_handlers={
                # numbers of a training run hardly compress: 8 % smaller, and up to
                # five times the time (measured, 400 MB)
                ARRAYS: ocp.PyTreeCheckpointHandler(use_compression=False),
                RECORD: _record_item().handler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(timeout_secs=_PATIENCE),
            ),
        )

    def save(self, number: int, record: Record, arrays: Mapping[str, Any]) -> None:
        """Takes what is to be saved and returns; waits for the save before, if any.

        **Raises:**

        `CheckpointError` where this save, or the one before, could not be written.
        """
        ocp = orbax()
        held = {name: _held(array) for name, array in arrays.items()}
        tree = {
            _key(i): array if _on_cpu(array) else held[name]
            for i, (name, array) in enumerate(arrays.items())
            if array.size
        }
        with self._failures_named():
            self._manager.save(
                number,
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeSave(tree),
                    record=_record_item().arguments(record, held),
                ),
                force=True,
            )

    def check(self) -> None:
        """Raises what a background save has met since, without waiting for one."""
        with self._failures_named():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Returns when everything is on the disk."""
        with self._failures_named():
            self._manager.wait_until_finished()

    def close(self) -> None:
        try:
            with self._failures_named():
                self._manager.close()
        finally:
            logging.getLogger("absl").removeFilter(_not_from_orbax)

    def _failures_named(self) -> "_Named":
        return _Named(self._path)


@dataclass(frozen=True)
class _Named:
    """Turns what Orbax raises into one sentence, and clears its remains away."""

    path: Path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        _clear_away(self.path)
        newest = newest_folder(self.path)
        raise _errors.cannot_write_checkpoint(
            self.path, short(error), newest
        ) from error


def _clear_away(path: Path) -> None:
    """Removes what a failed save left half written.

    Other parts of it may still be on their way to the disk, and make their folders
    anew: it is done when nothing has come back for a moment.
    """
    for _ in range(_LOOKS):
        remains = list(path.glob(_TEMPORARY))
        for folder in remains:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_MOMENT)
        if not remains:
            return


def folders(path: Path) -> list[Path]:
    """The complete checkpoints in a directory, the newest last."""
    try:
        found = [entry for entry in path.iterdir() if entry.name.isdecimal()]
    except FileNotFoundError:
        return []
    except OSError as error:
        problem = error.strerror or str(error)
        raise _errors.cannot_read_checkpoints(path, problem) from error
    return sorted(found, key=lambda entry: int(entry.name))


def newest_folder(path: Path) -> Path | None:
    found = folders(path)
    return found[-1] if found else None


def read_arrays(folder: Path, numbers: Sequence[int]) -> list[np.ndarray]:
    """Those arrays of a checkpoint, on the host. Raises whatever Orbax raises."""
    ocp = orbax()
    keys = [_key(number) for number in numbers]
    arguments = ocp.RestoreArgs(restore_type=np.ndarray)
    log = logging.getLogger("absl")
    log.addFilter(_not_from_orbax)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            tree = reader.restore(
                folder / ARRAYS,
                args=ocp.args.PyTreeRestore(
                    item=dict.fromkeys(keys, 0),
                    restore_args=dict.fromkeys(keys, arguments),
                    partial_restore=True,
                ),
            )
    finally:
        log.removeFilter(_not_from_orbax)
    return [tree[key] for key in keys]


def checksum(array: np.ndarray) -> int:
    flat = np.ascontiguousarray(array).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data)


def short(error: BaseException) -> str:
    """The operating system's word where there is one, else the first sentence."""
    text = str(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code.group(1))) if code else text.split("\n")[0][:200]


def _key(number: int) -> str:
    return f"{number:06d}"


def _held(array: Any) -> Any:
    """The array as the background may read it while training goes on.

    A view holds a CPU array's buffer: a step that would take it leaves it be. Other
    devices' arrays are copied to the host now. What no process holds whole is Orbax's.
    """
    if not isinstance(array, jax.Array):
        return np.array(array)
    if not (array.is_fully_addressable or array.is_fully_replicated):
        return array
    return np.asarray(array)


def _on_cpu(array: Any) -> bool:
    """Whether Orbax reads it where it lies; numpy arrays it would copy first."""
    if not isinstance(array, jax.Array):
        return False
    return all(device.platform == "cpu" for device in array.sharding.device_set)


def _not_from_orbax(entry: logging.LogRecord) -> bool:
    """Orbax logs pages for each failure; it is raised, in one sentence, anyway."""
    return f"{os.sep}orbax{os.sep}" not in entry.pathname


@dataclass(frozen=True)
class _RecordItem:
    """How Orbax writes `record.json`: a handler and its arguments."""

    handler: Any
    arguments: Any


@functools.cache
def _record_item() -> _RecordItem:
    """Made when Orbax is there, and once: Orbax keeps a register of them."""
    ocp = orbax()

    class RecordHandler(ocp.handlers.AsyncCheckpointHandler):
        async def async_save(self, directory: Any, args: Any) -> list[Any]:
            writing = _write_record(Path(directory), args.record, args.held)
            future = ocp.future.CommitFutureAwaitingContractedSignals(
                writing, name="eqaccum_record"
            )
            return [future]

        def save(self, directory: Any, args: Any) -> None:
            raise NotImplementedError("records are saved in the background")

        def restore(self, directory: Any, args: Any = None) -> None:
            raise NotImplementedError("records are read by read_record")

    @ocp.args.register_with_handler(RecordHandler, for_save=True)
    @dataclass(repr=False)
    class SaveRecord(ocp.args.CheckpointArgs):
        record: Record
        held: Mapping[str, Any]

    @ocp.args.register_with_handler(RecordHandler, for_restore=True)
    @dataclass
    class RestoreRecord(ocp.args.CheckpointArgs):
        pass

    return _RecordItem(RecordHandler, SaveRecord)


async def _write_record(
    directory: Path, record: Record, held: Mapping[str, Any]
) -> None:
    if jax.process_index() != 0:
        return
    checksums = {
        name: checksum(array) if isinstance(array, np.ndarray) else None
        for name, array in held.items()
    }
    with open(directory / RECORD_FILE, "w") as file:
        file.write(replace(record, checksums=checksums).to_json())
        file.flush()
        os.fsync(file.fileno())
