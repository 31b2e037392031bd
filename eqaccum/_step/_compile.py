"""The one seam that compiles: what is measured here is what runs."""

import functools
import hashlib
import itertools
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from .._mesh import Placement
from .._plan import (
    LargeArray,
    fresh_bytes,
    is_out_of_memory,
    largest_arrays,
    program_bytes,
)

# Compiled programs of the last step: a second `fit` of it finds its own. A step has up
# to seven: init, accumulate, weigh and both for short batches, finish, update.
_KEPT = 8
_programs: "OrderedDict[str, Program]" = OrderedDict()
_HOST_CALLBACK = re.compile(r"custom_call @\w*callback")
_numbers = itertools.count()


def region(name: str) -> jax.profiler.TraceAnnotation:
    """Names what the host does meanwhile, in a `jax.profiler` trace that a user starts.

    Without one it costs less than a microsecond.
    """
    return jax.profiler.TraceAnnotation(f"eqaccum/{name}")


class CompileOutOfMemory(Exception):
    """The compiler itself ran out of memory: the size does not fit."""


@dataclass(frozen=True)
class Program:
    """A compiled program and what the compiler says it needs, per device."""

    name: str
    key: str
    compiled: Callable
    bytes: int | None
    fresh: int  # bytes that a run allocates beside its arguments
    seconds: float

    def __call__(self, *args: Any) -> Any:
        with region(self.name):
            return self.compiled(*args)

    @functools.cached_property
    def arrays(self) -> tuple[LargeArray, ...]:
        """The largest arrays that it makes; none where the backend gives no text."""
        try:
            compiled: Any = self.compiled
            text = compiled.as_text()
        except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
            return ()
        return largest_arrays(text or "")


@dataclass(frozen=True)
class Lowered:
    """A program that is not compiled yet, known by its text."""

    name: str
    key: str
    text_digest: str  # of the program alone: the same in another process
    lowered: Any
    placement: Placement
    options: Mapping[str, Any] | None

    def compile(self) -> Program:
        """The compiled program, taken from the last ones where the text is the same.

        **Raises:**

        `CompileOutOfMemory` where the compiler says so; any other exception as it is.
        """
        if self.key in _programs:
            _programs.move_to_end(self.key)
            return _programs[self.key]
        start = time.perf_counter()
        options = dict(self.options) if self.options else None
        try:
            compiled = self.lowered.compile(compiler_options=options)
        except Exception as error:
            if is_out_of_memory(error):
                raise CompileOutOfMemory(str(error)) from error
            raise
        analysis = _analysis(compiled)
        return Program(
            self.name,
            self.key,
            compiled,
            program_bytes(analysis, backend=self.placement.backend),
            fresh_bytes(analysis),
            time.perf_counter() - start,
        )

    @property
    def kept(self) -> bool:
        return self.key in _programs


def keep(program: Program) -> None:
    """Holds on to a program that runs; probes that do not are let go."""
    _programs[program.key] = program
    _programs.move_to_end(program.key)
    while len(_programs) > _KEPT:
        _programs.popitem(last=False)


def forget() -> None:
    """Lets go of all kept programs (and so of the device memory that they hold)."""
    _programs.clear()


def lower(
    name: str,
    fn: Callable,
    args: tuple[Any, ...],
    *,
    placement: Placement,
    out: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Lowered:
    """Traces and lowers `fn` on structs; arguments that are not used stay arguments."""

    def program(*args: Any) -> Any:
        with jax.named_scope(f"eqaccum/{name}"):
            return fn(*args)

    program.__name__ = f"eqaccum_{name}"  # what a profile and a compiler's log show
    lies = {} if placement.mesh.size == 1 else {"out_shardings": out}
    jitted = jax.jit(program, donate_argnums=donate, keep_unused=True, **lies)
    lowered = jitted.lower(*args)
    text = lowered.as_text()
    parts = (
        text,
        # which Python function a host callback calls is not in the text
        str(next(_numbers)) if _HOST_CALLBACK.search(text) else "",
        repr(jax.tree.structure(args)),
        repr(lowered.out_tree),
        repr([str(device) for device in placement.devices]),
        repr(sorted((options or {}).items())),
    )
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Lowered(
        name,
        f"{name}-{digest}",
        hashlib.sha256(text.encode()).hexdigest(),
        lowered,
        placement,
        options,
    )


def _analysis(compiled: Any) -> Any:
    """What the backend tells; a backend that cannot is a normal case."""
    try:
        return compiled.memory_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None
