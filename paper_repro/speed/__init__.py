"""Figure 4: the seconds of an update."""

from ._experiment import EXPERIMENT as EXPERIMENT
