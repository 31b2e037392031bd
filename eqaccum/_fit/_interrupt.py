"""Ctrl-C finishes the step, a second one interrupts as usual; SIGTERM saves."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from .. import _errors

# What a shell reports for a process that SIGTERM ended.
TERMINATED = 128 + signal.SIGTERM


class Interrupt:
    """While open, the first SIGINT only sets `asked`. Main thread only.

    With `terminate` so does SIGTERM, and sets `terminated`: there is a checkpoint to
    write. A handler of the user's own is left where it is.
    """

    def __init__(self, *, terminate: bool = False) -> None:
        self.asked = False
        self.terminated = False
        self._handlers: dict[signal.Signals, tuple[Any, Any]] = {
            signal.SIGINT: (signal.default_int_handler, self._interrupt)
        }
        if terminate:
            self._handlers[signal.SIGTERM] = (signal.SIG_DFL, self._terminate)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number, (default, handler) in self._handlers.items():
                if signal.getsignal(number) is default:
                    self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        _errors.say("interrupted: finishing this step (again to stop at once)")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if not self.terminated:
            _errors.say("told to terminate: finishing this step and saving it")
        self.asked = self.terminated = True
