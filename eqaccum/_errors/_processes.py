"""Messages about the processes of one job: what they must agree on, and what failed."""

from typing import Any

from ._exceptions import (
    CannotTell,
    CheckpointError,
    DoesNotFit,
    InputError,
    PlanError,
    StepError,
)


def mesh_of_some_processes(those: list[int], count: int) -> InputError:
    return InputError(
        f"mesh= has devices of the processes {those}, of {count} in this job. Expected "
        "devices of all of them, so that all take every step, or of this process alone."
    )


def bank_on_processes() -> InputError:
    return InputError(
        "a memory bank: groups run in order on one device, and this job has several "
        "processes. Start one process, or pass mesh= of one device of this process."
    )


class RanOutElsewhere(Exception):
    """Another process ran out of memory: this one takes smaller passes as well."""


def ran_out_elsewhere(processes: list[int]) -> RanOutElsewhere:
    return RanOutElsewhere(f"RESOURCE_EXHAUSTED in process {_listed(processes)}")


def failed_elsewhere(processes: list[int]) -> StepError:
    return StepError(
        f"process {_listed(processes)} failed, so this one stops as well; what went "
        "wrong is in its own output."
    )


def does_not_fit_elsewhere(processes: list[int]) -> DoesNotFit:
    return DoesNotFit(
        f"nothing fits in process {_listed(processes)}; its own output tells the "
        "figures."
    )


def limit_unknown_elsewhere(processes: list[int]) -> CannotTell:
    return CannotTell(
        f"process {_listed(processes)} cannot tell how much memory its devices have; "
        'its own output tells more. Pass memory_limit="40GiB".'
    )


def plans_differ(plans: list[tuple[int, ...]]) -> PlanError:
    told = "; ".join(
        f"process {process}: {passes} passes in {windows} windows"
        for process, (passes, windows) in enumerate(plans)
    )
    return PlanError(
        f"the processes made different plans ({told}). All must run the same script on "
        "data of the same shapes; microbatch= pins the size."
    )


def _listed(processes: list[int]) -> str:
    return ", ".join(map(str, processes))


def stopped_elsewhere(processes: list[int]) -> StepError:
    return StepError(
        f"process {_listed(processes)} stopped with an exception between two steps, so "
        "this one stops as well, after the same step; what went wrong is in its own "
        "output."
    )


def checkpoints_differ(path: Any, newest: list[int]) -> CheckpointError:
    told = "; ".join(
        f"process {process}: {'none' if step < 0 else f'the one of batch {step}'}"
        for process, step in enumerate(newest)
    )
    return CheckpointError(
        f"the processes do not see the same newest checkpoint in {path} ({told}). "
        "checkpoint= must be a directory of a file system that all of them share."
    )


def share_of_global_batch(global_batch: int, processes: int) -> InputError:
    return InputError(
        f"global_batch={global_batch} rows cannot be shared evenly by {processes} "
        "processes. With an iterable each process gives rows of its own, global_batch "
        f"/ {processes} of them per update: choose a multiple of {processes}."
    )


def shapes_differ_between_processes() -> InputError:
    return InputError(
        "the processes have rows of other shapes or dtypes in the same global batch; "
        "all must have the same ones at each update."
    )


def no_rows_to_share() -> InputError:
    return InputError(
        "this process's iterable is at its end before the first global batch that it "
        "has a share of. Each process needs rows in every epoch."
    )


def iterable_in_processes(door: str) -> InputError:
    return InputError(
        f"{door} got an iterable in a job of several processes. Pass columns or a data "
        "set with __len__ and __getitem__, the same one in each process."
    )


def groups_of_shares() -> InputError:
    return InputError(
        "coupled(..., group=) got an iterable in a job of several processes: which "
        "rows form a group would depend on the processes. Pass columns or a data set "
        "with __len__ and __getitem__, the same one in each process."
    )


def devices_per_process(devices: list[int]) -> InputError:
    return InputError(
        f"the processes have {', '.join(map(str, devices))} devices along 'data'. With "
        "an iterable each process gives an equal share of the rows: start processes "
        "with as many devices each, in their order, or pass columns or a data set."
    )
