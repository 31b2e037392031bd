from ._compile import forget as forget
from ._settings import (
    Settings as Settings,
    check_compute_dtype as check_compute_dtype,
)
from ._step import Pending as Pending, Placed as Placed, Step as Step
