from ._fit import fit as fit
from ._history import History as History
from ._info import Info as Info
from ._load import load as load, restore as restore, save as save
from ._result import FitResult as FitResult
