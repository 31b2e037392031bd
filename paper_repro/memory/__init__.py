"""Table 3: the bytes of each method."""

from ._experiment import EXPERIMENT as EXPERIMENT
