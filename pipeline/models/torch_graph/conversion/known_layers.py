"""Translation of a graph's nodes to the package's layers, with their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.torch_graph.graph import ArrayOf, GraphNode, TorchGraph
from pipeline.models.torch_graph.operators.convolution_ops import as_pair, make_pads

Arrays = dict[str, np.ndarray]
_SCALE_AND_BIAS = ("params/scale", "params/bias")


class UnknownLayerError(ValueError):
    """A node that no layer computes. The message names the node's module."""


@dataclass(frozen=True)
class NamedLayer:
    """A layer with its arrays, and the layers inside of it."""

    layer: LayerSpec
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays by collection and leaf, such as `params/kernel`."""
    inside: Mapping[str, tuple[NamedLayer, ...]] = field(default_factory=dict)
    """Inner layers by their scope, relative to the layer's scope ("" is that scope itself)."""


@dataclass(frozen=True)
class Flow:
    """The value that a layer reads: its shape in PyTorch, and how it differs in the package."""

    shape: tuple[int, ...]
    """Shape of PyTorch's tensor, without the batch."""
    pooled: bool = False
    """Whether the package has (batch, channels) instead of PyTorch's images of one pixel."""
    flattened: tuple[int, ...] | None = None
    """Channels, height and width of the images that the package flattened in NHWC, or None."""

    @property
    def is_image(self) -> bool:
        """Whether the input is an image (channels, height, width)."""
        return len(self.shape) == 3 and not self.pooled

    def reorder(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Permute an axis of `array` that indexes flattened images from NCHW's order to NHWC's."""
        if self.flattened is None:
            return array
        indices = np.arange(np.prod(self.flattened)).reshape(self.flattened)
        return np.take(array, indices.transpose(1, 2, 0).reshape(-1), axis)


@dataclass(frozen=True)
class NodeReader:
    """A node, its graph, and the flow that it reads."""

    graph: TorchGraph
    node: GraphNode
    flow: Flow

    @property
    def operator(self) -> str:
        """Name of the operator, without ATen's prefix and overload."""
        return self.node.op.removeprefix("aten.").partition(".")[0]

    def argument(self, index: int, default: Any = None) -> Any:
        """Return an argument by index, or the default if the call doesn't have it."""
        return self.node.args[index] if len(self.node.args) > index else default

    def array(self, index: int) -> np.ndarray | None:
        """Return the array of an argument, or None if that is None or missing.

        Raises UnknownLayerError if the argument is the result of a node.
        """
        argument = self.argument(index)
        if argument is None:
            return None
        if not isinstance(argument, ArrayOf):
            raise self.refuse("its weight is computed")
        return self.graph.values[argument.name]

    def arrays(self, first: int, names: Sequence[str], problem: str) -> Arrays:
        """Return the arrays of consecutive arguments from index `first` on, by `names`.

        Raises UnknownLayerError, with the problem, if one is None.
        """
        arrays: Arrays = {}
        for index, name in enumerate(names, first):
            array = self.array(index)
            if array is None:
                raise self.refuse(problem)
            arrays[name] = array
        return arrays

    def refuse(self, problem: str = "") -> UnknownLayerError:
        """Return the error for a node that no layer computes."""
        node = self.node
        module = f"module {node.module or 'of the network itself'} ({node.module_class})"
        reason = f"; {problem}" if problem else ""
        return UnknownLayerError(f"{module} isn't a known layer: {node.op}{reason}")

    def output(self) -> Flow:
        """Return the flow with the shape of the node's result."""
        shape = self.node.results[0].shape[1:]
        if any(size is None for size in shape):
            raise self.refuse("its shape depends on the batch")
        return replace(self.flow, shape=tuple(size or 0 for size in shape))


Chain = tuple[tuple[NamedLayer, ...], Flow]
"""Consecutive layers, and the flow after the last."""
ReadChain = Callable[[NodeReader], Chain]
_READERS: dict[str, ReadChain] = {}


def read_node(graph: TorchGraph, node: GraphNode, flow: Flow) -> Chain:
    """Return the layers of a node with one input. Raises UnknownLayerError if none computes it."""
    reader = NodeReader(graph, node, flow)
    if reader.operator not in _READERS:
        raise reader.refuse()
    return _READERS[reader.operator](reader)


def _register_reader(*names: str) -> Callable[[ReadChain], ReadChain]:
    def register(read: ReadChain) -> ReadChain:
        _READERS.update(dict.fromkeys(names, read))
        return read

    return register


def _make_layer(reader: NodeReader, layer: LayerSpec, arrays: Arrays | None = None) -> Chain:
    return (NamedLayer(layer, arrays or {}),), reader.output()


_ACTIVATIONS: Mapping[str, standard.Activation] = {
    "relu": standard.Relu(),
    "relu6": standard.Relu6(),
    "tanh": standard.Tanh(),
    "sigmoid": standard.Sigmoid(),
    "silu": standard.Swish(),
    "hardsigmoid": standard.HardSigmoid(),
    "hardswish": standard.HardSwish(),
}


@_register_reader(*_ACTIVATIONS)
def _read_activation(reader: NodeReader) -> Chain:
    return _make_layer(reader, _ACTIVATIONS[reader.operator])


@_register_reader("hardtanh")
def _read_hardtanh(reader: NodeReader) -> Chain:
    if reader.argument(1, -1.0) != 0 or reader.argument(2, 1.0) != 6:
        raise reader.refuse("its bounds must be 0 and 6")
    return _make_layer(reader, standard.Relu6())


@_register_reader("gelu")
def _read_gelu(reader: NodeReader) -> Chain:
    if dict(reader.node.kwargs).get("approximate") != "tanh":
        raise reader.refuse("gelu must have approximate='tanh'")
    return _make_layer(reader, standard.Gelu())


@_register_reader("dropout")
def _read_dropout(reader: NodeReader) -> Chain:
    rate = reader.argument(1)
    if not reader.argument(2) or rate == 0:  # Argument 2 is whether it is training.
        return (), reader.output()
    return _make_layer(reader, standard.Dropout(rate=rate))


@_register_reader("contiguous", "clone", "alias")
def _read_identity(reader: NodeReader) -> Chain:
    return (), reader.output()


@_register_reader("conv2d")
def _read_conv(reader: NodeReader) -> Chain:
    kernel, arrays = _read_kernel(reader)
    has_bias = "params/bias" in arrays
    stride = as_pair(reader.argument(3, 1))
    dilation = as_pair(reader.argument(5, 1))
    groups = reader.argument(6, 1)
    rows, columns, _, features = kernel.shape
    pads = make_pads(reader.argument(4, 0), (rows, columns), dilation)
    if reader.flow.pooled:
        if (rows, columns, groups, pads) != (1, 1, 1, ((0, 0), (0, 0))):
            raise reader.refuse("a convolution of one pixel must be 1x1")
        arrays["params/kernel"] = kernel[0, 0]
        return _make_layer(reader, standard.Dense(features=features, bias=has_bias), arrays)
    if any(before != after for before, after in pads):
        raise reader.refuse("an even kernel must not have padding='same'")
    layer = standard.Conv(
        features=features,
        kernel=_simplify((rows, columns)),
        stride=_simplify(stride),
        padding=pads[0][0] if pads[0] == pads[1] else (pads[0], pads[1]),
        dilation=_simplify(dilation),
        groups=groups,
        bias=has_bias,
    )
    return _make_layer(reader, layer, arrays)


def _read_kernel(reader: NodeReader) -> tuple[np.ndarray, Arrays]:
    """Return the kernel, and all arrays of the layer by path: the kernel and perhaps a bias."""
    kernel = reader.array(1)
    bias = reader.array(2)
    assert kernel is not None, "the layer has a kernel"
    arrays = {"params/kernel": kernel}
    if bias is not None:
        arrays["params/bias"] = bias
    return kernel, arrays


@_register_reader("linear")
def _read_linear(reader: NodeReader) -> Chain:
    kernel, arrays = _read_kernel(reader)
    if reader.flow.is_image:
        raise reader.refuse("its input must not be images")
    arrays["params/kernel"] = reader.flow.reorder(kernel, 0)
    layer = standard.Dense(features=kernel.shape[1], bias="params/bias" in arrays)
    return (NamedLayer(layer, arrays),), replace(reader.output(), flattened=None)


@_register_reader("batch_norm")
def _read_batch_norm(reader: NodeReader) -> Chain:
    names = (*_SCALE_AND_BIAS, "batch_stats/mean", "batch_stats/var")
    arrays = reader.arrays(1, names, "it must have a weight and running statistics")
    if reader.argument(5) is not True:
        raise reader.refuse("it must train its statistics")
    arrays = {name: reader.flow.reorder(array, 0) for name, array in arrays.items()}
    momentum = round(1 - reader.argument(6), 12)
    layer = standard.BatchNorm(momentum=momentum, epsilon=reader.argument(7))
    return _make_layer(reader, layer, arrays)


@_register_reader("layer_norm")
def _read_layer_norm(reader: NodeReader) -> Chain:
    problem = "it must have one axis, a weight and a bias"
    arrays = reader.arrays(2, _SCALE_AND_BIAS, problem)
    if len(reader.argument(1)) != 1:
        raise reader.refuse(problem)
    if reader.flow.is_image or reader.flow.flattened is not None:
        raise reader.refuse("its axis must be the channels")
    return _make_layer(reader, standard.LayerNorm(epsilon=reader.argument(4, 1e-5)), arrays)


@_register_reader("group_norm")
def _read_group_norm(reader: NodeReader) -> Chain:
    arrays = reader.arrays(2, _SCALE_AND_BIAS, "it must have a weight and a bias")
    layer = standard.GroupNorm(groups=reader.argument(1), epsilon=reader.argument(4, 1e-5))
    return _make_layer(reader, layer, arrays)


@_register_reader("max_pool2d")
def _read_max_pool(reader: NodeReader) -> Chain:
    if as_pair(reader.argument(4, 1)) != (1, 1):
        raise reader.refuse("it must not be dilated")
    window = _read_window(reader, ceil_mode=reader.argument(5, False))
    return _make_layer(reader, standard.MaxPool(**window))


@_register_reader("avg_pool2d")
def _read_avg_pool(reader: NodeReader) -> Chain:
    counts_padding = reader.argument(5, True) and as_pair(reader.argument(3, 0)) != (0, 0)
    ceil_mode = reader.argument(4, False)
    divisor = reader.argument(6)
    if counts_padding or ceil_mode or divisor is not None:
        raise reader.refuse("it must divide by the number of pixels without padding")
    return _make_layer(reader, standard.AvgPool(**_read_window(reader, ceil_mode=False)))


@_register_reader("adaptive_avg_pool2d")
def _read_adaptive_avg_pool(reader: NodeReader) -> Chain:
    _, height, width = reader.flow.shape
    rows, columns = as_pair(reader.argument(1))
    if (rows, columns) == (height, width):
        return (), reader.output()
    if (rows, columns) == (1, 1):
        return _pool_globally(reader)
    if height % rows or width % columns:
        raise reader.refuse(f"{height}x{width} must be a multiple of {rows}x{columns}")
    kernel = _simplify((height // rows, width // columns))
    return _make_layer(reader, standard.AvgPool(kernel=kernel))


@_register_reader("mean")
def _read_mean(reader: NodeReader) -> Chain:
    if not reader.flow.is_image or sorted(dim % 4 for dim in reader.argument(1, ())) != [2, 3]:
        raise reader.refuse("it must be over the pixels of images")
    layers, flow = _pool_globally(reader)
    return layers, replace(flow, pooled=reader.argument(2, False))


def _pool_globally(reader: NodeReader) -> Chain:
    layers = () if reader.flow.pooled else (NamedLayer(standard.GlobalAvgPool()),)
    return layers, replace(reader.output(), pooled=True)


@_register_reader("flatten", "view", "reshape")
def _read_flatten(reader: NodeReader) -> Chain:
    flow = reader.flow
    output = reader.output()
    if output.shape != (int(np.prod(flow.shape)),):
        raise reader.refuse("it must flatten whole samples")
    if flow.pooled or len(flow.shape) == 1:
        return (), replace(output, pooled=False)
    if not flow.is_image:
        raise reader.refuse("it must flatten images")
    return (NamedLayer(standard.Flatten()),), replace(output, flattened=flow.shape)


def _read_window(reader: NodeReader, *, ceil_mode: bool) -> dict[str, Any]:
    """Return the fields kernel, stride and padding of a pooling layer."""
    if not reader.flow.is_image:
        raise reader.refuse("its input must be images")
    kernel = as_pair(reader.argument(1))
    stride = kernel if reader.argument(2, ()) == () else as_pair(reader.argument(2))
    pads = as_pair(reader.argument(3, 0))
    edges = []
    for axis in (0, 1):
        pad_after = pads[axis]
        if ceil_mode:
            # The last window may end beyond the padding.
            end = (reader.output().shape[1 + axis] - 1) * stride[axis] + kernel[axis]
            pad_after = max(pad_after, end - pads[axis] - reader.flow.shape[1 + axis])
        edges.append((pads[axis], pad_after))
    is_uniform = set(edges) == {(pads[0], pads[0])}
    return {
        "kernel": _simplify(kernel),
        "stride": None if stride == kernel else _simplify(stride),
        "padding": (pads[0] or "valid") if is_uniform else tuple(edges),
    }


def _simplify(sizes: tuple[int, int]) -> int | tuple[int, int]:
    """Return one number for two equal sizes, as recipes write them."""
    return sizes[0] if sizes[0] == sizes[1] else sizes
