from ._at_the_door import Own as Own, at_the_door as at_the_door
from ._check import (
    CheckReport as CheckReport,
    SelfTest as SelfTest,
    check as check,
    self_test as self_test,
)
from ._doctor import Machine as Machine, doctor as doctor
from ._evaluate import (
    Evaluation as Evaluation,
    evaluate as evaluate,
    predict as predict,
)
from ._make_step import (
    DEFAULT_OPTIMIZER as DEFAULT_OPTIMIZER,
    make_step as make_step,
    placement_for as placement_for,
)
from ._plan import (
    plan as plan,
    prepare_loss as prepare_loss,
    rows_per_step as rows_per_step,
)
from ._value_and_grad import value_and_grad as value_and_grad
