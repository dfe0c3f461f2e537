"""Placement of arrays: on one device, on a mesh of several, or in parts, of which each device has
one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.multihost_utils import process_allgather
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.flatten_util import ravel_pytree
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from pipeline.core.host.jaxpr import ELEMENTWISE, bind_equation, find_called_jaxpr, interpret_jaxpr
from pipeline.core.host.platforms import get_platform
from pipeline.training.parallel.fixed_sum import copy_unfused
from pipeline.training.parallel.parallel_spec import AXES, DATA, MODEL, ParallelSpec
from pipeline.training.parallel.ranks import is_readable
from pipeline.training.step_feature import StepFeature


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


SHARDED_FIELDS = ("params", "opt_state")
"""Fields of a state whose arrays are sharded: each device stores a part. So are the states of
features with arrays like the parameters."""


def find_sharded_dimension(shape: Sequence[int], devices: int) -> int | None:
    """Return the dimension along which an array is sharded; None if every device has all of it. It
    is the largest dimension whose size is a multiple of the number of devices, and of equal ones
    the first."""
    divisible = [dimension for dimension, size in enumerate(shape) if size and size % devices == 0]
    return max(divisible, key=shape.__getitem__, default=None)


class _Value(NamedTuple):
    """An array of an update. It is computed when an equation, or the result, reads it."""

    shape: tuple[int, ...]
    """Shape of the whole array."""
    part: Callable[[], Array]
    """Returns this device's part."""
    whole: Callable[[], Array]
    """Returns the whole array. Raises _WholeNeededError if this device has only its part."""


class _WholeNeededError(Exception):
    """An equation of an update reads a whole array of which this device has only a part."""


@dataclass(frozen=True, eq=False)
class StateSharing:
    """The sharing of a state between the devices along an axis of `shard_map`."""

    state: Any
    """Shapes and dtypes of the whole state, a `TrainState`."""
    devices: int
    sharded_features: tuple[str, ...] = ()
    """Names of the features whose states are sharded."""
    axis: str = DATA

    @cached_property
    def specs(self) -> Any:
        """The `PartitionSpec` of each array of the state, empty if every device has all of it."""

        def partition(array: Any) -> PartitionSpec:
            dimension = find_sharded_dimension(array.shape, self.devices)
            if dimension is None:
                return PartitionSpec()
            return PartitionSpec(*[None] * dimension, self.axis)

        sharded_fields = {name: getattr(self.state, name) for name in SHARDED_FIELDS}
        replicated = jax.tree.map(lambda _: PartitionSpec(), self.state)
        sharded_parts = {
            name: jax.tree.map(partition, part)
            for name, part in self.state.features.items()
            if name in self.sharded_features
        }
        return replace(
            replicated,
            **jax.tree.map(partition, sharded_fields),
            features={**replicated.features, **sharded_parts},
        )

    @property
    def part_bytes(self) -> int:
        """Bytes of the state that each device has."""
        pairs = zip(jax.tree.leaves(self.state), jax.tree.leaves(self.specs), strict=True)
        return sum(
            array.size * array.dtype.itemsize // (self.devices if spec else 1)
            for array, spec in pairs
        )

    def take_parts(self, state: Any) -> Any:
        return jax.tree.map(
            lambda array, spec: self._take_part(array) if spec else array, state, self.specs
        )

    def gather_weights(self, state: Any, features: Sequence[str]) -> Any:
        """Return `state`, a state of parts, with whole parameters, and whole states of those
        `features` that are sharded."""
        names = set(features) & set(self.sharded_features)

        def gather(parts: Any, whole: Any) -> Any:
            leaves, structure = jax.tree.flatten(parts)
            shapes = [leaf.shape for leaf in jax.tree.leaves(whole)]
            return jax.tree.unflatten(structure, self._gather(leaves, shapes))

        parts = {
            name: gather(part, self.state.features[name]) if name in names else part
            for name, part in state.features.items()
        }
        return replace(state, params=gather(state.params, self.state.params), features=parts)

    def update(self, function: Callable[..., Any], state: Any, gradients: Any) -> Any:
        """Return this device's part of the state `function(state, gradients)`.

        `state` is the device's part of a state; `gradients` are whole. The update is computed on
        parts if all its equations on arrays of the state are elementwise. Scalars may be computed
        from whole gradients, such as a norm. An update that needs whole arrays of the state, such
        as LAMB with its norms of parameters, is computed on whole arrays.

        XLA would round differently if it fused the update with slices and all-gathers. Copies
        prevent that.
        """
        leaves, structure = jax.tree.flatten(state)
        shapes = [array.shape for array in jax.tree.leaves(self.state)]
        are_parts = [bool(spec) for spec in jax.tree.leaves(self.specs)]
        operands = [
            _wrap_part(leaf, shape) if is_part else self._wrap_whole(leaf)
            for leaf, shape, is_part in zip(leaves, shapes, are_parts, strict=True)
        ]
        operands += map(self._wrap_whole, jax.tree.leaves(gradients))
        try:
            values = self._run(jax.make_jaxpr(function)(self.state, gradients), operands)
            results = [
                value.part() if is_part else value.whole()
                for value, is_part in zip(values, are_parts, strict=True)
            ]
        except _WholeNeededError:
            whole_leaves = [
                copy_unfused(self._gather([leaf], [shape])[0]) if is_part else leaf
                for leaf, shape, is_part in zip(leaves, shapes, are_parts, strict=True)
            ]
            updated = function(jax.tree.unflatten(structure, whole_leaves), gradients)
            results = [
                self._take_part(copy_unfused(array)) if is_part else array
                for array, is_part in zip(jax.tree.leaves(updated), are_parts, strict=True)
            ]
        return jax.tree.unflatten(structure, results)

    def _run(self, closed: ClosedJaxpr, operands: Sequence[_Value]) -> list[_Value]:
        """Return the results of a jaxpr. Raises _WholeNeededError."""
        return interpret_jaxpr(
            closed, operands, self._compute, lambda _, constant: self._wrap_whole(constant)
        )

    def _compute(self, equation: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Compute an equation of an update. Raises _WholeNeededError."""
        called = find_called_jaxpr(equation)
        if called is not None:
            return self._run(called, operands)
        name = equation.primitive.name
        shapes: list[tuple[int, ...]] = [getattr(var.aval, "shape", ()) for var in equation.outvars]
        shape = shapes[0]
        # Arrays of 1 element are treated as scalars.
        array_shapes = {value.shape for value in operands if prod(value.shape) != 1}
        is_broadcast_scalar = name == "broadcast_in_dim" and not array_shapes
        is_elementwise = name in ELEMENTWISE and array_shapes.issubset({shape})
        has_parts = is_broadcast_scalar or is_elementwise
        is_sharded = find_sharded_dimension(shape, self.devices) is not None

        def compute_whole() -> list[Array]:
            return bind_equation(equation, [value.whole() for value in operands])

        def compute_part() -> Array:
            if is_broadcast_scalar:
                return self._take_part(compute_whole()[0])
            parts = [value.part() if value.shape == shape else value.whole() for value in operands]
            return bind_equation(equation, parts)[0]

        if has_parts and is_sharded:
            return [_Value(shape, cache(compute_part), cache(lambda: compute_whole()[0]))]
        returns_scalars = all(prod(result_shape) == 1 for result_shape in shapes)
        if not has_parts and not returns_scalars:
            raise _WholeNeededError
        return list(map(self._wrap_whole, compute_whole()))

    def _wrap_whole(self, array: Any) -> _Value:
        """Return the value of an array that every device has whole."""
        part = cache(lambda: copy_unfused(self._take_part(array)))
        return _Value(jnp.shape(array), part, lambda: array)

    def _take_part(self, array: Array) -> Array:
        """Return this device's part of a whole array, which must have a sharded dimension."""
        dimension = find_sharded_dimension(array.shape, self.devices)
        assert dimension is not None, "an array that isn't sharded has no parts"
        size = array.shape[dimension] // self.devices
        start = lax.axis_index(self.axis) * size
        part: Array = lax.dynamic_slice_in_dim(array, start, size, dimension)
        return part

    def _gather(self, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return arrays of these whole shapes from their parts, by one all-gather for each dtype.
        An array that isn't sharded is returned unchanged."""
        arrays = list(parts)
        dimensions = [find_sharded_dimension(shape, self.devices) for shape in shapes]
        for dtype in dict.fromkeys(part.dtype for part in parts):
            dimension_by_position = {
                position: dimension
                for position, dimension in enumerate(dimensions)
                if dimension is not None and parts[position].dtype == dtype
            }
            flat, unravel = ravel_pytree([parts[position] for position in dimension_by_position])
            rows = lax.all_gather(flat, self.axis)  # (devices, elements of all parts)
            stacks = jax.vmap(unravel)(rows)  # Of each array (devices, *shape of a part).
            for (position, dimension), stack in zip(
                dimension_by_position.items(), stacks, strict=True
            ):
                # The axis of devices goes before the sharded axis, and reshape merges the two.
                moved = jnp.moveaxis(stack, 0, dimension)
                arrays[position] = moved.reshape(shapes[position])
        return arrays


def make_state_sharing(
    parallel: ParallelSpec, state: Any, features: Sequence[StepFeature], devices: int
) -> StateSharing | None:
    """Return how devices share a state with these shapes; None if every device has all of it."""
    if parallel.mode != "fsdp" or devices == 1:
        return None
    names = tuple(feature.name for feature in features if feature.is_like_params)
    return StateSharing(state, devices, sharded_features=names)


def _wrap_part(part: Array, whole_shape: tuple[int, ...]) -> _Value:
    """Return the value of an array of which this device has only `part`."""

    def refuse_whole() -> Array:
        raise _WholeNeededError

    return _Value(whole_shape, lambda: part, refuse_whole)
