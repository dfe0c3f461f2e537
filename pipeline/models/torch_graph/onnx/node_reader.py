"""Reading of an ONNX node's inputs and attributes, and the functions that translate operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipeline.models.torch_graph.onnx.graph_builder import Length, OnnxValue, TorchGraphBuilder
from pipeline.models.torch_graph.onnx.onnx_file import OnnxNode

Results = OnnxValue | tuple[OnnxValue, ...]


@dataclass(frozen=True)
class OnnxNodeReader:
    """A node, the values of its inputs, and the graph that is built.

    Methods raise ValueError for an input or attribute that is missing or of the wrong kind. `place`
    is the index of an input.
    """

    node: OnnxNode
    inputs: Sequence[OnnxValue | None]
    graph: TorchGraphBuilder
    opset: int
    transposable: frozenset[str]
    """Names of the weights that only one node reads, which may be stored in another order."""

    def value(self, place: int = 0) -> OnnxValue:
        """Return an input."""
        value = self.optional(place)
        if value is None:
            raise ValueError(f"input {place} is missing")
        return value

    def optional(self, place: int) -> OnnxValue | None:
        """Return an input, or None if the node leaves it out."""
        return self.inputs[place] if place < len(self.inputs) else None

    def values(self) -> tuple[OnnxValue, ...]:
        """Return all inputs."""
        return tuple(map(self.value, range(len(self.inputs))))

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute or the default. Unless that is None, it determines the type."""
        value = self.node.attributes.get(name, default)
        types: Any = {int: int, float: (int, float), str: str, tuple: tuple}.get(type(default))
        if types is not None and not isinstance(value, types):
            raise ValueError(f"attribute {name} = {value!r}; must be like {default!r}")
        return value

    def integers(self, name: str, place: int) -> tuple[int, ...] | None:
        """Return whole numbers of an attribute, or of an input (later opsets), or None."""
        if name in self.node.attributes:
            value = self.attribute(name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(number, int) for number in numbers):
                raise ValueError(f"attribute {name} = {value!r}; must be whole numbers")
            return numbers
        value = self.optional(place)
        return None if value is None else self.graph.fixed_integers(value)

    def sizes(self, place: int) -> tuple[Length, ...]:
        """Return whole numbers of an input, which may depend on the batch."""
        return self.graph.integers(self.value(place))

    def number(self, name: str, place: int, default: float | None) -> float | None:
        """Return the number of an attribute, or of an input (later opsets), or the default."""
        if name in self.node.attributes:
            return float(self.attribute(name, 0.0))
        value = self.optional(place)
        if value is None:
            return default
        if not value.is_constant or value.arrays[0].size != 1 or not value.is_fixed():
            raise ValueError(f"{name} must be one constant number")
        return float(np.reshape(value.arrays[0], ()))

    def axis(self, default: int) -> int:
        """Return the attribute `axis`, which may be negative, as an index of the first input."""
        return require_axis(self.attribute("axis", default), self.value().ndim)

    def shape(self) -> tuple[Length, ...]:
        """Return the shape of the first input."""
        return self.graph.shape(self.value())

    def fixed_sizes(self, first_axis: int) -> tuple[int, ...]:
        """Return the first input's sizes from an axis on. They must not depend on the batch."""
        return self.graph.fixed_shape(self.value(), first_axis)


def require_axis(axis: int, ndim: int) -> int:
    """Return an axis, which may be negative, as an index. Raises ValueError for a missing axis."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} of a tensor with {ndim} axes")
    return axis % ndim


ReadNode = Callable[[OnnxNodeReader], Results]
"""Adds nodes of PyTorch's operators that compute a node of ONNX, and returns their outputs.

Raises ValueError if no such operators compute it.
"""
ONNX_OPERATORS: dict[str, ReadNode] = {}
"""Functions that translate ONNX's operators, by the operators' names."""
Function = TypeVar("Function", bound=ReadNode)


def onnx_operator(*names: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function for these operators."""

    def register(function: Function) -> Function:
        for name in names:
            assert name not in ONNX_OPERATORS, f"{name} is registered twice"
            ONNX_OPERATORS[name] = function
        return function

    return register
