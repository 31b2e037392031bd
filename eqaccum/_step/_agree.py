"""What the processes of a job must find alike: the limit, and the passes chosen."""

from typing import Any

from .. import _errors
from .._mesh import Placement
from .._plan import Limit, read_limit

_CANNOT_TELL = -1


def common_limit(
    memory_limit: Any, placement: Placement, *, own_bytes: int = 0
) -> Limit:
    """The bytes that a step may take on each device: the least of all processes.

    **Raises:**

    `CannotTell` where one of them cannot tell.
    """
    limit, failure = None, None
    try:
        limit = read_limit(memory_limit, placement.devices, own_bytes=own_bytes)
    except _errors.CannotTell as error:
        failure = error
    if not placement.is_shared:
        if failure is not None:
            raise failure
        assert limit is not None
        return limit
    here = (_CANNOT_TELL, 0) if limit is None else (limit.bytes, int(limit.given))
    told = placement.exchange(*here)
    if failure is not None:
        raise failure
    least = min(told)
    process = told.index(least)
    if least[0] == _CANNOT_TELL:
        raise _errors.limit_unknown_elsewhere([process])
    assert limit is not None
    source = f"process {process}'s, the least of {len(told)} processes"
    if told[process] == here:
        source += f": {limit.source}"
    return Limit(least[0], source, given=bool(least[1]))
