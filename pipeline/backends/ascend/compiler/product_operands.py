"""Order in which the cube reads and writes matrices, and the permutations that it leaves to do.

A MatMul takes either operand transposed (`transpose_x1`, `transpose_x2` of the op) and so writes
either order as well: swapping the rows and columns of a product's operand or result costs nothing.
Where a permutation moves whole fractals of 16 x 16, as that of attention's heads does with tokens
and features of whole sixteens, MindSpore's `matmul_confusiontranspose` pass lets the product write
its blocks to their new place. Any other permutation is a Transpose of its own before or after the
product, also one that JAX keeps in a `dot_general`'s dimension numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK, Permutation, permutation_of
from pipeline.backends.graph.graph import Graph, Node


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
