"""Figures 5 and 7: the norms of the two encoders' gradients."""

from ._experiment import EXPERIMENT as EXPERIMENT
