"""Cube work of convolutions and matrix products."""

from __future__ import annotations

import math
from typing import Literal

from pipeline.backends.ascend.chip.tasks import CostClass, CubeWork
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
