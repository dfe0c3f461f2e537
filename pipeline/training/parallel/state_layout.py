"""A state that devices share: each has a part of every parameter and of the optimizer's arrays.

Parameters are gathered before a step, and gradients are added whole, as for data parallelism. The
update is computed on parts, equation by equation. So values are the same bits as on a device that
has the whole state, also for norms, which are sums over whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from pipeline.core.host.jaxpr import ELEMENTWISE, bind_equation, called_jaxpr, walk
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

    def init_parts(self, init: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that returns this device's part of the state of `init`."""
        return lambda *arguments: jax.tree.map(
            lambda array, spec: self.take(array) if spec else array, init(*arguments), self.specs
        )

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
            return jax.tree.unflatten(structure, self.gather(leaves, shapes))

        return replace(state, **{name: gather(name) for name in names})

    def update(self, function: Callable[..., Any], state: Any, gradients: Any) -> Any:
        """Return this device's part of the state `function(state, gradients)`.

        Takes the device's part of a state, and whole gradients. Elementwise equations are computed
        on parts. The operands of all others, such as sums, are gathered, unless they can be
        computed from the gradients alone.
        """
        closed = jax.make_jaxpr(function)(self.state, gradients)
        leaves, structure = jax.tree.flatten(state)
        specs = jax.tree.leaves(self.specs)
        operands = [
            _Value(self, shape.shape, partial(_return, leaf)) if spec else self._make_whole(leaf)
            for leaf, shape, spec in zip(leaves, jax.tree.leaves(self.state), specs, strict=True)
        ]
        operands += map(self._make_whole, jax.tree.leaves(gradients))
        results = zip(self._run(closed, operands), specs, strict=True)
        parts = [value.part if spec else value.whole for value, spec in results]
        return jax.tree.unflatten(structure, parts)

    def _run(self, closed: ClosedJaxpr, operands: Sequence[_Value]) -> list[_Value]:
        return walk(closed, operands, self._compute, lambda _, value: self._make_whole(value))

    def _compute(self, equation: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        called = called_jaxpr(equation)
        if called is not None:
            return self._run(called, operands)
        shape = equation.outvars[0].aval.shape
        is_elementwise = equation.primitive.name in ELEMENTWISE
        if not is_elementwise or find_shared_dimension(shape, self.devices) is None:
            results = bind_equation(equation, [value.whole for value in operands])
            return list(map(self._make_whole, results))

        def compute_part() -> Array:
            # The other operands are scalars.
            parts = [value.part if value.shape == shape else value.whole for value in operands]
            return bind_equation(equation, parts)[0]

        def compute_whole() -> Array:
            return bind_equation(equation, [value.whole for value in operands])[0]

        is_whole = all(value.compute_whole is not None for value in operands)
        return [_Value(self, shape, compute_part, compute_whole if is_whole else None)]

    def _make_whole(self, array: Any) -> _Value:
        return _Value(self, jnp.shape(array), compute_whole=partial(_return, array))

    def take(self, array: Array) -> Array:
        """Return this device's part of an array that devices share."""
        dimension = find_shared_dimension(array.shape, self.devices)
        assert dimension is not None, "devices share the array"
        size = array.shape[dimension] // self.devices
        start = lax.axis_index(self.axis) * size
        part: Array = lax.dynamic_slice_in_dim(array, start, size, dimension)
        return part

    def gather(self, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
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

    layout: StateLayout
    shape: tuple[int, ...]
    compute_part: Callable[[], Array] | None = None
    """None: the part is taken from the whole array."""
    compute_whole: Callable[[], Array] | None = None
    """None: the whole array is gathered from the parts."""

    @cached_property
    def part(self) -> Array:
        """This device's part of the array."""
        return self.layout.take(self.whole) if self.compute_part is None else self.compute_part()

    @cached_property
    def whole(self) -> Array:
        """The whole array."""
        if self.compute_whole is not None:
            return self.compute_whole()
        return self.layout.gather([self.part], [self.shape])[0]


def _return(array: Array) -> Array:
    return array


def make_state_layout(parallel: ParallelSpec, state: Any, devices: int) -> StateLayout | None:
    """Return how devices share a state with these shapes; None if every device has all of it."""
    return StateLayout(state, devices) if parallel.mode == "fsdp" and devices > 1 else None
