"""Run-time type checks of the public functions' arguments, once per call."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from beartype.door import is_bearable

from .. import _errors
from .._types import Own as Own

_F = TypeVar("_F", bound=Callable)


def at_the_door(fn: _F) -> _F:
    """Checks the arguments against the annotations before the call.

    The check is over when `fn` runs: a jaxtyping scope held open around user code would
    bind its axis names to the first microbatch. An exception leaves with the frames of
    the user's code.
    """
    signature = inspect.signature(fn)
    hints = {
        name: hint
        for name, hint in fn.__annotations__.items()
        if name != "return" and hint is not Any
    }

    @functools.wraps(fn)
    def door(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"eqaccum.{fn.__name__}: {error}") from None
        for name, value in given.items():
            if name in hints and not is_bearable(value, hints[name]):
                raise _errors.wrong_type(fn.__name__, name, value, hints[name])
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            _errors.shorten(error)
            raise

    return door  # type: ignore[return-value]
