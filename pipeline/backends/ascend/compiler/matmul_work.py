"""Cube work of convolutions and matrix products, and the order in which the cube reads matrices.

A MatMul takes either operand transposed (`transpose_x1`, `transpose_x2` of the op) and so writes
either order as well: swapping the rows and columns of a product's operand or result costs nothing.
If a permutation moves whole fractals of 16 x 16, as attention's heads do with multiples of 16
tokens and features, MindSpore's `matmul_confusiontranspose` pass lets the product write its blocks
to their new place. Any other permutation is a Transpose before or after the product, also one that
JAX keeps in a `dot_general`'s dimension numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

from pipeline.backends.ascend.chip.tasks import (
    CHANNEL_BLOCK,
    CostClass,
    CubeWork,
    Permutation,
    simplify_permutation,
)
from pipeline.backends.ascend.compiler.phases import Phases
from pipeline.backends.graph.graph import Graph, Node

ConvRole = Literal["forward", "input_grad", "kernel_grad"]

TYPES: dict[CostClass, str] = {
    "conv": "Conv2D",
    "conv_input_grad": "Conv2DBackpropInputD",
    "conv_kernel_grad": "Conv2DBackpropFilterD",
    "depthwise": "DepthwiseConv2D",
    "depthwise_input_grad": "DepthwiseConv2DBackpropInputD",
    "depthwise_kernel_grad": "DepthwiseConv2DBackpropFilterD",
    "matmul": "MatMul",
}


def measure_convolution(
    graph: Graph, node: Node, phases: Phases, backward: bool
) -> tuple[CostClass, CubeWork]:
    """Return the class and the im2col view of a convolution.

    A weight gradient is a convolution of two feature maps; an input gradient convolves with the
    weight's transpose, the gradient spread by the stride, as a transposed convolution does.
    """
    role: ConvRole = "forward"
    if backward:
        role = "input_grad" if node.inputs[1] in phases.weights else "kernel_grad"
    elif math.prod(node.params["lhs_dilation"]) > 1:
        role = "input_grad"
    work = (
        _measure_kernel_gradient(graph, node)
        if role == "kernel_grad"
        else _measure_product(graph, node, role)
    )
    taps_by_channels = work.m if role == "kernel_grad" else work.k
    depthwise = work.batch > 1 and taps_by_channels // max(1, work.taps) == 1
    kind = "depthwise" if depthwise else "conv"
    suffix = "" if role == "forward" else f"_{role}"
    return f"{kind}{suffix}", work  # type: ignore[return-value]


def _measure_product(graph: Graph, node: Node, role: ConvRole) -> CubeWork:
    """Return the product: rows are positions, columns output channels, the sum taps x channels.

    Of a gradient spread by a stride only one in `stride` positions is not zero, which the vendor's
    kernels make use of: the sum is shorter by that factor.
    """
    numbers = node.params["dimension_numbers"]
    kernel = graph.values[node.inputs[1]].shape
    out = graph.values[node.outputs[0]].shape
    groups = node.params["feature_group_count"]
    taps = math.prod(kernel[axis] for axis in numbers.rhs_spec[2:])
    channels = kernel[numbers.rhs_spec[1]]
    columns = out[numbers.out_spec[1]] // groups
    rows = out[numbers.out_spec[0]] * math.prod(out[axis] for axis in numbers.out_spec[2:])
    macs = rows * channels * taps * columns * groups
    stride = math.prod(node.params["window_strides"])
    if role == "input_grad":
        stride = math.prod(node.params["lhs_dilation"])
        macs //= stride
        taps = max(1, math.ceil(taps / stride))
    return CubeWork(groups, rows, taps * channels, columns, macs, taps, stride)


def _measure_kernel_gradient(graph: Graph, node: Node) -> CubeWork:
    """Return the product with taps x input channels as rows, summed over the batch's positions."""
    numbers = node.params["dimension_numbers"]
    gradient = graph.values[node.inputs[1]].shape
    out = graph.values[node.outputs[0]].shape
    groups = max(node.params["batch_group_count"], node.params["feature_group_count"])
    taps = math.prod(out[axis] for axis in numbers.out_spec[2:])
    summed = gradient[numbers.rhs_spec[1]] * math.prod(
        gradient[axis] for axis in numbers.rhs_spec[2:]
    )
    summed //= math.prod(node.params["lhs_dilation"])
    columns = out[numbers.out_spec[1]] // groups
    rows = taps * out[numbers.out_spec[0]]
    stride = math.prod(node.params["rhs_dilation"])
    return CubeWork(groups, rows, summed, columns, groups * rows * summed * columns, taps, stride)


def measure_matmul(graph: Graph, node: Node, dtype: str) -> CubeWork:
    """Return the sizes of a `dot_general`, its batch axes multiplied."""
    (left_sum, _), (left_batch, _) = node.params["dimension_numbers"]
    left, right = (graph.values[index].shape for index in node.inputs)
    batch = math.prod(left[axis] for axis in left_batch)
    summed = math.prod(left[axis] for axis in left_sum)
    rows = math.prod(left) // max(1, batch * summed)
    columns = math.prod(right) // max(1, batch * summed)
    return CubeWork(batch, rows, summed, columns, batch * rows * summed * columns, dtype=dtype)


def count_window_positions(node: Node) -> int:
    """Return the number of positions under a pooling window.

    A jitted `max_pool` takes one axis after the other, by a slice for each position forward and a
    pad backward.
    """
    if "window_dimensions" in node.params:
        return math.prod(node.params["window_dimensions"])
    inner = node.params.get("jaxpr")
    names = [eqn.primitive.name for eqn in inner.jaxpr.eqns] if inner is not None else []
    steps = max(names.count("slice"), names.count("pad"))
    return max(1, (steps // 2) ** 2)


def find_absorbed_transposes(graph: Graph) -> frozenset[int]:
    """Return the nodes that only rearrange an operand or a result as products do on their way."""
    makers = {out: node for node in graph.nodes for out in node.outputs}
    users: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for index in node.inputs:
            users[index].append(node)
    outputs = frozenset(graph.outputs)
    absorbed = set()
    for position, node in enumerate(graph.nodes):
        if node.primitive != "transpose":
            continue
        readers = users[node.outputs[0]]
        read = bool(readers) and all(user.primitive == "dot_general" for user in readers)
        maker = makers.get(node.inputs[0])
        if (read and node.outputs[0] not in outputs) or (
            maker is not None
            and maker.primitive == "dot_general"
            and is_free(find_result_permutation(graph, maker, node))
        ):
            absorbed.add(position)
    return frozenset(absorbed)


def is_free(moved: Permutation) -> bool:
    """Return whether a product leaves nothing of a permutation to do."""
    if moved.keeps_bytes:
        return True
    if not moved.keeps_rows or moved.lengths[-1] % CHANNEL_BLOCK:
        return False
    rows = (moved.lengths[-2], moved.lengths[moved.order[-2]])
    return any(length % CHANNEL_BLOCK == 0 for length in rows)


def find_result_permutation(graph: Graph, product: Node, transpose: Node) -> Permutation:
    """Return what is left of a transpose after a product that may write either order."""
    (left_sum, _), (left_batch, _) = product.params["dimension_numbers"]
    left = graph.values[product.inputs[0]].shape
    shape = graph.values[product.outputs[0]].shape
    order = transpose.params["permutation"]
    batch = len(left_batch)
    columns = batch + len(left) - len(left_sum) - batch
    axes = range(len(shape))
    swapped = (*axes[:batch], *axes[columns:], *axes[batch:columns])
    place = {axis: number for number, axis in enumerate(swapped)}
    from_swapped = simplify_permutation([shape[a] for a in swapped], [place[a] for a in order])
    return _choose_easiest(simplify_permutation(shape, order), from_swapped)


def find_operand_permutation(
    graph: Graph, product: Node, side: int, absorbed: Mapping[int, Node]
) -> Permutation:
    """Return what a product's operand needs before the cube: batch axes first, then its matrix.

    `absorbed` are transposes by the value that they write, counted as part of the operand's order.
    """
    summed, batched = (axes[side] for axes in product.params["dimension_numbers"])
    value = product.inputs[side]
    axes = range(len(graph.values[value].shape))
    free = [axis for axis in axes if axis not in summed and axis not in batched]
    orders = [(*batched, *free, *summed), (*batched, *summed, *free)]
    shape = graph.values[value].shape
    if value in absorbed:
        stored = absorbed[value].params["permutation"]
        shape = graph.values[absorbed[value].inputs[0]].shape
        orders = [tuple(stored[axis] for axis in order) for order in orders]
    return _choose_easiest(*(simplify_permutation(shape, order) for order in orders))


def _choose_easiest(*moved: Permutation) -> Permutation:
    """Return the first that is free, else the one that moves the longest rows."""

    def effort(permutation: Permutation) -> tuple[bool, bool, int]:
        row = math.prod(permutation.lengths[-1:]) if permutation.keeps_rows else 1
        return not is_free(permutation), not permutation.keeps_rows, -row

    return min(moved, key=effort)
