"""Is accumulation wasteful? Small batches at a fixed budget of tokens."""

from ._experiment import EXPERIMENT as EXPERIMENT
