"""Where batch and model live: a `data` axis over the devices of the job."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import _errors

DATA = "data"
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Spread:
    """How a trained leaf, and what belongs to it, lies on the devices.

    `parameter` is as the user placed it. Every device adds up rows of its own into
    `summed`, which is never cut over `data`. `updated` is how its finished gradient and
    its part of the optimizer's state lie; `axis` is the one that the reduction scatters
    over `data`, None where every device keeps all of it.
    """

    parameter: PartitionSpec = WHOLE
    summed: PartitionSpec = WHOLE
    updated: PartitionSpec = WHOLE
    axis: int | None = None


@dataclass(frozen=True)
class Placement:
    """The devices of a run and how its arrays lie on them.

    A batch of shape (passes, rows of one pass, ...) is cut along its second axis.
    Everything else is replicated, unless the user sharded it.
    """

    mesh: Mesh

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def size(self) -> int:
        """Devices that share the rows, those along other axes counted once."""
        return self.mesh.shape[DATA]

    @property
    def backend(self) -> str:
        return self.devices[0].platform

    @property
    def first_device(self) -> "Placement":
        """The same on the first device alone."""
        return Placement(Mesh(np.array(self.devices[:1]), (DATA,)))

    @property
    def takes_numpy(self) -> bool:
        """One CPU device reads numpy arrays where they lie (9 against 117 us)."""
        return self.mesh.size == 1 and self.backend == "cpu"

    @property
    def processes(self) -> list[int]:
        return sorted({device.process_index for device in self.devices})

    @property
    def is_shared(self) -> bool:
        """Whether other processes hold some of the devices."""
        return len(self.processes) > 1

    @functools.cached_property
    def here(self) -> tuple[int, ...]:
        """The places along `data` of this process's devices."""
        axis = self.mesh.axis_names.index(DATA)
        along = np.moveaxis(self.mesh.devices, axis, 0).reshape(self.size, -1)
        own = jax.process_index()
        return tuple(
            place
            for place, devices in enumerate(along)
            if any(device.process_index == own for device in devices)
        )

    def check_equal_shares(self) -> None:
        """Refuses processes of unequal numbers of devices, or in another order."""
        axis = self.mesh.axis_names.index(DATA)
        along = np.moveaxis(self.mesh.devices, axis, 0).reshape(self.size, -1)
        owners = [devices[0].process_index for devices in along]
        per_process = [owners.count(process) for process in self.processes]
        if owners != sorted(owners) or len(set(per_process)) > 1:
            raise _errors.devices_per_process(per_process)

    def slots_here(self, slots: np.ndarray, passes: int) -> np.ndarray:
        """Of the slots of so many passes, pass by pass, those of this process."""
        if not self.is_shared:
            return slots
        return slots.reshape(passes, self.size, -1)[:, list(self.here)].reshape(-1)

    def sharding(self, spec: PartitionSpec = WHOLE) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    # --- where leaves lie ---------------------------------------------------------

    def spec_of(self, name: str, leaf: Any) -> PartitionSpec:
        """How the user sharded a leaf over this mesh; replicated where they did not.

        **Raises:**

        `InputError` for a leaf that is sharded over another mesh.
        """
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
            return WHOLE
        theirs, here = sharding.mesh, self.mesh
        if theirs.axis_names != here.axis_names or theirs.shape != here.shape:
            raise _errors.sharded_elsewhere(name, sharding.spec, theirs.shape, here)
        return sharding.spec

    def spread(
        self, shape: Sequence[int], spec: PartitionSpec, *, shard: bool
    ) -> Spread:
        """How a trained leaf lies that its user sharded so.

        With `shard` its gradient is cut over `data` along the first axis that is free
        and divides.
        """
        entries = [*spec, *(None,) * (len(shape) - len(spec))]
        summed = PartitionSpec(*(_without_data(entry) for entry in entries))
        cut = [axis for axis, entry in enumerate(entries) if DATA in _names(entry)]
        if cut:  # by the user: its gradient lies as it does itself
            axis = cut[0]
            entries = [*summed]
            entries[axis] = (*_names(summed[axis]), DATA)
            return Spread(spec, summed, PartitionSpec(*entries), axis)
        for axis, entry in enumerate(entries):
            free = entry is None and self.size > 1
            if shard and free and shape[axis] > 0 and shape[axis] % self.size == 0:
                entries[axis] = DATA
                return Spread(spec, summed, PartitionSpec(*entries), axis)
        return Spread(spec, summed, spec, None)

    def bytes_of(self, structs: Sequence[Any], specs: Sequence[PartitionSpec]) -> int:
        """What leaves that lie so take on one device."""
        total = 0
        for struct, spec in zip(structs, specs, strict=True):
            shape = self.sharding(spec).shard_shape(tuple(struct.shape))
            total += int(np.prod(shape)) * struct.dtype.itemsize
        return total

    # --- placing ------------------------------------------------------------------

    def place(
        self, leaves: Sequence[Any], specs: Sequence[PartitionSpec] | None = None
    ) -> list[jax.Array]:
        """Copies of the leaves on the devices, never sharing the user's memory."""
        if specs is None:
            specs = [WHOLE] * len(leaves)
        return [
            self._placed(leaf, self.sharding(spec))
            for leaf, spec in zip(leaves, specs, strict=True)
        ]

    def _placed(self, leaf: Any, sharding: NamedSharding) -> jax.Array:
        if self.is_shared:
            return _placed_on_all(leaf, sharding)
        lies_so = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(
            sharding, leaf.ndim
        )
        if self.mesh.size > 1 and not lies_so:
            # a replicated copy would keep the user's own buffer on the first device
            leaf = jax.device_put(leaf, self.devices[0], may_alias=False)
        return jax.device_put(leaf, sharding, may_alias=False)

    def place_rows(self, leaves: Sequence[Any]) -> list[Any]:
        """The rows of this process, (passes, its rows of a pass, ...), on its devices.

        With several processes each leaf becomes a part of an array that all share.
        """
        if self.takes_numpy:
            return list(leaves)
        by_rows = self.sharding(PartitionSpec(None, DATA))
        if not self.is_shared:
            return [jax.device_put(leaf, by_rows) for leaf in leaves]
        return [self._part(leaf, by_rows) for leaf in leaves]

    def _part(self, leaf: np.ndarray, by_rows: NamedSharding) -> jax.Array:
        passes, own, *rest = leaf.shape
        rows = own // len(self.here)  # of one pass on one device

        def of_device(index: Any) -> np.ndarray:
            place = self.here.index((index[1].start or 0) // rows)
            return leaf[:, place * rows : (place + 1) * rows]

        shape = (passes, self.size * rows, *rest)
        return jax.make_array_from_callback(shape, by_rows, of_device)

    def whole(self, leaf: Any) -> Any:
        """An array with all of its parts, on the host where other processes hold
        some."""
        if not self.is_shared or not isinstance(leaf, jax.Array):
            return leaf
        return on_host(leaf)

    # --- agreeing -----------------------------------------------------------------

    def exchange(self, *values: int) -> list[tuple[int, ...]]:
        """What each process passes, in the processes' order; all must call it.

        It goes over the devices, in a millisecond. The numbers are below 2^60.
        """
        if not self.is_shared:
            return [values]
        # two halves: 64-bit integers are narrowed on the way
        halves = [part for v in values for part in (v >> 30, v & (2**30 - 1))]
        rows = multihost_utils.process_allgather(np.asarray(halves, np.int32))
        wide = np.asarray(rows, np.int64).reshape(len(self.processes), -1, 2)
        return [tuple(int(high << 30 | low) for high, low in row) for row in wide]

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, whether any process raises it."""
        told = self.exchange(*map(int, flags))
        return tuple(any(column) for column in zip(*told, strict=True))


def on_host(leaf: jax.Array) -> np.ndarray:
    """All of an array; where no process holds all of it, all processes must ask."""
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def parts_here(leaf: Any) -> list[np.ndarray]:
    """The parts of an array that this process holds, on the host."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return [np.asarray(leaf)]
    return [np.asarray(shard.data) for shard in leaf.addressable_shards]


def _placed_on_all(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """A copy that several processes share; each of them holds the leaf."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return jax.device_put(leaf, sharding, may_alias=False)
        leaf = on_host(leaf)
    host = np.array(leaf)  # never the user's own memory
    return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _without_data(entry: Any) -> Any:
    if not isinstance(entry, tuple):
        return None if entry == DATA else entry
    return tuple(name for name in entry if name != DATA) or None


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
    placement = Placement(Mesh(mesh.devices, mesh.axis_names, axis_types=auto))
    own, there = jax.process_index(), placement.processes
    if there != [own] and len(there) != jax.process_count():
        raise _errors.mesh_of_some_processes(there, jax.process_count())
    return placement


def job_devices() -> list[Any]:
    return jax.devices()
