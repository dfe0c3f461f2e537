"""Nodes of each layer. Images are (batch, channels, height, width), which is fast in runtimes."""

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
from pipeline.models.layers.standard import name_scopes
from pipeline.models.modules.layout import compute_pads, reach
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput

Translation = Callable[[Any, NodeOutput, GraphBuilder], NodeOutput]
_TRANSLATIONS: dict[type[LayerSpec], Translation] = {}


def add_layers(layers: Sequence[LayerSpec], x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    """Add the nodes of layers one after the other, whose parameters are below `graph.path`.

    Raises RecipeError that names a layer without a translation.
    """
    for name, layer in zip(name_scopes(layers), layers, strict=True):
        inner = graph.enter(name)
        translation = _TRANSLATIONS.get(type(layer))
        if translation is None:
            names = ", ".join(sorted(kind.model_fields["name"].default for kind in _TRANSLATIONS))
            raise RecipeError(
                f"model layer {'/'.join(inner.path)} ({layer.name}): has no translation to "
                f"ONNX; those that have are {names}. Export without --to onnx: StableHLO has "
                "all"
            )
        x = translation(layer, x, inner)
    return x


def _translates(*kinds: type[LayerSpec]) -> Callable[[Translation], Translation]:
    def register(translation: Translation) -> Translation:
        _TRANSLATIONS.update(dict.fromkeys(kinds, translation))
        return translation

    return register


@_translates(standard.Conv)
def _conv(layer: standard.Conv, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    kernel = graph.weight("kernel")
    strides = pair(layer.stride)
    dilation = pair(layer.dilation)
    pads, sizes = _windows(x, reach(pair(layer.kernel), dilation), strides, layer.padding)
    name = graph.node(
        "Conv",
        [x.name, graph.weight_constant("kernel", kernel.transpose(3, 2, 0, 1)), *_bias(graph)],
        kernel_shape=pair(layer.kernel),
        strides=strides,
        dilations=dilation,
        group=layer.groups,
        pads=pads,
    )
    return NodeOutput(name, (*sizes, kernel.shape[-1]), "nchw")


@_translates(standard.ConvTranspose)
def _conv_transpose(
    layer: standard.ConvTranspose, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    """Add a transposed convolution. Its kernel is mirrored in ONNX, and padding is cropped: rows
    are added at the end if XLA's sizes need more rows than the windows cover."""
    x = graph.to_order(x, "nchw")
    kernel = graph.weight("kernel")
    size = pair(layer.kernel)
    strides = pair(layer.stride)
    begins = []
    ends = []
    output_padding = []
    sizes = []
    for length, window, stride in zip(x.shape[:2], size, strides, strict=True):
        # Rows around the spread input, as `jax.lax.conv_transpose` has them.
        total = window + stride - 2
        before = window - 1 if stride > window - 1 else -(-total // 2)
        if layer.padding == "valid":
            total += max(window - stride, 0)
            before = window - 1
        after = total - before
        begins.append(window - 1 - before)
        ends.append(max(0, window - 1 - after))
        output_padding.append(max(0, after - window + 1))
        sizes.append((length - 1) * stride + 1 + total - window + 1)
    mirrored = kernel[::-1, ::-1].transpose(2, 3, 0, 1)
    name = graph.node(
        "ConvTranspose",
        [x.name, graph.weight_constant("kernel", mirrored), *_bias(graph)],
        kernel_shape=size,
        strides=strides,
        pads=[*begins, *ends],
        output_padding=output_padding,
    )
    return NodeOutput(name, (sizes[0], sizes[1], kernel.shape[-1]), "nchw")


@_translates(standard.Dense)
def _dense(layer: standard.Dense, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    outputs = graph.weight("kernel").shape[1]
    inputs = [x.name, graph.weight_constant("kernel")]
    bias = _bias(graph)
    if len(x.shape) == 1:
        return NodeOutput(graph.node("Gemm", [*inputs, *bias]), (outputs,))
    name = graph.node("MatMul", inputs)
    name = graph.node("Add", [name, *bias]) if bias else name
    return NodeOutput(name, (*x.shape[:-1], outputs), x.order)


@_translates(standard.BatchNorm)
def _batch_norm(layer: standard.BatchNorm, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    arrays = [graph.weight_constant(name) for name in ("scale", "bias")]
    statistics = {name: graph.weight(name, "batch_stats") for name in ("mean", "var")}
    arrays += [graph.weight_constant(name, array) for name, array in statistics.items()]
    norm = graph.node("BatchNormalization", [x.name, *arrays], epsilon=layer.epsilon)
    return replace(x, name=norm)


@_translates(standard.LayerNorm)
def _layer_norm(layer: standard.LayerNorm, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nhwc")
    arrays = [graph.weight_constant(name) for name in ("scale", "bias")]
    norm = graph.node("LayerNormalization", [x.name, *arrays], axis=-1, epsilon=layer.epsilon)
    return replace(x, name=norm)


@_translates(standard.GroupNorm)
def _group_norm(layer: standard.GroupNorm, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    channels = x.shape[-1]
    positions = x.shape[:-1] if x.is_image else ()
    grouped = graph.reshape(x, [-1, layer.groups, prod(x.shape) // layer.groups], ())
    ones = graph.constant("ones", np.ones(layer.groups, np.float32))
    zeros = graph.constant("zeros", np.zeros(layer.groups, np.float32))
    norm = graph.node("InstanceNormalization", [grouped.name, ones, zeros], epsilon=layer.epsilon)
    result = graph.reshape(NodeOutput(norm, x.shape, x.order), [-1, channels, *positions], x.shape)
    name = result.name
    for kind, weight in (("Mul", "scale"), ("Add", "bias")):
        array = graph.weight(weight).reshape(channels, *(1,) * len(positions))
        name = graph.node(kind, [name, graph.weight_constant(weight, array)])
    return replace(result, name=name)


@_translates(standard.Dropout)
def _dropout(layer: standard.Dropout, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    return x


@_translates(standard.Relu, standard.Tanh, standard.Sigmoid, standard.Relu6)
@_translates(standard.HardSigmoid, standard.HardSwish, standard.Swish, standard.Gelu)
def _activation(layer: standard.Activation, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    match layer.name:
        case "relu" | "tanh" | "sigmoid":
            return replace(x, name=graph.node(layer.name.title(), [x.name]))
        case "relu6":
            bounds = graph.scalar(0.0), graph.scalar(6.0)
            return replace(x, name=graph.node("Clip", [x.name, *bounds]))
        case "hard_sigmoid":
            return replace(x, name=graph.node("HardSigmoid", [x.name], alpha=1 / 6, beta=0.5))
        case "hard_swish":
            gate = graph.node("HardSigmoid", [x.name], alpha=1 / 6, beta=0.5)
        case "swish":
            gate = graph.node("Sigmoid", [x.name])
        case _:
            # 0.5 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as `jax.nn.gelu` has it.
            cube = graph.node("Mul", [graph.node("Mul", [x.name, x.name]), x.name])
            scaled = graph.node("Mul", [cube, graph.scalar(0.044715)])
            inner = graph.node("Add", [x.name, scaled])
            factor = graph.scalar(sqrt(2 / np.pi))
            curve = graph.node("Tanh", [graph.node("Mul", [inner, factor])])
            shifted = graph.node("Add", [curve, graph.scalar(1.0)])
            gate = graph.node("Mul", [shifted, graph.scalar(0.5)])
    return replace(x, name=graph.node("Mul", [x.name, gate]))


@_translates(standard.MaxPool, standard.AvgPool)
def _pool(layer: standard.Pool, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    window = pair(layer.kernel)
    strides = window if layer.stride is None else pair(layer.stride)
    pads, sizes = _windows(x, window, strides, layer.padding)
    kind = "MaxPool" if isinstance(layer, standard.MaxPool) else "AveragePool"
    name = graph.node(kind, [x.name], kernel_shape=window, strides=strides, pads=pads)
    return NodeOutput(name, (*sizes, x.shape[-1]), "nchw")


@_translates(standard.GlobalAvgPool)
def _global_avg_pool(
    layer: standard.GlobalAvgPool, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    mean = graph.node("ReduceMean", [x.name], axes=[2, 3], keepdims=0)
    return NodeOutput(mean, x.shape[-1:])


@_translates(standard.Upsample)
def _upsample(layer: standard.Upsample, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    scales = graph.constant("scales", np.array([1, 1, layer.factor, layer.factor], np.float32))
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    name = graph.node("Resize", [x.name, "", scales], mode="nearest", **how)
    height, width, channels = x.shape
    return NodeOutput(name, (height * layer.factor, width * layer.factor, channels), "nchw")


@_translates(standard.ChannelShuffle)
def _channel_shuffle(
    layer: standard.ChannelShuffle, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    height, width, channels = x.shape
    sizes = [-1, layer.groups, channels // layer.groups, height, width]
    parts = graph.reshape(x, sizes, x.shape)
    swapped = graph.node("Transpose", [parts.name], perm=(0, 2, 1, 3, 4))
    swapped_x = NodeOutput(swapped, x.shape, "nchw")
    return graph.reshape(swapped_x, [-1, channels, height, width], x.shape)


@_translates(standard.Flatten)
def _flatten(layer: standard.Flatten, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nhwc")
    return graph.reshape(x, [-1, prod(x.shape)], (prod(x.shape),))


@_translates(standard.Sequence)
def _sequence(layer: standard.Sequence, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    return add_layers(layer.body * layer.repeat, x, graph)


@_translates(standard.Residual)
def _residual(layer: standard.Residual, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    body = add_layers(layer.body, x, graph)
    shortcut = add_layers(layer.shortcut, x, graph.enter("shortcut"))
    shortcut = graph.to_order(shortcut, body.order)
    return replace(body, name=graph.node("Add", [body.name, shortcut.name]))


@_translates(standard.Branches)
def _branches(layer: standard.Branches, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    inputs = [x] * len(layer.branches)
    if layer.split:
        width = x.shape[-1] // len(layer.branches)
        inputs = [_slice(x, start, start + width, graph) for start in range(0, x.shape[-1], width)]
    results = [
        graph.to_order(add_layers(branch, part, graph.enter(f"branch_{index}")), "nchw")
        for index, (branch, part) in enumerate(zip(layer.branches, inputs, strict=True))
    ]
    return _concatenate(results, graph)


@_translates(standard.Gate)
def _gate(layer: standard.Gate, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nchw")
    factors = graph.to_order(add_layers(layer.body, x, graph), "nchw")
    if factors.shape != x.shape:
        ones = (1,) * (len(x.shape) - 1)
        channels = factors.shape[-1]
        # Channels come first in images, and last elsewhere.
        sizes = (channels, *ones) if x.is_image else (*ones, channels)
        factors = graph.reshape(factors, [-1, *sizes], factors.shape)
    return replace(x, name=graph.node("Mul", [x.name, factors.name]))


@_translates(standard.DualPath)
def _dual_path(layer: standard.DualPath, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    body = graph.to_order(add_layers(layer.body, x, graph), "nchw")
    shortcut = add_layers(layer.shortcut, x, graph.enter("shortcut"))
    shortcut = graph.to_order(shortcut, "nchw")
    added = layer.added
    ends = [
        _slice(path, start, stop, graph)
        for path in (body, shortcut)
        for start, stop in ((0, added), (added, path.shape[-1]))
    ]
    total = replace(ends[0], name=graph.node("Add", [ends[0].name, ends[2].name]))
    return _concatenate([part for part in (total, ends[3], ends[1]) if part.shape[-1]], graph)


def _channel_axis(x: NodeOutput) -> int:
    return 1 if x.is_image else -1


def _slice(x: NodeOutput, start: int, stop: int, graph: GraphBuilder) -> NodeOutput:
    """Take the channels from `start` to before `stop`."""
    bounds = [
        graph.constant("bound", np.array([number], np.int64))
        for number in (start, stop, _channel_axis(x))
    ]
    return NodeOutput(
        graph.node("Slice", [x.name, *bounds]), (*x.shape[:-1], stop - start), x.order
    )


def _concatenate(parts: Sequence[NodeOutput], graph: GraphBuilder) -> NodeOutput:
    """Concatenate parts along their channels."""
    name = graph.node("Concat", [part.name for part in parts], axis=_channel_axis(parts[0]))
    channels = sum(part.shape[-1] for part in parts)
    return NodeOutput(name, (*parts[0].shape[:-1], channels), parts[0].order)


def _bias(graph: GraphBuilder) -> list[str]:
    return [graph.weight_constant("bias")] if graph.has_bias() else []


def _windows(
    x: NodeOutput, window: tuple[int, int], strides: tuple[int, int], padding: standard.Padding
) -> tuple[list[int], tuple[int, int]]:
    """Return pads as ONNX has them (top, left, bottom, right), and the sizes of the result."""
    height, width = x.shape[:2]
    rows, columns = compute_pads((height, width), window, strides, padding)
    sizes = (
        (height + sum(rows) - window[0]) // strides[0] + 1,
        (width + sum(columns) - window[1]) // strides[1] + 1,
    )
    return [rows[0], columns[0], rows[1], columns[1]], sizes
