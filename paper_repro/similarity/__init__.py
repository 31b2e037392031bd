"""Figure 6: the mass of similarity by the passages' age."""

from ._experiment import EXPERIMENT as EXPERIMENT
