"""Where the memory limit comes from. Machines are faked by plain functions."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import pytest
from helpers import run_python

import eqaccum._errors as errors
from eqaccum._plan import Limit, Readers, cgroup_room, read_limit

GIB = 2**30


@dataclass(frozen=True)
class FakeDevice:
    stats: Any = None
    platform: str = "gpu"
    process_index: int = 0

    def memory_stats(self):
        return self.stats


NOTHING = Readers(
    available=lambda: None,
    cgroup=lambda: None,
    address_space=lambda: None,
    process_index=lambda: 0,
)


def read(devices, **kwargs):
    return read_limit(None, devices, readers=kwargs.pop("readers", NOTHING), **kwargs)


def gpu(limit, used):
    return FakeDevice({"bytes_limit": limit, "bytes_in_use": used})


def test_given_limit_is_taken_as_it_is():
    # No device is asked, and own bytes and margin change nothing.
    for value in (3 * GIB, "3GiB", "3.0 gib"):
        limit = read_limit(value, [FakeDevice(None)], own_bytes=GIB)
        assert limit.bytes == 3 * GIB
        assert limit.given and repr(value) in limit.source


@pytest.mark.parametrize("value", [0, -5, True, 1.5, "much", "10"])
def test_bad_limit_is_refused(value):
    with pytest.raises(errors.InputError, match="memory_limit="):
        read_limit(value, [FakeDevice(None)])


@pytest.mark.parametrize(
    "stats",
    [
        None,
        {},
        {"bytes_limit": 0, "bytes_in_use": 0},
        {"bytes_limit": -1, "bytes_in_use": 0},
        {"bytes_in_use": 5},
        {"bytes_limit": 100},
        {"bytes_limit": 100, "bytes_in_use": -1},
    ],
)
def test_device_that_does_not_say(stats):
    with pytest.raises(errors.CannotTell, match="memory_limit='10GiB'"):
        read([FakeDevice(stats)])


def test_own_bytes_count_once():
    # 100 in all, 30 in use, 10 of those are the model: 80 are there for a program
    # whose arguments include the model.
    assert read([gpu(100, 30)], own_bytes=10).bytes == int(0.95 * 80)
    assert read([gpu(100, 30)]).bytes == int(0.95 * 70)
    # What is not placed yet cannot be subtracted twice.
    assert read([gpu(100, 5)], own_bytes=10).bytes == 95
    assert read([gpu(100, 200)]).bytes == 0


def test_source_names_the_figures():
    limit = read([gpu(4 * GIB, GIB)], own_bytes=GIB // 2)
    assert not limit.given
    for words in ("4.0 GiB", "512.0 MiB", "5 %"):
        assert words in limit.source


def test_poorest_device_decides():
    devices = [gpu(100, 0), gpu(100, 60), gpu(100, 30)]
    assert read(devices).bytes == int(0.95 * 40)


def test_devices_of_other_processes_are_not_asked():
    far = replace(gpu(10, 0), process_index=1)
    assert read([gpu(100, 0), far]).bytes == 95
    with pytest.raises(errors.InputError, match="No device of this process"):
        read([far])


CPU = FakeDevice(None, "cpu")


@pytest.mark.parametrize(
    "available, cgroup, space, least",
    [(100, None, None, 100), (100, 60, None, 60), (100, 60, 40, 40), (30, 60, 40, 30)],
)
def test_cpu_takes_the_smallest_figure(available, cgroup, space, least):
    readers = Readers(
        lambda: available, lambda: cgroup, lambda: space, process_index=lambda: 0
    )
    limit = read([CPU], readers=readers)
    assert limit.bytes == int(0.95 * least)
    for figure in (available, cgroup, space):
        assert figure is None or f"{figure} B" in limit.source


def test_cpu_devices_share_the_machine():
    readers = replace(NOTHING, available=lambda: 1000)
    limit = read([CPU] * 4, readers=readers, own_bytes=50)
    assert limit.bytes == int(0.95 * (250 + 50))
    assert "4 CPU devices" in limit.source and "50 B" in limit.source


def test_cpu_that_says_nothing():
    with pytest.raises(errors.CannotTell, match="this machine"):
        read([CPU])


def write_group(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_cgroup_version_2_with_ancestors(tmp_path):
    table, root = tmp_path / "cgroup", tmp_path / "fs"
    table.write_text("0::/job/task\n")
    write_group(root / "job/task", {"memory.max": "max", "memory.current": 10})
    assert cgroup_room(table, root) is None
    write_group(root / "job", {"memory.max": 1000, "memory.current": 300})
    assert cgroup_room(table, root) == 700
    # Cached files are given back when memory is asked for.
    write_group(root / "job", {"memory.stat": "anon 5\ninactive_file 250"})
    assert cgroup_room(table, root) == 950
    write_group(root / "job/task", {"memory.max": 60})
    assert cgroup_room(table, root) == 50
    write_group(root / "job/task", {"memory.max": 5})
    assert cgroup_room(table, root) == 0


def test_cgroup_version_1(tmp_path):
    table, root = tmp_path / "cgroup", tmp_path / "fs"
    table.write_text("4:cpu,cpuacct:/\n3:memory:/box\n1:name=systemd:/\n0::/\n")
    unlimited = {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 7}
    write_group(root / "memory", unlimited)
    assert cgroup_room(table, root) is None
    write_group(
        root / "memory/box",
        {
            "memory.limit_in_bytes": 500,
            "memory.usage_in_bytes": 200,
            "memory.stat": "inactive_file 1\ntotal_inactive_file 80",
        },
    )
    assert cgroup_room(table, root) == 380


def test_cgroup_seen_from_inside_a_container(tmp_path):
    # The table names the host's path, but only the group's own folder is mounted.
    table, root = tmp_path / "cgroup", tmp_path / "fs"
    table.write_text("0::/docker/abc\n")
    write_group(root, {"memory.max": 1000, "memory.current": 300})
    assert cgroup_room(table, root) == 700
    assert cgroup_room(tmp_path / "absent", root) is None


def test_this_machine():
    limit = read_limit(None, jax.devices("cpu")[:1])
    assert isinstance(limit, Limit) and limit.bytes > 0
    whole = read_limit(None, jax.devices("cpu")[:2])
    assert whole.bytes < limit.bytes


def test_address_space_limit_is_read():
    code = """
import resource, psutil
from eqaccum._plan._limit import address_space_room
assert address_space_room() is None
most = psutil.Process().memory_info().vms + 10**9
resource.setrlimit(resource.RLIMIT_AS, (most, most))
print(address_space_room())
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    # 1000 MB less the 256 MB that are kept; the process itself moves by a little.
    assert int(result.stdout) == pytest.approx(744 * 10**6, rel=0.02)
