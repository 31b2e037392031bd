"""The user's own setup function: `module:function` that returns `fit`'s arguments."""

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from .. import _errors, fit

_KNOWN = tuple(inspect.signature(fit).parameters)


def arguments_of(target: str) -> dict[str, Any]:
    """What the function returns, checked by name.

    **Raises:**

    `InputError` where there is no such function, or it returns something else.
    Whatever the user's own code raises passes through.
    """
    module_name, colon, name = target.partition(":")
    if not (colon and name.isidentifier() and _is_dotted(module_name)):
        raise _errors.bad_target(target)
    function = _function(_module(module_name), module_name, name)
    arguments = function()
    if not isinstance(arguments, Mapping):
        raise _errors.setup_returned(target, arguments)
    missing = [name for name in ("model", "data") if name not in arguments]
    unknown = [str(name) for name in arguments if name not in _KNOWN]
    if missing or unknown:
        raise _errors.setup_names(target, missing, unknown)
    return dict(arguments)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _module(name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another module, which that one imports, is the user's own error.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _errors.no_module(name, folder) from None


def _function(module: Any, module_name: str, name: str) -> Any:
    function = getattr(module, name, None)
    if callable(function):
        return function
    there = [
        other
        for other, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise _errors.no_function(module_name, name, there)
