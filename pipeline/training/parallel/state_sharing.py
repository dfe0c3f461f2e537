"""A state that devices share: each has a part of every parameter and of the optimizer's arrays.

Parameters are gathered before a step, and gradients are added whole, as for data parallelism. The
update is computed on parts, equation by equation. So values are the same bits as on a device that
has the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from pipeline.core.host.jaxpr import ELEMENTWISE, bind_equation, find_called_jaxpr, interpret_jaxpr
from pipeline.training.parallel.fixed_sum import copy_unfused
from pipeline.training.parallel.parallel_spec import DATA, ParallelSpec

SHARDED_FIELDS = ("params", "opt_state", "average")
"""Fields of a state whose arrays are sharded: each device stores a part."""


def find_sharded_dimension(shape: Sequence[int], devices: int) -> int | None:
    """Return the dimension along which an array is sharded: the largest one that devices divide.

    Of equal ones it is the first. None if they divide none: every device has the whole array.
    """
    divided = [dimension for dimension, size in enumerate(shape) if size and size % devices == 0]
    return max(divided, key=shape.__getitem__, default=None)


class _Value(NamedTuple):
    """An array of an update. Its part and the whole array are computed if something reads them."""

    shape: tuple[int, ...]
    part: Callable[[], Array]
    whole: Callable[[], Array]


class _WholeNeededError(Exception):
    """An equation of an update can't be computed on parts with the bits of the whole."""


@dataclass(frozen=True, eq=False)
class StateSharing:
    """The sharing of a state between the devices along an axis of `shard_map`."""

    state: Any
    """Shapes and dtypes of the whole state, a dataclass with `SHARDED_FIELDS`."""
    devices: int
    axis: str = DATA

    @cached_property
    def specs(self) -> Any:
        """The `PartitionSpec` of each array of the state, empty if every device has all of it."""

        def partition(array: Any) -> PartitionSpec:
            dimension = find_sharded_dimension(array.shape, self.devices)
            if dimension is None:
                return PartitionSpec()
            return PartitionSpec(*[None] * dimension, self.axis)

        fields = {name: getattr(self.state, name) for name in SHARDED_FIELDS}
        replicated = jax.tree.map(lambda _: PartitionSpec(), self.state)
        return replace(replicated, **jax.tree.map(partition, fields))

    @property
    def part_bytes(self) -> int:
        """Bytes of the state that each device has."""
        pairs = zip(jax.tree.leaves(self.state), jax.tree.leaves(self.specs), strict=True)
        return sum(
            array.size * array.dtype.itemsize // (self.devices if spec else 1)
            for array, spec in pairs
        )

    def take_parts(self, state: Any) -> Any:
        """Return this device's part of a whole state."""
        return jax.tree.map(
            lambda array, spec: self._take(array) if spec else array, state, self.specs
        )

    def gather_fields(self, state: Any, *names: str) -> Any:
        """Return a state of parts with the fields `names` whole."""

        def gather(name: str) -> Any:
            leaves, structure = jax.tree.flatten(getattr(state, name))
            shapes = [leaf.shape for leaf in jax.tree.leaves(getattr(self.state, name))]
            return jax.tree.unflatten(structure, self._gather(leaves, shapes))

        return replace(state, **{name: gather(name) for name in names})

    def update(self, function: Callable[..., Any], state: Any, gradients: Any) -> Any:
        """Return this device's part of the state `function(state, gradients)`.

        Takes the device's part of a state, and whole gradients. The update is computed on parts if
        its equations are elementwise, except scalars that read no array of the state, such as norms
        of gradients. Else it is computed on whole arrays, as for LAMB, which takes norms of the
        state's arrays. Copies keep XLA from
        fusing the update with the taking and joining of parts, and so from rounding differently.
        """
        leaves, structure = jax.tree.flatten(state)
        arrays = list(
            zip(leaves, jax.tree.leaves(self.state), jax.tree.leaves(self.specs), strict=True)
        )
        operands = [
            _Value(whole.shape, partial(_return, leaf), _refuse) if spec else self._wrap(leaf)
            for leaf, whole, spec in arrays
        ]
        operands += map(self._wrap, jax.tree.leaves(gradients))
        try:
            values = self._run(jax.make_jaxpr(function)(self.state, gradients), operands)
            results = [
                value.part() if spec else value.whole()
                for value, (_, _, spec) in zip(values, arrays, strict=True)
            ]
        except _WholeNeededError:
            wholes = [
                copy_unfused(self._gather([leaf], [whole.shape])[0]) if spec else leaf
                for leaf, whole, spec in arrays
            ]
            updated = function(jax.tree.unflatten(structure, wholes), gradients)
            results = [
                self._take(copy_unfused(array)) if spec else array
                for array, (_, _, spec) in zip(jax.tree.leaves(updated), arrays, strict=True)
            ]
        return jax.tree.unflatten(structure, results)

    def _run(self, closed: ClosedJaxpr, operands: Sequence[_Value]) -> list[_Value]:
        return interpret_jaxpr(closed, operands, self._compute, lambda _, value: self._wrap(value))

    def _compute(self, equation: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Compute an equation of an update. Raises _WholeNeededError."""
        called = find_called_jaxpr(equation)
        if called is not None:
            return self._run(called, operands)
        shapes: list[tuple[int, ...]] = [getattr(var.aval, "shape", ()) for var in equation.outvars]
        shape = shapes[0]
        array_shapes = {value.shape for value in operands if prod(value.shape) != 1}
        repeats_scalar = equation.primitive.name == "broadcast_in_dim" and not array_shapes
        is_local = repeats_scalar or (
            equation.primitive.name in ELEMENTWISE and array_shapes <= {shape}
        )
        is_shared = find_sharded_dimension(shape, self.devices) is not None

        def compute_whole() -> list[Array]:
            return bind_equation(equation, [value.whole() for value in operands])

        def compute_part() -> Array:
            if repeats_scalar:
                return self._take(compute_whole()[0])
            parts = [value.part() if value.shape == shape else value.whole() for value in operands]
            return bind_equation(equation, parts)[0]

        if is_local and is_shared:
            return [_Value(shape, cache(compute_part), cache(lambda: compute_whole()[0]))]
        if not is_local and any(prod(other) != 1 for other in shapes):
            raise _WholeNeededError
        return list(map(self._wrap, compute_whole()))

    def _wrap(self, array: Any) -> _Value:
        """Return the value of an array that every device has."""
        part = cache(lambda: copy_unfused(self._take(array)))
        return _Value(jnp.shape(array), part, partial(_return, array))

    def _take(self, array: Array) -> Array:
        """Return this device's part of a whole array of a sharded shape."""
        dimension = find_sharded_dimension(array.shape, self.devices)
        assert dimension is not None, "devices share the array"
        size = array.shape[dimension] // self.devices
        start = lax.axis_index(self.axis) * size
        part: Array = lax.dynamic_slice_in_dim(array, start, size, dimension)
        return part

    def _gather(self, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return arrays of these shapes from their parts, by one all-gather for each dtype."""
        arrays = list(parts)
        dimensions = [find_sharded_dimension(shape, self.devices) for shape in shapes]
        for dtype in dict.fromkeys(part.dtype for part in parts):
            shared = {
                position: dimension
                for position, dimension in enumerate(dimensions)
                if dimension is not None and parts[position].dtype == dtype
            }
            flat, unravel = ravel_pytree([parts[position] for position in shared])
            rows = jax.vmap(unravel)(lax.all_gather(flat, self.axis))
            for (position, dimension), pieces in zip(shared.items(), rows, strict=True):
                arrays[position] = jnp.moveaxis(pieces, 0, dimension).reshape(shapes[position])
        return arrays


def make_state_sharing(parallel: ParallelSpec, state: Any, devices: int) -> StateSharing | None:
    """Return how devices share a state with these shapes; None if every device has all of it."""
    return StateSharing(state, devices) if parallel.mode == "fsdp" and devices > 1 else None


def _return(array: Array) -> Array:
    return array


def _refuse() -> Array:
    raise _WholeNeededError
