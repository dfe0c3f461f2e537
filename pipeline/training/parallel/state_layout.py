"""A state that devices share: each has a part of every parameter and of the optimizer's arrays.

Parameters are gathered before a step, and gradients are added whole, as for data parallelism. The
update is computed on parts, equation by equation. So values are the same bits as on a device that
has the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from pipeline.core.host.jaxpr import ELEMENTWISE, bind_equation, called_jaxpr, walk
from pipeline.training.parallel.fixed_sum import copy_unfused
from pipeline.training.parallel.parallel_spec import DATA, ParallelSpec

SHARED_FIELDS = ("params", "opt_state", "average")
"""Fields of a state whose arrays devices share."""


def find_shared_dimension(shape: Sequence[int], devices: int) -> int | None:
    """Return the dimension along which devices share an array: the largest one that they divide.

    Of equal ones it is the first. None if they divide none: every device has the whole array.
    """
    divided = [dimension for dimension, size in enumerate(shape) if size and size % devices == 0]
    return max(divided, key=shape.__getitem__, default=None)


@dataclass(frozen=True, eq=False)
class StateLayout:
    """How the devices along an axis of `shard_map` share a state."""

    state: Any
    """Shapes and dtypes of the whole state, a dataclass with `SHARED_FIELDS`."""
    devices: int
    axis: str = DATA

    @cached_property
    def specs(self) -> Any:
        """The `PartitionSpec` of each array of the state, empty if every device has all of it."""

        def partition(array: Any) -> PartitionSpec:
            dimension = find_shared_dimension(array.shape, self.devices)
            axes = [] if dimension is None else [*[None] * dimension, self.axis]
            return PartitionSpec(*axes)

        shared = {
            name: jax.tree.map(partition, getattr(self.state, name)) for name in SHARED_FIELDS
        }
        return replace(jax.tree.map(lambda _: PartitionSpec(), self.state), **shared)

    @property
    def part_bytes(self) -> int:
        """Bytes of the state that each device has."""
        pairs = zip(jax.tree.leaves(self.state), jax.tree.leaves(self.specs), strict=True)
        return sum(
            array.size * array.dtype.itemsize // (self.devices if spec else 1)
            for array, spec in pairs
        )

    def init_parts(self, init: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that returns this device's part of the state of `init`."""
        return lambda *arguments: self._take_parts(init(*arguments))

    def evaluate_parts(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of this device's part of a state, and other arguments of `evaluate`.

        Evaluations read the parameters and their average.
        """
        return lambda state, *arguments: evaluate(
            self.gather_fields(state, "params", "average"), *arguments
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

        Takes the device's part of a state, and whole gradients. The update is computed on parts,
        or array by array on whole ones if it adds values of the state, as LAMB does for its norms.
        Copies keep XLA from fusing the update with the taking and joining of parts, and so from
        rounding differently.
        """
        closed = jax.make_jaxpr(function)(self.state, gradients)
        leaves, structure = jax.tree.flatten(state)
        shapes = [array.shape for array in jax.tree.leaves(self.state)]
        is_shared = [bool(spec) for spec in jax.tree.leaves(self.specs)]
        if _adds_values(closed, is_shared):
            wholes = [
                copy_unfused(self._gather([leaf], [shape])[0]) if shared else leaf
                for leaf, shape, shared in zip(leaves, shapes, is_shared, strict=True)
            ]
            updated = jax.tree.leaves(function(jax.tree.unflatten(structure, wholes), gradients))
            results = [
                self._take(copy_unfused(array)) if shared else array
                for array, shared in zip(updated, is_shared, strict=True)
            ]
            return jax.tree.unflatten(structure, results)
        operands = [
            _Value(shape, partial(_return, leaf), _refuse) if shared else self._make_whole(leaf)
            for leaf, shape, shared in zip(leaves, shapes, is_shared, strict=True)
        ]
        operands += map(self._make_whole, jax.tree.leaves(gradients))
        values = zip(self._run(closed, operands), is_shared, strict=True)
        return jax.tree.unflatten(
            structure, [v.part if shared else v.whole for v, shared in values]
        )

    def _run(self, closed: ClosedJaxpr, operands: Sequence[_Value]) -> list[_Value]:
        return walk(closed, operands, self._compute, lambda _, value: self._make_whole(value))

    def _compute(self, equation: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        """Compute an equation of an update, an elementwise one on parts if something reads them."""
        called = called_jaxpr(equation)
        if called is not None:
            return self._run(called, operands)
        name = equation.primitive.name
        shape = equation.outvars[0].aval.shape

        def compute_whole() -> list[Array]:
            return bind_equation(equation, [value.whole for value in operands])

        def compute_part() -> Array:
            if name == "broadcast_in_dim":
                return jnp.full(self._shape_part(shape), operands[0].whole.reshape(()))
            # The other operands are scalars.
            parts = [value.part if value.shape == shape else value.whole for value in operands]
            return bind_equation(equation, parts)[0]

        repeats_scalar = name == "broadcast_in_dim" and prod(operands[0].shape) == 1
        if self._shape_part(shape) is not None and (name in ELEMENTWISE or repeats_scalar):
            return [_Value(shape, compute_part, lambda: compute_whole()[0])]
        return list(map(self._make_whole, compute_whole()))

    def _make_whole(self, array: Any) -> _Value:
        return _Value(
            jnp.shape(array), lambda: copy_unfused(self._take(array)), partial(_return, array)
        )

    def _take_parts(self, state: Any) -> Any:
        return jax.tree.map(
            lambda array, spec: self._take(array) if spec else array, state, self.specs
        )

    def _shape_part(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of a device's part; None if devices don't share the array."""
        dimension = find_shared_dimension(shape, self.devices)
        if dimension is None:
            return None
        return (*shape[:dimension], shape[dimension] // self.devices, *shape[dimension + 1 :])

    def _take(self, array: Array) -> Array:
        """Return this device's part of an array that devices share."""
        dimension = find_shared_dimension(array.shape, self.devices)
        assert dimension is not None, "devices share the array"
        size = array.shape[dimension] // self.devices
        start = lax.axis_index(self.axis) * size
        part: Array = lax.dynamic_slice_in_dim(array, start, size, dimension)
        return part

    def _gather(self, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return arrays of these shapes from their parts, by one all-gather for each dtype."""
        arrays = list(parts)
        dimensions = [find_shared_dimension(shape, self.devices) for shape in shapes]
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


@dataclass(eq=False)
class _Value:
    """An array of an update. Its part and the whole array are computed if something reads them."""

    shape: tuple[int, ...]
    compute_part: Callable[[], Array]
    compute_whole: Callable[[], Array]

    @cached_property
    def part(self) -> Array:
        """This device's part of the array."""
        return self.compute_part()

    @cached_property
    def whole(self) -> Array:
        """The whole array."""
        return self.compute_whole()


def _return(array: Array) -> Array:
    return array


def _refuse() -> Array:
    raise AssertionError("only elementwise equations read a part")


def _adds_values(closed: ClosedJaxpr, is_shared: Sequence[bool]) -> bool:
    """Whether other than elementwise equations read one of the first inputs that `is_shared`, or
    what is computed from it."""
    readers: list[str] = []

    def compute(equation: JaxprEqn, operands: list[bool]) -> list[bool]:
        called = called_jaxpr(equation)
        if called is not None:
            return walk(called, operands, compute, lambda *_: False)
        if any(operands) and equation.primitive.name not in ELEMENTWISE:
            readers.append(equation.primitive.name)
        return [any(operands)] * len(equation.outvars)

    others = [False] * (len(closed.jaxpr.invars) - len(is_shared))
    walk(closed, [*is_shared, *others], compute, lambda *_: False)
    return bool(readers)


def make_state_layout(parallel: ParallelSpec, state: Any, devices: int) -> StateLayout | None:
    """Return how devices share a state with these shapes; None if every device has all of it."""
    return StateLayout(state, devices) if parallel.mode == "fsdp" and devices > 1 else None
