"""Regions of a traced loss, and in each the groups of dimensions that are sharded together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from pipeline.backends.graph.graph import Graph, Node
from pipeline.backends.planner.blocks import OperatorDim
from pipeline.backends.planner.dimension_groups import (
    PRODUCTS,
    DimensionGroups,
    list_free_dims,
    number_components,
)
from pipeline.backends.planner.traced_loss import TracedLoss

SCATTERS = frozenset({"scatter-add", "scatter_add", "scatter"})
"""Gradients of look-ups; the primitive has a hyphen or an underscore by JAX's version."""


class RegionGroups:
    """Regions of all values, and the groups that can be sharded, numbered in each region.

    The groups of a value are in one region. Operators don't join groups, nor do products, look-ups
    and scatters of the backward pass. By other operations, values of the backward pass are in the
    groups of the forward pass.
    """

    def __init__(self, loss: TracedLoss) -> None:
        self._loss = loss
        graph = loss.graph
        skipped = set(loss.operators) | {
            index
            for index, node in enumerate(graph.nodes)
            if index not in loss.forward and node.primitive in (*PRODUCTS, *SCATTERS, "gather")
        }
        self.groups = DimensionGroups(graph, skipped, self._list_image_dims())
        self._region_of = self._number_regions()
        self.sizes: list[dict[int, int]] = [
            {} for _ in range(max(self._region_of.values(), default=-1) + 1)
        ]
        """Size of each group that can be sharded, by region; the number of pieces divides it."""
        for value in loss.list_forward_values():
            for size, group in zip(loss.get_shape(value), self.groups.get(value), strict=True):
                if group is not None and group not in self.groups.indivisible:
                    sizes = self.sizes[self._region_of[group]]
                    sizes[group] = math.gcd(sizes.get(group, 0), size)
        self._local = [
            {group: number for number, group in enumerate(sizes)} for sizes in self.sizes
        ]
        self.sample_groups = self._find_sample_groups()

    def find_region(self, value: int) -> int | None:
        """Return the region of a value; None for scalars and values of only the backward pass."""
        groups = _drop_none(self.groups.get(value))
        return next((self._region_of[group] for group in groups if group in self._region_of), None)

    def to_local(self, value: int) -> tuple[int | None, ...]:
        """Return each dimension's group, numbered in its region; None if it can't be sharded."""
        region = self.find_region(value)
        if region is None:
            return (None,) * len(self._loss.get_shape(value))
        numbers = self._local[region]
        groups = self.groups.get(value)
        return tuple(None if group is None else numbers.get(group) for group in groups)

    def find_sample_group(self, region: int) -> int | None:
        """Return the group of the batch dimension in a region; None if the region has none."""
        local = self._local[region]
        return next((local[group] for group in local if group in self.sample_groups), None)

    def _list_image_dims(self) -> Iterator[tuple[int, int]]:
        """Yield height, width and channels of images: `list_dims` says why they aren't sharded."""
        for index, (operand, _) in self._loss.operators.items():
            node = self._loss.graph.nodes[index]
            if node.primitive == "conv_general_dilated":
                numbers = node.params["dimension_numbers"]
                yield from ((operand, dim) for dim in numbers.lhs_spec[1:])
                yield from ((node.outputs[0], dim) for dim in numbers.out_spec[1:])

    def _number_regions(self) -> dict[int, int]:
        """Return the number of each group's region, in the order of the computation."""
        values = range(len(self._loss.graph.values))
        ties = [pair for value in values for pair in pairwise(_drop_none(self.groups.get(value)))]
        components = number_components(self.groups.count, ties)
        numbers: dict[int, int] = {}
        for value in self._loss.list_forward_values():
            for group in _drop_none(self.groups.get(value)):
                numbers.setdefault(components[group], len(numbers))
        return {group: numbers[item] for group, item in enumerate(components) if item in numbers}

    def _find_sample_groups(self) -> set[int]:
        """Return the groups of batch dimensions, of the batch's arrays and operators' results."""
        loss = self._loss
        samples: set[int] = set()
        for value in loss.batch:
            samples.update(_drop_none(self.groups.get(value)[:1]))
        for index, (operand, weight) in loss.operators.items():
            node = loss.graph.nodes[index]
            before = self.groups.get(operand)
            after = self.groups.get(node.outputs[0])
            for dim in list_dims(node, loss.graph, operand, weight):
                if dim.role == "batch" and dim.operand is not None and dim.result is not None:
                    result_group = after[dim.result]
                    if before[dim.operand] in samples and result_group is not None:
                        samples.add(result_group)
        return samples


def _drop_none(groups: Iterable[int | None]) -> list[int]:
    return [group for group in groups if group is not None]


def count_flops(node: Node, graph: Graph, weight: int) -> int:
    """Return the floating-point operations of a product, two per multiply-add; 0 for a look-up."""
    if node.primitive == "gather":
        return 0
    result = graph.values[node.outputs[0]]
    if node.primitive == "dot_general":
        sums, _ = node.params["dimension_numbers"]
        left = graph.values[node.inputs[0]].shape
        return 2 * result.size * math.prod(left[dim] for dim in sums[0])
    shape = graph.values[weight].shape
    out = node.params["dimension_numbers"].rhs_spec[0]
    return 2 * result.size * math.prod(shape) // shape[out]


def list_dims(node: Node, graph: Graph, operand: int, weight: int) -> tuple[OperatorDim, ...]:
    """Return the dimensions of an operator that can be sharded."""
    shape = graph.values[operand].shape
    if node.primitive == "gather":
        table = graph.values[weight].shape
        result = graph.values[node.outputs[0]].shape
        dims = [OperatorDim(size, "batch", dim, None, dim) for dim, size in enumerate(result[:-1])]
        dims.append(OperatorDim(table[0], "contracted", None, 0, None))
        dims.append(OperatorDim(table[1], "output", None, 1, len(result) - 1))
    elif node.primitive == "conv_general_dilated":
        # Only samples can be sharded: if channels are sharded, XLA gathers the samples of all
        # devices. ResNet-20 with sharded channels in its last stage moved 3.5 times the bytes.
        numbers = node.params["dimension_numbers"]
        before = numbers.lhs_spec[0]
        dims = [OperatorDim(shape[before], "batch", before, None, numbers.out_spec[0])]
    else:
        dims = _list_dot_dims(node, graph, weight_first=node.inputs[0] == weight)
    return tuple(dim for dim in dims if dim.size > 1)


def _list_dot_dims(node: Node, graph: Graph, *, weight_first: bool) -> list[OperatorDim]:
    """Return the dimensions of a matrix product.

    Its result has the batch dimensions (role "both"), then the free dimensions of the left operand,
    then of the right operand.
    """
    sums, batches = node.params["dimension_numbers"]
    operand, weight = (1, 0) if weight_first else (0, 1)
    left, right = (graph.values[value].shape for value in node.inputs[:2])
    shape = (left, right)[operand]
    free = list_free_dims(left, right, node)
    common = len(batches[0])
    pairs = zip(batches[operand], batches[weight], strict=True)
    dims = [
        OperatorDim(shape[dim], "both", dim, weight_dim, position)
        for position, (dim, weight_dim) in enumerate(pairs)
    ]
    first = common + (len(free[0]) if weight_first else 0)
    for position, dim in enumerate(free[operand], first):
        dims.append(OperatorDim(shape[dim], "batch", dim, None, position))
    for dim, weight_dim in zip(sums[operand], sums[weight], strict=True):
        dims.append(OperatorDim(shape[dim], "contracted", dim, weight_dim, None))
    first = common + (0 if weight_first else len(free[0]))
    for position, dim in enumerate(free[weight], first):
        dims.append(OperatorDim((left, right)[weight][dim], "output", None, dim, position))
    return dims
