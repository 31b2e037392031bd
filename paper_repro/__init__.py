"""Experiments of published papers, repeated: their data, models and measurements.

Beside the package, not in it; run from the root of the repository.
"""
