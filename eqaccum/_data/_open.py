"""Which of the three kinds the data is."""

import inspect
from typing import Any

import jax.tree_util as jtu

from .. import _errors
from . import _leaves
from ._columns import open_columns
from ._dataset import is_random_access, open_dataset
from ._iterable import IterableSource
from ._layout import plain_mapping
from ._source import Source


def open_source(data: Any, *, in_axes: Any = 0, example_weights: Any = None) -> Source:
    """Recognises data: columns, else random access, else an iterable of batches.

    Only protocols are asked for, so that no data library has to be installed.
    """
    if isinstance(data, list):
        raise _errors.top_level_list(data)
    if inspect.isroutine(data) or isinstance(data, type):
        raise _errors.data_is_a_function(data)
    if data is None:
        raise _errors.not_data(data)
    data = plain_mapping(data)
    if _leaves.is_array(data) or not jtu.all_leaves([data]):
        return open_columns(data, in_axes=in_axes, weights=example_weights)
    if isinstance(data, (str, bytes)):
        raise _errors.not_data(data)
    if is_random_access(data):
        if len(data) == 0:
            raise _errors.empty_data(f"the data set ({type(data).__name__})")
        try:
            first = data[0]
        except NotImplementedError:
            # Torch's `IterableDataset` inherits a `__getitem__` that only raises this.
            if not hasattr(data, "__iter__"):
                raise
        else:
            return open_dataset(data, first, in_axes=in_axes, weights=example_weights)
    if hasattr(data, "__iter__"):
        if example_weights is not None:
            raise _errors.weights_of_iterable()
        return IterableSource(data, in_axes=in_axes)
    raise _errors.not_data(data)
