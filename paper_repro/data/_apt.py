"""apt's package index, read through apt's own programs into a folder of its own."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import _errors

# An index is a run of records; a record maps a field to its value, whose further lines
# keep the blank that they begin with.
Record = dict[str, str]

_OS_RELEASE = Path("/etc/os-release")
_COMPONENTS = ("main", "universe")
_HELPER = "/usr/lib/apt/apt-helper"


@dataclasses.dataclass(frozen=True)
class Index:
    """A fetched package index of one release."""

    folder: Path
    codename: str

    def packages(self) -> Iterator[Record]:
        """The records of `Packages`: one per binary package."""
        return self._records("Packages")

    def translations(self) -> Iterator[Record]:
        """The records of `Translation-en`: one per description."""
        return self._records("Translations")

    def _records(self, kind: str) -> Iterator[Record]:
        for file in self._files(kind):
            command = [_helper(), "cat-file", str(file)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None  # PIPE was asked for
                yield from records(line.decode() for line in process.stdout)
            if process.returncode != 0:
                raise _errors.apt_failed(command, f"exit code {process.returncode}")

    def _files(self, kind: str) -> list[Path]:
        language = ["Language: en"] if kind == "Translations" else []
        targets = _apt(
            *("indextargets", *_options(self.folder)),
            *("--format", "$(CODENAME)\t$(COMPONENT)\t$(FILENAME)"),
            *(f"Created-By: {kind}", *language),
        )
        rows = [line.split("\t") for line in targets.splitlines()]
        files = [
            Path(file)
            for codename, component, file in rows
            if codename == self.codename
            and component in _COMPONENTS
            and Path(file).exists()
        ]
        if not files:
            raise _errors.no_index(self.codename, (row[0] for row in rows))
        return files


@contextlib.contextmanager
def fetched_index(codename: str) -> Iterator[Index]:
    """Fetches the index of a release; it is there while the block runs.

    Images often switch descriptions off, and the system's own lists need root: English
    is asked for here, into a folder that is removed afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="apt-lists-") as name:
        folder = Path(name)
        # Run as root, apt fetches as a user of its own, who must get in.
        folder.chmod(0o755)
        (folder / "partial").mkdir()
        _apt("update", *_options(folder))
        yield Index(folder, codename)


def records(lines: Iterator[str]) -> Iterator[Record]:
    """The records of an index, which are separated by empty lines."""
    record: Record = {}
    field = ""
    for line in lines:
        line = line.rstrip("\n")
        if not line:
            if record:
                yield record
            record = {}
        elif line[0] in " \t":
            record[field] += "\n" + line
        else:
            field, _, value = line.partition(":")
            record[field] = value.strip()
    if record:
        yield record


def _options(folder: Path) -> list[str]:
    settings = {
        "Acquire::Languages": "en",
        "Dir::State::lists": f"{folder}/",
        # Where the system's caches lie only root may write; memory serves.
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
    }
    return [part for item in settings.items() for part in ("-o", "=".join(item))]


def _apt(*arguments: str) -> str:
    command = [_program("apt-get"), *arguments]
    return _output(command)


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C.UTF-8"}
    )
    if done.returncode != 0:
        raise _errors.apt_failed(command, done.stderr or done.stdout)
    return done.stdout


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise _errors.no_apt(name)
    return path


def _helper() -> str:
    return _HELPER if Path(_HELPER).exists() else _program("apt-helper")


def this_release() -> str:
    """The code name of the system's own release."""
    lines = _OS_RELEASE.read_text().splitlines() if _OS_RELEASE.exists() else []
    for line in lines:
        name, _, value = line.partition("=")
        if name == "VERSION_CODENAME" and value:
            return value.strip("\"'")
    _program("apt-get")  # where apt is missing, that is what to say
    raise _errors.no_codename(_OS_RELEASE)
