"""Figure 3: the global batch and the bank's rows."""

from ._experiment import EXPERIMENT as EXPERIMENT
