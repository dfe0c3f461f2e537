"""The graph of a PyTorch network: nodes, arrays and two forms, as frozen data without torch.

A graph is a program of `torch.export`, with ATen's operators, after three changes. No operator
works in place. A value that depends on neither input nor weights is an array. Sizes that depend on
the batch are computed by nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

Role = Literal["parameter", "buffer", "constant"]
"""Use of an array. parameter: trained. buffer: stored with the batch statistics. constant: part of
the program."""
Order = Literal["torch", "hwio", "io"]
"""Order of an array's axes. torch: PyTorch's. hwio: a convolution's kernel, OIHW in PyTorch. io: a
dense kernel, OI in PyTorch."""
HWIO = (2, 3, 1, 0)
IO = (1, 0)
KERNEL_AXES: Mapping[Order, tuple[int, ...]] = {"hwio": HWIO, "io": IO}
"""PyTorch's numbers of the axes of a kernel that is stored in an order."""


@dataclass(frozen=True)
class ValueOf:
    """Reference to a node's result, or to result `item` of several; `INPUT` names the input."""

    node: str
    item: int | None = None


@dataclass(frozen=True)
class ArrayOf:
    """Reference to an array of the graph."""

    name: str


@dataclass(frozen=True)
class TypeOf:
    """An argument that is a dtype, such as float32."""

    name: str


INPUT = "input"


@dataclass(frozen=True)
class TensorSpec:
    """The shape and the dtype of a tensor; a size that depends on the batch is None."""

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class ArraySpec:
    """An array of the network."""

    name: str
    """PyTorch's name, such as `layer1.0.conv1.weight`."""
    path: str
    """Path in the network's variables, such as `layer1/0/conv1/kernel`."""
    role: Role
    order: Order
    shape: tuple[int, ...]
    """Shape in the order of the array."""
    dtype: str


@dataclass(frozen=True)
class GraphNode:
    """A call of an operator: `aten.conv2d.default`, or `sym.mul` for sizes."""

    name: str
    op: str
    args: tuple[Any, ...]
    """Arguments by the operator's schema: numbers, texts, None, references, and tuples of them."""
    kwargs: tuple[tuple[str, Any], ...]
    """Keyword-only arguments of the schema."""
    results: tuple[TensorSpec, ...]
    """Specs of resulting tensors; empty for a size."""
    module: str
    """Path of the PyTorch module that calls the operator; "" for the network itself."""
    kind: str
    """Class of the module, such as `Conv2d`."""
    line: str
    """Line of the user's code: `my_nets.py:12: y = self.conv(x)`; empty if unknown."""

    def where(self) -> str:
        """Return the module and the line as text for messages."""
        return describe_place(self.module, self.line)


@dataclass(frozen=True)
class Form:
    """The network in training or in evaluation: nodes in the order of computation."""

    nodes: tuple[GraphNode, ...]
    output: ValueOf
    updates: tuple[tuple[str, ValueOf], ...] = ()
    """New values of buffers by name, except statistics, which the nodes of batch norms update."""


@dataclass(frozen=True, eq=False)
class TorchGraph:
    """A network: its input, arrays and forms.

    Graphs are compared by identity, which is fast for a field of a flax module.
    """

    origin: str
    """Reference of the module, such as `torchvision.models:resnet18`."""
    torch: str
    """Version of torch that exported the module; empty for a network of an ONNX file."""
    input: TensorSpec
    arrays: tuple[ArraySpec, ...]
    train: Form
    evaluate: Form
    values: Mapping[str, np.ndarray] = field(repr=False)
    """Initial values of all arrays by name, in the order of their specs."""

    def graph_for(self, image: tuple[int, ...]) -> TorchGraph:
        """Return the graph itself, which is a source of graphs for images of any size."""
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
    """Return a place in the user's network as text for messages."""
    place = f"module {module}" if module else "the network"
    return f"{place} ({line})" if line else place


def find_references(argument: Any) -> Iterator[ValueOf | ArrayOf]:
    """Yield the references in an argument or a `GraphNode`, including those in tuples."""
    if isinstance(argument, GraphNode):
        argument = (argument.args, argument.kwargs)
    if isinstance(argument, ValueOf | ArrayOf):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from find_references(item)
