"""Checks of what is read back from a file: nothing foreign or damaged passes."""

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
Checks = dict[str, Check]


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_size(value: Any) -> bool:
    return is_count(value) and value >= 1


def is_maybe_count(value: Any) -> bool:
    return value is None or is_count(value)


def is_seconds(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < float("inf")


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def checked(
    data: Any, checks: Checks, *, where: str, refuse: Callable[[str], Exception]
) -> dict[str, Any]:
    """Exactly the named entries of `data`, each of which passes its check.

    **Raises:**

    `refuse(problem)`, the problem naming the entry.
    """
    if not is_mapping(data):
        raise refuse(f"{where} is a {type(data).__name__}, not a dict")
    if missing := [name for name in checks if name not in data]:
        raise refuse(f"{where} lacks {', '.join(missing)}")
    if unknown := [str(name) for name in data if name not in checks]:
        raise refuse(f"{where} has unknown {', '.join(unknown)}")
    for name, check in checks.items():
        if not check(data[name]):
            raise refuse(f"{where}.{name} is {repr(data[name])[:80]}")
    return dict(data)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)
