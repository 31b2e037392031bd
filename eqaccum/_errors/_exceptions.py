"""Every exception and warning that eqaccum raises.

EqaccumError                     the root; `.result` is what was trained, or None
├── InputError  (ValueError)     an argument, a model, a loss or data that cannot work
├── PlanError                    no plan can be made
│   ├── DoesNotFit               not even one example per pass fits
│   └── CannotTell               the backend gives no usable memory figures
├── CheckpointError              a checkpoint cannot be read or written
├── NonFiniteError               a loss or gradient was not finite
└── StepError                    the device failed while a step ran
EqaccumWarning (UserWarning)     the run goes on, but not as one may expect
"""

from typing import Any


class EqaccumError(Exception):
    """The root of eqaccum's exceptions.

    `result` is the `FitResult` of the last good step where training had begun, else
    None: nothing that was trained is lost to an exception.
    """

    result: Any = None


class InputError(EqaccumError, ValueError):
    """An argument, a model, a loss or data that cannot work.

    The message says what was passed, what was expected and what to do.
    """


class PlanError(EqaccumError):
    """No plan can be made."""


class DoesNotFit(PlanError):
    """Not even the smallest microbatch fits in the memory limit."""


class CannotTell(PlanError):
    """The backend gives no usable memory figures, so no size can be said to fit."""


class CheckpointError(EqaccumError):
    """A checkpoint cannot be written, or what is there is none or is damaged."""


class NonFiniteError(EqaccumError):
    """A loss or a gradient was not finite, or a batch had no weight."""


class StepError(EqaccumError):
    """The device failed while a step ran (out of memory, for one)."""


class EqaccumWarning(UserWarning):
    """The run goes on, but not as one may expect."""
