"""One script under several limits of memory, and on several devices."""

from ._experiment import EXPERIMENT as EXPERIMENT
