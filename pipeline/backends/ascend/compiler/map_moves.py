"""Moves of feature maps: which of them CANN runs in blocks of channels, and which on plain tensors.

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


def has_broken_blocks(
    graph: Graph, dataflow: Dataflow, axes: Mapping[int, int], node: Node, backward: bool
) -> bool:
    """Return whether a move of feature maps runs on plain tensors. `axes` are the channels'."""
    if node.primitive not in MAP_MOVES:
        return False
    maps = ((place, dataflow.alias[place]) for place in node.inputs)
    place, source = next(((p, s) for p, s in maps if s in axes), (-1, -1))
    if source < 0:
        return any(out in axes for out in node.outputs)
    if node.primitive == "transpose" or (backward and node.primitive in SLICES):
        return True
    is_reshaped = len(graph.values[place].shape) != len(graph.values[source].shape)
    axis = axes[source]
    return is_reshaped or any(edge % CHANNEL_BLOCK for edge in _list_edges(graph, node, axis))


def _list_edges(graph: Graph, node: Node, axis: int) -> Sequence[int]:
    """Return the channels at which the parts of a move begin and end."""
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

    A transpose that only reorders parts of the channels, such as a shuffle of groups, moves whole
    planes there, although the channels are JAX's minor axes.
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
    """Return the first of the minor axes that the channels of a map are reshaped to, or None."""
    sizes = [math.prod(shape[axis:]) for axis in range(len(shape))]
    return len(sizes) - 1 - sizes[::-1].index(channels) if channels in sizes[1:] else None


def keeps_positions(order: Sequence[int], first: int) -> bool:
    """Return whether a transpose moves no axis before `first`."""
    return tuple(order[:first]) == tuple(range(first))
