"""Messages about the model, the loss and what it returns."""

from typing import Any

from ._exceptions import InputError
from ._say import shown


class LossShapeError(InputError):
    """A loss returned an array of another shape than its form asks for."""


def name_of(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


# --- the model -------------------------------------------------------------------


def structure_changed(expected: Any, got: Any) -> InputError:
    return InputError(
        f"a pytree of another structure was passed: got {got}, expected {expected}. "
        "Pass the model (or state) that this step or plan was made for, or make a new "
        "one."
    )


def model_of_shapes() -> InputError:
    return InputError(
        "the model (or its state) holds jax.ShapeDtypeStruct, which tells shapes "
        "without any values: enough for eqaccum.plan, not for training. Pass arrays."
    )


def trainable_not_prefix(structure: Any) -> InputError:
    return InputError(
        f"trainable={structure} is not a prefix of the model. Pass True, a predicate "
        "on leaves, or a pytree of bools such as eqx.tree_at(lambda m: m.head, "
        "jax.tree.map(lambda _: False, model), True)."
    )


def trainable_not_bool(flag: Any) -> InputError:
    return InputError(
        f"trainable= gave {shown(flag)} for a leaf; expected True or False for each. A "
        "predicate sees shapes and dtypes, no values."
    )


def trainable_integer(leaf: Any) -> InputError:
    return InputError(
        f"trainable= marks a leaf of dtype {leaf.dtype} and shape {leaf.shape}; only "
        "floating and complex leaves can be trained. Mark it False."
    )


def nothing_to_train(dtypes: list[str]) -> InputError:
    if any("float" in dtype or "complex" in dtype for dtype in dtypes):
        return InputError(
            "the model has no leaf to train: trainable= leaves out all of its floating "
            "and complex arrays. Mark at least one of them True."
        )
    found = f"arrays of dtype {', '.join(dtypes)} only" if dtypes else "no arrays"
    return InputError(
        f"the model has no leaf to train: it holds {found}, and at least one floating "
        "or complex array is expected. Convert the parameters with "
        "jnp.asarray(x, jnp.float32)."
    )


# --- the loss as a callable ------------------------------------------------------


def loss_not_callable(loss: Any) -> InputError:
    return InputError(
        f"loss={loss!r} ({type(loss).__name__}); expected a function "
        "loss(model, example, key) that returns a float scalar or an eqaccum.Mean."
    )


def loss_arguments(
    fn: Any, signature: Any, names: list[str], has_state: bool
) -> InputError:
    return InputError(
        f"the loss {name_of(fn)}{signature} cannot be called with "
        f"({', '.join(names)}), which is what eqaccum passes"
        + (
            " where state= is given"
            if has_state
            else "; a loss of a stateful model also needs state="
        )
        + ". Give it exactly these arguments, in this order."
    )


def written_for_batch(fn: Any, error: Exception) -> InputError:
    return InputError(
        f"the loss {name_of(fn)} fails on one example but works on a batch, so it "
        "seems written for a batch. Write it for one example (eqaccum vmaps it), "
        "or wrap it: eqaccum.batched(fn), where fn returns one value per row. On one "
        f"example it said: {str(error).splitlines()[0] if str(error) else error!r}"
    )


# --- what a loss returns ---------------------------------------------------------


def loss_value(value: Any) -> InputError:
    return InputError(
        f"the loss returned {value!r} ({type(value).__name__}); expected a float "
        "scalar or an eqaccum.Mean(total, weight)."
    )


def loss_dtype(dtype: Any) -> InputError:
    return InputError(
        f"the loss returned dtype {dtype}; expected a real floating dtype. Convert it, "
        "for example with .astype(jnp.float32) or jnp.real."
    )


def loss_shape(shape: tuple[int, ...], *, row_axis: bool) -> LossShapeError:
    if row_axis:
        return LossShapeError(
            f"the batched loss returned shape {shape}; expected one value for each "
            "row, shape (n,). Reduce the other axes, for example with .mean(axis=-1)."
        )
    return LossShapeError(
        f"the loss of one example returned shape {shape}; expected a scalar. Reduce "
        "it, for example with jnp.mean(...), or return eqaccum.Mean(jnp.sum(...), "
        "count); for a loss of a whole batch use eqaccum.batched."
    )


def mean_shapes(total: tuple[int, ...], weight: tuple[int, ...]) -> LossShapeError:
    return LossShapeError(
        f"Mean(total, weight) got shapes {total} and {weight}; expected the same shape "
        "for both. Sum both over the same items."
    )


def batched_scalar() -> LossShapeError:
    return LossShapeError(
        "the batched loss returned a scalar, whose weight is unknown: averages of "
        "microbatches do not add up. Return one value per row, shape (n,), or "
        "Mean(total, weight) of two (n,) arrays; with batched(fn, weighted=True) one "
        "scalar Mean in which the weights are already in."
    )


def batched_rows(got: tuple[int, ...], expected: tuple[int, ...]) -> LossShapeError:
    return LossShapeError(
        f"the batched loss returned shape {got} for {expected[0]} rows; expected "
        f"{expected}, one value for each row."
    )


def mean_plus_other(other: Any) -> InputError:
    return InputError(
        f"a Mean and {shown(other)} cannot be added: the other term's weight is "
        "unknown. Write Mean(value, 1.0) for a term that counts once for each example."
    )


def mean_times_mean() -> InputError:
    return InputError(
        "two Means were multiplied; a loss is a sum of Means. Multiply a Mean by a "
        "number, or combine the two totals before making one Mean."
    )


def _kinds(has_aux: bool, has_state: bool) -> str:
    parts = ["value"] + ["state"] * has_state + ["aux"] * has_aux
    return f"({', '.join(parts)})" if len(parts) > 1 else "value alone"


def loss_results(out: Any, *, has_aux: bool, has_state: bool) -> InputError:
    got = f"a tuple of {len(out)}" if isinstance(out, tuple) else shown(out)
    if has_aux and has_state and isinstance(out, tuple) and len(out) == 2:
        hint = "If the loss has no auxiliary output, drop has_aux=True."
    elif not has_state and _holds_state(out):
        hint = "It returns a state: pass state= as well."
    elif not has_aux and isinstance(out, tuple):
        hint = "If the last one is an auxiliary output, pass has_aux=True."
    elif has_state:
        hint = "If the model has no state, drop state=."
    else:
        hint = "If the loss has no auxiliary output, drop has_aux=True."
    return InputError(
        f"the loss returned {got}; expected {_kinds(has_aux, has_state)}, for "
        f"has_aux={has_aux} and {'a' if has_state else 'no'} state. {hint}"
    )


def _holds_state(out: Any) -> bool:
    if not isinstance(out, tuple):
        return False
    return any(type(item).__name__ == "State" for item in out)


# --- state -----------------------------------------------------------------------


def state_not_passed() -> InputError:
    return InputError(
        "the loss returned an eqx.nn.State where its auxiliary output was expected. "
        "Pass the state as state= and return (value, state), or (value, state, aux)."
    )


def state_differs(error: Exception) -> InputError:
    return InputError(
        "the state differs between the examples of a microbatch, so there is no one "
        "state to keep. Combine it over the batch inside the layer, with "
        'jax.lax.pmean(x, "batch") as eqx.nn.BatchNorm does. JAX said: '
        f"{str(error).splitlines()[0]}"
    )


def state_structure(expected: Any, got: Any) -> InputError:
    return InputError(
        f"the loss returned a state of structure {got}; expected that of state=, "
        f"{expected}. Return the state that the model gave back."
    )


def state_leaf(path: str, old: Any, new: Any) -> InputError:
    return InputError(
        f"the loss changed the state's leaf {path} from {old.dtype}{old.shape} to "
        f"{new.dtype}{new.shape}; a state keeps its shapes and dtypes."
    )


def state_type(state: Any) -> InputError:
    return InputError(
        f"state={type(state).__name__} was passed; expected the eqx.nn.State that "
        "eqx.nn.make_with_state(...) gives beside the model."
    )


# --- auxiliary outputs -----------------------------------------------------------


def aux_integer(name: str, dtype: Any) -> InputError:
    return InputError(
        f"the auxiliary output{name} is a scalar of dtype {dtype}, and it is not clear "
        "how to combine it. Return eqaccum.Sum(x) to add it up, eqaccum.Mean(total, "
        "count) for a ratio, or a float or bool to average it."
    )


def aux_not_array(name: str, value: Any) -> InputError:
    return InputError(
        f"the auxiliary output{name} is {value!r} ({type(value).__name__}); expected "
        "an array, a number, eqaccum.Mean or eqaccum.Sum. Leave it out."
    )


def aux_is_sum_of_means(name: str) -> InputError:
    return InputError(
        f"the auxiliary output{name} is a sum of Means. Return each Mean under a name "
        "of its own."
    )


def aux_without_rows(name: str, shape: tuple[int, ...], rows: int) -> InputError:
    return InputError(
        f"the auxiliary output{name} of a batched loss has an array of shape {shape} "
        f"for {rows} rows; expected one value for each row, shape ({rows}, ...), in an "
        "eqaccum.Mean or eqaccum.Sum too: what is summed over a microbatch already "
        "would count rows of weight 0. (Where the loss is one scalar Mean with the "
        "weights in, auxiliary Means may be scalars like it.)"
    )


# --- keys ------------------------------------------------------------------------


def not_a_key(key: Any) -> InputError:
    return InputError(
        f"key= is {shown(key)}; expected one PRNG key: jax.random.key(0), or a legacy "
        "uint32 key of shape (2,)."
    )


# --- the default losses ----------------------------------------------------------


def default_needs_pair(structure: Any) -> InputError:
    return InputError(
        f"loss=None needs data (x, y), got {structure}. Pass loss=, a function "
        "loss(model, example, key)."
    )


def default_target(dtype: Any, hint: str) -> InputError:
    return InputError(
        f"loss=None cannot choose a loss for targets of dtype {dtype}: {hint}"
    )


def default_shapes(output: Any, target: Any, expected: str, hint: str) -> InputError:
    return InputError(
        f"loss=None: the model's output has shape {output}, the target {target}; "
        f"expected {expected}. {hint}"
    )


def label_range(low: int, high: int, classes: int) -> InputError:
    return InputError(
        f"the integer targets range from {low} to {high}, but the model has {classes} "
        f"outputs; expected 0 to {classes - 1}. Relabel the targets, widen the model, "
        "or pass loss= if some targets are to be ignored."
    )


def model_not_callable(model: Any) -> InputError:
    return InputError(
        f"loss=None calls the model, and a {type(model).__name__} cannot be called. "
        "Pass loss=, a function loss(model, example, key)."
    )


def nothing_to_call(model: Any) -> InputError:
    return InputError(
        f"predict calls model(x), and a {type(model).__name__} cannot be called. Pass "
        "a callable pytree: the model, a part such as model.query, or a function of "
        "one row."
    )


def default_state(out: Any) -> InputError:
    return InputError(
        f"loss=None with state= expects model(x, state) to return (output, state); it "
        f"returned a {type(out).__name__}. Pass loss=."
    )


def default_state_missing() -> InputError:
    return InputError(
        "loss=None: the model returned a tuple. If it has an eqx.nn.State, pass "
        "state=; otherwise pass loss=."
    )


def default_output(structure: Any) -> InputError:
    return InputError(
        f"loss=None: the model returned {structure}; expected one array. Pass loss=."
    )


# --- coupled losses --------------------------------------------------------------


def embed_results(out: Any) -> InputError:
    return InputError(
        f"embed returned a {type(out).__name__}; expected a pytree of arrays, and "
        "(embeddings, state) where state= is given."
    )


def head_results(out: Any, *, has_aux: bool) -> InputError:
    shape = getattr(out, "shape", None)
    what = f"an array of shape {shape}" if shape else f"a {type(out).__name__}"
    expected = "(scalar, aux)" if has_aux else "a float scalar"
    return InputError(
        f"the head returned {what}; expected {expected}: the loss of the whole global "
        "batch, in which the weights are already in."
    )


def head_ignores_weights(first: float, second: float, finite: bool) -> InputError:
    what = (
        f"its value moved from {first:.6g} to {second:.6g} when the content of a row "
        "of weight 0 changed"
        if finite
        else "its gradient is not finite where a row has weight 0"
    )
    return InputError(
        f"the head ignores weights: {what}. Rows of weight 0 are copies that fill a "
        "short batch; leave them out as negatives too (info_nce(..., weights=weights) "
        "does), or avoid them: drop_remainder=True and a global_batch that all batches "
        "fill."
    )


def head_aux_rows(shape: tuple[int, ...], rows: int) -> InputError:
    return InputError(
        f"the head's auxiliary output has an array of shape {shape}; expected scalars, "
        f"or arrays with one entry for each of the {rows} examples in front. Reduce "
        "it, or return eqaccum.Sum(x) or eqaccum.Mean(total, count), of any shape."
    )


def bad_group(group: Any) -> InputError:
    return InputError(
        f"group={group!r} ({type(group).__name__}); expected a positive int, the "
        "consecutive examples that the head sees together, or None for the whole "
        "global batch."
    )


def group_above_batch(group: int, rows: int) -> InputError:
    return InputError(
        f"group={group:,} is above the global batch of {rows:,} rows. Choose a group "
        "of at most the global batch, or leave group= out: the head then sees it all."
    )


def not_a_bank(bank: Any) -> InputError:
    return InputError(
        f"bank={bank!r} is a {type(bank).__name__}; expected an eqaccum.MemoryBank, "
        "such as eqaccum.MemoryBank(1024)."
    )


def bad_bank(name: str, value: Any, expected: str) -> InputError:
    return InputError(
        f"MemoryBank got {name}={value!r} ({type(value).__name__}); expected "
        f"{expected}."
    )


def bank_needs_group() -> InputError:
    return InputError(
        "coupled(..., bank=...) needs group=: the bank is pushed after each group of "
        "examples, so the group is part of the experiment. Pass group=8, say; "
        "group=global_batch pushes once per step."
    )


def bank_needs_tuple(embeddings: Any) -> InputError:
    return InputError(
        f"embed returned {embeddings}; with a memory bank it must return a tuple whose "
        "first entry is the queries, such as (query, passage)."
    )


def bank_on_devices(devices: int) -> InputError:
    return InputError(
        f"a memory bank on {devices} devices: each group reads the rows of the group "
        "before it, so groups run in order, on one device. Pass a mesh of one device, "
        "or leave bank= out: groups are then spread over all."
    )


def one_device_of(devices: int) -> str:
    return (
        f"a memory bank: groups run in order, so one of the {devices} devices is used"
    )


def bank_without_step() -> InputError:
    return InputError(
        "value_and_grad got a loss with a memory bank, which has rows to keep from one "
        "step to the next. Use make_step or fit, or leave bank= out."
    )


def bank_of_other_rows(expected: str, got: str) -> InputError:
    return InputError(
        f"this TrainState holds a memory bank of {got}; this loss needs "
        f"{expected or 'none'}. "
        "Use the TrainState of this step, or a new one: step.init(model, key)."
    )
