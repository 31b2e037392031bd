"""Table 2: ContAccum without its parts."""

from ._experiment import EXPERIMENT as EXPERIMENT
