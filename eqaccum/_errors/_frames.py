"""Tracebacks that lead to the user's code and not through eqaccum's."""

import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import jax

from ._exceptions import EqaccumError

_F = TypeVar("_F", bound=Callable)
# Packages whose frames say nothing about a mistake in a user's code.
_INTERNAL = ("eqaccum", "jax", "jaxlib", "jaxtyping", "importlib")


def shorten(error: BaseException) -> None:
    """Takes eqaccum's and JAX's own frames out of an exception's traceback.

    What is left are the user's, and those of other libraries (Equinox, a data set's).
    Where there is none of these, the exception is either one of eqaccum's, whose
    message says all, or a fault of eqaccum itself, which is shown whole. With
    `jax.config.update("jax_traceback_filtering", "off")` nothing is left out.
    """
    if getattr(jax.config, "jax_traceback_filtering", None) == "off":
        return
    for linked in _chain(error):
        frames = _frames(linked.__traceback__)
        kept = [frame for frame in frames if not _is_internal(frame)]
        if kept or isinstance(linked, EqaccumError):
            linked.__traceback__ = _linked(kept)


def short_tracebacks(fn: _F) -> _F:
    """A function of the user's level, which is the one frame of eqaccum's in errors."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise

    return call  # type: ignore[return-value]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that would be shown before it."""
    seen: set[int] = set()
    linked: BaseException | None = error
    while linked is not None and id(linked) not in seen:
        seen.add(id(linked))
        yield linked
        hidden = linked.__suppress_context__
        linked = linked.__cause__ or (None if hidden else linked.__context__)


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def _is_internal(traceback: TracebackType) -> bool:
    name = str(traceback.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _INTERNAL


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    chain = None
    for each in reversed(frames):
        chain = TracebackType(chain, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return chain
