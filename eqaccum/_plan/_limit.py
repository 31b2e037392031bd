"""How many bytes a step may take on each device: given, or asked of the machine."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import psutil

from .. import _errors
from ._bytes import format_bytes, parse_bytes

# Kept free under an address-space limit: compiling with 60 MB left aborts the process.
_COMPILER_ROOM = 256 * 10**6
_MARGIN = 0.05
# cgroup v1 writes "no limit" as the largest multiple of a page that fits 63 bits.
_UNLIMITED = 2**60


@dataclass(frozen=True)
class Limit:
    """The bytes that the step may take on one device.

    **Arguments:**

    - `bytes`: how many.
    - `source`: where they come from, figure by figure, for people.
    - `given`: whether the user gave them; else the machine was asked.
    """

    bytes: int
    source: str
    given: bool


@runtime_checkable
class Device(Protocol):
    """What is asked of a `jax.Device`."""

    @property
    def platform(self) -> str: ...

    @property
    def process_index(self) -> int: ...

    def memory_stats(self) -> Any: ...


def cgroup_room(
    table: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The bytes that this process's control groups still allow, `None` for no limit.

    Versions 1 and 2, and every ancestor: the tightest counts. Files that the kernel
    merely keeps cached are given back under pressure, so they are not use.
    """
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _walk_up(root, path, _room_v2)
        elif "memory" in controllers.split(","):
            rooms += _walk_up(root / "memory", path, _room_v1)
    return min(rooms, default=None)


def _walk_up(root: Path, path: str, room: Callable[[Path], int | None]) -> list[int]:
    folder = root / path.lstrip("/")
    found = [room(folder)]
    while folder != root and root in folder.parents:
        folder = folder.parent
        found.append(room(folder))
    return [size for size in found if size is not None]


def _room_v2(folder: Path) -> int | None:
    return _room(folder, "memory.max", "memory.current", "inactive_file")


def _room_v1(folder: Path) -> int | None:
    return _room(
        folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )


def _room(folder: Path, limit: str, use: str, cached: str) -> int | None:
    try:
        most = int((folder / limit).read_text())
        used = int((folder / use).read_text())
    except (OSError, ValueError):  # no such group, or the limit is "max"
        return None
    if most >= _UNLIMITED:
        return None
    return max(0, most - max(0, used - _cached_bytes(folder, cached)))


def _cached_bytes(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next(int(w[1]) for w in map(str.split, lines) if w[0] == name)
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


def address_space_room() -> int | None:
    """What is left under RLIMIT_AS, `None` where there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    return max(0, most - psutil.Process().memory_info().vms - _COMPILER_ROOM)


def available_memory() -> int:
    """The machine's memory that can be had without swapping."""
    return psutil.virtual_memory().available


@dataclass(frozen=True)
class Readers:
    """The functions that ask the machine; tests put others in their place."""

    available: Callable[[], int | None] = available_memory
    cgroup: Callable[[], int | None] = cgroup_room
    address_space: Callable[[], int | None] = address_space_room
    process_index: Callable[[], int] = functools.partial(jax.process_index)


def read_limit(
    memory_limit: Any,
    devices: Sequence[Device],
    *,
    own_bytes: int = 0,
    readers: Readers | None = None,
) -> Limit:
    """The bytes that the step's programs may take on each device.

    **Arguments:**

    - `memory_limit`: bytes, or text such as `"10GiB"`: taken as it is. `None` asks
        the devices and leaves a margin of 5 %.
    - `devices`: those that run the step. The poorest one of this process decides, and
        CPU devices share the machine's memory.
    - `own_bytes`: bytes on each device that are in use already and are the step's own
        arguments (parameters, say): they count once.
    - `readers`: the functions that ask the machine.

    **Raises:**

    `InputError` for a limit that is no number of bytes; `CannotTell` where a device
    does not say how much memory it has.
    """
    if memory_limit is not None:
        count = parse_bytes(memory_limit)
        return Limit(count, f"given: memory_limit={memory_limit!r}", given=True)
    readers = Readers() if readers is None else readers
    mine = [d for d in devices if d.process_index == readers.process_index()]
    if not mine:
        raise _errors.no_devices()
    hosts = [device for device in mine if device.platform == "cpu"]
    found = [_device_room(d, own_bytes) for d in mine if d.platform != "cpu"]
    if hosts:
        found.append(_host_room(hosts, own_bytes, readers))
    count, source = min(found)
    return Limit(
        int(count * (1 - _MARGIN)),
        f"{source}, less a margin of {100 * _MARGIN:.0f} %",
        given=False,
    )


def _device_room(device: Device, own_bytes: int) -> tuple[int, str]:
    stats = device.memory_stats()
    if not stats:
        raise _errors.no_limit(str(device), "gives no memory statistics")
    most, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    if not most or most < 0:
        raise _errors.no_limit(str(device), f"reports a limit of {most!r} bytes")
    if used is None or used < 0:
        raise _errors.no_limit(str(device), f"reports {used!r} bytes in use")
    others = max(0, used - own_bytes)
    return (
        max(0, most - others),
        f"{device} offers {format_bytes(most)}, of which other arrays hold "
        f"{format_bytes(others)}",
    )


def _host_room(
    devices: Sequence[Device], own_bytes: int, readers: Readers
) -> tuple[int, str]:
    figures = {
        "available memory": readers.available(),
        "the control group": readers.cgroup(),
        "the address-space limit (less 256 MB for the compiler)": (
            readers.address_space()
        ),
    }
    known = {name: room for name, room in figures.items() if room is not None}
    if not known:
        raise _errors.no_limit("this machine", "does not say how much memory is left")
    least = min(known.values())
    source = "the least of " if len(known) > 1 else ""
    source += ", ".join(f"{name} {format_bytes(n)}" for name, n in known.items())
    if len(devices) > 1:
        source += f", shared by {len(devices)} CPU devices"
    if own_bytes:
        source += f", and {format_bytes(own_bytes)} that the step itself holds"
    return max(0, least) // len(devices) + own_bytes, source
