"""What can be wrong with a checkpoint, and what to do."""

from typing import Any

from ._exceptions import CheckpointError, InputError


def no_orbax() -> CheckpointError:
    return CheckpointError(
        "checkpoints are written with Orbax, which is not installed. Install it with "
        'pip install "eqaccum[checkpoint]".'
    )


# --- arguments ------------------------------------------------------------------


def bad_resume(resume: Any) -> InputError:
    return InputError(
        f"resume={resume!r:.80} is a {type(resume).__name__}; expected True (continue "
        "the newest checkpoint in checkpoint=, or start), False, or the FitResult of a "
        "finished fit."
    )


def needs_checkpoint(argument: str, value: Any) -> InputError:
    return InputError(
        f"{argument}={value!r} was passed without checkpoint=. Say where the "
        'checkpoints are: fit(..., checkpoint="runs/a").'
    )


def bad_path(argument: str, value: Any) -> InputError:
    return InputError(
        f"{argument}={value!r:.80} is a {type(value).__name__}; expected the path of a "
        "directory."
    )


def run_exists(path: Any, newest: int) -> InputError:
    return InputError(
        f"{path} holds a run already (newest checkpoint: {newest}), and resume=False "
        "starts a new one. Continue it by resume=True, or choose another directory: "
        "nothing is overwritten."
    )


def holds_run(path: Any) -> InputError:
    return InputError(
        f"{path} holds the checkpoints of a fit; eqaccum.save would mix them with "
        "those of another loop. Choose another path."
    )


def other_leaf(where: str, name: str, saved: str, here: str) -> InputError:
    return InputError(
        f"{where} has another structure: its first leaf that differs is {name}, "
        f"{saved} in the checkpoint and {here} here. Pass the model, state, trainable= "
        "and optimizer that it was made with, or choose another directory."
    )


def other_run(where: str, what: str, saved: Any, here: Any) -> InputError:
    return InputError(
        f"{where} was made with {what} {_shown(saved)}; this fit has {what} "
        f"{_shown(here)}, so its batches would be others. Pass the same, or start a "
        "new run from the trained model: fit(eqaccum.load(...), ...) in another "
        "directory."
    )


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else repr(value)


def cannot_go_on(description: str, where: str, batches: int) -> InputError:
    return InputError(
        f"{where} stopped {batches:,} batches into an epoch, and the data, "
        f"{description}, is an iterator, which cannot be read again up to there. Pass "
        "an object that starts afresh at each `iter(...)` (a loader, or a class whose "
        "`__iter__` makes the generator): its first batches are then passed over."
    )


def bad_state_to_load(state: Any, where: str) -> InputError:
    return InputError(
        f"state= is a {type(state).__name__}; expected the eqx.nn.State that "
        f"eqx.nn.make_with_state returns, to be filled from {where}."
    )


# --- what is on the disk --------------------------------------------------------


def no_checkpoint(path: Any, entries: list[str]) -> CheckpointError:
    found = ", ".join(entries) if entries else "nothing"
    return CheckpointError(
        f"there is no checkpoint in {path} (it holds {found}). Pass the directory "
        "that fit(checkpoint=...) or eqaccum.save wrote to."
    )


def no_directory(path: Any) -> CheckpointError:
    return CheckpointError(
        f"there is no directory {path}. Pass the one that fit(checkpoint=...) or "
        "eqaccum.save wrote to."
    )


def cannot_read_checkpoints(path: Any, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the directory {path} cannot be read: {problem}. Give read permission there, "
        "or choose another directory."
    )


def foreign_checkpoint(where: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is no checkpoint of eqaccum's: {problem}. Choose another directory."
    )


def other_checkpoint_version(where: str, found: Any, known: int) -> CheckpointError:
    return CheckpointError(
        f"{where} is a checkpoint of version {found!r}; this eqaccum reads version "
        f"{known}. Use the eqaccum that wrote it."
    )


def no_run(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} was written by eqaccum.save: a TrainState without a place in the "
        "data. Go on with it in a loop of your own, eqaccum.restore(path, like=train), "
        "or choose another directory for fit."
    )


def damaged_checkpoint(where: str, problem: str, older: Any) -> CheckpointError:
    remedy = "There is no older one beside it."
    if older is not None:
        remedy = (
            f"The one before it, {older}, is untouched: remove {where} to go on from "
            "there."
        )
    return CheckpointError(
        f"the checkpoint {where} is damaged: {problem}. Nothing of it was used. "
        f"{remedy}"
    )


def cannot_write_checkpoint(path: Any, problem: str, newest: Any) -> CheckpointError:
    kept = "It holds no checkpoint yet."
    if newest is not None:
        kept = f"The newest good checkpoint is {newest}; it was not touched."
    return CheckpointError(
        f"no checkpoint could be written to {path}: {problem}. {kept} Make room or "
        "give write permission there, or choose another directory; resume=True then "
        "goes on."
    )
