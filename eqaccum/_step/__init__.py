from ._agree import common_limit as common_limit
from ._compile import forget as forget, region as region
from ._forward import Forward as Forward
from ._launch import Pending as Pending, Placed as Placed
from ._optimizer import (
    choose_optimizer as choose_optimizer,
    refuse_uncalled as refuse_uncalled,
)
from ._settings import (
    Settings as Settings,
    batch_norms as batch_norms,
    check_compute_dtype as check_compute_dtype,
    check_global_batch as check_global_batch,
    check_settings as check_settings,
    check_values as check_values,
)
from ._step import Step as Step
