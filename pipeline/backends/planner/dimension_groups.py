"""Layouts of arrays on a mesh, and dimensions that are sharded together: connected components of
the dimensions of a graph's values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Any

import numpy as np

from pipeline.backends.graph.graph import Graph, Node
from pipeline.backends.rates import CollectiveKind

Layout = tuple[int | None, ...]
"""The dimension or group that each axis of a mesh shards; None: the axis shards nothing."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Numbers of devices along `data` and `model`. Devices along `model` have adjacent numbers."""

    data: int
    model: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of devices along the axes, in the order of AXES."""
        return self.data, self.model

    @property
    def devices(self) -> int:
        return self.data * self.model

    def count_along(self, axes: Sequence[int]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def count_pieces(self, layout: Layout) -> int:
        return self.count_along([axis for axis, dim in enumerate(layout) if dim is not None])

    def __str__(self) -> str:
        return f"{self.data} x {self.model}"


def list_meshes(devices: int) -> tuple[Mesh, ...]:
    """Return all meshes of a number of devices, by descending size along `data`."""
    return tuple(
        Mesh(devices // model, model) for model in range(1, devices + 1) if devices % model == 0
    )


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of the devices along some axes."""

    kind: CollectiveKind
    nbytes: float
    """Size of a device's array, after an all-gather and before any other collective."""
    axes: tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def list_layouts(sizes: tuple[int, ...], mesh: Mesh, samples: int | None) -> tuple[Layout, ...]:
    """Return all layouts of dimensions of some sizes; the first one shards nothing.

    `data` shards the dimension `samples` or nothing, `model` any dimension or nothing. An axis of
    one device shards nothing. All pieces are equal, since compiled programs require it.
    """
    data = (None,) if mesh.data == 1 or samples is None else (None, samples)
    model = (None,) if mesh.model == 1 else (None, *range(len(sizes)))
    return tuple(
        layout
        for layout in product(data, model)
        if all(size % count_pieces(layout, mesh, dim) == 0 for dim, size in enumerate(sizes))
    )


def count_pieces(layout: Layout, mesh: Mesh, *dims: int) -> int:
    """Return the number of pieces that a layout divides some dimensions into."""
    return prod(size for size, dim in zip(mesh.sizes, layout, strict=True) if dim in dims)


def convert_region_layout(layout: Layout, groups: Sequence[int | None]) -> Layout:
    """Return the layout of an array whose dimensions have these groups, in a region's layout."""
    dims = {group: dim for dim, group in enumerate(groups) if group is not None}
    return tuple(None if group is None else dims.get(group) for group in layout)


@lru_cache(maxsize=1 << 16)
def find_transfer(
    source: Layout, partial: tuple[int, ...], target: Layout, nbytes: float, mesh: Mesh
) -> tuple[Collective, ...]:
    """Return the collectives that bring an array from one layout to another.

    `nbytes` is the size of the complete array. Along the axes `partial`, devices have terms of a
    sum. Slices come first, since they need no communication and leave smaller arrays; gathers come
    last. Axes that are scattered or summed have one collective, and axes that gather a dimension.
    """
    steps: list[Collective] = []
    axes = range(len(source))
    if _is_copied_to_all(source, target):
        sharded = tuple(axis for axis in axes if source[axis] is not None)
        steps.append(Collective("all_gather", nbytes, sharded))
        source = (None,) * len(source)
    nbytes /= mesh.count_pieces(source)
    for axis in axes:
        if source[axis] is None and target[axis] is not None and axis not in partial:
            nbytes /= mesh.sizes[axis]
    scattered = tuple(axis for axis in partial if target[axis] is not None)
    if scattered:
        steps.append(Collective("reduce_scatter", nbytes, scattered))
        nbytes /= mesh.count_along(scattered)
    summed = tuple(axis for axis in partial if target[axis] is None)
    if summed:
        steps.append(Collective("all_reduce", nbytes, summed))
    steps += [
        Collective("all_to_all", nbytes, (axis,))
        for axis in axes
        if source[axis] is not None and target[axis] not in (None, source[axis])
    ]
    by_dim: dict[int, list[int]] = {}
    for axis in axes:
        dim = source[axis]
        if dim is not None and target[axis] is None:
            by_dim.setdefault(dim, []).append(axis)
    for gathered in by_dim.values():
        nbytes *= mesh.count_along(gathered)
        steps.append(Collective("all_gather", nbytes, tuple(gathered)))
    return tuple(steps)


def _is_copied_to_all(source: Layout, target: Layout) -> bool:
    """Return whether XLA copies an array to all devices to change its layout.

    XLA copies ("involuntary full rematerialization") if both axes shard the same dimension in one
    layout, and in the other layout `data`, the outer axis, shards neither that dimension nor the
    dimension that `model` shards.
    """

    def is_stacked_against(layout: Layout, other: Layout) -> bool:
        data, model = layout
        return data is not None and data == model and other[0] not in (data, other[1])

    return is_stacked_against(source, target) or is_stacked_against(target, source)


REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
     "reduce_xor", "argmax", "argmin"}
)  # fmt: skip
ALONG_AN_AXIS = frozenset(
    {"cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "rev", "sort", "top_k", "split"}
)
"""Primitives whose results depend on all positions of an axis, and keep the axis."""
OF_SAMPLES = frozenset(
    {"fft", "cholesky", "triangular_solve", "lu", "eigh", "qr", "geqrf", "svd",
     "householder_product"}
)  # fmt: skip
"""Primitives that transform the last axes of arrays, or decompose the matrices there."""
MATRIX_AXES = (-2, -1)
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


class DimensionGroups:
    """Groups of the dimensions of all values of a graph.

    A node *ties* dimensions: it joins their groups. Nodes whose index is in `skipped` tie none. A
    dimension of size 1 has no group. An *indivisible* group is never sharded, since an operation
    can't compute it in pieces, such as the height and width of a convolution. `indivisible` are
    further dimensions, as pairs of a value and a dimension.
    """

    def __init__(
        self, graph: Graph, skipped: Collection[int], indivisible: Iterable[tuple[int, int]]
    ) -> None:
        self.shapes = [value.shape for value in graph.values]
        self._first = [0, *accumulate(map(len, self.shapes))]
        self._ties: list[tuple[int, int]] = []
        self._marked: list[int] = []
        for index, node in enumerate(graph.nodes):
            if index not in skipped:
                _RULES.get(node.primitive, _tie_elementwise)(self, node)
        for value, dim in indivisible:
            self.mark_indivisible(value, dim)
        self._groups = number_components(self._first[-1], self._ties)
        self.count = len(set(self._groups))
        self.indivisible = {self._groups[place] for place in self._marked}
        # An axis can shard only one of several dimensions of a value in one group.
        for value in range(len(self.shapes)):
            for group, count in Counter(self.get(value)).items():
                if group is not None and count > 1:
                    self.indivisible.add(group)

    def get(self, value: int) -> tuple[int | None, ...]:
        """Return the group of each dimension of a value; None for dimensions of size 1."""
        return tuple(
            self._groups[self._first[value] + dim] if size > 1 else None
            for dim, size in enumerate(self.shapes[value])
        )

    def tie(self, value: int, dim: int, other: int, other_dim: int) -> None:
        """Join the groups of a dimension of `value` and one of `other`, unless one has size 1."""
        if self.shapes[value][dim] > 1 and self.shapes[other][other_dim] > 1:
            self._ties.append((self._first[value] + dim, self._first[other] + other_dim))

    def mark_indivisible(self, value: int, dim: int) -> None:
        self._marked.append(self._first[value] + dim)

    def mark_all_indivisible(self, node: Node) -> None:
        for value in (*node.inputs, *node.outputs):
            for dim in range(len(self.shapes[value])):
                self.mark_indivisible(value, dim)


def number_components(count: int, ties: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of the component of each of `count` items, which pairs of items tie."""
    # Imported here: only searches for plans need it.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    rows, columns = np.array(ties, np.int32).reshape(-1, 2).T
    edges = coo_array((np.ones(len(ties)), (rows, columns)), shape=(count, count))
    numbers: np.ndarray = connected_components(edges, directed=False)[1]
    return numbers.tolist()


def _tie_elementwise(groups: DimensionGroups, node: Node) -> None:
    """Tie equal positions of operands and result; mark all as indivisible if a shape differs."""
    target = groups.shapes[node.outputs[0]]
    values = [value for value in (*node.inputs, *node.outputs[1:]) if groups.shapes[value]]
    if not all(_can_broadcast(groups.shapes[value], target) for value in values):
        groups.mark_all_indivisible(node)
        return
    for value in values:
        for dim in range(len(target)):
            groups.tie(value, dim, node.outputs[0], dim)


def _can_broadcast(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return whether shapes have the same rank, and sizes of `shape` are 1 or equal `target`'s."""
    if len(shape) != len(target):
        return False
    return all(size in (1, other) for size, other in zip(shape, target, strict=True))


def _tie_dims(groups: DimensionGroups, source: int, target: int, untied: Collection[int]) -> None:
    """Tie equal dimensions, but mark those in `untied` or of different sizes as indivisible."""
    for dim in range(len(groups.shapes[target])):
        if dim in untied or groups.shapes[source][dim] != groups.shapes[target][dim]:
            groups.mark_indivisible(source, dim)
            groups.mark_indivisible(target, dim)
        else:
            groups.tie(source, dim, target, dim)


def _tie_rearranged(groups: DimensionGroups, node: Node) -> None:
    """Tie dimensions of the operand to their new positions in the result."""
    rank = len(groups.shapes[node.inputs[0]])
    dims: Sequence[int] = range(rank)
    places: Sequence[int] = range(rank)
    if node.primitive == "broadcast_in_dim":
        places = node.params["broadcast_dimensions"]
    elif node.primitive == "transpose":
        dims = node.params["permutation"]
    else:
        removed = node.params["dimensions" if node.primitive == "squeeze" else "axes"]
        dims = [dim for dim in dims if dim not in {axis % rank for axis in removed}]
    for dim, place in zip(dims, places, strict=False):
        groups.tie(node.inputs[0], dim, node.outputs[0], place)


def _tie_reshaped(groups: DimensionGroups, node: Node) -> None:
    """Tie the outermost dimensions of each split or join. Mark its inner ones as indivisible."""
    source = node.inputs[0]
    target = node.outputs[0]
    for left, right in pair_reshaped_dims(groups.shapes[source], groups.shapes[target]):
        groups.tie(source, left[0], target, right[0])
        for dim in left[1:]:
            groups.mark_indivisible(source, dim)
        for dim in right[1:]:
            groups.mark_indivisible(target, dim)


def pair_reshaped_dims(
    source: Sequence[int], target: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Pair the smallest runs of dimensions with equal products, the outermost first.

    (6, 4) and (2, 3, 4) have ([0], [0, 1]) and ([1], [2]). Dimensions of size 1 are left out.
    """
    left = [dim for dim, size in enumerate(source) if size > 1]
    right = [dim for dim, size in enumerate(target) if size > 1]
    pairs: list[tuple[list[int], list[int]]] = []
    while left and right:
        source_run = [left.pop(0)]
        target_run = [right.pop(0)]
        while True:
            source_size = math.prod(source[dim] for dim in source_run)
            target_size = math.prod(target[dim] for dim in target_run)
            if source_size == target_size:
                break
            if source_size < target_size:
                source_run.append(left.pop(0))
            else:
                target_run.append(right.pop(0))
        pairs.append((source_run, target_run))
    return pairs


def _tie_product(groups: DimensionGroups, node: Node) -> None:
    """Tie the dimensions of a product of two activations, such as queries and keys."""
    left, right = node.inputs
    target = node.outputs[0]
    (left_sum, right_sum), (left_batch, right_batch) = node.params["dimension_numbers"]
    pairs = zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True)
    for left_dim, right_dim in pairs:
        groups.tie(left, left_dim, right, right_dim)
    left_free, right_free = list_free_dims(groups.shapes[left], groups.shapes[right], node)
    for position, dim in enumerate((*left_batch, *left_free)):
        groups.tie(left, dim, target, position)
    for position, dim in enumerate(right_free, len(left_batch) + len(left_free)):
        groups.tie(right, dim, target, position)


def list_free_dims(
    left: Sequence[int], right: Sequence[int], node: Node
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions of both operands that a product neither sums over nor pairs."""
    (left_sum, right_sum), (left_batch, right_batch) = node.params["dimension_numbers"]
    return (
        tuple(dim for dim in range(len(left)) if dim not in (*left_sum, *left_batch)),
        tuple(dim for dim in range(len(right)) if dim not in (*right_sum, *right_batch)),
    )


def _tie_slices(groups: DimensionGroups, node: Node) -> None:
    """Tie the dimensions that slices, pads and concatenations don't change."""
    target = node.outputs[0]
    untied = [node.params["dimension"]] if node.primitive == "concatenate" else []
    for source in node.inputs:
        if groups.shapes[source] and len(groups.shapes[source]) == len(groups.shapes[target]):
            _tie_dims(groups, source, target, untied)


def _tie_other_axes(groups: DimensionGroups, node: Node) -> None:
    """Tie all dimensions except the axis of the operation, which is indivisible."""
    keys = ("axis", "dimension", "dimensions", "operand")
    axes = next(node.params[key] for key in keys if key in node.params)
    rank = len(groups.shapes[node.inputs[0]])
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    untied = {axis % rank for axis in axes}
    for value in (*node.inputs[1:], *node.outputs):  # A sort moves further arrays alike.
        _tie_dims(groups, node.inputs[0], value, untied)


def _tie_samples(groups: DimensionGroups, node: Node) -> None:
    """Tie the dimensions before those that are transformed or decomposed, which are indivisible."""
    rank = len(groups.shapes[node.inputs[0]])
    num_free = rank - len(node.params.get("fft_lengths", MATRIX_AXES))
    for value in (*node.inputs, *node.outputs):
        for dim in range(len(groups.shapes[value])):
            if dim < num_free:
                groups.tie(node.inputs[0], dim, value, dim)
            else:
                groups.mark_indivisible(value, dim)


def _tie_windows(groups: DimensionGroups, node: Node) -> None:
    """Tie batch and channels. Mark the dimensions that a window slides over as indivisible."""
    window = node.params.get("window_dimensions")
    rank = len(groups.shapes[node.inputs[0]])
    if window is None:
        untied = set(range(1, rank - 1))  # This package's max_pool reads (B, H, W, C).
    else:
        untied = {dim for dim, size in enumerate(window) if size > 1}
    for value in (*node.inputs[1:], *node.outputs):
        if len(groups.shapes[value]) == rank:
            _tie_dims(groups, node.inputs[0], value, untied)


def _tie_gathered(groups: DimensionGroups, node: Node) -> None:
    """Tie batch dimensions and dimensions that are copied in full. Others are indivisible."""
    operand, indices = node.inputs[:2]
    target = node.outputs[0]
    numbers = node.params["dimension_numbers"]
    shape = groups.shapes[operand]
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    dims = [dim for dim in range(len(shape)) if dim not in removed]
    for dim, position in zip(dims, numbers.offset_dims, strict=True):
        if node.params["slice_sizes"][dim] == shape[dim]:
            groups.tie(operand, dim, target, position)
        else:
            groups.mark_indivisible(operand, dim)
            groups.mark_indivisible(target, position)
    for dim in numbers.collapsed_slice_dims:
        groups.mark_indivisible(operand, dim)
    rank = len(groups.shapes[target])
    batch = (dim for dim in range(rank) if dim not in set(numbers.offset_dims))
    for dim, position in enumerate(batch):
        groups.tie(indices, dim, target, position)
    index_dims = numbers.start_indices_batching_dims
    for dim, index_dim in zip(numbers.operand_batching_dims, index_dims, strict=True):
        groups.tie(operand, dim, indices, index_dim)


def _tie_scanned(groups: DimensionGroups, node: Node) -> None:
    """Tie an iteration's slice or result to the scan's array, which also has a first dimension."""
    is_slice = node.primitive == "scan_slice"
    array = node.inputs[0] if is_slice else node.outputs[0]
    part = node.outputs[0] if is_slice else node.inputs[0]
    groups.mark_indivisible(array, 0)
    for dim in range(len(groups.shapes[part])):
        groups.tie(array, dim + 1, part, dim)


_RULES: Mapping[str, Callable[[DimensionGroups, Node], Any]] = {
    **dict.fromkeys(("broadcast_in_dim", "transpose", "squeeze", *REDUCTIONS), _tie_rearranged),
    **dict.fromkeys(ALONG_AN_AXIS, _tie_other_axes),
    **dict.fromkeys(OF_SAMPLES, _tie_samples),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
         "select_and_scatter_add", "select_and_gather_add", "max_pool"),
        _tie_windows,
    ),
    **dict.fromkeys(
        ("slice", "pad", "dynamic_slice", "dynamic_update_slice", "concatenate"), _tie_slices
    ),
    # No dimension of these results depends on a dimension of an operand.
    **dict.fromkeys(
        ("random_bits", "random_fold_in", "random_wrap", "random_seed", "random_unwrap",
         "random_split", "random_clone", "iota"),
        lambda groups, node: None,
    ),
    "reshape": _tie_reshaped,
    "dot_general": _tie_product,
    "conv_general_dilated": DimensionGroups.mark_all_indivisible,
    "gather": _tie_gathered,
    **dict.fromkeys(("scan_slice", "scan_stack"), _tie_scanned),
}  # fmt: skip
