"""Where batch and model live: one `data` axis over the devices of the job."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import _errors

DATA = "data"


@dataclass(frozen=True)
class Placement:
    """The devices of a run and how its arrays lie on them.

    Everything but the batch is replicated; a batch of shape (passes, rows of one
    pass, ...) is cut along its second axis.
    """

    mesh: Mesh

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def size(self) -> int:
        return self.mesh.shape[DATA]

    @property
    def backend(self) -> str:
        return self.devices[0].platform

    @property
    def first_device(self) -> "Placement":
        """The same on the first device alone."""
        return Placement(Mesh(np.array(self.devices[:1]), (DATA,)))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def by_rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(None, DATA))

    @property
    def takes_numpy(self) -> bool:
        """One CPU device reads numpy arrays where they lie (9 against 117 us)."""
        return self.size == 1 and self.backend == "cpu"

    def place(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Copies of the leaves on all devices, never sharing the user's memory."""
        first = self.devices[0]
        if self.size > 1:
            # a replicated copy would keep the user's own buffer on the first device
            leaves = [jax.device_put(leaf, first, may_alias=False) for leaf in leaves]
        return [
            jax.device_put(leaf, self.replicated, may_alias=False) for leaf in leaves
        ]

    def place_rows(self, leaves: Sequence[Any]) -> list[Any]:
        if self.takes_numpy:
            return list(leaves)
        return [jax.device_put(leaf, self.by_rows) for leaf in leaves]


def placement_on(mesh: Mesh | None) -> Placement:
    """The placement on a mesh; None is all devices of the job.

    Explicit axes (the default of `jax.make_mesh`) are taken as Auto: adamw, adafactor,
    muon and lamb fail on parameters with Explicit shardings.
    """
    if mesh is None:
        return Placement(Mesh(np.array(job_devices()), (DATA,)))
    if DATA not in mesh.axis_names:
        raise _errors.mesh_without_data(mesh)
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return Placement(Mesh(mesh.devices, mesh.axis_names, axis_types=auto))


def job_devices() -> list[Any]:
    return jax.devices()
