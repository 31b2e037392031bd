"""Saying what data is, where it could be taken for something else."""

from ._data import examples as examples
