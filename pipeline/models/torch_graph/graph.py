"""The graph of a PyTorch network, as frozen data without torch, and its custom backward passes.

A graph has arrays and two forms, one for training and one for evaluation. A form lists its nodes,
each a call of an operator.

A graph is a program of `torch.export`, with ATen's operators, after three changes. No operator
works in place. A value that is computed from constants alone is an array whose role is constant.
Nodes compute the sizes that depend on the batch.

A `torch.autograd.Function` is three parts of a form. Its forward pass is plain nodes. A node
`pipeline.cotangent` stands for the gradient that reaches an output, and all nodes that depend on it
are the backward pass. A node `pipeline.custom_gradient` (inputs, outputs, cotangents, gradients)
returns the outputs, and is differentiated by the backward pass alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
INPUT = "input"
"""Name of the network's inputs in references, and of an only input."""
COTANGENT = "pipeline.cotangent.default"
CUSTOM_GRADIENT = "pipeline.custom_gradient.default"


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


@dataclass(frozen=True)
class BackwardPass:
    """The nodes that compute the gradients of one node `pipeline.custom_gradient`."""

    numbers: tuple[int, ...]
    """Indices of the nodes in their form, in the order of computation."""
    reads: tuple[ValueOf | ArrayOf, ...]
    """Arrays and results of the forward pass that the nodes, or the gradients, refer to."""


def find_backward_passes(form: Form) -> Mapping[str, BackwardPass]:
    """Return the backward passes of a form by their node `pipeline.custom_gradient`.

    Raises ValueError if a node outside of a backward pass depends on its results.
    """
    by_cotangent = {
        reference.node: node.name
        for node in form.nodes
        if node.op == CUSTOM_GRADIENT
        for reference in _read_list(node, 2)
        if isinstance(reference, ValueOf)
    }
    owners: dict[str, str] = {}
    numbers: dict[str, list[int]] = {name: [] for name in by_cotangent.values()}
    for number, node in enumerate(form.nodes):
        owner = _find_owner(node, owners, by_cotangent)
        if owner is not None:
            owners[node.name] = owner
            numbers[owner].append(number)
    for name, reference in (("", form.output), *form.updates):
        if reference.node in owners:
            what = f"buffer {name} changes" if name else "the network's output depends on a value"
            raise ValueError(f"{what} in a backward pass; must do so in the forward pass")
    return {
        node.name: BackwardPass(
            tuple(numbers.get(node.name, ())),
            tuple(_find_reads(form, node, numbers.get(node.name, ()), owners)),
        )
        for node in form.nodes
        if node.op == CUSTOM_GRADIENT
    }


def _find_owner(
    node: GraphNode, owners: Mapping[str, str], by_cotangent: Mapping[str, str]
) -> str | None:
    """Return the node `pipeline.custom_gradient` whose backward pass has a node; None for none."""
    if node.op == COTANGENT:
        if node.name not in by_cotangent:
            raise ValueError(f"{node.op} of {node.describe_place()} has no custom gradient")
        return by_cotangent[node.name]
    if node.op == CUSTOM_GRADIENT:
        forward = (*_read_list(node, 0), *_read_list(node, 1))
        gradients = _read_list(node, 3)
        wrong = [r for r in forward if isinstance(r, ValueOf) and r.node in owners]
        wrong += [
            r
            for r in gradients
            if isinstance(r, ValueOf) and owners.get(r.node, node.name) != node.name
        ]
        if wrong or len(gradients) != len(_read_list(node, 0)):
            raise ValueError(
                f"{node.op} of {node.describe_place()}: its gradients must be of its inputs, and "
                "depend on its cotangents alone"
            )
        return None
    found = {
        owners[reference.node]
        for reference in find_references(node)
        if isinstance(reference, ValueOf) and reference.node in owners
    }
    if len(found) > 1:
        raise ValueError(f"{node.op} of {node.describe_place()} is of two backward passes")
    return found.pop() if found else None


def _read_list(node: GraphNode, index: int) -> tuple[object, ...]:
    """Return a list among the four arguments of a custom gradient. Raises ValueError if missing."""
    value = node.args[index] if len(node.args) == 4 else None
    if not isinstance(value, tuple):
        raise ValueError(f"{node.op} of {node.describe_place()} must have four lists")
    return value


def _find_reads(
    form: Form, node: GraphNode, numbers: tuple[int, ...] | list[int], owners: Mapping[str, str]
) -> Iterator[ValueOf | ArrayOf]:
    """Yield each reference of a backward pass to what isn't part of it, once."""
    references = [r for number in numbers for r in find_references(form.nodes[number])]
    references += [r for r in _read_list(node, 3) if isinstance(r, ValueOf | ArrayOf)]
    for reference in dict.fromkeys(references):
        if isinstance(reference, ArrayOf) or owners.get(reference.node) != node.name:
            yield reference
