"""Dense and convolutional nodes of a graph, for optimizers that read the inputs of layers."""

from __future__ import annotations

from pipeline.models.lowerings.problem.conv_window import make_window
from pipeline.models.lowerings.problem.image_layout import Layout
from pipeline.models.modules.layer_capture import observe_layer
from pipeline.models.torch_graph.graph import ArrayOf, GraphNode, TorchGraph
from pipeline.models.torch_graph.operators.convolution_ops import (
    Convolution,
    as_pair,
    conv_pads,
)
from pipeline.models.torch_graph.tensor import IMAGE_ORDERS, TorchTensor, to_tensor

DENSE = "aten.linear.default"
OBSERVED = frozenset((DENSE, "aten.conv2d.default", "aten.conv2d.padding"))
"""Operators whose nodes may be layers."""


def observe_node(
    graph: TorchGraph, node: GraphNode, x: TorchTensor, result: TorchTensor, layout: Layout
) -> TorchTensor:
    """Return the result of a node, observed if it is a layer without groups of a kernel.

    `x` is the node's input, with the batch as its first axis. Raises ValueError if the kernel is
    used twice.
    """
    weight = node.args[1]
    if not isinstance(weight, ArrayOf) or graph.spec(weight.name).role != "parameter":
        return result
    layer, _, name = graph.spec(weight.name).path.rpartition("/")
    if name != "kernel":
        return result
    if node.op == DENSE:
        outputs = observe_layer(layer, x.plain(), result.plain(), None)
        return to_tensor(outputs)
    settings = Convolution(*node.args[3:], **dict(node.kwargs))
    if settings.groups != 1:
        return result
    order = IMAGE_ORDERS[layout]
    images = x.transpose(order)
    height, width, *_ = graph.spec(weight.name).shape
    dilation = as_pair(settings.dilation)
    window = make_window(
        (images.shape[1], images.shape[2]),
        (height, width),
        as_pair(settings.stride),
        conv_pads(settings.padding, (height, width), dilation),
        dilation,
        groups=1,
    )
    outputs = observe_layer(layer, images, result.transpose(order), window, layout)
    return TorchTensor(outputs, order)
