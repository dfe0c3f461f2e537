"""The graph of a PyTorch network: nodes, arrays and the two forms, as frozen data without torch.

A graph is a program of `torch.export`, with ATen's operators, after these changes: nothing is
computed in place; a value that depends on neither input nor weights is an array; nodes compute the
sizes that depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

Role = Literal["parameter", "buffer", "constant"]
"""Trained; stored with the batch statistics; part of the program."""
Order = Literal["torch", "hwio", "io"]
"""Order of an array's axes: PyTorch's, a convolution's kernel here (from OIHW), or a dense kernel
here (from OI)."""


@dataclass(frozen=True)
class ValueOf:
    """Reference to the result of a node, or to one of several; `INPUT` names the input."""

    node: str
    item: int | None = None


@dataclass(frozen=True)
class ArrayOf:
    """Reference to an array of the graph."""

    name: str


@dataclass(frozen=True)
class TypeOf:
    """A dtype as an argument, such as float32."""

    name: str


INPUT = "input"


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype; None is a size that depends on the batch."""

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class ArraySpec:
    """An array of the network: PyTorch's name, its path here and its order of axes."""

    name: str
    """Such as `layer1.0.conv1.weight`."""
    path: str
    """Such as `layer1/0/conv1/kernel`."""
    role: Role
    order: Order
    shape: tuple[int, ...]
    """In its order."""
    dtype: str


@dataclass(frozen=True)
class GraphNode:
    """A call of an operator: `aten.conv2d.default`, or `sym.mul` for sizes."""

    name: str
    op: str
    args: tuple[Any, ...]
    """Arguments in the order of the operator's schema: numbers, texts, None, references, and tuples
    of them."""
    kwargs: tuple[tuple[str, Any], ...]
    """Keyword-only arguments of the schema."""
    results: tuple[TensorSpec, ...]
    """Of tensors; empty for sizes."""
    module: str
    """Path of the PyTorch module that calls it; "" for the network itself."""
    kind: str
    """Class of that module, such as `Conv2d`."""
    line: str
    """Line of the user's code: `my_nets.py:12: y = self.conv(x)`; empty if unknown."""

    def where(self) -> str:
        """Describe the place for messages: module and line."""
        return describe_place(self.module, self.line)


@dataclass(frozen=True)
class Form:
    """The network in training or in evaluation: nodes in the order of computation."""

    nodes: tuple[GraphNode, ...]
    output: ValueOf
    updates: tuple[tuple[str, ValueOf], ...] = ()
    """New values of buffers, by the name of the array, without batch norm's statistics: an argument
    of its node decides whether they change."""


@dataclass(frozen=True, eq=False)
class TorchGraph:
    """A network: its input, arrays and forms. Compared by identity, so that it can be a field of a
    flax module at no cost."""

    origin: str
    """Where it is from, as `torchvision.models:resnet18`."""
    torch: str
    """Version of torch that exported it; empty for a network that torch didn't."""
    input: TensorSpec
    arrays: tuple[ArraySpec, ...]
    train: Form
    evaluate: Form
    values: Mapping[str, np.ndarray] = field(repr=False)
    """Initial values of all arrays by name, in the order of their specs."""

    def graph_for(self, image: tuple[int, ...]) -> TorchGraph:
        """Return the graph itself, as a source of it for images of any size."""
        return self

    def form(self, train: bool) -> Form:
        """Return the form for training or for evaluation."""
        return self.train if train else self.evaluate

    def spec(self, name: str) -> ArraySpec:
        """Return the spec of an array. Raises KeyError."""
        return self._specs[name]

    @cached_property
    def _specs(self) -> Mapping[str, ArraySpec]:
        return {spec.name: spec for spec in self.arrays}


def describe_place(module: str, line: str) -> str:
    """Describe a place in the user's network for messages."""
    place = f"module {module}" if module else "the network"
    return f"{place} ({line})" if line else place


def references(argument: Any) -> Iterator[ValueOf | ArrayOf]:
    """Yield the references of an argument, also those in tuples."""
    if isinstance(argument, ValueOf | ArrayOf):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def references_of(node: GraphNode) -> Iterator[ValueOf | ArrayOf]:
    """Yield the references of a node's arguments."""
    for argument in (*node.args, *(value for _, value in node.kwargs)):
        yield from references(argument)
