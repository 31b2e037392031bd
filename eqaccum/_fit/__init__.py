from ._fit import fit as fit
from ._history import History as History
from ._info import Info as Info
from ._result import FitResult as FitResult
