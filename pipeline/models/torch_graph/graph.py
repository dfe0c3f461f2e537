"""The graph of a PyTorch network, as frozen data without torch.

A graph has arrays and two forms, one for training and one for evaluation. A form lists its nodes,
each a call of an operator.

A graph is a program of `torch.export`, with ATen's operators, after three changes. No operator
works in place. A value that is computed from constants alone is an array whose role is constant.
Nodes compute the sizes that depend on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np

Role = Literal["parameter", "buffer", "constant"]
"""A parameter is trained, a buffer is stored with the batch statistics, and a constant is part of
the compiled program."""
Order = Literal["torch", "hwio", "io"]
"""Order of an array's axes: torch is PyTorch's, hwio is for the kernel of a convolution (OIHW in
PyTorch), io for the kernel of a dense layer (OI in PyTorch)."""
HWIO = (2, 3, 1, 0)
IO = (1, 0)
KERNEL_AXES: Mapping[Order, tuple[int, ...]] = {"hwio": HWIO, "io": IO}
"""Axis i of a kernel that is stored in `order` is PyTorch's axis `KERNEL_AXES[order][i]`."""


@dataclass(frozen=True)
class ValueOf:
    """Reference to the result of a node, or to the network's input if `node` is `INPUT`.

    `item` is the result's index if the node has several results, or the input's index if the
    network has several inputs, else None.
    """

    node: str
    item: int | None = None


@dataclass(frozen=True)
class ArrayOf:
    """Reference to an array of the graph."""

    name: str


@dataclass(frozen=True)
class TypeOf:
    """A dtype, such as float32, as an argument of an operator."""

    name: str


INPUT = "input"
"""Name of the network's inputs in references, and of an only input."""


@dataclass(frozen=True)
class TensorSpec:
    """The shape and the PyTorch dtype of a tensor; a size that depends on the batch is None."""

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class SampleSpec:
    """A sample of one input, as the pipeline has it."""

    shape: tuple[int, ...]
    """Of images (height, width, channels)."""
    dtype: str = "float32"
    name: str = INPUT
    """The network's name for the input; `INPUT` for an only input."""


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
    """Sizes of the axes, in `order`."""
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
    """Specs of the resulting tensors; empty if the node computes a size."""
    module: str
    """Path of the PyTorch module that calls the operator; "" for the network itself."""
    module_class: str
    """Class of the module, such as `Conv2d`. For an ONNX file, the ONNX operator."""
    line: str
    """Line of the user's code: `my_nets.py:12: y = self.conv(x)`; empty if unknown."""

    def describe_place(self) -> str:
        """Return the module and the line as text for messages."""
        return describe_place(self.module, self.line)


@dataclass(frozen=True)
class Form:
    """The computation of the network in training or in evaluation."""

    nodes: tuple[GraphNode, ...]
    """In the order of computation."""
    output: ValueOf
    updates: tuple[tuple[str, ValueOf], ...] = ()
    """Names of buffers with references to their new values. Running statistics of batch norms are
    missing here: the node of a batch norm updates its statistics itself."""


@dataclass(frozen=True, eq=False)
class TorchGraph:
    """A network: its inputs, arrays and two forms.

    Graphs are compared by identity: flax compares the fields of modules, which must be fast.
    """

    origin: str
    """Reference of the module, such as `torchvision.models:resnet18`."""
    torch_version: str
    """Version of torch that exported the module; empty for a network of an ONNX file."""
    inputs: Mapping[str, TensorSpec]
    """The inputs by name, in the order of their indices in references."""
    arrays: tuple[ArraySpec, ...]
    training: Form
    evaluation: Form
    values: Mapping[str, np.ndarray] = field(repr=False)
    """Initial values of all arrays by name, in the order of their specs."""

    def graph_for(self, *samples: SampleSpec) -> TorchGraph:
        """Return the graph itself, as `GraphSource` requires."""
        return self

    @property
    def input(self) -> TensorSpec:
        """The first input, for networks that have one."""
        return next(iter(self.inputs.values()))

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


def refer_to_inputs(count: int) -> tuple[ValueOf, ...]:
    """Return the references to a network's inputs."""
    if count == 1:
        return (ValueOf(INPUT),)
    return tuple(ValueOf(INPUT, index) for index in range(count))


def fits_sizes(shape: Sequence[Any], sizes: Sequence[int | None]) -> bool:
    """Return whether a shape has these sizes, of which None fits any size."""
    if len(shape) != len(sizes):
        return False
    return all(size in (None, actual) for size, actual in zip(sizes, shape, strict=True))


def find_references(node: GraphNode) -> list[ValueOf | ArrayOf]:
    """Return the references in the arguments of a node, including those in tuples."""
    leaves = jax.tree.leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, ValueOf | ArrayOf)]
