"""Channels of feature maps, and moves of maps: in blocks of channels, or on plain tensors.

`op_select_format` of CANN's split_d, concat_v2_d and strided_slice_d offers NC1HWC0 along the
channels only if every part is whole blocks of 16. Other parts, reshapes of the channels, their
transposes, and the Slice of a concatenation's gradient take plain tensors, NCHW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK, Permutation, simplify_permutation
from pipeline.backends.ascend.compiler.dataflow import Dataflow
from pipeline.backends.graph.graph import Graph, Node

SLICES = ("slice", "split")
MAP_MOVES = (*SLICES, "concatenate", "pad", "transpose")
"""Primitives whose operands or results may be parts of feature maps."""
CHANNEL_CARRIERS = ("elementwise", "rows", "window", "move", "loop_view")
"""Kinds of nodes whose results keep the channels of their operands."""


def find_channel_axes(graph: Graph, dataflow: Dataflow) -> dict[int, int]:
    """Return the channel axis of each feature map.

    Feature maps are inputs and outputs of convolutions, and results of element-wise work on them.
    """
    axes: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        inputs = [dataflow.alias[index] for index in node.inputs]
        if node.primitive == "conv_general_dilated":
            numbers = node.params["dimension_numbers"]
            if numbers.lhs_spec[:2] in ((0, 1), (0, len(numbers.lhs_spec) - 1)):
                axes.setdefault(inputs[0], numbers.lhs_spec[1])
                axes[node.outputs[0]] = numbers.out_spec[1]
        elif node.primitive == "transpose" and inputs[0] in axes:
            source = graph.values[inputs[0]].shape
            channels = source[axes[inputs[0]]] if axes[inputs[0]] < len(source) else 0
            first = find_first_part(graph.values[node.inputs[0]].shape, channels)
            if first is not None and keeps_positions(node.params["permutation"], first):
                axes[node.outputs[0]] = first
        elif dataflow.kinds[position] in CHANNEL_CARRIERS and node.primitive != "transpose":
            rank = len(graph.values[node.outputs[0]].shape)
            for index, view in zip(inputs, node.inputs, strict=True):
                if index in axes and len(graph.values[view].shape) == rank:
                    axes.update(dict.fromkeys(node.outputs, axes[index]))
                    break
    # A view of another shape has the index of its source, which may have fewer axes.
    ranks = {index: len(graph.values[index].shape) for index in axes}
    return {index: axis for index, axis in axes.items() if axis < ranks[index]}


def has_broken_blocks(
    graph: Graph, dataflow: Dataflow, axes: Mapping[int, int], node: Node, backward: bool
) -> bool:
    """Return whether a move of feature maps runs on plain tensors.

    `axes` has the channel axis of each map; `backward` is whether the move is in the backward pass.
    """
    if node.primitive not in MAP_MOVES:
        return False
    view = next((index for index in node.inputs if dataflow.alias[index] in axes), None)
    if view is None:
        return any(out in axes for out in node.outputs)
    if node.primitive == "transpose" or (backward and node.primitive in SLICES):
        return True
    source = dataflow.alias[view]
    is_reshaped = len(graph.values[view].shape) != len(graph.values[source].shape)
    axis = axes[source]
    return is_reshaped or any(edge % CHANNEL_BLOCK for edge in _list_edges(graph, node, axis))


def _list_edges(graph: Graph, node: Node, axis: int) -> Sequence[int]:
    """Return the numbers that must be multiples of 16, so that a move keeps blocks of channels."""
    channels = [graph.values[index].shape[axis] for index in (*node.inputs[:1], *node.outputs)]
    if node.primitive == "slice":
        edges = [node.params["start_indices"][axis], node.params["limit_indices"][axis]]
        return edges if channels[0] != channels[1] else []
    if node.primitive == "pad":
        return list(node.params["padding_config"][axis])
    if node.primitive == "concatenate":
        sizes = [graph.values[index].shape[axis] for index in node.inputs]
        return sizes if node.params["dimension"] == axis else []
    return channels[1:] if node.params["axis"] == axis else []


def find_map_permutation(shape: Sequence[int], order: Sequence[int], channels: int) -> Permutation:
    """Return a transpose of a map of `channels` as frameworks with NCHW write it.

    With NCHW, a transpose that only reorders parts of the channels, such as a shuffle of groups,
    moves whole planes. In JAX the channels are the minor axes.
    """
    first = find_first_part(shape, channels)
    if first is None or not keeps_positions(order, first):
        return simplify_permutation(shape, order)
    positions = range(1, first)
    axes = (0, *range(first, len(shape)), *positions)
    place = {axis: number for number, axis in enumerate(axes)}
    moved = [place[axis] for axis in (0, *order[first:], *positions)]
    return simplify_permutation([shape[axis] for axis in axes], moved)


def find_first_part(shape: Sequence[int], channels: int) -> int | None:
    """Return the first of the minor axes that together are the channels; None if none are."""
    sizes = [math.prod(shape[axis:]) for axis in range(len(shape))]
    return len(sizes) - 1 - sizes[::-1].index(channels) if channels in sizes[1:] else None


def keeps_positions(order: Sequence[int], first: int) -> bool:
    """Return whether a transpose moves no axis before `first`."""
    return tuple(order[:first]) == tuple(range(first))
