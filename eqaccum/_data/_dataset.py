"""Kind 2: random access, one example per index."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .. import _errors
from .._types import Own
from . import _leaves
from ._batch import Batch, Rows
from ._layout import Layout, layout_of, leaf_names, marks_whole, plain_mapping
from ._source import Cut, Source, count_batches, cuts
from ._weights import example_weights

# A data set that repeats for ever says that its length is `sys.maxsize`.
_ENDLESS = 1 << 48


class Examples:
    """A sequence of examples; see `eqaccum.data.examples`."""

    def __init__(self, sequence: Any, workers: int):
        self._sequence = sequence
        self._workers = workers

    def __len__(self) -> int:
        return len(self._sequence)

    def __getitem__(self, index: int) -> Any:
        return self._sequence[index]

    def fetch(self, indices: list[int]) -> Iterator[Any]:
        """The examples at these indices, in order, read by the workers if any."""
        if not self._workers:
            yield from fetch(self._sequence, indices)
            return
        with ThreadPoolExecutor(self._workers, "eqaccum-data") as pool:
            waiting = [pool.submit(self._sequence.__getitem__, i) for i in indices]
            try:
                for example in waiting:
                    yield example.result()
            finally:  # after an error the others are not wanted
                for example in waiting:
                    example.cancel()


def examples(sequence: Any, *, workers: Own[int, ...] = 0) -> Examples:
    """Says that a sequence holds examples, one per index, and not columns.

    A list could mean either, so `fit` refuses one that is not marked.

    **Arguments:**

    - `sequence`: anything with `__len__` and `__getitem__`: a list of `(x, y)`, of
        dicts, of arrays, a data set. All examples have one structure, one dtype and one
        shape.
    - `workers`: threads that read the examples of a batch, for a `__getitem__` that
        waits for files or decodes images; it must be safe to call from several at once.
        The examples and their order are the same. While a step runs, the next batch is
        read in any case.

    **Returns:**

    An object that `eqaccum.fit`, `eqaccum.plan` and the others take as `data`.

    **Raises:**

    `eqaccum.InputError` if `sequence` has no length or cannot be indexed, or `workers`
    is no number of threads.

    !!! Example

        ```python
        pairs = [(image, label) for image, label in folder]
        eqaccum.fit(model, eqaccum.data.examples(pairs), global_batch=256)

        images = eqaccum.data.examples(ImageFolder("train"), workers=8)
        eqaccum.fit(model, images, global_batch=256)
        ```
    """
    whole = isinstance(workers, int | np.integer) and not isinstance(workers, bool)
    if not whole or workers < 0:
        raise _errors.bad_workers(workers)
    if isinstance(sequence, (str, bytes)) or not is_random_access(sequence):
        raise _errors.not_examples(sequence)
    return Examples(sequence, int(workers))


def is_random_access(data: Any) -> bool:
    """Whether one index can give one example."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetSource(Source):
    """A data set whose examples are read when a batch needs them."""

    data: Any
    count: int
    rows: int | None
    layout: Layout
    description: str
    weights: np.ndarray | None
    kind = "dataset"
    can_shuffle = True
    restartable = True

    def epoch(
        self,
        epoch: int,
        *,
        global_batch: int,
        order: np.ndarray | None = None,
        drop_remainder: bool = False,
        start: int = 0,
    ) -> Iterator[Batch]:
        all_cuts = cuts(
            self.count,
            global_batch=global_batch,
            order=order,
            drop_remainder=drop_remainder,
            start=start,
        )
        return (self._batch(cut, epoch) for cut in all_cuts)

    def _batch(self, cut: Cut, epoch: int) -> Batch:
        return Batch(
            layout=self.layout,
            count=len(cut.rows),
            weights=None if self.weights is None else self.weights[cut.rows],
            whole=[],
            rows=ExampleRows(self.data, self.layout, cut.rows),
            epoch=epoch,
            index=cut.index,
            first_row=cut.first_row,
        )

    def batches_per_epoch(self, global_batch: int, drop_remainder: bool = False) -> int:
        return count_batches(self.count, global_batch, drop_remainder)

    def column_chunks(self, leaf: int) -> Iterator[np.ndarray]:
        return iter(())


class ExampleRows(Rows):
    """The examples at some indices, each of which is read once.

    They are read when first taken, so that a process reads its own share only, and
    kept, so that a second look (a replay, a second sweep) sees the same examples even
    where the data set draws at random.
    """

    def __init__(self, data: Any, layout: Layout, indices: np.ndarray):
        self._data = data
        self._layout = layout
        self._indices = indices
        self._is_read = np.zeros(len(indices), bool)
        self._rows = [
            _leaves.empty((len(indices), *struct.shape), struct.dtype)
            for struct in layout.row_structs
        ]

    def take(self, order: np.ndarray) -> list[np.ndarray]:
        wanted = np.zeros(len(self._indices), bool)
        wanted[order] = True
        missing = np.flatnonzero(wanted & ~self._is_read)
        if len(missing):
            self._read(missing)
        return _leaves.take_own(self._rows, order)

    def _read(self, missing: np.ndarray) -> None:
        indices = [int(index) for index in self._indices[missing]]
        # Integers are first kept as wide as they may come, so that one out of range is
        # seen. Each example is copied at once: a data set may reuse its memory.
        wide = [_leaves.widest(rows.dtype) for rows in self._rows]
        targets = [
            rows if dtype == rows.dtype else np.empty(rows.shape, dtype)
            for rows, dtype in zip(self._rows, wide, strict=True)
        ]
        examples = fetch(self._data, indices)
        for place, index, example in zip(missing, indices, examples, strict=True):
            arrays = read_example(example, self._layout, index)
            for target, array in zip(targets, arrays, strict=True):
                target[place] = array
        for target, rows, name in zip(
            targets, self._rows, self._layout.paths, strict=True
        ):
            if target is not rows:
                found = target[missing]
                _leaves.check_range(found, rows.dtype, name=name, what="the data set")
                rows[missing] = found
        self._is_read[missing] = True


def fetch(data: Any, indices: list[int]) -> Iterator[Any]:
    """The examples at these indices, at once where the data set can do so."""
    if isinstance(data, Examples):
        yield from data.fetch(indices)
        return
    # Torch's protocol for it; Hugging Face's data sets are much faster this way.
    if hasattr(data, "__getitems__"):
        yield from data.__getitems__(indices)
    else:
        for index in indices:
            yield data[index]


def read_example(example: Any, layout: Layout, index: int) -> list[np.ndarray]:
    """The arrays of one example, which must be like those of the first."""
    leaves, treedef = _flatten(example)
    if treedef != layout.treedef:
        raise _errors.item_structure(
            _name(index), expected=layout.treedef, found=treedef
        )
    arrays = []
    for leaf, path, struct in zip(
        leaves, layout.paths, layout.row_structs, strict=True
    ):
        array = _array(leaf, path, index)
        dtype = _leaves.final_dtype(array.dtype, name=path, what=_name(index))
        if dtype != struct.dtype:
            raise _errors.item_dtype(
                path, _name(index), expected=struct.dtype, found=dtype
            )
        if array.shape != struct.shape:
            raise _errors.example_shape(
                path, _name(index), expected=struct.shape, found=array.shape
            )
        arrays.append(array)
    return arrays


def first_layout(example: Any) -> Layout:
    """The layout of batches of examples like this one."""
    leaves, treedef = _flatten(example)
    if not leaves:
        raise _errors.no_rows(_name(0), 0)
    specs = []
    for leaf, path in zip(leaves, leaf_names(treedef), strict=True):
        array = _array(leaf, path, 0)
        dtype = _leaves.final_dtype(array.dtype, name=path, what=_name(0))
        specs.append(("rows", array.shape, dtype))
    return layout_of(treedef, tuple(specs))


def _flatten(example: Any) -> tuple[list[Any], Any]:
    return jtu.tree_flatten(plain_mapping(example), is_leaf=_leaves.is_number_list)


def _array(leaf: Any, path: str, index: int) -> np.ndarray:
    if isinstance(leaf, (str, bytes)):
        raise _errors.text_in_example(path, leaf, _name(index))
    is_number = isinstance(leaf, (bool, int, float, complex, list))
    if not (is_number or _leaves.is_array(leaf)):
        raise _errors.not_an_array(path, leaf, _name(index))
    return np.asarray(_leaves.as_array(leaf, name=path, what=_name(index)))


def _name(index: int) -> str:
    return f"example {index}"


def open_dataset(data: Any, first: Any, *, in_axes: Any, weights: Any) -> DatasetSource:
    """Opens a data set whose example 0 is `first`."""
    if marks_whole(in_axes):
        raise _errors.in_axes_of_examples(in_axes)
    count = len(data)
    if count > _ENDLESS:
        raise _errors.endless_data(count)
    is_marked = isinstance(data, Examples)
    kind = "examples" if is_marked else f"data set {type(data).__name__}"
    return DatasetSource(
        data=data,
        count=count,
        rows=count,
        layout=first_layout(first),
        description=f"{count:,} rows ({kind})",
        weights=example_weights(weights, count),
    )
