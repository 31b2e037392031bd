"""`doctor`: what eqaccum sees of the machine, before anything is trained."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from .. import _errors
from .._mesh import placement_on
from .._plan import format_bytes, open_cache, read_limit

_NEEDED = ("eqaccum", "jax", "jaxlib", "equinox", "optax", "numpy")
_OPTIONAL = (
    *("orbax-checkpoint", "matplotlib", "pandas", "tensorboardX", "wandb"),
    *("grain", "datasets", "torch"),
)
_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    "jax_compilation_cache_dir",
)
_VARIABLES = (
    *("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_ENABLE_X64", "XLA_FLAGS"),
    *("LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES"),
    *("EQACCUM_CACHE", "EQACCUM_CACHE_DIR"),
)


@dataclass(frozen=True)
class Machine:
    """What `doctor` found. Print it.

    **Attributes:**

    - `devices`: those that `mesh=None` means, in words.
    - `limit_bytes`: what a step may take on each of them, None where they do not say;
        `limit_source`: where that comes from, figure by figure.
    - `versions`: of Python and of the packages that are installed; `missing`: optional
        packages that are not.
    - `cache`: the folder of remembered figures, None where it is switched off;
        `cache_entries` and `cache_bytes`: what is in it.
    - `settings`: JAX's settings and the environment's variables that matter here.

    !!! Example

        ```python
        print(eqaccum.doctor())
        ```
    """

    devices: tuple[str, ...]
    limit_bytes: int | None
    limit_source: str
    versions: Mapping[str, str]
    missing: tuple[str, ...]
    cache: str | None
    cache_entries: int
    cache_bytes: int
    settings: Mapping[str, str]

    def __str__(self) -> str:
        limit = (
            "unknown" if self.limit_bytes is None else format_bytes(self.limit_bytes)
        )
        cache = "off: in each process only"
        if self.cache is not None:
            held = f"{self.cache_entries:,} entries, {format_bytes(self.cache_bytes)}"
            cache = f"{self.cache} ({held})"
        blocks = {
            "devices": self.devices,
            "memory limit": (f"{limit} on each: {self.limit_source}",),
            "versions": tuple(f"{name} {v}" for name, v in self.versions.items()),
            "not installed": (", ".join(self.missing) or "nothing that could be used",),
            "cache": (cache,),
            "settings": tuple(f"{name}={v}" for name, v in self.settings.items()),
        }
        return "\n".join(
            "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
            for title, lines in blocks.items()
        )


def doctor() -> Machine:
    """What eqaccum sees of this machine: devices, memory, versions, cache.

    It allocates nothing on a device; on a GPU it starts JAX's backend.

    **Returns:**

    A `Machine`. Print it, and add it to a report of something that went wrong.

    !!! Example

        ```python
        print(eqaccum.doctor())  # or: python -m eqaccum doctor
        ```
    """
    devices = placement_on(None).devices
    limit_bytes, limit_source = _limit(devices)
    folder = open_cache().folder
    sizes = _sizes(folder)
    return Machine(
        devices=tuple(_device(device) for device in devices),
        limit_bytes=limit_bytes,
        limit_source=limit_source,
        versions={"python": platform.python_version(), **_versions(_NEEDED)}
        | _versions(_OPTIONAL),
        missing=tuple(name for name in _OPTIONAL if not _versions((name,))),
        cache=None if folder is None else str(folder),
        cache_entries=len(sizes),
        cache_bytes=sum(sizes),
        settings=_settings(),
    )


def _device(device: Any) -> str:
    here = "" if device.process_index == jax.process_index() else ", another process"
    return f"{device} ({device.platform}, {device.device_kind}{here})"


def _limit(devices: list[Any]) -> tuple[int | None, str]:
    try:
        limit = read_limit(None, devices)
    except _errors.CannotTell as error:
        return None, str(error)
    return limit.bytes, limit.source


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name == "eqaccum":
                found[name] = "(run from its source)"
    return found


def _sizes(folder: Path | None) -> list[int]:
    if folder is None or not folder.is_dir():
        return []
    return [file.stat().st_size for file in folder.glob("*.json")]


def _settings() -> dict[str, str]:
    own = {name: getattr(jax.config, name) for name in _SETTINGS}
    said = {name: str(value) for name, value in own.items() if value is not None}
    return said | {n: os.environ[n] for n in _VARIABLES if n in os.environ}
