"""The weights of examples, as the user gave them."""

from typing import Any

import numpy as np

from .. import _errors


def example_weights(weights: Any, rows: int) -> np.ndarray | None:
    """A copy of the weights of all rows of the data, of which one must be positive."""
    checked = batch_weights(weights, rows)
    if checked is not None and not checked.any():
        raise _errors.weights_all_zero(rows)
    return checked


def batch_weights(weights: Any, rows: int) -> np.ndarray | None:
    """A copy of the weights of a batch's rows; all may be 0, which the step reports."""
    if weights is None:
        return None
    given = np.asarray(weights)
    if given.shape != (rows,):
        raise _errors.weights_shape(given.shape, rows)
    if not np.can_cast(given.dtype, np.float64, "same_kind"):
        raise _errors.weights_dtype(given.dtype)
    with np.errstate(over="ignore"):  # what becomes infinite is refused below
        checked = np.array(given, np.float32)
    wrong = ~(np.isfinite(checked) & (checked >= 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise _errors.weights_value(row, given[row].item())
    return checked
