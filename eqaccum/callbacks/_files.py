"""Logs in text files: one row or one line for each step that is written."""

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _errors
from .._types import Own
from ._logger import Logger


class CSV(Logger):
    """Writes a CSV file, one row per step and one column per name of the history.

    The file is complete after each step. A resumed run goes on in it: rows of the step
    at which it begins and later ones are dropped first, so a new run begins it anew.

    **Arguments:**

    - `path`: the file; its folder is made if need be.
    - `every`: write every so many steps. A step after which there was a validation is
        always written.

    **Raises:**

    `eqaccum.InputError` where the file is there and is not such a log.

    !!! Example

        ```python
        log = eqaccum.callbacks.CSV("runs/a/log.csv", every=10)
        eqaccum.fit(model, data, global_batch=512, callbacks=[log])
        ```
    """

    @_errors.short_tracebacks
    def __init__(
        self, path: Own[str | os.PathLike, ...], *, every: Own[int, ...] = 1
    ) -> None:
        super().__init__(every)
        self._path = _file("CSV", path)
        self._names: list[str] = []
        self._rows()

    def _open(self, step: int) -> None:
        rows = [row for row in self._rows() if int(row["step"]) < step]
        self._names = list(rows[0]) if rows else []
        self._write_anew(rows)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        new = [name for name in values if name not in self._names]
        if new:  # the first step, and the first one with a validation
            rows = self._rows()
            self._names += new
            self._write_anew(rows)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._names).writerow(values)

    def _write_anew(self, rows: Iterable[Mapping[str, str]]) -> None:
        with _Replaced(self._path) as part, part.open("w", newline="") as file:
            if self._names:
                writer = csv.DictWriter(file, self._names)
                writer.writeheader()
                writer.writerows(rows)

    def _rows(self) -> Sequence[dict[str, str]]:
        try:
            with self._path.open(newline="") as file:
                reader = csv.DictReader(file)
                names = reader.fieldnames or []
                rows = list(reader)
        except FileNotFoundError:
            return []
        except (ValueError, csv.Error):
            raise _errors.not_a_log("CSV", self._path) from None
        # A process that was killed may have left half a row.
        whole = [row for row in rows if None not in row.values()]
        if names and not ("step" in names and all(_is_step(r["step"]) for r in whole)):
            raise _errors.not_a_log("CSV", self._path)
        return whole


class JSONL(Logger):
    """Writes a file of JSON objects, one line per step, by the names of the history.

    Numbers that are not finite are `null`. The file is complete after each step. A
    resumed run goes on in it: lines of the step at which it begins and later ones are
    dropped first, so a new run begins it anew.

    **Arguments:**

    - `path`: the file; its folder is made if need be.
    - `every`: write every so many steps. A step after which there was a validation is
        always written.

    **Raises:**

    `eqaccum.InputError` where the file is there and is not such a log.

    !!! Example

        ```python
        log = eqaccum.callbacks.JSONL("runs/a/log.jsonl")
        eqaccum.fit(model, data, global_batch=512, callbacks=[log])
        ```
    """

    @_errors.short_tracebacks
    def __init__(
        self, path: Own[str | os.PathLike, ...], *, every: Own[int, ...] = 1
    ) -> None:
        super().__init__(every)
        self._path = _file("JSONL", path)
        self._lines()

    def _open(self, step: int) -> None:
        lines = [line for line in self._lines() if json.loads(line)["step"] < step]
        with _Replaced(self._path) as part:
            part.write_text("".join(line + "\n" for line in lines))

    def _write(self, step: int, values: dict[str, Any]) -> None:
        finite = {n: v if math.isfinite(v) else None for n, v in values.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(finite, allow_nan=False) + "\n")

    def _lines(self) -> Sequence[str]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return []
        except ValueError:
            raise _errors.not_a_log("JSONL", self._path) from None
        # What follows the last end of a line was cut off when a process was killed.
        lines = text.split("\n")[:-1]
        for line in lines:
            try:
                is_ours = _is_step(json.loads(line)["step"])
            except (ValueError, TypeError, KeyError):
                is_ours = False
            if not is_ours:
                raise _errors.not_a_log("JSONL", self._path)
        if text and not lines:
            raise _errors.not_a_log("JSONL", self._path)
        return lines


class _Replaced:
    """A file that is put in the place of another one when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")

    def __enter__(self) -> Path:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._part

    def __exit__(self, error: Any, *_: Any) -> None:
        if error is None:
            os.replace(self._part, self._path)


def _file(name: str, path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise _errors.bad_log_path(name, path)
    found = Path(os.fsdecode(path)).expanduser().absolute()
    if found.is_dir():
        raise _errors.bad_log_path(name, path)
    return found


def _is_step(value: Any) -> bool:
    return str(value).isdecimal()
