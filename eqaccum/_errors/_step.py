"""Messages about the step: its arguments, the optimizer, failures while it runs."""

import re
from typing import Any

from ._exceptions import InputError, NonFiniteError, StepError
from ._loss import name_of


def not_an_optimizer(optimizer: Any) -> InputError:
    return InputError(
        f"optimizer={optimizer!r} ({type(optimizer).__name__}); expected an Optax "
        "gradient transformation such as optax.adamw(1e-3), or in fit a function of "
        "the total number of steps that returns one."
    )


def accumulates_already() -> InputError:
    return InputError(
        "the optimizer holds optax.MultiSteps, which cannot work here: eqaccum "
        "accumulates already. Pass the inner optimizer."
    )


def needs_each_gradient() -> InputError:
    return InputError(
        "the optimizer holds optax.contrib.differentially_private_aggregate, which "
        "cannot work here: it needs the gradient of each example, and accumulation "
        "adds them up. jax_privacy trains with differential privacy."
    )


def optimizer_needs_more(error: Exception) -> InputError:
    return InputError(
        "the optimizer's update needs more than (updates, state, params, value), as "
        "optax.lbfgs and other line searches do; eqaccum evaluates the loss once per "
        f"step and cannot give it. Use a first-order optimizer. Optax said: {error}"
    )


def optimizer_structure(name: str) -> InputError:
    return InputError(
        f"the optimizer's update returned {name} of another structure than it was "
        "given. A transformation must keep its structure."
    )


def optimizer_leaf(name: str, path: str, was: Any, now: Any) -> InputError:
    return InputError(
        f"the optimizer's update turned the {name}'s leaf {path or '(the only one)'} "
        f"from {was.dtype}{was.shape} into {now.dtype}{now.shape}, so its second step "
        "could not run. Use an optimizer that keeps dtypes, or float32 parameters with "
        "compute_dtype=."
    )


def optimizer_not_called(optimizer: Any) -> InputError:
    name = f"optax.{optimizer.__name__}"
    return InputError(
        f"optimizer={name} is the function that makes an optimizer, and would get the "
        f"number of steps as its learning rate. Call it: {name}(1e-3), say."
    )


def optimizer_of_steps() -> InputError:
    return InputError(
        "optimizer= is a function of the total number of steps, which make_step and "
        "plan do not know. Pass the optimizer itself."
    )


def bad_global_batch(value: Any) -> InputError:
    return InputError(
        f"global_batch={value!r} ({type(value).__name__}); expected a positive int, "
        "the examples of one optimizer update over all devices together."
    )


def bad_choice(name: str, value: Any, choices: tuple[str, ...]) -> InputError:
    return InputError(
        f"{name}={value!r}; expected one of {', '.join(map(repr, choices))}."
    )


def bad_compute_dtype(value: Any) -> InputError:
    return InputError(
        f"compute_dtype={value!r}; expected a floating dtype such as jnp.bfloat16."
    )


def penalty_value(shape: Any, dtype: Any) -> InputError:
    return InputError(
        f"the penalty returned {dtype}{shape}; expected a float scalar, a function of "
        "the model alone. Reduce it, for example with jnp.sum(...)."
    )


def penalty_arguments(penalty: Any, signature: Any) -> InputError:
    return InputError(
        f"the penalty {name_of(penalty)}{signature} cannot be called with (model), "
        "which is what eqaccum passes: a penalty is a function of the model alone. A "
        "term that looks at the data belongs in the loss."
    )


def not_callable(name: str, value: Any) -> InputError:
    return InputError(
        f"{name}={value!r} ({type(value).__name__}); expected a function of the model."
    )


def batch_too_large(rows: int, global_batch: int) -> InputError:
    return InputError(
        f"the batch has {rows:,} rows, global_batch is {global_batch:,}. Pass at most "
        "global_batch rows to each step."
    )


def consumed() -> InputError:
    return InputError(
        "this TrainState was consumed by an earlier step (its arrays were given back "
        "to the device). Use the newest one: train, metrics = step(train, batch)."
    )


def foreign_train_state() -> InputError:
    return InputError(
        "this TrainState was not made for this step: its model, state or optimizer has "
        "another structure. Use train = step.init(model, key)."
    )


def not_a_train_state(train: Any) -> InputError:
    return InputError(
        f"a {type(train).__name__} was passed where a TrainState was expected. Make "
        "one by train = step.init(model, key); then train, metrics = step(train, "
        "batch)."
    )


def inside_jit(name: str) -> InputError:
    return InputError(
        f"{name}(...) was called inside jax.jit or another transformation; it runs "
        "compiled programs of its own and waits for them. Call it outside; inside use "
        "eqaccum.value_and_grad."
    )


def plan_mismatch(what: str, planned: Any, got: Any) -> InputError:
    return InputError(
        f"plan= was made for {what}={planned}, this run has {what}={got}. Make a plan "
        "for this run, or leave plan= out."
    )


def non_finite(step: int, what: str, rows: str) -> NonFiniteError:
    which = f"; {rows}" if rows else ""
    return NonFiniteError(
        f"step {step}: {what}{which}. Nothing was updated. Look at those rows, lower "
        'the learning rate, or pass nonfinite="skip" to leave such batches out.'
    )


def no_weight(step: int) -> NonFiniteError:
    return NonFiniteError(
        f"step {step}: the weights of the global batch add up to 0, so there is no "
        "mean to take. Nothing was updated. Check example_weights and the Mean's "
        'weight, or pass nonfinite="skip" to leave such batches out.'
    )


def no_weight_of_a_mean(step: int) -> NonFiniteError:
    return NonFiniteError(
        f"step {step}: one of the Means that the loss adds up has weight 0 over the "
        "whole global batch, so it has no mean. Nothing was updated. Give it a weight "
        'that cannot be 0, such as 1 per example, or pass nonfinite="skip" to leave '
        "such batches out."
    )


def too_many_skips(count: int) -> NonFiniteError:
    return NonFiniteError(
        f"{count} steps in a row were skipped because loss or gradient was not finite. "
        "The model itself has probably diverged: start from an earlier state with a "
        "lower learning rate."
    )


def out_of_memory(
    where: str, plan: str, error: BaseException, *, lost: bool
) -> StepError:
    return StepError(
        f"the device ran out of memory in {where} ({plan}). {_fate(lost)} Free memory "
        "on the device, or pass a smaller memory_limit= or microbatch=. The device "
        f"said: {_told(error)}"
    )


def device_failed(where: str, error: BaseException, *, lost: bool) -> StepError:
    return StepError(f"the device failed in {where}: {_told(error)}. {_fate(lost)}")


def _fate(lost: bool) -> str:
    if lost:
        return (
            "It had taken the parameters to replace them, so they are lost: go on from "
            "the last checkpoint."
        )
    return "Nothing was updated: the TrainState given to this step is still valid."


def _told(error: BaseException) -> str:
    """The line that says most: the last one of a traceback, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return repr(error)
    if lines[0].endswith("Traceback (most recent call last):"):
        return lines[-1].rstrip(".")
    return lines[0].rstrip(".")


def unknown_argument(door: str, names: list[str]) -> InputError:
    return InputError(
        f"{door} got unknown arguments: {', '.join(names)}. Expected those of fit; see "
        "help(eqaccum.fit)."
    )


def bad_count(name: str, value: Any) -> InputError:
    return InputError(
        f"{name}={value!r} ({type(value).__name__}); expected a positive int, or None."
    )


def cannot_shuffle(description: str) -> InputError:
    return InputError(
        f"shuffle=True, but {description} cannot be indexed by row. Shuffle in the "
        "iterable itself, or pass arrays or a data set with __len__ and __getitem__."
    )


def total_unknown() -> InputError:
    return InputError(
        "optimizer= is a function of the total number of steps, and the number of rows "
        "of an iterable is not known. Pass steps=."
    )


def wrong_type(door: str, name: str, value: Any, hint: Any) -> InputError:
    expected = hint.__name__ if isinstance(hint, type) else str(hint)
    # jax._src.mesh.Mesh | None reads Mesh or None
    expected = re.sub(r"(?:\w+\.)+(?=\w)", "", expected).replace(" | ", " or ")
    hint_of_bool = ": True or False" if expected == "bool" else ""
    return InputError(
        f"{door} got {name}={value!r} ({type(value).__name__}); expected {expected}"
        f"{hint_of_bool}."
    )


def evaluate_needs_global_batch() -> InputError:
    return InputError(
        "evaluate of a coupled loss needs global_batch=: the loss of a group of rows "
        "depends on how many they are. Pass the one of fit."
    )


def nothing_to_predict() -> InputError:
    return InputError("predict got no rows; expected at least one.")


def validate_nothing(steps: int) -> InputError:
    return InputError(
        f"validate_every={steps}, but there is nothing to validate on. Pass "
        "validation=, data of the same form as data, or leave validate_every= out."
    )


def mesh_without_data(mesh: Any) -> InputError:
    return InputError(
        f"mesh= has the axes {tuple(mesh.axis_names)}; expected one named 'data', over "
        'which the batch is cut: jax.make_mesh((8,), ("data",)).'
    )


def sharded_elsewhere(name: str, spec: Any, theirs: Any, mesh: Any) -> InputError:
    return InputError(
        f"{name} is sharded as {spec} over a mesh of {dict(theirs)}, and the run is on "
        f"one of {dict(mesh.shape)}. Pass the mesh of the parameters as mesh=; it "
        "needs an axis 'data', over which the batch is cut."
    )


def bad_remat(value: Any) -> InputError:
    return InputError(
        f'remat={value!r}; expected None, "auto" (where one example per pass does not '
        "fit), True (always) or a policy such as "
        "jax.checkpoint_policies.dots_saveable."
    )


def bad_ema(value: Any) -> InputError:
    return InputError(
        f"ema={value!r}; expected the decay of the average, a number from 0 to below 1 "
        "such as 0.999, or None."
    )


def noise_of_whole_batch() -> InputError:
    return InputError(
        "noise_scale=True compares the gradients of independent parts of the global "
        "batch, and in a coupled loss over all of it every pass depends on the others. "
        "Leave noise_scale out, or couple groups of examples: coupled(..., group=n)."
    )


def noise_with_bank() -> InputError:
    return InputError(
        "noise_scale=True compares the gradients of independent groups, and with a "
        "MemoryBank a group's gradient depends on the groups before it. Leave "
        "noise_scale or bank out."
    )


def nothing_to_compare(rows: int) -> str:
    return (
        f"noise_scale=True needs at least two passes, and one holds all {rows:,} rows: "
        "it is nan. A smaller microbatch= gives it"
    )


def bad_grad_metrics(path: str, value: Any) -> InputError:
    return InputError(
        f"grad_metrics= returned {value!r} ({type(value).__name__}) at "
        f"{path or 'its top'}; expected a dict of scalars computed from the gradient "
        'it is given, such as {"norm": optax.tree.norm(grads.layers[0])}.'
    )


def fastest_with_batch_norm(names: list[str]) -> InputError:
    return InputError(
        f'microbatch="fastest" was passed with BatchNorm ({", ".join(names)}); '
        "expected a model whose result does not depend on the microbatch: batch "
        'statistics are those of the microbatch. Pass "largest" or an int, or use '
        "eqx.nn.GroupNorm."
    )


def fastest_only_in_training(door: str) -> InputError:
    return InputError(
        f'{door} got microbatch="fastest", which is tried on steps of training; '
        'expected "largest" or an int.'
    )
