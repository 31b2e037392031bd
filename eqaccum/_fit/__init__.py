from ._checkpoint import check_save_path as check_save_path
from ._fit import fit as fit
from ._history import VALIDATION as VALIDATION, History as History
from ._info import Info as Info
from ._load import load as load, restore as restore, save as save
from ._result import FitResult as FitResult
