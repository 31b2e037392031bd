"""The commands, their options, and what they print."""

import argparse
import dataclasses
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import eqaccum

from .. import _errors
from ._setup import arguments_of

# What `check` takes of `fit`'s arguments.
_OF_CHECK = (
    *("model", "data", "loss", "state", "key", "has_aux", "in_axes", "trainable"),
    "axis_name",
)

_DONE, _FOUND, _REFUSED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    **Returns:**

    The exit status: 0; 1 where `check` found something, or the user's own code raised;
    2 where something cannot work, with one line on standard error.
    """
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except eqaccum.EqaccumError as error:
        print(f"eqaccum: error: {error}", file=sys.stderr)
        return _REFUSED
    except Exception as error:
        _errors.shorten(error)
        traceback.print_exception(error)
        return _FOUND


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eqaccum",
        description="Plans and checks a training run without training.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    plan = _of_setup(
        commands, "plan", "the microbatch that fits, and where the bytes go"
    )
    plan.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="examples per update (default: what the function returns)",
    )
    plan.add_argument(
        "--memory",
        metavar="BYTES",
        help="the limit, such as 16GiB (default: what the function returns, else what "
        "the device says)",
    )
    plan.add_argument("--plot", metavar="FILE", help="draw the plan: a .png, .svg, ...")
    plan.set_defaults(run=_plan)
    check = _of_setup(
        commands, "check", "whether accumulation is exact for the loss; 1 if not"
    )
    check.add_argument(
        "--examples", type=int, default=4, metavar="N", help="rows looked at (4)"
    )
    check.set_defaults(run=_check)
    doctor = commands.add_parser(
        "doctor", help="devices, memory limits and where they come from, versions"
    )
    doctor.set_defaults(run=_doctor)
    for command in (plan, check, doctor):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _of_setup(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text)
    command.add_argument(
        "setup",
        metavar="module:function",
        help="a function without arguments that returns a dict of fit's arguments: "
        "model, data and what else it needs, as arrays or jax.ShapeDtypeStructs",
    )
    return command


def _plan(options: argparse.Namespace) -> int:
    arguments = arguments_of(options.setup)
    if options.global_batch is not None:
        arguments["global_batch"] = options.global_batch
    if options.memory is not None:
        arguments["memory_limit"] = _bytes(options.memory)
    if arguments.get("microbatch") == "fastest":  # tried on steps of training alone
        arguments["microbatch"] = "largest"
    if "global_batch" not in arguments:
        raise _errors.no_global_batch(options.setup)
    plan = eqaccum.plan(**arguments)
    if options.plot is not None:
        _draw(plan, options.plot)
    _show(plan, plan.to_dict(), options.json)
    return _DONE


def _bytes(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _draw(plan: eqaccum.Plan, path: str) -> None:
    try:
        importlib.import_module("matplotlib").use("Agg")  # no window is needed
    except ImportError:
        pass  # said by plot()
    figure = plan.plot().figure
    try:
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise _errors.cannot_draw(path, error) from None


def _check(options: argparse.Namespace) -> int:
    given = arguments_of(options.setup)
    arguments = {name: given[name] for name in _OF_CHECK if name in given}
    report = eqaccum.check(**arguments, examples=options.examples)
    data = dataclasses.asdict(dataclasses.replace(report, errors=dict(report.errors)))
    _show(report, data, options.json)
    return _DONE if report.ok else _FOUND


def _doctor(options: argparse.Namespace) -> int:
    machine = eqaccum.doctor()
    _show(machine, dataclasses.asdict(machine), options.json)
    return _DONE


def _show(record: Any, data: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(data, indent=2) if as_json else record)
