"""Placement of arrays: on one device, or on a mesh of several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from pipeline.parallel.shards import DATA


@dataclass(frozen=True)
class Placement:
    """The devices of a run, in the order of the parts of a batch that they take."""

    devices: tuple[jax.Device, ...]

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh; None for one device."""
        if len(self.devices) == 1:
            return None
        return Mesh(np.array(self.devices), (DATA,), axis_types=(AxisType.Auto,))

    @property
    def device(self) -> jax.Device:
        """A device of this process, for what is measured on one."""
        own = jax.process_index()
        return next(device for device in self.devices if device.process_index == own)

    @property
    def whole(self) -> Sharding:
        """Sharding of an array of which every device has a copy."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def by_batch(self) -> Sharding:
        """Sharding of arrays (steps, batch, ...) of which every device has a part of each batch."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(None, DATA))

    def rows(self, batch: int) -> slice:
        """Rows of a batch that devices of this process take."""
        own = [d.process_index == jax.process_index() for d in self.devices]
        size = batch // len(own)
        return slice(own.index(True) * size, (own.index(True) + sum(own)) * size)

    def put(self, tree: Any) -> Any:
        """Copy arrays of the host to every device. All processes pass the same."""
        sharding = self.whole
        if sharding.is_fully_addressable:
            return jax.device_put(tree, sharding)

        def put(value: Any) -> jax.Array:
            array = np.asarray(value)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        return jax.tree.map(put, tree)

    def put_batches(self, rows: np.ndarray) -> jax.Array:
        """Copy batches (steps, rows, ...) to the devices; a process passes its own rows."""
        if self.mesh is None:
            return jax.device_put(rows, self.devices[0])
        return jax.make_array_from_process_local_data(self.by_batch, rows)

    def shapes(self, tree: Any) -> Any:
        """Shapes and dtypes of a tree, with a copy on every device."""
        sharding = self.whole
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )
