"""A node of an ONNX file, and the table of the functions that read nodes into a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipeline.models.torch_graph.onnx.graph_builder import Length, OnnxValue, TorchGraphBuilder
from pipeline.models.torch_graph.onnx.onnx_file import OnnxNode

Results = OnnxValue | tuple[OnnxValue, ...]


@dataclass(frozen=True)
class OnnxNodeReader:
    """A node, the values of its inputs, and the graph that is built.

    Methods raise ValueError for an input or attribute that is missing or of the wrong kind.
    """

    node: OnnxNode
    inputs: Sequence[OnnxValue | None]
    graph: TorchGraphBuilder
    opset: int
    transposable: frozenset[str]
    """Weights that this node alone reads, so that they may be stored in another order."""

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
        """Return an attribute, which must have the type of the default."""
        value = self.node.attributes.get(name, default)
        kinds: Any = {int: int, float: (int, float), str: str, tuple: tuple}.get(type(default))
        if kinds is not None and not isinstance(value, kinds):
            raise ValueError(f"attribute {name} = {value!r}; must be like {default!r}")
        return value

    def integers(self, name: str, place: int) -> tuple[int, ...] | None:
        """Return whole numbers of an attribute, else of an input (later opsets), else None."""
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
        """Return a number of an attribute, else of an input (later opsets), else the default."""
        if name in self.node.attributes:
            return float(self.attribute(name, 0.0))
        value = self.optional(place)
        if value is None:
            return default
        if not value.is_constant or value.arrays[0].size != 1 or not value.is_fixed():
            raise ValueError(f"{name} must be one constant number")
        return float(np.reshape(value.arrays[0], ()))

    def axis(self, default: int) -> int:
        """Return the attribute `axis` as a number from 0 on."""
        return require_axis(self.attribute("axis", default), self.value().ndim)

    def shape(self, place: int = 0) -> tuple[Length, ...]:
        """Return the shape of an input."""
        return self.graph.shape(self.value(place))

    def fixed_sizes(self, first_axis: int) -> tuple[int, ...]:
        """Return the sizes of the first input from an axis on, which the batch doesn't change."""
        sizes = self.shape()[first_axis:]
        if not all(isinstance(size, int) for size in sizes):
            raise ValueError("a size of its input depends on the batch, where it can't")
        return tuple(size for size in sizes if isinstance(size, int))


def require_axis(axis: int, ndim: int) -> int:
    """Return an axis as a number from 0 on. Raises ValueError for an unknown axis."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} of a tensor with {ndim} axes")
    return axis % ndim


ReadNode = Callable[[OnnxNodeReader], Results]
"""Adds nodes of PyTorch's operators that compute a node of ONNX, and returns their outputs.

Raises ValueError if no such operators compute it.
"""
ONNX_OPERATORS: dict[str, ReadNode] = {}
"""Every operator of ONNX that is read, by name."""
Function = TypeVar("Function", bound=ReadNode)


def onnx_operator(*names: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function, which reads nodes of these operators."""
    return onnx_operators(names)


def onnx_operators(names: Iterable[str]) -> Callable[[Function], Function]:
    """Return the decorator of `onnx_operator` for the operators of a table."""

    def register(function: Function) -> Function:
        for name in names:
            assert name not in ONNX_OPERATORS, f"{name} is registered twice"
            ONNX_OPERATORS[name] = function
        return function

    return register
