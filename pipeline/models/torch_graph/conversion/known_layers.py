"""The layers of this project that nodes of a graph stand for, with their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.torch_graph.graph import ArrayOf, GraphNode, TorchGraph

Arrays = dict[str, np.ndarray]


class UnknownLayerError(ValueError):
    """A node that no layer stands for; the message names its module."""


@dataclass(frozen=True)
class NamedLayer:
    """A layer with its arrays by collection and leaf, and the layers inside of it by scope."""

    layer: LayerSpec
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Such as `params/kernel`."""
    inside: Mapping[str, tuple[NamedLayer, ...]] = field(default_factory=dict)
    """By scope below the layer's own; "" is the layer's own."""


@dataclass(frozen=True)
class Flow:
    """The input of a layer: the shape of a sample in PyTorch, and what became of it here."""

    shape: tuple[int, ...]
    """Of the tensor of PyTorch, without the batch."""
    pooled: bool = False
    """Whether images of one pixel are (batch, channels) here."""
    flattened: tuple[int, ...] | None = None
    """Channels, height and width of images that were flattened here pixel by pixel."""

    @property
    def is_image(self) -> bool:
        """Whether it is (channels, height, width) of several pixels."""
        return len(self.shape) == 3 and not self.pooled

    def own_order(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Return an array whose axis counts flattened images, in the order that they have here."""
        if self.flattened is None:
            return array
        places = np.arange(np.prod(self.flattened)).reshape(self.flattened)
        return np.take(array, places.transpose(1, 2, 0).reshape(-1), axis)


@dataclass(frozen=True)
class KnownNode:
    """A node to be read, its graph, and what reaches it."""

    graph: TorchGraph
    node: GraphNode
    flow: Flow

    def argument(self, place: int, default: Any = None) -> Any:
        """Return an argument, or the default where the call leaves it out."""
        return self.node.args[place] if len(self.node.args) > place else default

    def option(self, name: str, default: Any = None) -> Any:
        """Return an argument by name."""
        return dict(self.node.kwargs).get(name, default)

    def array(self, place: int) -> np.ndarray | None:
        """Return the values of an argument that is an array, None where it is none."""
        argument = self.argument(place)
        if argument is None:
            return None
        if not isinstance(argument, ArrayOf):
            raise self.unknown("its weight is computed")
        return self.graph.values[argument.name]

    def unknown(self, why: str = "") -> UnknownLayerError:
        """Return the error that no layer stands for the node."""
        node = self.node
        module = f"module {node.module or 'of the network itself'} ({node.kind})"
        reason = f"; {why}" if why else ""
        return UnknownLayerError(f"{module} is no known layer: {node.op}{reason}")

    def after(self) -> Flow:
        """Return what leaves the node, in the shape that the graph says."""
        shape = self.node.results[0].shape[1:]
        if any(size is None for size in shape):
            raise self.unknown("its shape depends on the batch")
        return replace(self.flow, shape=tuple(size or 0 for size in shape))


Known = tuple[tuple[NamedLayer, ...], Flow]
"""The layers that stand for a node, and what leaves them."""
_READERS: dict[str, Callable[[KnownNode], Known]] = {}


def layers_of_node(graph: TorchGraph, node: GraphNode, flow: Flow) -> Known:
    """Return the layers for a node of one input.

    Raises UnknownLayerError where there are none with the same result.
    """
    known = KnownNode(graph, node, flow)
    name = node.op.removeprefix("aten.").partition(".")[0]
    if name not in _READERS:
        raise known.unknown()
    return _READERS[name](known)


def _reads(*names: str) -> Callable[[Callable[[KnownNode], Known]], Callable[[KnownNode], Known]]:
    def register(reader: Callable[[KnownNode], Known]) -> Callable[[KnownNode], Known]:
        for name in names:
            _READERS[name] = reader
        return reader

    return register


def _one(known: KnownNode, layer: LayerSpec, arrays: Arrays | None = None) -> Known:
    return (NamedLayer(layer, arrays or {}),), known.after()


_ACTIVATIONS: Mapping[str, Callable[[], standard.Activation]] = {
    "relu": standard.Relu,
    "relu6": standard.Relu6,
    "tanh": standard.Tanh,
    "sigmoid": standard.Sigmoid,
    "silu": standard.Swish,
    "hardsigmoid": standard.HardSigmoid,
    "hardswish": standard.HardSwish,
}


@_reads(*_ACTIVATIONS)
def _activation(known: KnownNode) -> Known:
    return _one(known, _ACTIVATIONS[known.node.op.split(".")[1]]())


@_reads("hardtanh")
def _hardtanh(known: KnownNode) -> Known:
    if (known.argument(1, -1.0), known.argument(2, 1.0)) != (0, 6):
        raise known.unknown("its bounds are not 0 and 6")
    return _one(known, standard.Relu6())


@_reads("gelu")
def _gelu(known: KnownNode) -> Known:
    if known.option("approximate", "none") != "tanh":
        raise known.unknown("gelu here is the form approximate='tanh'")
    return _one(known, standard.Gelu())


@_reads("dropout")
def _dropout(known: KnownNode) -> Known:
    rate, train = known.argument(1), known.argument(2)
    if not train or rate == 0:
        return (), known.after()
    return _one(known, standard.Dropout(rate=rate))


@_reads("contiguous", "clone", "alias", "detach")
def _nothing(known: KnownNode) -> Known:
    if known.node.op.startswith("aten.detach"):
        raise known.unknown()
    return (), known.after()


@_reads("conv2d")
def _conv(known: KnownNode) -> Known:
    kernel, bias = known.array(1), known.array(2)
    assert kernel is not None, "a convolution has a kernel"
    stride, padding, dilation = (
        _two(known.argument(place, default)) for place, default in ((3, 1), (4, 0), (5, 1))
    )
    groups = known.argument(6, 1)
    arrays = {"params/kernel": kernel}
    if bias is not None:
        arrays["params/bias"] = bias
    rows, columns, _, features = kernel.shape
    if known.flow.pooled:
        if (rows, columns, groups, padding) != (1, 1, 1, (0, 0)):
            raise known.unknown("of images of one pixel only 1x1 convolutions are known")
        arrays["params/kernel"] = kernel[0, 0]
        return _one(known, standard.Dense(features=features, bias=bias is not None), arrays)
    layer = standard.Conv(
        features=features,
        kernel=(rows, columns) if rows != columns else rows,
        stride=_short(stride),
        padding=_pads(known, padding, (rows, columns), dilation),
        dilation=_short(dilation),
        groups=groups,
        bias=bias is not None,
    )
    return _one(known, layer, arrays)


@_reads("linear")
def _linear(known: KnownNode) -> Known:
    kernel, bias = known.array(1), known.array(2)
    assert kernel is not None, "a dense layer has a kernel"
    if known.flow.is_image:
        raise known.unknown("of images")
    arrays = {"params/kernel": known.flow.own_order(kernel, 0)}
    if bias is not None:
        arrays["params/bias"] = bias
    layer = standard.Dense(features=kernel.shape[1], bias=bias is not None)
    return (NamedLayer(layer, arrays),), replace(known.after(), flattened=None)


@_reads("batch_norm")
def _batch_norm(known: KnownNode) -> Known:
    weight, bias, mean, var = (known.array(place) for place in (1, 2, 3, 4))
    if weight is None or bias is None or mean is None or var is None:
        raise known.unknown("it has no weight, or no running statistics")
    if known.argument(5) is not True:
        raise known.unknown("it does not train its statistics")
    arrays = {
        "params/scale": weight,
        "params/bias": bias,
        "batch_stats/mean": mean,
        "batch_stats/var": var,
    }
    own = {name: known.flow.own_order(array, 0) for name, array in arrays.items()}
    momentum, epsilon = 1 - known.argument(6), known.argument(7)
    layer = standard.BatchNorm(momentum=round(momentum, 12), epsilon=epsilon)
    return _one(known, layer, own)


@_reads("layer_norm")
def _layer_norm(known: KnownNode) -> Known:
    weight, bias = known.array(2), known.array(3)
    if len(known.argument(1)) != 1 or weight is None or bias is None:
        raise known.unknown("it has several axes, or no weight and bias")
    if known.flow.is_image or known.flow.flattened is not None:
        raise known.unknown("its axis is not the one of the channels")
    layer = standard.LayerNorm(epsilon=known.argument(4, 1e-5))
    return _one(known, layer, {"params/scale": weight, "params/bias": bias})


@_reads("group_norm")
def _group_norm(known: KnownNode) -> Known:
    weight, bias = known.array(2), known.array(3)
    if weight is None or bias is None:
        raise known.unknown("it has no weight and bias")
    layer = standard.GroupNorm(groups=known.argument(1), epsilon=known.argument(4, 1e-5))
    return _one(known, layer, {"params/scale": weight, "params/bias": bias})


@_reads("max_pool2d")
def _max_pool(known: KnownNode) -> Known:
    if _two(known.argument(4, 1)) != (1, 1):
        raise known.unknown("it is dilated")
    return _one(known, standard.MaxPool(**_window(known, ceil_mode=known.argument(5, False))))


@_reads("avg_pool2d")
def _avg_pool(known: KnownNode) -> Known:
    counted = known.argument(5, True) and _two(known.argument(3, 0)) != (0, 0)
    if counted or known.argument(6) is not None or known.argument(4, False):
        raise known.unknown("its padding counts, or its divisor is given")
    return _one(known, standard.AvgPool(**_window(known, ceil_mode=False)))


@_reads("adaptive_avg_pool2d")
def _adaptive_avg_pool(known: KnownNode) -> Known:
    _, height, width = known.flow.shape
    wanted = _two(known.argument(1))
    if wanted == (height, width):
        return (), known.after()
    if wanted == (1, 1):
        return _pooled(known)
    if height % wanted[0] or width % wanted[1]:
        raise known.unknown(f"{height}x{width} is no multiple of {wanted[0]}x{wanted[1]}")
    window = height // wanted[0], width // wanted[1]
    return _one(known, standard.AvgPool(kernel=_short(window)))


@_reads("mean")
def _mean(known: KnownNode) -> Known:
    dims, keeps = known.argument(1, ()), known.argument(2, False)
    if not known.flow.is_image or sorted(dim % 4 for dim in dims) != [2, 3]:
        raise known.unknown("it is not over the pixels of images")
    layers, flow = _pooled(known)
    return layers, replace(flow, pooled=keeps)


def _pooled(known: KnownNode) -> Known:
    flow = replace(known.after(), pooled=True)
    return ((NamedLayer(standard.GlobalAvgPool()),) if not known.flow.pooled else ()), flow


@_reads("flatten", "view", "reshape")
def _flatten(known: KnownNode) -> Known:
    flow, after = known.flow, known.after()
    if after.shape != (int(np.prod(flow.shape)),):
        raise known.unknown("it flattens no whole sample")
    if flow.pooled or len(flow.shape) == 1:
        return (), replace(after, pooled=False)
    if not flow.is_image:
        raise known.unknown("it flattens no images")
    return (NamedLayer(standard.Flatten()),), replace(after, flattened=flow.shape)


def _window(known: KnownNode, *, ceil_mode: bool) -> dict[str, Any]:
    """Kernel, stride and padding of a pooling layer."""
    if not known.flow.is_image:
        raise known.unknown("it reads no images")
    kernel = _two(known.argument(1))
    stride = kernel if known.argument(2, ()) == () else _two(known.argument(2))
    pads = _two(known.argument(3, 0))
    around = []
    for axis in (0, 1):
        size, wanted = known.flow.shape[1 + axis], known.after().shape[1 + axis]
        reach = (wanted - 1) * stride[axis] + kernel[axis]
        after = max(pads[axis], reach - size - pads[axis]) if ceil_mode else pads[axis]
        around.append([pads[axis], after])
    same = around[0] == around[1] and around[0][0] == around[0][1]
    return {
        "kernel": _short(kernel),
        "stride": None if stride == kernel else _short(stride),
        "padding": around[0][0] or "valid" if same else tuple(map(tuple, around)),
    }


def _pads(known: KnownNode, padding: Any, kernel: tuple[int, int], dilation: Any) -> Any:
    if isinstance(padding, str):
        if padding == "valid":
            return 0
        totals = [(size - 1) * wide for size, wide in zip(kernel, dilation, strict=True)]
        if any(total % 2 for total in totals):
            raise known.unknown("padding='same' of an even kernel")
        padding = totals[0] // 2, totals[1] // 2
    rows, columns = padding
    return rows if rows == columns else ((rows, rows), (columns, columns))


def _two(sizes: int | Sequence[int] | str) -> Any:
    if isinstance(sizes, str):
        return sizes
    return (sizes, sizes) if isinstance(sizes, int) else (sizes[0], sizes[-1])


def _short(sizes: tuple[int, int]) -> int | tuple[int, int]:
    return sizes[0] if sizes[0] == sizes[1] else sizes
