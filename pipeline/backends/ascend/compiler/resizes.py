"""Resizes of maps, which JAX writes as products or gathers, as the vendor's one op each.

`jax.image.resize` multiplies each spatial axis by a matrix of weights (bilinear), or gathers from
it (nearest). MindSpore and torch_npu have an op and its gradient, ResizeBilinear(Grad) and
ResizeNearestNeighbor(Grad), whose maps are in blocks of 16 channels. They compute the address of
each position on the scalar unit, and move its block, as a gather computes the address of each row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK
from pipeline.backends.graph.graph import Graph, Node, list_users

RESIZE_OPS = "resize_ops"
"""Name of this pass among the fusions that are skipped."""
RESIZE = "resize"
"""Primitive of a joined node; its parameter `rows` counts the blocks of the result's positions, or
of the gradient's."""
CALL = "_resize"
"""The jitted function of `jax.image.resize`."""
LINEAR, NEAREST = "dot_general", "gather"
STEPS = (LINEAR, NEAREST, "scatter-add", "transpose")
"""Primitives of resizes and their gradients."""


def join_resizes(graph: Graph) -> Graph:
    """Return the graph with one node for each resize of maps, and for each gradient of one.

    A resize whose steps another node reads, and one of a map of one position, stay as they are.
    """
    nodes: list[Node] = []
    chain: list[Node] = []
    users = list_users(graph.nodes)
    for node in graph.nodes:
        if chain and not _continues(chain[-1], node, graph, users):
            nodes += _join(chain, graph)
            chain = []
        if CALL in node.calls and node.primitive in STEPS:
            chain.append(node)
        else:
            nodes.append(node)
    return replace(graph, nodes=[*nodes, *_join(chain, graph)])


def _find_maps(node: Node, graph: Graph) -> list[int]:
    return [index for index in node.inputs if index not in graph.constants]


def _continues(before: Node, node: Node, graph: Graph, users: Mapping[int, Sequence[Node]]) -> bool:
    """Return whether a node is the next step of the resize with the step `before`."""
    out = before.outputs[0]
    return (
        CALL in node.calls
        and node.primitive in STEPS
        and node.op == before.op
        and _find_maps(node, graph) == [out]
        and len(users[out]) == 1
        and out not in graph.outputs
    )


def _join(chain: Sequence[Node], graph: Graph) -> list[Node]:
    """Return the node of a chain of steps, or the steps if they aren't a resize of maps."""
    if not chain or all(node.primitive == "transpose" for node in chain):
        return list(chain)
    maps = _find_maps(chain[0], graph)
    out = chain[-1].outputs[0]
    if len(maps) != 1:
        return list(chain)
    source, result = graph.values[maps[0]].shape, graph.values[out].shape
    if len(source) != len(result) or len(source) < 3 or source[0] != result[0]:
        return list(chain)
    axis = len(source) - 1 if source[-1] == result[-1] else 1
    smaller = min(source, result, key=math.prod)
    if source[axis] != result[axis] or math.prod(smaller) == smaller[0] * smaller[axis]:
        return list(chain)
    resized = source if chain[0].mark == "backward" else result
    blocks = math.ceil(resized[axis] / CHANNEL_BLOCK)
    is_linear = any(node.primitive == LINEAR for node in chain)
    params = {"rows": math.prod(resized) // resized[axis] * blocks, "is_linear": is_linear}
    last = chain[-1]
    return [replace(last, primitive=RESIZE, params=params, inputs=(maps[0],), outputs=(out,))]
