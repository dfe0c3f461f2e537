"""Dimensions that are cut together: union-find over the dimensions of a traced function's values.

Two dimensions are in one group where an operation reads and writes them element by element, so that
cutting both needs no communication (the named dimensions of TOAST, arXiv 2508.15010; CFP, arXiv
2504.00598). Operations of a parameter's product are left out: there, a plan chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pipeline.backends.ascend.frontend.graph import Graph, Node

REDUCTIONS = frozenset(
    {
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        *("reduce_xor", "argmax", "argmin"),
    }
)
ALONG_AN_AXIS = frozenset(
    {"cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "rev", "sort", "top_k", "split"}
)
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


class DimensionGroups:
    """Groups of the dimensions of all values of a graph.

    A dimension of size 1 has no group. A *whole* group is one that some operation can't compute in
    pieces, as the height and width of a convolution.
    """

    def __init__(self, graph: Graph, skipped: Collection[int]) -> None:
        self._shapes = [value.shape for value in graph.values]
        self._first: list[int] = []
        count = 0
        for shape in self._shapes:
            self._first.append(count)
            count += len(shape)
        self._parent = list(range(count))
        self._whole = [False] * count
        for index, node in enumerate(graph.nodes):
            if index not in skipped:
                _RULES.get(node.primitive, _elementwise)(self, node)
        self._refuse_repeated()

    def of(self, value: int) -> tuple[int | None, ...]:
        """The group of each dimension of a value; None for those of size 1."""
        return tuple(
            self._find(self._first[value] + dim) if size > 1 else None
            for dim, size in enumerate(self._shapes[value])
        )

    def is_whole(self, group: int) -> bool:
        """Whether no dimension of a group may be cut."""
        return self._whole[self._find(group)]

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self._shapes[value]

    def tie(self, value: int, dim: int, other: int, other_dim: int) -> None:
        """Join the groups of two dimensions, unless one has size 1."""
        if self._shapes[value][dim] == 1 or self._shapes[other][other_dim] == 1:
            return
        a = self._find(self._first[value] + dim)
        b = self._find(self._first[other] + other_dim)
        low, high = min(a, b), max(a, b)
        self._parent[high] = low
        self._whole[low] = self._whole[low] or self._whole[high]

    def keep_whole(self, value: int, dim: int) -> None:
        """Mark the group of a dimension as one that is never cut."""
        self._whole[self._find(self._first[value] + dim)] = True

    def keep_all_whole(self, values: Sequence[int]) -> None:
        """Mark all groups of some values as never cut."""
        for value in values:
            for dim in range(len(self._shapes[value])):
                self.keep_whole(value, dim)

    def _find(self, index: int) -> int:
        parent = self._parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def _refuse_repeated(self) -> None:
        """Mark groups that a value has twice: a piece of it would not be a slice."""
        for value in range(len(self._shapes)):
            groups = [group for group in self.of(value) if group is not None]
            if len(set(groups)) < len(groups):
                for group in groups:
                    if groups.count(group) > 1:
                        self._whole[self._find(group)] = True


def _elementwise(groups: DimensionGroups, node: Node) -> None:
    """Tie equal dimensions of all operands of one rank; anything else is not cut."""
    target = node.outputs[0]
    rank = len(groups.shape(target))
    for value in (*node.inputs, *node.outputs[1:]):
        shape = groups.shape(value)
        if not shape:
            continue
        fits = len(shape) == rank and all(
            size in (1, wanted) for size, wanted in zip(shape, groups.shape(target), strict=True)
        )
        if not fits:
            groups.keep_all_whole((*node.inputs, *node.outputs))
            return
    for value in (*node.inputs, *node.outputs[1:]):
        for dim in range(len(groups.shape(value))):
            groups.tie(value, dim, target, dim)


def _same_dims(groups: DimensionGroups, source: int, target: int, apart: Collection[int]) -> None:
    """Tie equal dimensions but those `apart`, which are kept whole on both sides."""
    for dim in range(len(groups.shape(target))):
        if dim in apart or groups.shape(source)[dim] != groups.shape(target)[dim]:
            groups.keep_whole(source, dim)
            groups.keep_whole(target, dim)
        else:
            groups.tie(source, dim, target, dim)


def _broadcast(groups: DimensionGroups, node: Node) -> None:
    for dim, target in enumerate(node.params["broadcast_dimensions"]):
        groups.tie(node.inputs[0], dim, node.outputs[0], target)


def _transpose(groups: DimensionGroups, node: Node) -> None:
    for target, dim in enumerate(node.params["permutation"]):
        groups.tie(node.inputs[0], dim, node.outputs[0], target)


def _reshape(groups: DimensionGroups, node: Node) -> None:
    """Tie the outermost dimensions that are split or joined; the inner ones are not cut."""
    source, target = node.inputs[0], node.outputs[0]
    for left, right in reshape_factors(groups.shape(source), groups.shape(target)):
        groups.tie(source, left[0], target, right[0])
        for value, dims in ((source, left), (target, right)):
            for dim in dims[1:]:
                groups.keep_whole(value, dim)


def reshape_factors(
    source: Sequence[int], target: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Dimensions of a reshape that hold the same elements, without those of size 1."""
    left = [dim for dim, size in enumerate(source) if size > 1]
    right = [dim for dim, size in enumerate(target) if size > 1]
    found: list[tuple[list[int], list[int]]] = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (have := math.prod(source[dim] for dim in a)) != (
            want := math.prod(target[dim] for dim in b)
        ):
            if have < want:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        found.append((a, b))
    return found


def _squeeze(groups: DimensionGroups, node: Node) -> None:
    gone = {dim % len(groups.shape(node.inputs[0])) for dim in node.params["dimensions"]}
    kept = [dim for dim in range(len(groups.shape(node.inputs[0]))) if dim not in gone]
    for target, dim in enumerate(kept):
        groups.tie(node.inputs[0], dim, node.outputs[0], target)


def _reduction(groups: DimensionGroups, node: Node) -> None:
    axes = reduced_axes(node)
    kept = [dim for dim in range(len(groups.shape(node.inputs[0]))) if dim not in axes]
    for target, dim in enumerate(kept):
        groups.tie(node.inputs[0], dim, node.outputs[0], target)


def reduced_axes(node: Node) -> tuple[int, ...]:
    """Dimensions of the operand that a reduction sums over."""
    return tuple(node.params["axes"])


def _dot(groups: DimensionGroups, node: Node) -> None:
    """Tie the dimensions of a product of two activations, as of queries and keys."""
    (left, right), target = node.inputs, node.outputs[0]
    (left_sum, right_sum), (left_batch, right_batch) = node.params["dimension_numbers"]
    for a, b in (
        *zip(left_sum, right_sum, strict=True),
        *zip(left_batch, right_batch, strict=True),
    ):
        groups.tie(left, a, right, b)
    left_free, right_free = free_dims(groups.shape(left), groups.shape(right), node)
    for position, dim in enumerate((*left_batch, *left_free)):
        groups.tie(left, dim, target, position)
    for position, dim in enumerate(right_free):
        groups.tie(right, dim, target, len(left_batch) + len(left_free) + position)


def free_dims(
    left: Sequence[int], right: Sequence[int], node: Node
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions of the operands of a product that are neither summed over nor in its batch."""
    (left_sum, right_sum), (left_batch, right_batch) = node.params["dimension_numbers"]
    return (
        tuple(dim for dim in range(len(left)) if dim not in (*left_sum, *left_batch)),
        tuple(dim for dim in range(len(right)) if dim not in (*right_sum, *right_batch)),
    )


def _slice(groups: DimensionGroups, node: Node) -> None:
    _same_dims(groups, node.inputs[0], node.outputs[0], ())


def _update_slice(groups: DimensionGroups, node: Node) -> None:
    _same_dims(groups, node.inputs[0], node.outputs[0], ())
    _same_dims(groups, node.inputs[1], node.outputs[0], ())


def _concatenate(groups: DimensionGroups, node: Node) -> None:
    for source in node.inputs:
        _same_dims(groups, source, node.outputs[0], (node.params["dimension"],))


def _along_an_axis(groups: DimensionGroups, node: Node) -> None:
    given = next(
        node.params[key] for key in ("axis", "dimension", "dimensions", "operand")
        if key in node.params
    )  # fmt: skip
    rank = len(groups.shape(node.inputs[0]))
    apart = {dim % rank for dim in (given if isinstance(given, (tuple, list)) else (given,))}
    for target in node.outputs:
        _same_dims(groups, node.inputs[0], target, apart)


def _window(groups: DimensionGroups, node: Node) -> None:
    """Tie batch and channels; dimensions that a window slides over are not cut."""
    window = node.params.get("window_dimensions")
    rank = len(groups.shape(node.inputs[0]))
    if window is None:
        apart = set(range(1, rank - 1))  # max_pool of this package reads (B, H, W, C)
    else:
        apart = {dim for dim, size in enumerate(window) if size > 1}
    values = (*node.inputs[1:], *node.outputs)
    for value in values:
        if len(groups.shape(value)) == rank:
            _same_dims(groups, node.inputs[0], value, apart)


def _gather(groups: DimensionGroups, node: Node) -> None:
    """Tie dimensions that a gather takes whole, and its batch; the others are not cut."""
    operand, indices, target = node.inputs[0], node.inputs[1], node.outputs[0]
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    batching = tuple(numbers.operand_batching_dims)
    gone = {*numbers.collapsed_slice_dims, *batching}
    taken = [dim for dim in range(len(groups.shape(operand))) if dim not in gone]
    for dim, position in zip(taken, numbers.offset_dims, strict=True):
        if sizes[dim] == groups.shape(operand)[dim]:
            groups.tie(operand, dim, target, position)
        else:
            groups.keep_whole(operand, dim)
            groups.keep_whole(target, position)
    for dim in numbers.collapsed_slice_dims:
        groups.keep_whole(operand, dim)
    rest = [d for d in range(len(groups.shape(target))) if d not in set(numbers.offset_dims)]
    for dim, position in enumerate(rest):
        groups.tie(indices, dim, target, position)
    for dim, other in zip(batching, numbers.start_indices_batching_dims, strict=True):
        groups.tie(operand, dim, indices, other)


def _scan_slice(groups: DimensionGroups, node: Node) -> None:
    groups.keep_whole(node.inputs[0], 0)
    for dim in range(len(groups.shape(node.outputs[0]))):
        groups.tie(node.inputs[0], dim + 1, node.outputs[0], dim)


def _scan_stack(groups: DimensionGroups, node: Node) -> None:
    groups.keep_whole(node.outputs[0], 0)
    for dim in range(len(groups.shape(node.inputs[0]))):
        groups.tie(node.inputs[0], dim, node.outputs[0], dim + 1)


def _whole(groups: DimensionGroups, node: Node) -> None:
    groups.keep_all_whole((*node.inputs, *node.outputs))


def _ignore(groups: DimensionGroups, node: Node) -> None:
    """Nothing is tied: the result depends on no dimension of an operand."""


_RULES: Mapping[str, Callable[[DimensionGroups, Node], Any]] = {
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(ALONG_AN_AXIS, _along_an_axis),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
         "select_and_scatter_add", "select_and_gather_add", "max_pool"),
        _window,
    ),
    **dict.fromkeys(("slice", "pad", "dynamic_slice"), _slice),
    **dict.fromkeys(("random_bits", "random_fold_in", "random_wrap", "random_seed"), _ignore),
    **dict.fromkeys(("random_unwrap", "random_split", "random_clone", "iota"), _ignore),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "conv_general_dilated": _whole,
    "concatenate": _concatenate,
    "dynamic_update_slice": _update_slice,
    "gather": _gather,
    "scan_slice": _scan_slice,
    "scan_stack": _scan_stack,
}  # fmt: skip
