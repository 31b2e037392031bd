"""The gradient noise scale, free from accumulation."""

from ._experiment import EXPERIMENT as EXPERIMENT
