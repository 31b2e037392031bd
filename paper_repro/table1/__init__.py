"""Table 1: the order of the methods."""

from ._experiment import EXPERIMENT as EXPERIMENT
