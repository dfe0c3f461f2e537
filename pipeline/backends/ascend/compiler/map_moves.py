"""The channel axis of feature maps, and the layout in which maps are moved.

CANN's layout NC1HWC0 has blocks of 16 channels. By their `op_select_format`, split_d, concat_v2_d
and strided_slice_d divide the channels in it only if every part is whole blocks. Other parts,
reshapes and transposes of the channels, and the Slice of a concatenation's gradient take plain
tensors, NCHW.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.backends.ascend.chip.tasks import Permutation, simplify_permutation
from pipeline.backends.ascend.compiler.dataflow import Dataflow
from pipeline.backends.graph.graph import Graph, Node

SLICES = ("slice", "split")
MAP_MOVES = (*SLICES, "concatenate", "pad", "transpose")
"""Primitives whose operands or results may be parts of feature maps."""
CHANNEL_CARRIERS = ("elementwise", "rows", "window", "move", "loop_view")
"""Kinds of nodes whose results keep the channels of their operands."""


def find_channel_axes(graph: Graph, dataflow: Dataflow) -> dict[int, int]:
    """Return the channel axis of each feature map.

    Feature maps are inputs and outputs of convolutions, and results of work on them that keeps the
    channels: `CHANNEL_CARRIERS`, and transposes of the other axes.
    """
    axes: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        sources = [dataflow.alias[index] for index in node.inputs]
        if node.primitive == "conv_general_dilated":
            numbers = node.params["dimension_numbers"]
            batch_axis, channel_axis, *position_axes = numbers.lhs_spec
            if batch_axis == 0 and channel_axis in (1, len(position_axes) + 1):
                axes.setdefault(sources[0], channel_axis)
                axes[node.outputs[0]] = numbers.out_spec[1]
        elif node.primitive == "transpose" and sources[0] in axes:
            source_shape = graph.values[sources[0]].shape
            axis = axes[sources[0]]
            # 0, which no part has, if the source lacks the axis: see below.
            channels = source_shape[axis] if axis < len(source_shape) else 0
            first = find_first_part(graph.values[node.inputs[0]].shape, channels)
            if first is not None and keeps_positions(node.params["permutation"], first):
                axes[node.outputs[0]] = first
        elif dataflow.kinds[position] in CHANNEL_CARRIERS and node.primitive != "transpose":
            rank = len(graph.values[node.outputs[0]].shape)
            for source, operand in zip(sources, node.inputs, strict=True):
                if source in axes and len(graph.values[operand].shape) == rank:
                    axes.update(dict.fromkeys(node.outputs, axes[source]))
                    break
    # A convolution of a reshaped value sets the axis of its source, which may have fewer axes.
    ranks = {index: len(graph.values[index].shape) for index in axes}
    return {index: axis for index, axis in axes.items() if axis < ranks[index]}


def list_edges(graph: Graph, node: Node, axis: int) -> Sequence[int]:
    """Return the numbers that must be multiples of 16, so that a move keeps blocks of channels."""
    if node.primitive == "pad":
        return list(node.params["padding_config"][axis])
    input_channels = [graph.values[index].shape[axis] for index in node.inputs]
    output_channels = [graph.values[index].shape[axis] for index in node.outputs]
    if node.primitive == "slice":
        edges = [node.params["start_indices"][axis], node.params["limit_indices"][axis]]
        return edges if input_channels != output_channels else []
    if node.primitive == "concatenate":
        return input_channels if node.params["dimension"] == axis else []
    return output_channels if node.params["axis"] == axis else []


def find_map_permutation(shape: Sequence[int], order: Sequence[int], channels: int) -> Permutation:
    """Return the permutation by which a network in NCHW transposes a map.

    `shape` and `order` are those in JAX, with `channels` in the minor axes. In NCHW, a reordering
    of parts of the channels, such as a shuffle of groups, moves whole planes.
    """
    first = find_first_part(shape, channels)
    if first is None or not keeps_positions(order, first):
        return simplify_permutation(shape, order)
    positions = range(1, first)
    axes_before = (0, *range(first, len(shape)), *positions)
    axes_after = (0, *order[first:], *positions)
    nchw_order = [axes_before.index(axis) for axis in axes_after]
    return simplify_permutation([shape[axis] for axis in axes_before], nchw_order)


def find_first_part(shape: Sequence[int], channels: int) -> int | None:
    """Return the first of the fewest minor axes that together are the channels, else None."""
    axes = reversed(range(1, len(shape)))
    return next((axis for axis in axes if math.prod(shape[axis:]) == channels), None)


def keeps_positions(order: Sequence[int], first: int) -> bool:
    """Return whether a transpose moves no axis before `first`."""
    return tuple(order[:first]) == tuple(range(first))
