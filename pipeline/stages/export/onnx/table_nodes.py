"""ONNX nodes of the layers for rows of a table."""

from __future__ import annotations

from dataclasses import replace
from math import log, pi, sqrt

import numpy as np

from pipeline.models.layers import tables
from pipeline.models.modules.tables import (
    LARGEST_EXPONENT,
    list_bin_edges,
    list_one_hot_rows,
)
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput
from pipeline.stages.export.onnx.layer_nodes import register_translation


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
        if size <= max(2, layer.one_hot_up_to):
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
    return replace(result, name=_add_average(layer.average, name, members, graph))


def _add_average(average: str, name: str, members: int, graph: GraphBuilder) -> str:
    def sum_exponentials(logs: str) -> str:
        return graph.add_node("ReduceLogSumExp", [logs], axes=[1], keepdims=0)

    def log_sigmoid(name: str) -> str:
        return graph.add_node("Neg", [graph.add_node("Softplus", [name])])

    if average == "probabilities":
        shares = graph.add_node("LogSoftmax", [name], axis=-1)
        return graph.add_node("Sub", [sum_exponentials(shares), graph.add_scalar(log(members))])
    if average == "labels":
        yes = sum_exponentials(log_sigmoid(graph.add_node("Neg", [name])))
        return graph.add_node("Sub", [yes, sum_exponentials(log_sigmoid(name))])
    return graph.add_node("ReduceMean", [name], axes=[1], keepdims=0)
