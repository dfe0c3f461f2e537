"""Cube work of convolutions and matrix products, and the order in which the cube reads matrices.

A MatMul can read either operand transposed (`transpose_x1`, `transpose_x2`), and so write either
order: swapping the rows and columns of an operand or a result costs nothing. If an attention head
has multiples of 16 tokens and features, its transposes move whole fractals of 16 x 16. MindSpore's
`matmul_confusiontranspose` pass lets the product write these to their new places. All other
permutations, also in a `dot_general`'s dimension numbers, are Transposes before or after the
product.
"""

from __future__ import annotations

import math
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
from pipeline.backends.graph.graph import Graph, Node, list_users

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
"""The vendor's op types."""


def measure_convolution(
    graph: Graph, node: Node, phases: Phases, backward: bool
) -> tuple[CostClass, CubeWork]:
    """Return the class and the im2col view of a convolution.

    A weight gradient convolves two feature maps. An input gradient, like a transposed convolution,
    convolves the weight with the gradient, which has `stride - 1` zeros between its positions.
    """
    role: ConvRole = "forward"
    if backward:
        role = "input_grad" if node.inputs[1] in phases.weights else "kernel_grad"
    elif math.prod(node.params["lhs_dilation"]) > 1:
        role = "input_grad"
    if role == "kernel_grad":
        work = _measure_kernel_gradient(graph, node)
        taps_by_channels = work.m
    else:
        work = _measure_product(graph, node, role)
        taps_by_channels = work.k
    depthwise = work.batch > 1 and taps_by_channels // max(1, work.taps) == 1
    kind = "depthwise" if depthwise else "conv"
    suffix = "" if role == "forward" else f"_{role}"
    return f"{kind}{suffix}", work  # type: ignore[return-value]


def _measure_product(graph: Graph, node: Node, role: ConvRole) -> CubeWork:
    """Return the product: rows are positions, columns output channels, the sum taps x channels.

    The vendor's kernels skip the zeros between an input gradient's positions, so its sum is shorter
    by the product of the strides.
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
    """Return the product: rows are taps x input channels, summed over the batch's positions."""
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

    A jitted `max_pool` has a square window. It pools along one axis after the other, with a slice
    for each position forward and a pad backward.
    """
    if "window_dimensions" in node.params:
        return math.prod(node.params["window_dimensions"])
    body = node.params.get("jaxpr")
    names = [eqn.primitive.name for eqn in body.jaxpr.eqns] if body is not None else []
    steps = max(names.count("slice"), names.count("pad"))
    return max(1, (steps // 2) ** 2)


def find_absorbed_transposes(graph: Graph, *, writes_heads: bool = True) -> frozenset[int]:
    """Return the transposes that are part of how a product reads an operand or writes a result.

    `writes_heads` is whether products write the fractals of attention heads to their new places.
    """
    makers = {out: node for node in graph.nodes for out in node.outputs}
    users = list_users(graph.nodes)
    outputs = frozenset(graph.outputs)
    absorbed = set()
    for position, node in enumerate(graph.nodes):
        if node.primitive != "transpose":
            continue
        readers = users[node.outputs[0]]
        is_operand = bool(readers) and all(user.primitive == "dot_general" for user in readers)
        is_operand = is_operand and node.outputs[0] not in outputs
        maker = makers.get(node.inputs[0])
        is_result = False
        if maker is not None and maker.primitive == "dot_general":
            moved = find_result_permutation(graph, maker, node)
            is_result = is_free(moved) and (writes_heads or moved.keeps_bytes)
        if is_operand or is_result:
            absorbed.add(position)
    return frozenset(absorbed)


def is_free(moved: Permutation) -> bool:
    """Return whether a product writes a permuted result at no cost: in place or by fractals."""
    if moved.keeps_bytes:
        return True
    if not moved.keeps_rows or moved.lengths[-1] % CHANNEL_BLOCK:
        return False
    rows = (moved.lengths[-2], moved.lengths[moved.order[-2]])
    return any(length % CHANNEL_BLOCK == 0 for length in rows)


def find_result_permutation(graph: Graph, product: Node, transpose: Node) -> Permutation:
    """Return the easiest permutation of a transpose from an order that its product can write."""
    (left_sum, _), (left_batch, _) = product.params["dimension_numbers"]
    left = graph.values[product.inputs[0]].shape
    shape = graph.values[product.outputs[0]].shape
    order = transpose.params["permutation"]
    batch = len(left_batch)
    first_column = len(left) - len(left_sum)
    axes = range(len(shape))
    swapped = (*axes[:batch], *axes[first_column:], *axes[batch:first_column])
    place = {axis: number for number, axis in enumerate(swapped)}
    from_swapped = simplify_permutation(
        [shape[axis] for axis in swapped], [place[axis] for axis in order]
    )
    return _choose_easiest(simplify_permutation(shape, order), from_swapped)


def find_operand_permutation(
    graph: Graph, product: Node, side: int, absorbed: Mapping[int, Node]
) -> Permutation:
    """Return the easiest permutation of an operand to the cube's order: batch axes, then a matrix.

    `side` is 0 for the left operand, 1 for the right. `absorbed` has the absorbed transposes by the
    value that they write.
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
    """Return the first permutation that is free, else the one that moves the longest rows."""

    def measure_effort(permutation: Permutation) -> tuple[bool, bool, int]:
        row = math.prod(permutation.lengths[-1:]) if permutation.keeps_rows else 1
        return not is_free(permutation), not permutation.keeps_rows, -row

    return min(moved, key=measure_effort)
