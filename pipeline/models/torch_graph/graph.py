"""The graph of a PyTorch network: nodes, arrays and the two forms, as frozen data without torch.

A graph is what `torch.export` gives, with ATen's operators, after these changes: nothing is
computed in place; what depends on neither input nor weights is an array; sizes that depend on the
batch are computed by nodes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

Role = Literal["parameter", "buffer", "constant"]
"""Trained; kept with the batch statistics; part of the program."""
Order = Literal["torch", "hwio", "io"]
"""Order of axes that an array is kept in: PyTorch's; that of a convolution's kernel here (from
OIHW); that of a dense kernel here (from OI)."""


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
    """As it is kept, in its order."""
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
    """Arguments that the schema has by name only."""
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
        module = f"module {self.module}" if self.module else "the network"
        return f"{module} ({self.line})" if self.line else module


@dataclass(frozen=True)
class Form:
    """The network in training or in evaluation: nodes in the order of computation."""

    nodes: tuple[GraphNode, ...]
    output: ValueOf
    updates: tuple[tuple[str, ValueOf], ...] = ()
    """New values of buffers, by the name of the array. Batch norm's statistics are not among them:
    its node says whether it changes them."""


@dataclass(frozen=True, eq=False)
class TorchGraph:
    """A network: its input, arrays and forms. Equal to itself alone, so that it can be a field of a
    flax module at no cost."""

    origin: str
    """Where it is from, as `torchvision.models:resnet18`."""
    torch: str
    """Version of torch that exported it."""
    input: TensorSpec
    arrays: tuple[ArraySpec, ...]
    train: Form
    evaluate: Form
    values: Mapping[str, np.ndarray] = field(repr=False)
    """Initial values of all arrays by name, in the order of their specs."""

    def form(self, train: bool) -> Form:
        """Return the form for training or for evaluation."""
        return self.train if train else self.evaluate

    def spec(self, name: str) -> ArraySpec:
        """Return the spec of an array. Raises KeyError."""
        return self._specs[name]

    @cached_property
    def _specs(self) -> Mapping[str, ArraySpec]:
        return {spec.name: spec for spec in self.arrays}


def references(argument: Any) -> Iterator[ValueOf | ArrayOf]:
    """Yield the references of an argument, those in tuples among them."""
    if isinstance(argument, ValueOf | ArrayOf):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def references_of(node: GraphNode) -> Iterator[ValueOf | ArrayOf]:
    """Yield the references of a node's arguments."""
    for argument in (*node.args, *(value for _, value in node.kwargs)):
        yield from references(argument)
