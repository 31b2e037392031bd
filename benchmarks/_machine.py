"""The machine and the versions that a result was made with."""

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import psutil

_PACKAGES = ("eqaccum", "jax", "jaxlib", "equinox", "optax", "numpy")


def facts() -> dict[str, Any]:
    """For a result's JSON; no name of the machine and no path."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "allocator": " ".join(platform.libc_ver()),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.split(":")[1].strip() for line in lines if "model name" in line)
    return next(named, platform.machine())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "from source"


def described(told: Mapping[str, Any]) -> str:
    """One sentence for a result's page."""
    versions = ", ".join(f"{k} {v}" for k, v in told["versions"].items())
    return (
        f"{told['processor']}, {told['cores']} cores, {told['memory']}, "
        f"{told['system']}, {told['allocator']}, device {told['device']}; Python "
        f"{told['python']}, {versions}."
    )
