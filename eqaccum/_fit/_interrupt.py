"""Ctrl-C finishes the step; a second one interrupts as usual."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from .. import _errors


class Interrupt:
    """While open, the first SIGINT only sets `asked`. Main thread only."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if self._before is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._handle)
            else:  # the user's own handler, or none: leave it
                self._before = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        _errors.say("interrupted: finishing this step (again to stop at once)")
