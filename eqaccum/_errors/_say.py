"""How eqaccum speaks: one line on standard error for each choice it made."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from ._exceptions import EqaccumWarning


def shown(value: Any) -> str:
    """A value as a message shows it; arrays, traced ones too, by dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    return f"{value!r} ({type(value).__name__})"


def say(text: str) -> None:
    """Prints one line, `eqaccum: text`, on standard error.

    Of the processes of a job the first one speaks for all.
    """
    if jax.distributed.is_initialized() and jax.process_index() != 0:
        return
    with _beside_bars():
        print(f"eqaccum: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Warns with `EqaccumWarning`, pointing outside of the package."""
    depth, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        "eqaccum"
    ):
        depth, frame = depth + 1, frame.f_back
    with _beside_bars():
        warnings.warn(text, EqaccumWarning, stacklevel=depth)


@contextlib.contextmanager
def _beside_bars() -> Iterator[None]:
    """A progress bar's line is left free meanwhile, and drawn again below."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        yield
        return
    with tqdm.tqdm.external_write_mode(file=sys.stderr):
        yield
