"""Bytes as people write and read them."""

import operator
import re

from .. import _errors

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def format_bytes(count: int | float) -> str:
    """Bytes for people, in binary units: `3.1 GiB`, `683 B`."""
    sign, size = ("-" if count < 0 else ""), abs(count)
    if size < 1024:
        return f"{sign}{int(size)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # 1023.96 would be printed as 1024.0: it belongs to the next unit.
        if size < 1023.95:
            return f"{sign}{size:.1f} {unit}"
    return f"{sign}{size:.1f} TiB"


def parse_bytes(value: object) -> int:
    """A number of bytes out of a positive int or out of text such as `"10GiB"`.

    `kB`, `MB`, `GB` and `TB` are powers of 1000, `KiB`, `MiB`, `GiB` and `TiB` powers
    of 1024; letter case does not matter. Anything else is refused.
    """
    if isinstance(value, str):
        count = _parse_text(value)
    elif isinstance(value, bool):
        count = None
    else:
        try:
            count = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            count = None
    if count is None or count <= 0:
        raise _errors.bad_bytes(value)
    return count


def _parse_text(text: str) -> int | None:
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    unit = _UNITS.get(match[2].lower())
    return None if unit is None else int(float(match[1]) * unit)
