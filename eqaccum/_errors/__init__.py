from ._exceptions import (
    CannotTell as CannotTell,
    DoesNotFit as DoesNotFit,
    EqaccumError as EqaccumError,
    EqaccumWarning as EqaccumWarning,
    InputError as InputError,
    NonFiniteError as NonFiniteError,
    PlanError as PlanError,
    StepError as StepError,
)
from ._say import say as say, warn as warn
