"""ONNX nodes of layers with inner layers: in sequence, in parallel, added or multiplied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.models.layers import standard
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput
from pipeline.stages.export.onnx.layer_nodes import add_layers, register_translation

_GATE_ACTIVATIONS = {
    layer.name: layer
    for layer in (standard.Swish(), standard.Gelu(), standard.Relu(), standard.Sigmoid())
}
"""Activations of gated MLPs by name."""


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
        # Channels are first in images, and last in other tensors.
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
