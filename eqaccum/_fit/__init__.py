from ._history import History as History
from ._loop import fit as fit
from ._result import FitResult as FitResult
