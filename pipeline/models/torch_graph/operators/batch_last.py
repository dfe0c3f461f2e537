"""Graphs whose images can be computed in CHWN, with the batch innermost."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.models.torch_graph.graph import GraphNode, TorchGraph

CONVOLUTIONS = frozenset(("conv2d.default", "conv2d.padding"))
DRAWS = frozenset(("dropout", "feature_dropout", "native_dropout"))
RESHAPES = frozenset(("flatten", "reshape", "squeeze", "view"))
GROUPS = 6
"""Place of the number of groups among a convolution's arguments."""

# fmt: off
BATCH_LAST = frozenset((
    # Value by value.
    "add", "clone", "contiguous", "detach", "div", "elu", "gelu", "hardsigmoid", "hardswish",
    "hardtanh", "leaky_relu", "mish", "mul", "relu", "relu6", "selu", "sigmoid", "silu",
    "softplus", "sub", "tanh",
    # Of images.
    "_adaptive_avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "conv2d",
    "max_pool2d", "max_pool2d_with_indices", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "batch_norm",
    # Of any axes.
    "cat", "dropout", "feature_dropout", "flatten", "linear", "log_softmax", "mean",
    "native_dropout", "reshape", "squeeze", "sym_size", "view",
))
# fmt: on
"""Operators that move no data of images that lie in CHWN, but where they become rows."""


def can_be_batch_last(graph: TorchGraph) -> bool:
    """Return whether the graph reads images, and each operator can compute them in CHWN."""
    nodes = (*graph.train.nodes, *graph.evaluate.nodes)
    knows_all = len(graph.input.shape) == 4 and all(map(_knows_batch_last, nodes))
    return knows_all and _draws_alike(nodes)


def _knows_batch_last(node: GraphNode) -> bool:
    library, name, *overload = node.op.split(".")
    if library != "aten":
        return True
    groups = dict(node.kwargs).get("groups", (*node.args[GROUPS:], 1)[0])
    if ".".join((name, *overload)) in CONVOLUTIONS and groups != 1:
        return False
    return name in BATCH_LAST


def _draws_alike(nodes: Sequence[GraphNode]) -> bool:
    """Return whether random numbers are drawn in the same order in both layouts.

    Rows and images are; what is reshaped to other axes may lie in another order in NHWC.
    """
    drawn_axes = {_num_axes(node) for node in nodes if _name(node) in DRAWS}
    has_reshaped_images = any(_name(node) in RESHAPES and _num_axes(node) == 4 for node in nodes)
    return drawn_axes <= ({2} if has_reshaped_images else {2, 4})


def _name(node: GraphNode) -> str:
    return node.op.split(".")[1]


def _num_axes(node: GraphNode) -> int:
    return len(node.results[0].shape)
