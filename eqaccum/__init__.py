"""The same training run on every device: global batches out of microbatches that fit.

import eqaccum
result = eqaccum.fit(model, data, global_batch=4096)
"""

from . import callbacks as callbacks, data as data, losses as losses
from ._accumulate import batched as batched, shared_key as shared_key
from ._coupled import MemoryBank as MemoryBank, coupled as coupled
from ._doors import (
    CheckReport as CheckReport,
    Machine as Machine,
    check as check,
    doctor as doctor,
    evaluate as evaluate,
    make_step as make_step,
    plan as plan,
    predict as predict,
    value_and_grad as value_and_grad,
)
from ._errors import (
    CannotTell as CannotTell,
    CheckpointError as CheckpointError,
    DoesNotFit as DoesNotFit,
    EqaccumError as EqaccumError,
    EqaccumWarning as EqaccumWarning,
    InputError as InputError,
    NonFiniteError as NonFiniteError,
    PlanError as PlanError,
    StepError as StepError,
)
from ._fit import (
    FitResult as FitResult,
    History as History,
    Info as Info,
    fit as fit,
    load as load,
    restore as restore,
    save as save,
)
from ._plan import (
    LargeArray as LargeArray,
    Parts as Parts,
    Plan as Plan,
    Probe as Probe,
)
from ._step import Step as Step
from ._types import (
    Mean as Mean,
    Metrics as Metrics,
    Sum as Sum,
    TrainState as TrainState,
)
