"""Packages that only some experiments need."""

import importlib
from typing import Any

from . import _errors


def optional_module(name: str, what: str) -> Any:
    """The module `name`; where it is missing, an error that says who needs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise _errors.no_module(name, what) from None
