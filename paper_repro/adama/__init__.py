"""AdamA: the moments accumulate in the gradient's place."""

from ._experiment import EXPERIMENT as EXPERIMENT
