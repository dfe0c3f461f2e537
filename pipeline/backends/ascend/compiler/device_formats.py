"""Layouts of values in device memory, and the elements that they store."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK, Layout
from pipeline.backends.ascend.compiler.dataflow import Dataflow
from pipeline.backends.graph.graph import Graph, Node, Value


def channel_axes(graph: Graph, dataflow: Dataflow) -> dict[int, int]:
    """Return which axis of each feature map holds its channels.

    Feature maps are the inputs and outputs of convolutions and the results of element-wise work on
    them.
    """
    axes: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        if node.primitive == "conv_general_dilated":
            _mark_convolution(dataflow, node, axes)
        elif dataflow.kinds[position] in ("elementwise", "rows", "window", "move", "loop_view"):
            _carry(graph, dataflow, node, axes)
    return axes


def _mark_convolution(dataflow: Dataflow, node: Node, axes: dict[int, int]) -> None:
    numbers = node.params["dimension_numbers"]
    if numbers.lhs_spec[:2] in ((0, 1), (0, len(numbers.lhs_spec) - 1)):
        axes.setdefault(dataflow.alias[node.inputs[0]], numbers.lhs_spec[1])
        axes[node.outputs[0]] = numbers.out_spec[1]


def _carry(graph: Graph, dataflow: Dataflow, node: Node, axes: dict[int, int]) -> None:
    if node.primitive == "transpose":
        return
    for index in (dataflow.alias[index] for index in node.inputs):
        rank = len(graph.values[index].shape)
        if index in axes and rank == len(graph.values[node.outputs[0]].shape):
            axes.update(dict.fromkeys(node.outputs, axes[index]))
            return


def is_aligned(shape: Sequence[int]) -> bool:
    """Return whether both edges of a matrix are whole sixteens, so that it fills its fractals."""
    edges = shape[-2:]
    return len(edges) == 2 and all(edge % CHANNEL_BLOCK == 0 for edge in edges)


def padded_elements(value: Value, layout: Layout, channel_axis: int | None = None) -> int:
    """Return the elements that a layout stores.

    Channels are padded to blocks of 16, in FRACTAL_NZ both minor axes of a matrix.
    """
    shape = list(value.shape)
    if layout == "NC1HWC0" and channel_axis is not None:
        shape[channel_axis] = _blocks(shape[channel_axis])
    elif layout == "FRACTAL_NZ" and len(shape) > 1:
        shape[-2:] = [_blocks(shape[-2]), _blocks(shape[-1])]
    elif layout == "FRACTAL_Z" and len(shape) > 1:
        shape = _fractal_kernel(shape)
    return math.prod(shape)


def _fractal_kernel(shape: Sequence[int]) -> list[int]:
    """Return a weight's shape with its two largest axes, the channels, padded; the taps are the
    others.
    """
    order = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))
    minor = order[-2:]
    return [_blocks(size) if axis in minor else size for axis, size in enumerate(shape)]


def _blocks(size: int) -> int:
    return math.ceil(size / CHANNEL_BLOCK) * CHANNEL_BLOCK
