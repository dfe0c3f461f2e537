"""ONNX nodes of layers with inner layers, in sequence, in parallel, added or multiplied, and of the
layers for rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log, pi, sqrt
from typing import Literal

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.models.layers import standard, tables
from pipeline.models.modules.tables import LARGEST_EXPONENT, list_bin_edges, list_one_hot_rows
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput
from pipeline.stages.export.onnx.layer_nodes import add_layers, register_translation

_GATE_ACTIVATIONS = {
    layer.name: layer
    for layer in (standard.Swish(), standard.Gelu(), standard.Relu(), standard.Sigmoid())
}
"""Activations of gated MLPs by name."""
Average = Literal["probabilities", "labels", "numbers"]


@register_translation(standard.Sequence)
def _add_sequence(layer: standard.Sequence, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    return add_layers(layer.body * layer.repeat, x, graph)


@register_translation(standard.Residual)
def _add_residual(layer: standard.Residual, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    body = add_layers(layer.body, x, graph)
    shortcut = add_layers(layer.shortcut, x, graph.enter("shortcut"))
    shortcut = graph.to_order(shortcut, body.order)
    return replace(body, name=graph.add_node("Add", [body.name, shortcut.name]))


@register_translation(standard.Branches)
def _add_branches(
    layer: standard.Branches, x: NodeOutput | Mapping[str, NodeOutput], graph: GraphBuilder
) -> NodeOutput:
    """Add branches, and concatenate their outputs.

    All branches read the input, with `split` each a part of its channels, or each the one of
    several inputs that it names; a single branch reads all of these.
    """
    if layer.join == "film":
        raise RecipeError("model layer branches: join film has no translation to ONNX")
    if isinstance(x, Mapping):
        return _add_branches_of_inputs(layer, x, graph)
    x = graph.to_order(x, "nchw")
    inputs = [x] * len(layer.branches)
    if layer.split:
        width = x.shape[-1] // len(layer.branches)
        inputs = [
            _slice_channels(x, start, start + width, graph)
            for start in range(0, x.shape[-1], width)
        ]
    results = [
        graph.to_order(add_layers(branch, part, graph.enter(f"branch_{index}")), "nchw")
        for index, (branch, part) in enumerate(zip(layer.branches, inputs, strict=True))
    ]
    return _concatenate_channels(results, graph)


def _add_branches_of_inputs(
    layer: standard.Branches, inputs: Mapping[str, NodeOutput], graph: GraphBuilder
) -> NodeOutput:
    """Add the branch of each input, and concatenate their outputs."""
    results = []
    for number, name in enumerate(layer.inputs):
        index = number % len(layer.branches)
        inside = graph.enter(f"branch_{index}")
        inside = replace(inside, token_mask=graph.input_masks.get(name, graph.token_mask))
        result = add_layers(layer.branches[index], inputs[name], inside)
        results.append(graph.to_order(result, "nchw"))
    return _concatenate_channels(results, graph)


@register_translation(standard.Gate, order="nchw")
def _add_gate(layer: standard.Gate, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    factors = graph.to_order(add_layers(layer.body, x, graph), "nchw")
    if factors.shape != x.shape:
        ones = (1,) * (len(x.shape) - 1)
        channels = factors.shape[-1]
        # Channels are the first axis if there are positions, and else the last.
        sizes = (channels, *ones) if x.has_positions else (*ones, channels)
        factors = graph.reshape(factors, [-1, *sizes], factors.shape)
    return replace(x, name=graph.add_node("Mul", [x.name, factors.name]))


@register_translation(standard.GatedMlp, order="nhwc")
def _add_gated_mlp(layer: standard.GatedMlp, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    def project(name: str, features: int, x: NodeOutput) -> NodeOutput:
        dense = standard.Dense(scope=name, features=features, bias=layer.bias)
        return add_layers((dense,), x, graph)

    activation = _GATE_ACTIVATIONS[layer.activation]
    gate = add_layers((activation,), project("gate", layer.hidden, x), graph)
    up = project("up", layer.hidden, x)
    product = replace(up, name=graph.add_node("Mul", [gate.name, up.name]))
    return project("down", x.shape[-1], product)


@register_translation(standard.DualPath)
def _add_dual_path(layer: standard.DualPath, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    """Sum the first `added` channels of body and shortcut, and append their other channels."""
    body = graph.to_order(add_layers(layer.body, x, graph), "nchw")
    shortcut = add_layers(layer.shortcut, x, graph.enter("shortcut"))
    shortcut = graph.to_order(shortcut, "nchw")
    added = layer.added
    added_body = _slice_channels(body, 0, added, graph)
    new_body = _slice_channels(body, added, body.shape[-1], graph)
    added_shortcut = _slice_channels(shortcut, 0, added, graph)
    new_shortcut = _slice_channels(shortcut, added, shortcut.shape[-1], graph)
    total = replace(added_body, name=graph.add_node("Add", [added_body.name, added_shortcut.name]))
    parts = (total, new_shortcut, new_body)
    return _concatenate_channels([part for part in parts if part.shape[-1]], graph)


@register_translation(standard.Views, order="nchw")
def _add_views(layer: standard.Views, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    """Add the views, one batch of all of them, and the mean of the body's outputs over views."""
    height, width, _ = x.shape
    shift = layer.shift
    views = [x.name]
    if shift:
        pads = graph.add_constant("pads", np.array([0, 0, shift, shift] * 2, np.int64))
        padded = graph.add_node("Pad", [x.name, pads], mode="reflect")
        for start in (2 * shift, 0):
            ends = (start + height, start + width)
            views.append(graph.add_slice(padded, ((start, start), ends, (2, 3))))
    if layer.mirror:
        backwards = ((-1,), (np.iinfo(np.int64).min,), (3,), (-1,))
        views += [graph.add_slice(view, backwards) for view in views]
    batch = graph.add_node("Concat", views, axis=0)
    y = add_layers(layer.body, replace(x, name=batch), graph)
    parts = graph.reshape(y, [len(views), -1, *y.shape], y.shape)
    return replace(y, name=graph.add_node("ReduceMean", [parts.name], axes=[0], keepdims=0))


def _get_channel_axis(x: NodeOutput) -> int:
    return 1 if x.has_positions else -1


def _slice_channels(x: NodeOutput, start: int, stop: int, graph: GraphBuilder) -> NodeOutput:
    """Add a slice of the channels from `start` to before `stop`."""
    name = graph.add_slice(x.name, ((start,), (stop,), (_get_channel_axis(x),)))
    return NodeOutput(name, (*x.shape[:-1], stop - start), x.order)


def _concatenate_channels(parts: Sequence[NodeOutput], graph: GraphBuilder) -> NodeOutput:
    """Add a concatenation of tensors of the same order along their channels."""
    name = graph.add_node("Concat", [part.name for part in parts], axis=_get_channel_axis(parts[0]))
    channels = sum(part.shape[-1] for part in parts)
    return NodeOutput(name, (*parts[0].shape[:-1], channels), parts[0].order)


@register_translation(tables.TableColumns)
def _add_table_columns(
    layer: tables.TableColumns, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    x = graph.cast(x, "float32")
    numbers = layer.numbers
    parts = []
    if numbers:
        rows = graph.add_slice(x.name, [[0], [numbers], [1]])
        parts.append(_add_number_features(layer, rows, graph))
    for position, size in enumerate(layer.categories):
        column = numbers + position
        cell = graph.add_slice(x.name, [[column], [column + 1], [1]])
        row_numbers = graph.add_constant("shape", np.array([-1], np.int64))
        code = graph.cast(NodeOutput(graph.add_node("Reshape", [cell, row_numbers]), ()), "int64")
        if layer.is_one_hot(size):
            table = graph.add_constant("one_hot", list_one_hot_rows(size))
        else:
            table = graph.add_weight(f"category_{position}")
        parts.append(graph.add_node("Gather", [table, code.name], axis=0))
    features = graph.add_node("Concat", parts, axis=1)
    if layer.scale_factor:
        scale = 1 + layer.scale_factor * graph.read_weight("scale")
        name = graph.add_weight("scale", scale.astype(np.float32))
        features = graph.add_node("Mul", [features, name])
    return NodeOutput(features, (sum(layer.sizes),))


def _add_number_features(layer: tables.TableColumns, rows: str, graph: GraphBuilder) -> str:
    cells = graph.add_node("Unsqueeze", [rows, graph.add_axis(2)])
    parts = [_add_waves(layer, cells, graph)] if layer.frequencies else []
    parts.append(cells)
    if layer.bins:
        edges = list_bin_edges(layer.bins)
        low = graph.add_node("Sub", [cells, graph.add_constant("edges", edges[:-1])])
        shares = graph.add_node("Div", [low, graph.add_constant("widths", np.diff(edges))])
        limits = [graph.add_scalar(0.0), graph.add_scalar(1.0)]
        parts.append(graph.add_node("Clip", [shares, *limits]))
    joined = graph.add_node("Concat", parts, axis=2)
    width = sum(layer.sizes[: layer.numbers])
    target = graph.add_constant("shape", np.array([-1, width], np.int64))
    return graph.add_node("Reshape", [joined, target])


def _add_waves(layer: tables.TableColumns, cells: str, graph: GraphBuilder) -> str:
    slow = layer.slow_factor

    def read(name: str, factor: float = slow) -> str:
        return graph.add_weight(name, (factor * graph.read_weight(name)).astype(np.float32))

    angles = graph.add_node("Mul", [cells, read("frequency", slow * 2 * pi)])
    waves = graph.add_node("Cos", [graph.add_node("Add", [angles, read("phase")])])
    # (batch, numbers, 1, frequencies) x (numbers, frequencies, size)
    spread = graph.add_node("Unsqueeze", [waves, graph.add_axis(2)])
    product = graph.add_node("MatMul", [spread, read("wave_kernel")])
    flat = graph.add_node("Squeeze", [product, graph.add_axis(2)])
    return graph.add_node("Add", [flat, read("wave_bias")])


@register_translation(tables.MemberDense, order="nhwc")
def _add_member_dense(layer: tables.MemberDense, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    name = x.name
    if len(x.shape) == 1:
        name = graph.add_node("Unsqueeze", [name, graph.add_axis(1)])
        if layer.members > 1:
            ones = graph.add_constant("shape", np.array([1, layer.members, 1], np.int64))
            name = graph.add_node("Expand", [name, ones])
    kernel = graph.read_weight("kernel") / np.float32(sqrt(x.shape[-1]))
    if layer.members > 1:
        name = graph.add_node("Mul", [name, graph.add_weight("before")])
    name = graph.add_node("MatMul", [name, graph.add_weight("kernel", kernel)])
    if layer.members > 1:
        name = graph.add_node("Mul", [name, graph.add_weight("after")])
    bias = np.float32(layer.slow_factor) * graph.read_weight("bias")
    name = graph.add_node("Add", [name, graph.add_weight("bias", bias)])
    activated = _add_activation(layer.activation, name, graph)
    if layer.parametric:
        share = 1 + np.float32(layer.slow_factor) * graph.read_weight("share")
        change = graph.add_node("Sub", [activated, name])
        change = graph.add_node("Mul", [change, graph.add_weight("share", share)])
        activated = graph.add_node("Add", [name, change])
    return NodeOutput(activated, (layer.members, layer.features))


def _add_activation(activation: str, name: str, graph: GraphBuilder) -> str:
    if activation == "mish":
        return graph.add_node(
            "Mul", [name, graph.add_node("Tanh", [graph.add_node("Softplus", [name])])]
        )
    return graph.add_node({"relu": "Relu", "selu": "Selu"}[activation], [name])


@register_translation(tables.MemberHead, order="nhwc")
def _add_member_head(layer: tables.MemberHead, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    kernel = graph.read_weight("kernel")
    members, inputs, outputs = kernel.shape
    # (batch, members, 1, inputs) x (members, inputs, outputs)
    spread = graph.add_node("Unsqueeze", [x.name, graph.add_axis(2)])
    weight = graph.add_weight("kernel", kernel / np.float32(sqrt(inputs)))
    product = graph.add_node("MatMul", [spread, weight])
    flat = graph.add_node("Squeeze", [product, graph.add_axis(2)])
    bias = np.float32(layer.slow_factor) * graph.read_weight("bias")
    name = graph.add_node("Add", [flat, graph.add_weight("bias", bias)])
    if layer.ratios:
        limits = [graph.add_scalar(-LARGEST_EXPONENT), graph.add_scalar(LARGEST_EXPONENT)]
        grown = graph.add_node("Exp", [graph.add_node("Clip", [name, *limits])])
        change = graph.add_node("Sub", [grown, graph.add_scalar(1.0)])
        ratios = graph.add_constant("ratios", np.array(layer.ratios, np.float32))
        name = graph.add_node("Mul", [change, ratios])
    result = replace(x, shape=(outputs,))
    if members == 1:
        return replace(result, name=graph.add_node("Squeeze", [name, graph.add_axis(1)]))
    return replace(result, name=add_average(layer.average, name, 1, members, graph))


def add_average(
    average: Average, stacked: str, axis: int, members: int, graph: GraphBuilder
) -> str:
    """Add the average of the outputs of members, which are stacked along `axis`: of numbers, or the
    logits of the mean of probabilities, of classes or of single labels.

    With p = sigmoid(x), log p = -softplus(-x) and log(1 - p) = -softplus(x). The logit of the mean
    of p is log(sum p) - log(sum(1 - p)), in which the number of members cancels.
    """

    def add_log_of_sum(logs: str) -> str:
        return graph.add_node("ReduceLogSumExp", [logs], axes=[axis], keepdims=0)

    def add_negative_softplus(name: str) -> str:
        return graph.add_node("Neg", [graph.add_node("Softplus", [name])])

    if average == "numbers":
        return graph.add_node("ReduceMean", [stacked], axes=[axis], keepdims=0)
    if average == "probabilities":
        logs = graph.add_node("LogSoftmax", [stacked], axis=-1)
        return graph.add_node("Sub", [add_log_of_sum(logs), graph.add_scalar(log(members))])
    logs_of_p = add_negative_softplus(graph.add_node("Neg", [stacked]))
    logs_of_not_p = add_negative_softplus(stacked)
    return graph.add_node("Sub", [add_log_of_sum(logs_of_p), add_log_of_sum(logs_of_not_p)])
