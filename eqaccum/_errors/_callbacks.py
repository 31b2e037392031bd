"""Messages about callbacks, ready-made ones and the user's, and about frames."""

from collections.abc import Mapping, Sequence
from typing import Any

from ._exceptions import EqaccumError, InputError


def not_callbacks(callbacks: Any) -> InputError:
    return InputError(
        f"callbacks={callbacks!r} ({type(callbacks).__name__}); expected a list of "
        "functions of one record: callbacks=[callback]."
    )


def bad_callback(callback: Any) -> InputError:
    return InputError(
        f"callbacks= holds {callback!r}; expected functions of one record, "
        "callback(info), with an optional attribute every, a positive int of steps."
    )


def callback_not_made(callback: type) -> InputError:
    return InputError(
        f"callbacks= holds the class {callback.__name__}; expected what it makes. "
        f"Call it: callbacks=[{callback.__name__}(...)]."
    )


def watches_no_validation(callback: Any) -> InputError:
    return InputError(
        f"callbacks= holds {type(callback).__name__}({callback.watches!r}), but there "
        "is nothing to validate on. Pass validation=, data of the same form as data, "
        "or watch a name of training such as 'loss'."
    )


def bad_every(door: str, every: Any) -> InputError:
    return InputError(
        f"{door} got every={every!r} ({type(every).__name__}); expected a positive int "
        "of steps. Pass every=1 to write each step."
    )


def bad_log_path(door: str, path: Any) -> InputError:
    kind = "file" if door in ("CSV", "JSONL") else "folder"
    return InputError(
        f"{door} got the path {path!r:.80} ({type(path).__name__}); expected that of a "
        f"{kind} to write, as text or a pathlib.Path."
    )


def not_a_log(door: str, path: Any) -> InputError:
    return InputError(
        f"{door} was asked to write {path}, which is there and was not written by "
        f"{door}; expected a new file, or the log of a run that goes on. Choose "
        "another path: this file was not touched."
    )


def run_and_init(init: Mapping[str, Any]) -> InputError:
    return InputError(
        f"WandB got a run and {', '.join(init)} as well; expected one of them: the "
        "arguments of wandb.init are for a run that is still to be started. Leave them "
        "out, or leave the run out."
    )


def not_installed(what: str, package: str, command: str) -> EqaccumError:
    return EqaccumError(
        f"{what} needs {package}, which is not installed. Install it with {command}."
    )


def bad_watched_name(door: str, name: Any) -> InputError:
    return InputError(
        f"{door} was given {name!r:.80} ({type(name).__name__}) to watch; expected a "
        "name of the history, such as 'validation_loss'."
    )


def watched_name_missing(door: str, name: str, names: Sequence[str]) -> InputError:
    return InputError(
        f"{door} watches {name!r}, which is not in the history; expected one of "
        f"{', '.join(map(repr, names))}. Auxiliary outputs are there with "
        "has_aux=True, where they are scalars."
    )


def bad_flag(door: str, name: str, value: Any) -> InputError:
    return InputError(
        f"{door} got {name}={value!r} ({type(value).__name__}); expected True or False."
    )


def bad_margin(door: str, margin: Any) -> InputError:
    return InputError(
        f"{door} got margin={margin!r} ({type(margin).__name__}); expected a number of "
        "at least 0: a value is better by more than this. Pass 0.0 for any gain."
    )


def bad_patience(patience: Any) -> InputError:
    return InputError(
        f"EarlyStopping got patience={patience!r} ({type(patience).__name__}); "
        "expected a positive int: so many entries in a row may be no better. Pass 3, "
        "say."
    )
