"""The initializers of an ONNX network that are weights, and their names in the graph.

An ONNX file doesn't mark which initializers are trained. Here a parameter is a float initializer of
more than one value that a layer reads as a weight, or from which such a weight is computed. The
initializers that `Sub`, `Div`, `Where` and `ScatterND` read are constants, since these operators
normalise inputs, mask values and make masks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.models.torch_graph.onnx.onnx_file import OnnxNode

STATISTICS = (3, 4)
"""Indices of the running mean and variance among the inputs of a batch norm."""
_LEAVES = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}
"""Last parts of names by the index of the input, for weights without a module in their name."""
_RECURRENT = ("LSTM", "GRU", "RNN")
_RECURRENT_LEAVES = {1: "weight_ih", 2: "weight_hh", 3: "bias"}
_WEIGHT_INPUTS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "BatchNormalization", "LayerNormalization"), (1, 2)),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), (1, 2)),
    "PRelu": (1,),
    **dict.fromkeys(("Add", "Mul", "MatMul"), (0, 1)),
    "Gemm": (0, 1, 2),
    **dict.fromkeys(_RECURRENT, (1, 2, 3)),
    "Gather": (0,),
    "Concat": tuple(range(64)),
    "Einsum": tuple(range(8)),
}
"""Indices of the inputs that are weights if they don't depend on the network's input."""
_CONSTANT = frozenset(("Shape", "Size", "ScatterND"))
"""Operators whose results are constants, such as masks, and never weights."""
_LAYERS = frozenset(op for op, places in _WEIGHT_INPUTS.items() if 0 not in places)
"""Operators whose weights may have a single value, as those of `Gemm` besides its first input. In
others, such as `Add`, it is a constant."""


@dataclass(frozen=True)
class WeightTensor:
    """A weight: an initializer, or a copy of it for one input of a node.

    Exporters store equal arrays once, such as the initial scales of batch norms. So each input that
    reads a vector has a copy; all nodes that read a larger array train the same array.
    """

    name: str
    """Name of the initializer."""
    node: int | None = None
    """Index of the node that reads the copy; None without a copy."""
    place: int = 0
    """Index of the input that reads the copy."""


@dataclass(frozen=True)
class NetworkWeights:
    """The weights of a network: parameters, and the statistics of batch norms."""

    nodes: Sequence[OnnxNode]
    initializers: Mapping[str, np.ndarray]
    inputs: Set[str]
    """Names of the network's inputs."""

    @cached_property
    def tensors(self) -> tuple[WeightTensor, ...]:
        """All weights in the order in which nodes read them."""
        return tuple(dict.fromkeys(self.by_input.values()))

    @cached_property
    def statistics(self) -> Set[str]:
        """Names of running means and variances."""
        return {
            self.names[self.by_input[number, place]]
            for number, node in enumerate(self.nodes)
            if node.op == "BatchNormalization"
            for place in STATISTICS
            if (number, place) in self.by_input
        }

    @cached_property
    def _producers(self) -> Mapping[str, OnnxNode]:
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def _dependent(self) -> Set[str]:
        """Names of tensors that depend on the values of the network's inputs, not just shapes."""
        dependent = set(self.inputs)
        for node in self.nodes:
            if node.op not in ("Shape", "Size") and not dependent.isdisjoint(node.inputs):
                dependent.update(node.outputs)
        return dependent

    @cached_property
    def _trained(self) -> Set[str]:
        """Names of initializers that are parameters."""
        trained: set[str] = set()
        pending = [
            (name, node.op, node.op in _LAYERS or (node.op == "Gemm" and place > 0))
            for node in self.nodes
            if not self._dependent.isdisjoint(node.inputs) and not self._is_plain_norm(node)
            for place in _WEIGHT_INPUTS.get(node.op, ())
            for name in node.inputs[place : place + 1]
        ]
        seen = set(pending)
        while pending:
            name, reader, is_layer = pending.pop()
            if name in self._dependent:
                continue
            if name in self.initializers:
                array = self.initializers[name]
                is_number = array.size == 1 and not is_layer
                is_float = array.dtype.name in ("float16", "bfloat16", "float32", "float64")
                # What is only added to scores, such as a mask of attention, has -infinity.
                is_mask = reader == "Add" and np.isneginf(array).any()
                if is_float and not is_number and not is_mask:
                    trained.add(name)
            elif name in self._producers and self._producers[name].op not in _CONSTANT:
                inner = {(source, reader, False) for source in self._producers[name].inputs}
                pending += inner - seen
                seen |= inner
        return trained

    def _is_plain_norm(self, node: OnnxNode) -> bool:
        """Return whether a norm has scale 1 and bias 0, as exporters write a norm without them."""
        if node.op != "InstanceNormalization" or len(node.inputs) < 3:
            return False
        scale, bias = (self.initializers.get(name) for name in node.inputs[1:3])
        return scale is not None and bias is not None and (scale == 1).all() and not bias.any()

    @cached_property
    def by_input(self) -> Mapping[tuple[int, int], WeightTensor]:
        """The weight that a node reads, by the indices of the node and of the input."""
        weights = {}
        for number, node in enumerate(self.nodes):
            for place, name in enumerate(node.inputs):
                is_statistic = node.op == "BatchNormalization" and place in STATISTICS
                if name not in self.initializers or not (is_statistic or name in self._trained):
                    continue
                is_shared = self._uses[name] > 1
                is_copied = is_shared and self.initializers[name].ndim < 2
                tensor = WeightTensor(name, number, place) if is_copied else WeightTensor(name)
                weights[number, place] = tensor
        return weights

    @cached_property
    def _uses(self) -> Mapping[str, int]:
        """The number of inputs that read each tensor."""
        return Counter(name for node in self.nodes for name in node.inputs)

    @cached_property
    def transposable(self) -> frozenset[str]:
        """Names of the weights that only one node reads."""
        tensors = (tensor for tensor in self.tensors if self._uses[tensor.name] == 1)
        return frozenset(self.names[tensor] for tensor in tensors)

    @cached_property
    def names(self) -> Mapping[WeightTensor, str]:
        """Names of the weights in the graph: from the file, or from the layer that reads them."""
        names: dict[WeightTensor, str] = {}
        for (number, place), tensor in self.by_input.items():
            if tensor not in names:
                is_recurrent = self.nodes[number].op in _RECURRENT
                leaves = _RECURRENT_LEAVES if is_recurrent else _LEAVES
                leaf = leaves.get(place, f"input_{place}")
                name = _clean_name(tensor.name)
                if tensor.node is not None or "." not in name:
                    layer = _make_node_path(self.nodes[number])
                    name = f"{layer}.{leaf}" if layer else name
                names[tensor] = name
        return dict(zip(names, make_names_distinct(names.values(), "."), strict=True))

    def module(self, number: int) -> str:
        """Return the path of a node's module: its first weight's if it has one, or its name."""
        node = self.nodes[number]
        for place in range(len(node.inputs)):
            tensor = self.by_input.get((number, place))
            if tensor is not None and "." in self.names[tensor]:
                return self.names[tensor].rpartition(".")[0]
        return _make_node_path(node)


def _clean_name(name: str) -> str:
    """Return a name of letters, digits and dots: `conv1/weight:0` becomes `conv1.weight_0`."""
    name = re.sub(r"[^\w.-]", "_", name.replace("/", ".").replace("::", "."))
    return ".".join(filter(None, (piece.lstrip("-") for piece in name.split("."))))[:400] or "_"


def _make_node_path(node: OnnxNode) -> str:
    """Return a node's name as a path without the operator: `/conv1/Conv` becomes `conv1`."""
    name = _clean_name(node.name) if node.name else ""
    path, _, last = name.rpartition(".")
    return path if path and re.fullmatch(rf"{re.escape(node.op)}(_\d+)?", last) else name


def make_names_distinct(names: Iterable[str], separator: str) -> Iterator[str]:
    """Yield the names. A name that repeats, or that is a scope of another, is made distinct."""
    taken: set[str] = set()
    outer: set[str] = set()
    for name in names:
        unique = name
        number = 1
        while unique in outer or not taken.isdisjoint(_list_scopes(unique, separator)):
            number += 1
            unique = f"{name.replace(separator, '_')}_{number}"
        taken.add(unique)
        outer.update(_list_scopes(unique, separator))
        yield unique


def _list_scopes(name: str, separator: str) -> list[str]:
    """Return a name and the scopes that contain it: `a`, `a.b` and `a.b.c` for `a.b.c`."""
    pieces = name.split(separator)
    return [separator.join(pieces[:count]) for count in range(1, len(pieces) + 1)]
