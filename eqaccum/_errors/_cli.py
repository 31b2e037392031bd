"""Messages of the command line."""

from collections.abc import Sequence
from typing import Any

from ._exceptions import InputError


def bad_target(target: str) -> InputError:
    return InputError(
        f"{target!r} was passed; expected module:function, as Python imports it: "
        "train:setup for the function setup in train.py, or "
        "experiments.digits:setup."
    )


def no_module(name: str, folder: str) -> InputError:
    return InputError(
        f"there is no module {name}, neither in {folder} nor where Python looks for "
        "packages. Run the command in the folder that holds it, or set PYTHONPATH."
    )


def no_function(module: str, name: str, there: Sequence[str]) -> InputError:
    found = ", ".join(there) if there else "none"
    return InputError(
        f"{module} has no function {name}; its functions are: {found}. Expected one "
        "without arguments that returns a dict of fit's arguments. Pass "
        f"{module}:{there[0] if there else 'setup'}."
    )


def setup_returned(target: str, value: Any) -> InputError:
    return InputError(
        f"{target} returned {value!r:.80} ({type(value).__name__}); expected a dict of "
        'fit\'s arguments: return {"model": model, "data": data, "loss": loss}.'
    )


def setup_names(
    target: str, missing: Sequence[str], unknown: Sequence[str]
) -> InputError:
    found = []
    if missing:
        found.append(f"no {' and no '.join(missing)}")
    if unknown:
        found.append(f"what fit does not know: {', '.join(unknown)}")
    return InputError(
        f"the dict that {target} returned has {'; and '.join(found)}. Expected model, "
        "data and other arguments of fit; see help(eqaccum.fit)."
    )


def no_global_batch(target: str) -> InputError:
    return InputError(
        f"{target} returned no global_batch; expected the examples of one update. Add "
        "it there, or pass --global-batch 4096."
    )


def cannot_draw(path: str, problem: Exception) -> InputError:
    return InputError(
        f"--plot {path} cannot be written: {problem}. Expected a file such as plan.png "
        "in a folder that is there; pass another one."
    )
