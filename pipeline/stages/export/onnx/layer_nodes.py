"""Nodes of each layer. Images lie as (batch, channels, height, width), as runtimes want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.models.layers import standard
from pipeline.models.layers.fields import pair
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import scope_names
from pipeline.models.modules.layout import pads_around, reach
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput

Path = tuple[str, ...]
Translation = Callable[[Any, NodeOutput, Path, GraphBuilder], NodeOutput]
_TRANSLATIONS: dict[type[LayerSpec], Translation] = {}


def add_layers(
    layers: Sequence[LayerSpec], value: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    """Add the nodes of layers one after the other, whose parameters are below `path`.

    Raises RecipeError, which names the layer, for one that has no translation.
    """
    for name, layer in zip(scope_names(layers), layers, strict=True):
        translation = _TRANSLATIONS.get(type(layer))
        if translation is None:
            known = ", ".join(sorted(kind.model_fields["name"].default for kind in _TRANSLATIONS))
            raise RecipeError(
                [
                    f"model layer {'/'.join((*path, name))} ({layer.name}): has no translation to "
                    f"ONNX; those that have are {known}. Export without --to onnx: StableHLO has "
                    "all"
                ]
            )
        value = translation(layer, value, (*path, name), graph)
    return value


def _translates(*kinds: type[LayerSpec]) -> Callable[[Translation], Translation]:
    def register(translation: Translation) -> Translation:
        for kind in kinds:
            _TRANSLATIONS[kind] = translation
        return translation

    return register


@_translates(standard.Conv)
def _conv(layer: standard.Conv, x: NodeOutput, path: Path, graph: GraphBuilder) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    kernel = graph.weight(path, "kernel")
    size, strides, dilation = pair(layer.kernel), pair(layer.stride), pair(layer.dilation)
    pads, sizes = _windows(x, reach(size, dilation), strides, layer.padding)
    inputs = [x.name, graph.constant("/".join((*path, "kernel")), kernel.transpose(3, 2, 0, 1))]
    name = graph.node(
        "Conv",
        [*inputs, *_bias(path, graph)],
        kernel_shape=size,
        strides=strides,
        dilations=dilation,
        group=layer.groups,
        pads=pads,
    )
    return NodeOutput(name, (*sizes, kernel.shape[-1]), "nchw")


@_translates(standard.ConvTranspose)
def _conv_transpose(
    layer: standard.ConvTranspose, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    """Add a transposed convolution. Its kernel is mirrored in ONNX, and padding is what is cut off:
    where XLA's sizes need more rows than the windows cover, rows are added at the end."""
    x = graph.in_order(x, "nchw")
    kernel = graph.weight(path, "kernel")
    size, strides = pair(layer.kernel), pair(layer.stride)
    begins, ends, added, sizes = [], [], [], []
    for length, window, stride in zip(x.shape[:2], size, strides, strict=True):
        before, after = _pads_of_transpose(window, stride, layer.padding)
        begins.append(window - 1 - before)
        ends.append(max(0, window - 1 - after))
        added.append(max(0, after - window + 1))
        sizes.append((length - 1) * stride + 1 + before + after - window + 1)
    mirrored = kernel[::-1, ::-1].transpose(2, 3, 0, 1)
    inputs = [x.name, graph.constant("/".join((*path, "kernel")), mirrored)]
    name = graph.node(
        "ConvTranspose",
        [*inputs, *_bias(path, graph)],
        kernel_shape=size,
        strides=strides,
        pads=[*begins, *ends],
        output_padding=added,
    )
    return NodeOutput(name, (sizes[0], sizes[1], kernel.shape[-1]), "nchw")


def _pads_of_transpose(window: int, stride: int, padding: str) -> tuple[int, int]:
    """Rows around the spread input, as `jax.lax.conv_transpose` has them."""
    if padding == "valid":
        total, before = window + stride - 2 + max(window - stride, 0), window - 1
    else:
        total = window + stride - 2
        before = window - 1 if stride > window - 1 else -(-total // 2)
    return before, total - before


@_translates(standard.Dense)
def _dense(layer: standard.Dense, x: NodeOutput, path: Path, graph: GraphBuilder) -> NodeOutput:
    kernel = graph.weight(path, "kernel")
    inputs = [x.name, graph.constant("/".join((*path, "kernel")), kernel)]
    bias = _bias(path, graph)
    if len(x.shape) == 1:
        return NodeOutput(graph.node("Gemm", [*inputs, *bias]), kernel.shape[1:])
    name = graph.node("MatMul", inputs)
    name = graph.node("Add", [name, *bias]) if bias else name
    return NodeOutput(name, (*x.shape[:-1], kernel.shape[1]), x.order)


@_translates(standard.BatchNorm)
def _batch_norm(
    layer: standard.BatchNorm, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    arrays = [
        graph.constant("/".join((*path, name)), graph.weight(path, name, kind))
        for kind, name in (
            ("params", "scale"),
            ("params", "bias"),
            ("batch_stats", "mean"),
            ("batch_stats", "var"),
        )
    ]
    name = graph.node("BatchNormalization", [x.name, *arrays], epsilon=layer.epsilon)
    return replace(x, name=name)


@_translates(standard.LayerNorm)
def _layer_norm(
    layer: standard.LayerNorm, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    x = graph.in_order(x, "nhwc")
    arrays = [
        graph.constant("/".join((*path, name)), graph.weight(path, name))
        for name in ("scale", "bias")
    ]
    norm = graph.node("LayerNormalization", [x.name, *arrays], axis=-1, epsilon=layer.epsilon)
    return replace(x, name=norm)


@_translates(standard.GroupNorm)
def _group_norm(
    layer: standard.GroupNorm, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    channels = x.shape[-1]
    positions = x.shape[:-1] if x.is_image else ()
    grouped = graph.reshaped(x, [-1, layer.groups, prod(x.shape) // layer.groups], ())
    ones = graph.constant("ones", np.ones(layer.groups, np.float32))
    zeros = graph.constant("zeros", np.zeros(layer.groups, np.float32))
    norm = graph.node("InstanceNormalization", [grouped.name, ones, zeros], epsilon=layer.epsilon)
    result = graph.reshaped(NodeOutput(norm, x.shape, x.order), [-1, channels, *positions], x.shape)
    name = result.name
    for kind, weight in (("Mul", "scale"), ("Add", "bias")):
        array = graph.weight(path, weight).reshape(channels, *(1,) * len(positions))
        name = graph.node(kind, [name, graph.constant("/".join((*path, weight)), array)])
    return replace(result, name=name)


@_translates(standard.Dropout)
def _dropout(layer: standard.Dropout, x: NodeOutput, path: Path, graph: GraphBuilder) -> NodeOutput:
    return x


@_translates(
    standard.Relu,
    standard.Tanh,
    standard.Sigmoid,
    standard.Relu6,
    standard.HardSigmoid,
    standard.HardSwish,
    standard.Swish,
    standard.Gelu,
)
def _activation(
    layer: standard.Activation, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    match layer.name:
        case "relu" | "tanh" | "sigmoid":
            return replace(x, name=graph.node(layer.name.title(), [x.name]))
        case "relu6":
            bounds = graph.number(0.0), graph.number(6.0)
            return replace(x, name=graph.node("Clip", [x.name, *bounds]))
        case "hard_sigmoid":
            return replace(x, name=graph.node("HardSigmoid", [x.name], alpha=1 / 6, beta=0.5))
        case "hard_swish":
            gate = graph.node("HardSigmoid", [x.name], alpha=1 / 6, beta=0.5)
        case "swish":
            gate = graph.node("Sigmoid", [x.name])
        case _:
            gate = _gelu_gate(x, graph)
    return replace(x, name=graph.node("Mul", [x.name, gate]))


def _gelu_gate(x: NodeOutput, graph: GraphBuilder) -> str:
    """0.5 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as `jax.nn.gelu` has it."""
    squared = graph.node("Mul", [x.name, x.name])
    cube = graph.node("Mul", [squared, x.name])
    inner = graph.node("Add", [x.name, graph.node("Mul", [cube, graph.number(0.044715)])])
    curve = graph.node("Tanh", [graph.node("Mul", [inner, graph.number(sqrt(2 / np.pi))])])
    return graph.node("Mul", [graph.node("Add", [curve, graph.number(1.0)]), graph.number(0.5)])


@_translates(standard.MaxPool, standard.AvgPool)
def _pool(layer: standard.Pool, x: NodeOutput, path: Path, graph: GraphBuilder) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    window = pair(layer.kernel)
    strides = window if layer.stride is None else pair(layer.stride)
    pads, sizes = _windows(x, window, strides, layer.padding)
    kind = "MaxPool" if isinstance(layer, standard.MaxPool) else "AveragePool"
    name = graph.node(kind, [x.name], kernel_shape=window, strides=strides, pads=pads)
    return NodeOutput(name, (*sizes, x.shape[-1]), "nchw")


@_translates(standard.GlobalAvgPool)
def _global_avg_pool(
    layer: standard.GlobalAvgPool, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    mean = graph.node("ReduceMean", [x.name], axes=[2, 3], keepdims=0)
    return NodeOutput(mean, x.shape[-1:])


@_translates(standard.Upsample)
def _upsample(
    layer: standard.Upsample, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    scales = graph.constant("scales", np.array([1, 1, layer.factor, layer.factor], np.float32))
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    name = graph.node("Resize", [x.name, "", scales], mode="nearest", **how)
    height, width, channels = x.shape
    return NodeOutput(name, (height * layer.factor, width * layer.factor, channels), "nchw")


@_translates(standard.ChannelShuffle)
def _channel_shuffle(
    layer: standard.ChannelShuffle, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    height, width, channels = x.shape
    groups = layer.groups
    parts = graph.reshaped(x, [-1, groups, channels // groups, height, width], x.shape)
    swapped = graph.node("Transpose", [parts.name], perm=(0, 2, 1, 3, 4))
    return graph.reshaped(
        NodeOutput(swapped, x.shape, "nchw"), [-1, channels, height, width], x.shape
    )


@_translates(standard.Flatten)
def _flatten(layer: standard.Flatten, x: NodeOutput, path: Path, graph: GraphBuilder) -> NodeOutput:
    x = graph.in_order(x, "nhwc")
    return graph.reshaped(x, [-1, prod(x.shape)], (prod(x.shape),))


@_translates(standard.Sequence)
def _sequence(
    layer: standard.Sequence, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    return add_layers(layer.body * layer.repeat, x, path, graph)


@_translates(standard.Residual)
def _residual(
    layer: standard.Residual, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    body = add_layers(layer.body, x, path, graph)
    shortcut = add_layers(layer.shortcut, x, (*path, "shortcut"), graph)
    shortcut = graph.in_order(shortcut, body.order)
    return replace(body, name=graph.node("Add", [body.name, shortcut.name]))


@_translates(standard.Branches)
def _branches(
    layer: standard.Branches, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    inputs = [x] * len(layer.branches)
    if layer.split:
        inputs = _split(x, x.shape[-1] // len(layer.branches), graph)
    results = [
        graph.in_order(add_layers(branch, part, (*path, f"branch_{index}"), graph), "nchw")
        for index, (branch, part) in enumerate(zip(layer.branches, inputs, strict=True))
    ]
    return _concatenated(results, graph)


@_translates(standard.Gate)
def _gate(layer: standard.Gate, x: NodeOutput, path: Path, graph: GraphBuilder) -> NodeOutput:
    x = graph.in_order(x, "nchw")
    factors = graph.in_order(add_layers(layer.body, x, path, graph), "nchw")
    if factors.shape != x.shape:
        ones = (1,) * (len(x.shape) - 1)
        channels = factors.shape[-1]
        # Channels come first in images, and last elsewhere.
        sizes = (channels, *ones) if x.is_image else (*ones, channels)
        factors = graph.reshaped(factors, [-1, *sizes], factors.shape)
    return replace(x, name=graph.node("Mul", [x.name, factors.name]))


@_translates(standard.DualPath)
def _dual_path(
    layer: standard.DualPath, x: NodeOutput, path: Path, graph: GraphBuilder
) -> NodeOutput:
    body = graph.in_order(add_layers(layer.body, x, path, graph), "nchw")
    shortcut = add_layers(layer.shortcut, x, (*path, "shortcut"), graph)
    shortcut = graph.in_order(shortcut, "nchw")
    added = layer.added
    ends = [
        _channels(one, begin, end, graph)
        for one in (body, shortcut)
        for begin, end in ((0, added), (added, one.shape[-1]))
    ]
    total = replace(ends[0], name=graph.node("Add", [ends[0].name, ends[2].name]))
    return _concatenated([part for part in (total, ends[3], ends[1]) if part.shape[-1]], graph)


def _channel_axis(x: NodeOutput) -> int:
    return 1 if x.is_image else -1


def _split(x: NodeOutput, channels: int, graph: GraphBuilder) -> list[NodeOutput]:
    """Equal parts of the channels."""
    return [
        _channels(x, begin, begin + channels, graph) for begin in range(0, x.shape[-1], channels)
    ]


def _channels(x: NodeOutput, begin: int, end: int, graph: GraphBuilder) -> NodeOutput:
    """The channels from `begin` to before `end`."""
    bounds = [
        graph.constant("bound", np.array([number], np.int64))
        for number in (begin, end, _channel_axis(x))
    ]
    return NodeOutput(graph.node("Slice", [x.name, *bounds]), (*x.shape[:-1], end - begin), x.order)


def _concatenated(parts: Sequence[NodeOutput], graph: GraphBuilder) -> NodeOutput:
    """Parts side by side along their channels."""
    name = graph.node("Concat", [part.name for part in parts], axis=_channel_axis(parts[0]))
    channels = sum(part.shape[-1] for part in parts)
    return NodeOutput(name, (*parts[0].shape[:-1], channels), parts[0].order)


def _bias(path: Path, graph: GraphBuilder) -> list[str]:
    if not graph.has_weight(path, "bias"):
        return []
    return [graph.constant("/".join((*path, "bias")), graph.weight(path, "bias"))]


def _windows(
    x: NodeOutput, window: tuple[int, int], strides: tuple[int, int], padding: standard.Padding
) -> tuple[list[int], tuple[int, int]]:
    """Pads as ONNX orders them (top, left, bottom, right), and the sizes of the result."""
    height, width = x.shape[:2]
    rows, columns = pads_around((height, width), window, strides, padding)
    sizes = (
        (height + sum(rows) - window[0]) // strides[0] + 1,
        (width + sum(columns) - window[1]) // strides[1] + 1,
    )
    return [rows[0], columns[0], rows[1], columns[1]], sizes
