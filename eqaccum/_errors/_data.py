"""What is said of data that cannot be trained on."""

from collections.abc import Iterable, Sequence
from typing import Any

from ._exceptions import InputError

# The name of the only leaf, where the pytree is a single array.
THE_ARRAY = "the array"


def _kind(value: object) -> str:
    return type(value).__name__


def _at(name: str, what: str) -> str:
    leaf = "The array" if name == THE_ARRAY else f"Leaf {name}"
    return f"{leaf} of {what}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def top_level_list(data: list) -> InputError:
    first = f" of {_kind(data[0])}" if data else ""
    return InputError(
        f"The data is a list{first} with {len(data)} items, which could be columns or "
        "examples. For columns pass a tuple of arrays, `(x, y)`; for a list of "
        "examples pass `eqaccum.data.examples(data)`."
    )


def not_data(data: object) -> InputError:
    return InputError(
        f"The data is {_shown(data)} ({_kind(data)}), which is none of the three kinds "
        "of data: a pytree of arrays whose axis 0 counts examples; an object with "
        "`__len__` and `__getitem__`, one example per index; an iterable of batches."
    )


def data_is_a_function(data: object) -> InputError:
    return InputError(
        f"The data is a function or a class, {_shown(data)}. Pass what it returns; for "
        "more than one epoch of a generator pass an object whose `__iter__` calls it."
    )


def not_examples(sequence: object) -> InputError:
    return InputError(
        f"`eqaccum.data.examples` got {_shown(sequence)} ({_kind(sequence)}); it needs "
        "a sequence with `__len__` and `__getitem__`, such as a list of examples. "
        "Write `eqaccum.data.examples(list(...))` for an iterator."
    )


def empty_data(what: str) -> InputError:
    return InputError(
        f"There are no rows in {what}: at least one example is needed to train on."
    )


def endless_data(rows: int) -> InputError:
    return InputError(
        f"The data set says that it has {rows:,} examples, as one that repeats for "
        "ever does. Pass it without the repetition; epochs= or steps= repeats it."
    )


def no_rows(what: str, in_axes: Any) -> InputError:
    axes = "" if in_axes == 0 else f" under in_axes={in_axes!r}"
    return InputError(
        f"No array with an example axis was found in {what}{axes}: nothing counts the "
        "examples. Columns and batches are pytrees of arrays whose axis 0 counts "
        "examples; an iterable must give batches, not single examples."
    )


def not_an_array(name: str, value: object, what: str) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"is {_shown(value)} ({_kind(value)}), which is neither an "
        "array nor a number, a string or None. Convert it to an array, or leave it out."
    )


def ragged_list(name: str, what: str) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"is a list of numbers that does not make an array, since its "
        "rows differ in length. Pad them to one length (and say by a mask which "
        "entries are padding)."
    )


def typed_key(name: str, what: str) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"holds typed PRNG keys. Pass their data, "
        "`jax.random.key_data(keys)`, and call `jax.random.wrap_key_data` in the loss; "
        "or use the key that every example is given."
    )


def bad_dtype(name: str, dtype: object, what: str) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"has dtype {dtype}, which JAX cannot compute with. Convert "
        "it to numbers (strings to token ids, dates to floats, nested arrays to one "
        "array of one shape), or leave it out."
    )


def out_of_range(
    name: str, *, value: int, stored: object, final: object, what: str
) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"holds {value}, which does not fit in {final}: {stored} "
        f"becomes {final} unless 64-bit mode is on. Use smaller numbers, or switch it "
        'on by `jax.config.update("jax_enable_x64", True)`.'
    )


def not_whole_here(name: str, what: str) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"is spread over several processes, and this one holds only a "
        "part. Pass data that is whole in each process (a numpy array), or an iterable "
        "of each process's own share."
    )


def lengths_differ(lengths: Sequence[tuple[str, int]], what: str) -> InputError:
    # One leaf for each length tells enough where there are many leaves.
    shown = lengths if len(lengths) <= 6 else _one_of_each(lengths)[:6]
    listed = ", ".join(f"{name} has {rows:,}" for name, rows in shown)
    return InputError(
        f"The arrays of {what} differ in their number of rows: {listed}. Axis 0 must "
        "count the same examples in each. Mark an array without an example axis by "
        "None at its place in `in_axes`, a pytree of 0 and None as in `jax.vmap`."
    )


def _one_of_each(lengths: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    firsts = {rows: name for name, rows in reversed(lengths)}
    return [(name, rows) for name, rows in lengths if firsts[rows] == name]


def in_axes_value(value: object) -> InputError:
    return InputError(
        f"in_axes holds {_shown(value)} ({_kind(value)}); each leaf must be 0 (axis 0 "
        "counts examples) or None (the array has no example axis and is passed whole). "
        "For another axis move it first: `numpy.moveaxis(array, axis, 0)`."
    )


def in_axes_structure(in_axes: Any, structure: object, what: str) -> InputError:
    return InputError(
        f"in_axes={_shown(in_axes)} does not match {what}, whose structure is "
        f"{structure}. It must be 0, or a pytree prefix of it with 0 or None as "
        "leaves, as in `jax.vmap`."
    )


def in_axes_of_examples(in_axes: Any) -> InputError:
    return InputError(
        f"in_axes={_shown(in_axes)} was given for a data set of single examples, whose "
        "arrays have no example axis to mark. Leave in_axes out; what is the same for "
        "all examples belongs to the loss (an `eqx.Module` that holds it)."
    )


def text_in_example(name: str, value: object, what: str) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"is the text {_shown(value)}. An example is made of arrays "
        "and numbers: turn the text into token ids, or leave it out."
    )


def weights_shape(shape: tuple[int, ...], rows: int) -> InputError:
    return InputError(
        f"The weights have shape {shape}, where ({rows},) was expected: one weight "
        "for each example."
    )


def weights_dtype(dtype: object) -> InputError:
    return InputError(
        f"The weights have dtype {dtype}; they must be real numbers, one for each "
        "example."
    )


def weights_value(row: int, value: float | int) -> InputError:
    return InputError(
        f"The weight of row {row} is {value}; a weight must be finite in float32 and "
        "not negative, 0 for a row that does not count."
    )


def weights_all_zero(rows: int) -> InputError:
    return InputError(
        f"All {rows:,} example weights are 0 (in float32): nothing would be learnt. "
        "At least one must be positive."
    )


def weights_of_iterable() -> InputError:
    return InputError(
        "example_weights was given, but the data is an iterable of batches, whose rows "
        "cannot be numbered. Put the weight into each batch and let the loss return "
        "`eqaccum.Mean(w * value, w)`."
    )


def only_shapes() -> InputError:
    return InputError(
        "The data holds `jax.ShapeDtypeStruct`, which tells shapes without any values: "
        "enough for a plan, not for training. Pass arrays."
    )


def iterator_used_up(data: object) -> InputError:
    return InputError(
        f"The data is an iterator ({_kind(data)}), which can be read once: one epoch "
        "is over and another was asked for. Pass an object that starts afresh at each "
        "`iter(...)` (a loader, or a class whose `__iter__` makes the generator), or "
        "ask for one epoch."
    )


def one_epoch(epochs: int, description: str) -> InputError:
    return InputError(
        f"epochs={epochs}, but the data, {description}, is an iterator, which can be "
        "read once. Pass an object that starts afresh at each `iter(...)` (a loader, "
        "or a class whose `__iter__` makes the generator), or leave epochs= out."
    )


def epoch_without_rows(epoch: int, data: object) -> InputError:
    return InputError(
        f"The iterable ({_kind(data)}) gave no rows in epoch {epoch}. Each "
        "`iter(...)` of it must start again at the first batch."
    )


def item_structure(what: str, *, expected: object, found: object) -> InputError:
    return InputError(
        f"The structure of {what} is {found}, where the first one's is {expected}. "
        "All must have one structure."
    )


def item_dtype(name: str, what: str, *, expected: object, found: object) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"has dtype {found}, where the first one's is {expected}. "
        "Convert it, so that all have one dtype."
    )


def item_role(name: str, what: str, *, expected: str, found: str) -> InputError:
    return InputError(
        f"{_at(name, what)} is {found}, where in the first one it is {expected}."
    )


def item_value(name: str, what: str, *, expected: str, found: str) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"is {found}, where the first one's is {expected}. What is "
        "not an array is part of the compiled program and must stay the same: make a "
        "number an array (`numpy.float32(...)`), encode text as integers, or leave it "
        "out. Each item must be a batch, not a single example."
    )


def example_shape(
    name: str, what: str, *, expected: tuple[int, ...], found: tuple[int, ...]
) -> InputError:
    return InputError(
        f"{_at(name, what)} "
        f"has shape {found}, where the first one's is {expected}: "
        "rows of different shapes cannot share a batch. Pad them to one shape, or pass "
        "an iterable that makes batches of one shape each."
    )


def shapes_cannot_mix(
    what: str, *, pending: int, global_batch: int, changes: Iterable[str]
) -> InputError:
    return InputError(
        f"{what[0].upper()}{what[1:]} cannot be joined with the {pending} rows before "
        f"it into one batch of {global_batch}: {'; '.join(changes)}. Let each item "
        f"have exactly global_batch={global_batch} rows, or pad all to one shape. Each "
        "item must be a batch, not a single example."
    )


def bad_workers(value: Any) -> InputError:
    return InputError(
        f"eqaccum.data.examples got workers={value!r} ({type(value).__name__}); "
        "expected a number of threads, 0 for none. Pass 8, say, where reading an "
        "example waits for a file."
    )
