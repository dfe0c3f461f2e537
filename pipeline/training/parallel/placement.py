"""Placement of arrays: on one device, or on a mesh of several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from pipeline.core.host.platforms import get_platform
from pipeline.training.parallel.parallel_spec import AXES, DATA, MODEL
from pipeline.training.parallel.ranks import is_readable


@dataclass(frozen=True)
class DevicePlacement:
    """The devices of a run, in the order of their parts of a batch."""

    devices: tuple[jax.Device, ...]
    model: int = 1
    """Number of devices along the mesh's second axis, `model`."""
    batch_axes: tuple[str, ...] = (DATA,)
    """Axes along which devices have different samples of a batch."""

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh; None for one device."""
        if len(self.devices) == 1:
            return None
        grid = np.array(self.devices).reshape(-1, self.model)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto, AxisType.Auto))

    @property
    def parts(self) -> int:
        """Number of parts of a batch, one for each device along `batch_axes`."""
        sizes: dict[str, int] = {DATA: len(self.devices) // self.model, MODEL: self.model}
        return prod(sizes[axis] for axis in self.batch_axes)

    @property
    def device(self) -> jax.Device:
        """A device of this process, for measurements on one device."""
        process = jax.process_index()
        return next(device for device in self.devices if device.process_index == process)

    @property
    def free_bytes(self) -> int | None:
        """Bytes that JAX can still allocate on the fullest GPU of this process; None if no device
        reports its memory."""
        stats = self._memory_stats()
        if not stats:
            return None
        return max(0, min(gpu.get("bytes_limit", 0) - gpu.get("bytes_in_use", 0) for gpu in stats))

    @property
    def used_bytes(self) -> int:
        """Bytes that JAX has allocated on the fullest GPU of this process; 0 if no device reports
        its memory."""
        return max((gpu.get("bytes_in_use", 0) for gpu in self._memory_stats()), default=0)

    def _memory_stats(self) -> list[dict[str, int]]:
        local = (d for d in self.devices if d.process_index == jax.process_index())
        gpus = [device for device in local if get_platform(device.platform).is_cuda]
        return [stats for device in gpus if (stats := device.memory_stats())]

    @property
    def replicated(self) -> Sharding:
        """Sharding of an array that every device has a copy of."""
        return self.make_sharding(PartitionSpec())

    def make_sharding(self, spec: PartitionSpec) -> Sharding:
        """Return the sharding of an array by a spec; on one device, that device."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    def list_rows(self, batch: int) -> slice:
        """Return which of the `batch` rows of a batch the devices of this process need."""
        sharding = self.make_sharding(PartitionSpec(self.batch_axes))
        if sharding.is_fully_addressable:
            return slice(0, batch)
        slices = sharding.addressable_devices_indices_map((batch,)).values()
        ranges = [index[0].indices(batch) for index in slices if index is not None]
        return slice(min(start for start, _, _ in ranges), max(stop for _, stop, _ in ranges))

    def put(self, tree: Any, shardings: Any = None) -> Any:
        """Copy arrays that all processes have to the devices, by a tree of shardings; None: each
        device gets whole arrays."""
        if self.replicated.is_fully_addressable:
            return jax.device_put(tree, self.replicated if shardings is None else shardings)

        def put(value: Any, sharding: Sharding) -> jax.Array:
            if isinstance(value, jax.Array) and value.sharding == sharding:
                return value  # This process can't read the parts of other processes.
            array = np.asarray(value)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        if shardings is None:
            shardings = jax.tree.map(lambda _: self.replicated, tree)
        return jax.tree.map(put, tree, shardings)

    def put_batches(self, rows: np.ndarray, batch: int) -> jax.Array:
        """Copy this process's rows of batches of size `batch`, (steps, rows, ...), to the devices.
        Devices along the axis `model` have the same rows, also if they belong to two processes."""
        if self.mesh is None:
            return jax.device_put(rows, self.devices[0])
        first = self.list_rows(batch).start

        def read(index: Any) -> np.ndarray:
            start, stop, _ = index[1].indices(batch)
            return rows[:, start - first : stop - first]

        shape = (len(rows), batch, *rows.shape[2:])
        sharding = self.make_sharding(PartitionSpec(None, self.batch_axes))
        return jax.make_array_from_callback(shape, sharding, read)

    def make_shapes(self, tree: Any, shardings: Any = None) -> Any:
        """Return the shapes and dtypes of a tree, with a tree of shardings; None: replicated."""
        if shardings is None:
            shardings = jax.tree.map(lambda _: self.replicated, tree)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            tree,
            shardings,
        )


def gather_arrays(tree: Any) -> Any:
    """Return a tree that every process can read. Arrays of several processes are copied to the
    host. All processes must call it. The devices hold one whole array at a time."""
    return jax.tree.map(
        lambda array: array if is_readable(array) else process_allgather(array, tiled=True), tree
    )
