"""The layers of this project that compute the nodes of a graph, with their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.torch_graph.graph import ArrayOf, GraphNode, TorchGraph
from pipeline.models.torch_graph.operators.convolution_ops import as_pair, conv_pads

Arrays = dict[str, np.ndarray]


class UnknownLayerError(ValueError):
    """A node that no layer computes; the message names its module."""


@dataclass(frozen=True)
class NamedLayer:
    """A layer with its arrays by collection and leaf, and the layers inside of it by scope."""

    layer: LayerSpec
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Such as `params/kernel`."""
    inside: Mapping[str, tuple[NamedLayer, ...]] = field(default_factory=dict)
    """By scope inside of the layer's scope; "" is the layer's scope."""


@dataclass(frozen=True)
class Flow:
    """The input of a layer: the shape of a sample in PyTorch, and how it differs here."""

    shape: tuple[int, ...]
    """Shape of PyTorch's tensor, without the batch."""
    pooled: bool = False
    """Whether images of one pixel are (batch, channels) here."""
    flattened: tuple[int, ...] | None = None
    """Channels, height and width of images that were flattened here pixel by pixel."""

    @property
    def is_image(self) -> bool:
        """Whether it is (channels, height, width) of several pixels."""
        return len(self.shape) == 3 and not self.pooled

    def reorder(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Permute an axis of the values of flattened images from PyTorch's order to NHWC."""
        if self.flattened is None:
            return array
        places = np.arange(np.prod(self.flattened)).reshape(self.flattened)
        return np.take(array, places.transpose(1, 2, 0).reshape(-1), axis)


@dataclass(frozen=True)
class NodeReader:
    """A node, its graph and its input."""

    graph: TorchGraph
    node: GraphNode
    flow: Flow

    def argument(self, place: int, default: Any = None) -> Any:
        """Return an argument, or the default if the call leaves it out."""
        return self.node.args[place] if len(self.node.args) > place else default

    def option(self, name: str, default: Any = None) -> Any:
        """Return an argument by name."""
        return dict(self.node.kwargs).get(name, default)

    def array(self, place: int) -> np.ndarray | None:
        """Return the values of an argument that is an array, or None."""
        argument = self.argument(place)
        if argument is None:
            return None
        if not isinstance(argument, ArrayOf):
            raise self.refuse("its weight is computed")
        return self.graph.values[argument.name]

    def refuse(self, why: str = "") -> UnknownLayerError:
        """Return the error that no layer computes the node."""
        node = self.node
        module = f"module {node.module or 'of the network itself'} ({node.kind})"
        reason = f"; {why}" if why else ""
        return UnknownLayerError(f"{module} is no known layer: {node.op}{reason}")

    def after(self) -> Flow:
        """Return the output of the node, in the shape of the graph."""
        shape = self.node.results[0].shape[1:]
        if any(size is None for size in shape):
            raise self.refuse("its shape depends on the batch")
        return replace(self.flow, shape=tuple(size or 0 for size in shape))


Layers = tuple[tuple[NamedLayer, ...], Flow]
"""The layers that compute a node, and their output."""
ReadLayers = Callable[[NodeReader], Layers]
_READERS: dict[str, ReadLayers] = {}


def layers_of_node(graph: TorchGraph, node: GraphNode, flow: Flow) -> Layers:
    """Return the layers for a node of one input.

    Raises UnknownLayerError if none has the same result.
    """
    reader = NodeReader(graph, node, flow)
    name = node.op.removeprefix("aten.").partition(".")[0]
    if name not in _READERS:
        raise reader.refuse()
    return _READERS[name](reader)


def _reads(*names: str) -> Callable[[ReadLayers], ReadLayers]:
    def register(read: ReadLayers) -> ReadLayers:
        _READERS.update(dict.fromkeys(names, read))
        return read

    return register


def _one_layer(reader: NodeReader, layer: LayerSpec, arrays: Arrays | None = None) -> Layers:
    return (NamedLayer(layer, arrays or {}),), reader.after()


_ACTIVATIONS: Mapping[str, standard.Activation] = {
    "relu": standard.Relu(),
    "relu6": standard.Relu6(),
    "tanh": standard.Tanh(),
    "sigmoid": standard.Sigmoid(),
    "silu": standard.Swish(),
    "hardsigmoid": standard.HardSigmoid(),
    "hardswish": standard.HardSwish(),
}


def _read_activation(reader: NodeReader) -> Layers:
    return _one_layer(reader, _ACTIVATIONS[reader.node.op.split(".")[1]])


_READERS.update(dict.fromkeys(_ACTIVATIONS, _read_activation))


@_reads("hardtanh")
def _hardtanh(reader: NodeReader) -> Layers:
    if (reader.argument(1, -1.0), reader.argument(2, 1.0)) != (0, 6):
        raise reader.refuse("its bounds are not 0 and 6")
    return _one_layer(reader, standard.Relu6())


@_reads("gelu")
def _gelu(reader: NodeReader) -> Layers:
    if reader.option("approximate", "none") != "tanh":
        raise reader.refuse("gelu here is the form approximate='tanh'")
    return _one_layer(reader, standard.Gelu())


@_reads("dropout")
def _dropout(reader: NodeReader) -> Layers:
    if not reader.argument(2) or reader.argument(1) == 0:
        return (), reader.after()
    return _one_layer(reader, standard.Dropout(rate=reader.argument(1)))


@_reads("contiguous", "clone", "alias")
def _identity(reader: NodeReader) -> Layers:
    return (), reader.after()


@_reads("conv2d")
def _conv(reader: NodeReader) -> Layers:
    kernel, arrays = _read_kernel(reader)
    has_bias = "params/bias" in arrays
    stride = as_pair(reader.argument(3, 1))
    dilation = as_pair(reader.argument(5, 1))
    groups = reader.argument(6, 1)
    rows, columns, _, features = kernel.shape
    pads = conv_pads(reader.argument(4, 0), (rows, columns), dilation)
    if reader.flow.pooled:
        if (rows, columns, groups, pads) != (1, 1, 1, ((0, 0), (0, 0))):
            raise reader.refuse("of images of one pixel only 1x1 convolutions are known")
        arrays["params/kernel"] = kernel[0, 0]
        return _one_layer(reader, standard.Dense(features=features, bias=has_bias), arrays)
    if any(before != after for before, after in pads):
        raise reader.refuse("padding='same' of an even kernel")
    layer = standard.Conv(
        features=features,
        kernel=_short((rows, columns)),
        stride=_short(stride),
        padding=pads[0][0] if pads[0] == pads[1] else pads,
        dilation=_short(dilation),
        groups=groups,
        bias=has_bias,
    )
    return _one_layer(reader, layer, arrays)


def _read_kernel(reader: NodeReader) -> tuple[np.ndarray, Arrays]:
    """Return the kernel, and the arrays of a layer: the kernel and the bias, if there is one."""
    kernel = reader.array(1)
    bias = reader.array(2)
    assert kernel is not None, "the layer has a kernel"
    arrays = {"params/kernel": kernel}
    return kernel, arrays if bias is None else {**arrays, "params/bias": bias}


@_reads("linear")
def _linear(reader: NodeReader) -> Layers:
    kernel, arrays = _read_kernel(reader)
    if reader.flow.is_image:
        raise reader.refuse("of images")
    arrays["params/kernel"] = reader.flow.reorder(kernel, 0)
    layer = standard.Dense(features=kernel.shape[1], bias="params/bias" in arrays)
    return (NamedLayer(layer, arrays),), replace(reader.after(), flattened=None)


@_reads("batch_norm")
def _batch_norm(reader: NodeReader) -> Layers:
    weight, bias, mean, var = (reader.array(place) for place in (1, 2, 3, 4))
    if weight is None or bias is None or mean is None or var is None:
        raise reader.refuse("it has no weight, or no running statistics")
    if reader.argument(5) is not True:
        raise reader.refuse("it does not train its statistics")
    arrays = {
        "params/scale": weight,
        "params/bias": bias,
        "batch_stats/mean": mean,
        "batch_stats/var": var,
    }
    arrays = {name: reader.flow.reorder(array, 0) for name, array in arrays.items()}
    momentum = round(1 - reader.argument(6), 12)
    layer = standard.BatchNorm(momentum=momentum, epsilon=reader.argument(7))
    return _one_layer(reader, layer, arrays)


@_reads("layer_norm")
def _layer_norm(reader: NodeReader) -> Layers:
    weight = reader.array(2)
    bias = reader.array(3)
    if len(reader.argument(1)) != 1 or weight is None or bias is None:
        raise reader.refuse("it has several axes, or no weight and bias")
    if reader.flow.is_image or reader.flow.flattened is not None:
        raise reader.refuse("its axis is not the one of the channels")
    layer = standard.LayerNorm(epsilon=reader.argument(4, 1e-5))
    return _one_layer(reader, layer, {"params/scale": weight, "params/bias": bias})


@_reads("group_norm")
def _group_norm(reader: NodeReader) -> Layers:
    weight = reader.array(2)
    bias = reader.array(3)
    if weight is None or bias is None:
        raise reader.refuse("it has no weight and bias")
    layer = standard.GroupNorm(groups=reader.argument(1), epsilon=reader.argument(4, 1e-5))
    return _one_layer(reader, layer, {"params/scale": weight, "params/bias": bias})


@_reads("max_pool2d")
def _max_pool(reader: NodeReader) -> Layers:
    if as_pair(reader.argument(4, 1)) != (1, 1):
        raise reader.refuse("it is dilated")
    return _one_layer(
        reader, standard.MaxPool(**_window(reader, ceil_mode=reader.argument(5, False)))
    )


@_reads("avg_pool2d")
def _avg_pool(reader: NodeReader) -> Layers:
    counted = reader.argument(5, True) and as_pair(reader.argument(3, 0)) != (0, 0)
    if counted or reader.argument(6) is not None or reader.argument(4, False):
        raise reader.refuse("its padding counts, or its divisor is given")
    return _one_layer(reader, standard.AvgPool(**_window(reader, ceil_mode=False)))


@_reads("adaptive_avg_pool2d")
def _adaptive_avg_pool(reader: NodeReader) -> Layers:
    _, height, width = reader.flow.shape
    rows, columns = as_pair(reader.argument(1))
    if (rows, columns) == (height, width):
        return (), reader.after()
    if (rows, columns) == (1, 1):
        return _pool_globally(reader)
    if height % rows or width % columns:
        raise reader.refuse(f"{height}x{width} is no multiple of {rows}x{columns}")
    return _one_layer(reader, standard.AvgPool(kernel=_short((height // rows, width // columns))))


@_reads("mean")
def _mean(reader: NodeReader) -> Layers:
    if not reader.flow.is_image or sorted(dim % 4 for dim in reader.argument(1, ())) != [2, 3]:
        raise reader.refuse("it is not over the pixels of images")
    layers, flow = _pool_globally(reader)
    return layers, replace(flow, pooled=reader.argument(2, False))


def _pool_globally(reader: NodeReader) -> Layers:
    flow = replace(reader.after(), pooled=True)
    return ((NamedLayer(standard.GlobalAvgPool()),) if not reader.flow.pooled else ()), flow


@_reads("flatten", "view", "reshape")
def _flatten(reader: NodeReader) -> Layers:
    flow = reader.flow
    after = reader.after()
    if after.shape != (int(np.prod(flow.shape)),):
        raise reader.refuse("it flattens no whole sample")
    if flow.pooled or len(flow.shape) == 1:
        return (), replace(after, pooled=False)
    if not flow.is_image:
        raise reader.refuse("it flattens no images")
    return (NamedLayer(standard.Flatten()),), replace(after, flattened=flow.shape)


def _window(reader: NodeReader, *, ceil_mode: bool) -> dict[str, Any]:
    """Return kernel, stride and padding of a pooling layer."""
    if not reader.flow.is_image:
        raise reader.refuse("it reads no images")
    kernel = as_pair(reader.argument(1))
    stride = kernel if reader.argument(2, ()) == () else as_pair(reader.argument(2))
    pads = as_pair(reader.argument(3, 0))
    edges = []
    for axis in (0, 1):
        reach = (reader.after().shape[1 + axis] - 1) * stride[axis] + kernel[axis]
        missing = reach - reader.flow.shape[1 + axis] - pads[axis] if ceil_mode else 0
        edges.append((pads[axis], max(pads[axis], missing)))
    return {
        "kernel": _short(kernel),
        "stride": None if stride == kernel else _short(stride),
        "padding": pads[0] or "valid" if {*edges} == {(pads[0], pads[0])} else tuple(edges),
    }


def _short(sizes: tuple[int, int]) -> int | tuple[int, int]:
    return sizes[0] if sizes[0] == sizes[1] else sizes
