"""Cube work of convolutions and matrix products."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from pipeline.backends.ascend.chip.tasks import (
    CHANNEL_BLOCK,
    CostClass,
    CubeWork,
    Permutation,
    permutation_of,
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


def convolution_work(
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
    work = _kernel_gradient(graph, node) if role == "kernel_grad" else _product(graph, node, role)
    depthwise = work.batch > 1 and _channels_of_a_group(work, role) == 1
    kind = "depthwise" if depthwise else "conv"
    suffix = {"forward": "", "input_grad": "_input_grad", "kernel_grad": "_kernel_grad"}[role]
    return f"{kind}{suffix}", work  # type: ignore[return-value]


def _channels_of_a_group(work: CubeWork, role: ConvRole) -> int:
    return (work.m if role == "kernel_grad" else work.k) // max(1, work.taps)


def _product(graph: Graph, node: Node, role: ConvRole) -> CubeWork:
    """Return the product with positions as rows, output channels as columns, taps x channels
    summed.

    Of a gradient spread by a stride only one in `stride` positions is not zero, which the vendor's
    kernels make use of: the sum is shorter by that factor.
    """
    numbers = node.params["dimension_numbers"]
    kernel, out = graph.values[node.inputs[1]].shape, graph.values[node.outputs[0]].shape
    groups = node.params["feature_group_count"]
    taps = math.prod(kernel[axis] for axis in numbers.rhs_spec[2:])
    inner, columns = kernel[numbers.rhs_spec[1]], out[numbers.out_spec[1]] // groups
    rows = out[numbers.out_spec[0]] * math.prod(out[axis] for axis in numbers.out_spec[2:])
    stride = math.prod(node.params["window_strides"])
    if role == "input_grad":
        stride = math.prod(node.params["lhs_dilation"])
        taps_used = max(1, math.ceil(taps / stride))
        macs = rows * inner * taps * columns * groups // stride
        taps = taps_used
    else:
        macs = rows * inner * taps * columns * groups
    return CubeWork(groups, rows, taps * inner, columns, macs, taps, stride)


def _kernel_gradient(graph: Graph, node: Node) -> CubeWork:
    """Return the product with taps x input channels as rows, summed over the batch's positions."""
    numbers = node.params["dimension_numbers"]
    gradient, out = graph.values[node.inputs[1]].shape, graph.values[node.outputs[0]].shape
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


def matrix_work(graph: Graph, node: Node, dtype: str) -> CubeWork:
    """Return the sizes of a `dot_general`, its batch axes multiplied."""
    (left_sum, _), (left_batch, _) = node.params["dimension_numbers"]
    left, right = graph.values[node.inputs[0]].shape, graph.values[node.inputs[1]].shape
    batch = math.prod(left[axis] for axis in left_batch)
    summed = math.prod(left[axis] for axis in left_sum)
    rows = math.prod(left) // max(1, batch * summed)
    columns = math.prod(right) // max(1, batch * summed)
    return CubeWork(batch, rows, summed, columns, batch * rows * summed * columns, dtype=dtype)


def window_area(node: Node) -> int:
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


def absorbed_transposes(graph: Graph) -> frozenset[int]:
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
            and is_free(result_permutation(graph, maker, node))
        ):
            absorbed.add(position)
    return frozenset(absorbed)


def is_free(moved: Permutation) -> bool:
    """Return whether a product leaves nothing of a permutation to do."""
    return moved.keeps_bytes or _moves_whole_fractals(moved)


def _moves_whole_fractals(moved: Permutation) -> bool:
    if not moved.keeps_rows or moved.lengths[-1] % CHANNEL_BLOCK:
        return False
    rows = (moved.lengths[-2], moved.lengths[moved.order[-2]])
    return any(length % CHANNEL_BLOCK == 0 for length in rows)


def result_permutation(graph: Graph, product: Node, transpose: Node) -> Permutation:
    """Return what is left of a transpose after a product that may write either order."""
    (left_sum, _), (left_batch, _) = product.params["dimension_numbers"]
    left = graph.values[product.inputs[0]].shape
    shape, order = graph.values[product.outputs[0]].shape, transpose.params["permutation"]
    batch = len(left_batch)
    columns = batch + len(left) - len(left_sum) - batch
    axes = range(len(shape))
    swapped = (*axes[:batch], *axes[columns:], *axes[batch:columns])
    return _easiest(permutation_of(shape, order), _from(shape, swapped, order))


def operand_permutation(
    graph: Graph, product: Node, side: int, absorbed: Mapping[int, Node]
) -> Permutation:
    """Return what a product's operand needs before the cube: batch axes first, then the two of the
    matrix in either order.

    `absorbed` are transposes by the value that they write, counted as part of the operand's order.
    """
    summed, batched = (axes[side] for axes in product.params["dimension_numbers"])
    value = product.inputs[side]
    axes = range(len(graph.values[value].shape))
    free = [axis for axis in axes if axis not in summed and axis not in batched]
    wanted = ((*batched, *free, *summed), (*batched, *summed, *free))
    shape = graph.values[value].shape
    if value in absorbed:
        order = absorbed[value].params["permutation"]
        shape = graph.values[absorbed[value].inputs[0]].shape
        wanted = tuple(tuple(order[axis] for axis in each) for each in wanted)  # type: ignore[assignment]
    return _easiest(*(permutation_of(shape, each) for each in wanted))


def _from(shape: Sequence[int], stored: Sequence[int], order: Sequence[int]) -> Permutation:
    """Return the permutation from a value stored in another order of its axes to `order`."""
    place = {axis: number for number, axis in enumerate(stored)}
    return permutation_of([shape[axis] for axis in stored], [place[axis] for axis in order])


def _easiest(*moved: Permutation) -> Permutation:
    """Return the first that is free, else the one that moves the longest rows."""

    def effort(each: Permutation) -> tuple[bool, bool, int]:
        row = math.prod(each.lengths[-1:]) if each.keeps_rows else 1
        return not is_free(each), not each.keeps_rows, -row

    return min(moved, key=effort)
