"""Is an accumulated gradient the gradient of the whole batch?"""

from ._experiment import EXPERIMENT as EXPERIMENT
