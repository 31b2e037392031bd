"""The token-mean fault: a mean of the microbatches' means is another loss."""

from ._experiment import EXPERIMENT as EXPERIMENT
