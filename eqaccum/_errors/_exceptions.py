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

# Tracebacks show the names that users import.
_FRONT_DOOR = "eqaccum"


class EqaccumError(Exception):
    """The root of eqaccum's exceptions.

    `result` is the `FitResult` of the last good step where training had begun, else
    None: nothing that was trained is lost to an exception.
    """

    __module__ = _FRONT_DOOR
    result: Any = None


class InputError(EqaccumError, ValueError):
    """An argument, a model, a loss or data that cannot work.

    The message says what was passed, what was expected and what to do.
    """

    __module__ = _FRONT_DOOR


class PlanError(EqaccumError):
    """No plan can be made."""

    __module__ = _FRONT_DOOR


class DoesNotFit(PlanError):
    """Not even the smallest microbatch fits in the memory limit."""

    __module__ = _FRONT_DOOR


class CannotTell(PlanError):
    """The backend gives no usable memory figures, so no size can be said to fit."""

    __module__ = _FRONT_DOOR


class CheckpointError(EqaccumError):
    """A checkpoint cannot be written, or what is there is none or is damaged."""

    __module__ = _FRONT_DOOR


class NonFiniteError(EqaccumError):
    """A loss or a gradient was not finite, or a batch had no weight."""

    __module__ = _FRONT_DOOR


class StepError(EqaccumError):
    """The device failed while a step ran (out of memory, for one)."""

    __module__ = _FRONT_DOOR


class EqaccumWarning(UserWarning):
    """The run goes on, but not as one may expect."""

    __module__ = _FRONT_DOOR
