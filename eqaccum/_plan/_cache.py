"""What programs were found to need, remembered in the process and on disk.

An entry belongs to one program under a key made of named parts, so that a miss can say
which part changed. The limit is no part of it: free memory moves from run to run, and
the limit only chooses among the figures.
"""

import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs

from .. import _errors
from ._decode import Checks, checked, is_list, is_maybe_count, is_seconds, is_text

_MAGIC = "eqaccum.cache"
_VERSION = 1
_MOST_ENTRIES = 512
# A writer that was killed leaves its temporary file behind; it is removed after this.
_STALE_SECONDS = 3600
# Only files of this form are ever removed: the folder may hold others.
_ENTRY = "[0-9a-f]" * 16 + "-" + "[0-9a-f]" * 32 + ".json"
_UNFINISHED = "eqaccum-*.tmp"
_OFF = ("0", "false", "no", "off")
_ON = ("", "1", "true", "yes", "on")


@dataclass(frozen=True)
class Key:
    """What an entry is about.

    **Arguments:**

    - `name`: what stays the same while the parts change: the step and its passes.
    - `parts`: pairs `(name, text)`; the entry is found again where all are equal.
    """

    name: str
    parts: tuple[tuple[str, str], ...]

    @functools.cached_property
    def digest(self) -> str:
        """The key as one word."""
        text = json.dumps([self.name, self.parts])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def file(self) -> str:
        """The entry's file name; entries of one name start alike."""
        return f"{_name_digest(self.name)}-{self.digest[:32]}.json"


@dataclass(frozen=True)
class Remembered:
    """What is known about a program.

    **Arguments:**

    - `bytes`: what the compiler said that it needs; `None` for not known.
    - `step_seconds`: how long a step with it took; `None` for not tried.
    - `out_of_memory`: whether memory ran out while it was compiled or ran.
    """

    bytes: int | None = None
    step_seconds: float | None = None
    out_of_memory: bool = False


def program_key(
    name: str,
    program: str,
    *,
    device: Any,
    options: Mapping[str, Any] | None = None,
) -> Key:
    """The key of a program.

    **Arguments:**

    - `name`: the step and its passes, in words that survive a change of the program.
    - `program`: its text, or a digest of it.
    - `device`: the `jax.Device` that it is compiled for.
    - `options`: the compiler options.
    """
    client = getattr(device, "client", None)
    parts = {
        "program": hashlib.sha256(program.encode()).hexdigest(),
        "device": f"{device.platform} {device.device_kind}",
        "backend": getattr(client, "platform_version", ""),
        # The compiler for CPUs cuts loops by their number.
        "processors": str(os.cpu_count()) if device.platform == "cpu" else "",
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "eqaccum": _version("eqaccum"),
        "options": json.dumps(dict(options or {}), sort_keys=True, default=str),
        "XLA_FLAGS": _flags("XLA_FLAGS"),
        "LIBTPU_INIT_ARGS": _flags("LIBTPU_INIT_ARGS"),
    }
    return Key(name, tuple(parts.items()))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from its source
        return ""


def _flags(name: str) -> str:
    """Flags in order, less those that only write files for people."""
    flags = os.environ.get(name, "").split()
    return " ".join(sorted(f for f in flags if not f.startswith("--xla_dump")))


def _name_digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


# What this process learned, whichever folder it writes to.
_process: dict[Key, Remembered] = {}
_said: set[str] = set()


class Cache:
    """Entries by key: in the process always, in a folder where there is one.

    Entries are one small file each, written whole or not at all, so writers need no
    lock. A file that is damaged, foreign or of another version is a miss. Beyond
    `most_entries` those that were not used for longest are removed. A folder that
    cannot be written to is given up, which is said once.

    **Arguments:**

    - `folder`: where the files are; `None` for the process alone.
    - `process`: the entries of this process; those of all caches by default.
    - `most_entries`: how many files are kept.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        process: dict[Key, Remembered] | None = None,
        most_entries: int = _MOST_ENTRIES,
    ) -> None:
        self._folder = folder
        self._process = _process if process is None else process
        self._most_entries = most_entries

    @property
    def folder(self) -> Path | None:
        """Where the files are, `None` for the process alone."""
        return self._folder

    def recall(self, key: Key) -> Remembered | None:
        """What is known under the key, or `None`."""
        if key not in self._process and self._folder is not None:
            path = self._folder / key.file
            entry = _read(path)
            if entry is not None and entry[0] == key:
                self._process[key] = entry[1]
                _touch(path)
        return self._process.get(key)

    def remember(self, key: Key, **learned: Any) -> None:
        """Adds what was learned to what is known under the key.

        **Arguments:**

        - `learned`: fields of [`Remembered`][]; the others stay as they are.
        """
        known = asdict(self.recall(key) or Remembered())
        self._process[key] = new = Remembered(**{**known, **learned})
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(self._folder / key.file, key, new)
            self._shrink(self._folder)
        except OSError as error:
            self._give_up(self._folder, error)

    def why_missed(self, key: Key) -> str:
        """Why `recall` found nothing: what changed since an earlier process's entry.

        What this process knows is no answer: a second loss over the same shapes is
        another program, and not one that was expected to be remembered.
        """
        nearest = min(
            self._same_name(key), key=lambda old: len(_changes(old, key)), default=None
        )
        if nearest is None:
            return "nothing is remembered about this step yet"
        changes = _changes(nearest, key)
        return "; ".join(changes) if changes else "nothing changed: it is remembered"

    def _same_name(self, key: Key) -> list[Key]:
        if self._folder is None:
            return []
        files = sorted(self._folder.glob(f"{_name_digest(key.name)}-*.json"))
        found = [entry[0] for entry in map(_read, files) if entry is not None]
        unknown = (old for old in found if old not in self._process)
        return [old for old in unknown if old.name == key.name]

    def _shrink(self, folder: Path) -> None:
        ages = sorted((_modified(path), path) for path in folder.glob(_ENTRY))
        for _, path in ages[: max(0, len(ages) - self._most_entries)]:
            path.unlink(missing_ok=True)
        for path in folder.glob(_UNFINISHED):
            if _modified(path) < time.time() - _STALE_SECONDS:
                path.unlink(missing_ok=True)

    def _give_up(self, folder: Path, error: OSError) -> None:
        self._folder = None
        if str(folder) not in _said:
            _said.add(str(folder))
            _errors.say(
                f"plans are remembered in this process only: {folder} cannot be "
                f"written to ({error.strerror or error}); EQACCUM_CACHE_DIR names "
                "another folder, cache=False asks for none"
            )


def open_cache(cache: bool = True) -> Cache:
    """The cache that the arguments and the environment ask for.

    On disk unless `cache=False` or `EQACCUM_CACHE=0`, in the user's cache folder or in
    `EQACCUM_CACHE_DIR`.
    """
    word = os.environ.get("EQACCUM_CACHE", "")
    if word.lower() not in _OFF + _ON:
        raise _errors.bad_cache_switch(word)
    if not cache or word.lower() in _OFF:
        return Cache(None)
    folder = os.environ.get("EQACCUM_CACHE_DIR")
    return Cache(Path(folder or platformdirs.user_cache_dir("eqaccum")))


def _changes(old: Key, new: Key) -> list[str]:
    before, after = dict(old.parts), dict(new.parts)
    names = [name for name in after | before if before.get(name) != after.get(name)]
    # Digests tell people nothing.
    return [
        "the program changed (the model, the loss, the shapes or the optimizer)"
        if name == "program"
        else f"{name} was {before.get(name, '')!r}, is {after.get(name, '')!r}"
        for name in names
    ]


# Files


def _is_maybe_seconds(value: Any) -> bool:
    return value is None or is_seconds(value)


_FILE: Checks = {
    "kind": lambda value: value == _MAGIC,
    "version": lambda value: value == _VERSION,
    "name": is_text,
    "parts": is_list,
    "bytes": is_maybe_count,
    "step_seconds": _is_maybe_seconds,
    "out_of_memory": lambda value: isinstance(value, bool),
}


def _read(path: Path) -> tuple[Key, Remembered] | None:
    """The entry in a file; `None` where it is absent, damaged or foreign."""
    try:
        data = json.loads(path.read_bytes())
        data = checked(data, _FILE, where="entry", refuse=ValueError)
        parts = tuple((str(name), str(text)) for name, text in data["parts"])
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    seconds = data["step_seconds"]
    return Key(data["name"], parts), Remembered(
        data["bytes"],
        None if seconds is None else float(seconds),
        data["out_of_memory"],
    )


def _write(path: Path, key: Key, entry: Remembered) -> None:
    body = {"kind": _MAGIC, "version": _VERSION, **asdict(key), **asdict(entry)}
    handle, name = tempfile.mkstemp(".tmp", "eqaccum-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(body, file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another writer removed it
        return 0.0


def _touch(path: Path) -> None:
    """Marks an entry as used; a folder that is only readable stays usable."""
    try:
        os.utime(path)
    except OSError:
        pass
