"""What the processes of a job tell each other between two steps, so that all stop at
the same one."""

from dataclasses import dataclass

from .. import _errors
from .._mesh import Placement
from ._interrupt import Interrupt


@dataclass
class Together:
    """One process's part in what all decide; a process that is alone decides itself.

    `known` is the exception that stops all of them after the same step: only then do
    they save together. Any other one may have caught this process alone.
    """

    placement: Placement
    known: BaseException | None = None
    _asked: bool = False
    _terminated: bool = False

    @property
    def several(self) -> bool:
        return self.placement.is_shared

    @property
    def is_first(self) -> bool:
        return not self.several or 0 in self.placement.here

    def hear(
        self, interrupt: Interrupt, failure: Exception | None = None
    ) -> Exception | None:
        """Tells the others of a signal or an exception, and hears of theirs.

        Returns what stops this process: its own exception, or one that names theirs.
        """
        if not self.several:
            return failure
        told = self.placement.exchange(
            int(failure is not None), int(interrupt.asked), int(interrupt.terminated)
        )
        self._asked = any(asked for _, asked, _ in told)
        self._terminated = any(terminated for *_, terminated in told)
        return self._common(failure, [failed for failed, *_ in told])

    def agree(self, stop: bool, failure: Exception | None) -> bool:
        """Whether one of the processes asks to stop.

        **Raises:**

        What was raised here, or an exception that names the process where it was.
        """
        if self.several:
            told = self.placement.exchange(int(failure is not None), int(stop))
            failure = self._common(failure, [failed for failed, _ in told])
            stop = any(asked for _, asked in told)
        if failure is not None:
            raise failure
        return stop

    def asked(self, interrupt: Interrupt) -> bool:
        """Whether a signal asked to stop, in a way that all processes know of."""
        return self._asked if self.several else interrupt.asked

    def terminated(self, interrupt: Interrupt) -> bool:
        return self._terminated if self.several else interrupt.terminated

    def knows(self, error: BaseException) -> bool:
        """Whether the others stop after the same step, too."""
        same = isinstance(error, _errors.NonFiniteError)  # the loss is all devices'
        return not self.several or same or error is self.known

    def _common(self, failure: Exception | None, failed: list[int]) -> Exception | None:
        if not any(failed):
            return None
        where = [process for process, one in enumerate(failed) if one]
        self.known = failure or _errors.stopped_elsewhere(where)
        return failure or self.known
