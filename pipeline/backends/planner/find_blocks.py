"""Find the blocks of a step in its traced loss and gradients.

A block has regions, in each of which groups of dimensions are sharded together.

A cotangent is sharded like its value, as with `with_sharding_constraint`, so the backward pass adds
prices but no decisions. It is traced to find the values that it reads, which need memory, and its
sums, which are all-reduced.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from pipeline.backends.graph.graph import Graph, Node
from pipeline.backends.planner.blocks import (
    Array,
    Extent,
    LayerOutput,
    LossToPlan,
    Operator,
    OperatorDim,
    OperatorUse,
    PartialSum,
    Region,
    RegionParameter,
    StepBlocks,
    TracedLoss,
    Weight,
)
from pipeline.backends.planner.dimension_groups import (
    PRODUCTS,
    REDUCTIONS,
    DimensionGroups,
    list_free_dims,
    number_components,
)
from pipeline.models.modules.name_stack import find_layer

PASSES = 3
"""Number of products in a step for each product of the forward pass: itself and two gradients."""
Groups = tuple[int, ...]
"""Groups of dimensions in a region, ascending."""
SCATTERS = frozenset({"scatter-add", "scatter_add", "scatter"})
"""Gradients of look-ups; the primitive has a hyphen or an underscore by JAX's version."""


def find_blocks(step: LossToPlan) -> StepBlocks:
    """Trace a loss and its gradients, and return their blocks."""
    loss = TracedLoss(step)
    return _Finder(loss, RegionGroups(loss), step.sync_batch_norm).find()


@dataclass
class _RegionItems:
    """Amounts of a region by the groups that shard them: bytes, but for `flops`."""

    moved: Counter[Groups] = field(default_factory=Counter)
    flops: Counter[Groups] = field(default_factory=Counter)
    saved: Counter[Groups] = field(default_factory=Counter)
    parameters: Counter[Groups] = field(default_factory=Counter)
    sums: defaultdict[tuple[Groups, Groups], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Bytes of each result, by the groups of the result and the groups that are summed."""

    def to_region(self, sizes: Sequence[int], samples: int | None) -> Region:
        return Region(
            sizes=tuple(sizes),
            samples=samples,
            work=tuple(
                Extent(groups, self.moved[groups], self.flops[groups])
                for groups in sorted({*self.moved, *self.flops})
            ),
            saved=_make_extents(self.saved),
            sums=tuple(
                PartialSum(groups, summed, sum(nbytes), len(nbytes))
                for (groups, summed), nbytes in sorted(self.sums.items())
            ),
            parameters=_make_extents(self.parameters),
        )


def _make_extents(amounts: Counter[Groups]) -> tuple[Extent, ...]:
    return tuple(Extent(groups, nbytes) for groups, nbytes in sorted(amounts.items()))


class _Finder:
    """Search for the blocks of one traced loss."""

    def __init__(self, loss: TracedLoss, regions: RegionGroups, sync_batch_norm: bool) -> None:
        self.loss = loss
        self.regions = regions
        self.sync_batch_norm = sync_batch_norm
        self.graph = loss.graph
        self.items = [_RegionItems() for _ in regions.sizes]
        # A weight that is computed from several parameters is treated as a view of the first.
        self.uses = Counter(min(loss.made_of[weight]) for _, weight in loss.operators.values())
        """Number of operators by parameter."""
        self.weights = {leaf: number for number, leaf in enumerate(self.uses)}

    def find(self) -> StepBlocks:
        """Return all blocks, in the order of the computation."""
        loss = self.loss
        operators = tuple(self._list_operators())
        parameters = tuple(self._list_parameters())
        self._add_products()
        self._add_saved()
        self._add_sums()
        return StepBlocks(
            regions=tuple(
                items.to_region(tuple(sizes.values()), self.regions.find_sample_group(number))
                for number, (items, sizes) in enumerate(
                    zip(self.items, self.regions.sizes, strict=True)
                )
            ),
            operators=operators,
            weights=tuple(
                Weight(loss.params[leaf], loss.get_shape(leaf), loss.count_bytes(leaf), uses)
                for leaf, uses in self.uses.items()
            ),
            parameters=parameters,
            outputs=tuple(self._list_outputs()),
        )

    def _list_operators(self) -> Iterator[OperatorUse]:
        for index, (operand, weight) in self.loss.operators.items():
            node = self.graph.nodes[index]
            leaf = min(self.loss.made_of[weight])
            source, target = map(self.regions.find_region, (operand, node.outputs[0]))
            if source is not None and target is not None:
                operator = self._make_operator(node, operand, weight, leaf)
                yield OperatorUse(operator, source, target, self.weights[leaf])

    def _make_operator(self, node: Node, operand: int, weight: int, leaf: int) -> Operator:
        operand_array, result_array = (
            Array(self.loss.count_bytes(value) * node.repeat, self.regions.to_local(value))
            for value in (operand, node.outputs[0])
        )
        dims = tuple(
            located
            for dim in list_dims(node, self.graph, operand, weight)
            if _can_shard(dim, operand_array, result_array)
            and (located := self._locate_on_leaf(dim, weight, leaf)) is not None
        )
        groups = self.regions.groups.get(operand)
        samples = [
            place
            for place, dim in enumerate(dims)
            if dim.operand is not None and groups[dim.operand] in self.regions.sample_groups
        ]
        return Operator(
            kind="look_up" if node.primitive == "gather" else "product",
            operand=operand_array,
            result=result_array,
            dims=dims,
            weight_bytes=self.loss.count_bytes(leaf),
            flops=count_flops(node, self.graph, weight) * node.repeat,
            samples=samples[0] if samples else None,
            operand_gradient=operand in self.loss.made_of,
        )

    def _locate_on_leaf(self, dim: OperatorDim, weight: int, leaf: int) -> OperatorDim | None:
        """Return a dimension with its position in parameter `leaf`; None if it can't shard it."""
        if dim.weight is None:
            return dim
        groups = self.regions.groups
        group = groups.get(weight)[dim.weight]
        leaf_groups = groups.get(leaf)
        if group is None or group not in leaf_groups or group in groups.indivisible:
            return None
        return replace(dim, weight=leaf_groups.index(group))

    def _list_parameters(self) -> Iterator[RegionParameter]:
        """Yield the parameters that aren't weights of operators, and add them to their regions."""
        for leaf, path in self.loss.params.items():
            if leaf in self.weights:
                continue
            region = self.regions.find_region(leaf)
            groups = self.regions.to_local(leaf)
            if region is None:
                readers = (self.regions.find_region(out) for out in self._list_reader_outputs(leaf))
                region = next((reader for reader in readers if reader is not None), None)
            if region is None:
                continue
            nbytes = self.loss.count_bytes(leaf)
            self.items[region].parameters[_sort_groups(groups)] += nbytes
            yield RegionParameter(path, self.loss.get_shape(leaf), nbytes, region, groups)

    def _list_reader_outputs(self, leaf: int) -> Iterator[int]:
        for node in self.graph.nodes:
            if any(leaf in self.loss.made_of.get(value, ()) for value in node.inputs):
                yield from (out for out in node.outputs if out in self.loss.varying)

    def _add_products(self) -> None:
        """Add products of two activations, and partial sums of the products and their gradients."""
        for index in sorted(self.loss.forward - set(self.loss.operators)):
            node = self.graph.nodes[index]
            region = self.regions.find_region(node.outputs[0])
            if node.primitive != "dot_general" or region is None:
                continue
            items = self.items[region]
            values = (*node.inputs[:2], node.outputs[0])
            groups_by_value = [set(_sort_groups(self.regions.to_local(value))) for value in values]
            all_groups = set(chain.from_iterable(groups_by_value))
            (summed, _), _ = node.params["dimension_numbers"]
            depth = math.prod(self.loss.get_shape(values[0])[dim] for dim in summed)
            flops = 2 * self.graph.values[values[2]].size * depth
            items.flops[_sort_groups(all_groups)] += PASSES * flops * node.repeat
            for value, groups in zip(values, groups_by_value, strict=True):
                nbytes = self.loss.count_bytes(value) * node.repeat
                items.moved[_sort_groups(groups)] += PASSES * nbytes
                if summed_groups := _sort_groups(all_groups - groups):
                    items.sums[_sort_groups(groups), summed_groups].append(nbytes)

    def _add_saved(self) -> None:
        """Add the activations that the backward pass reads: each is written and read once."""
        repeats = {out: node.repeat for node in self.graph.nodes for out in node.outputs}
        for value in self.loss.find_saved_values():
            region = self.regions.find_region(value)
            if region is not None:
                groups = _sort_groups(self.regions.to_local(value))
                nbytes = self.loss.count_bytes(value) * repeats.get(value, 1)
                self.items[region].saved[groups] += nbytes
                self.items[region].moved[groups] += 2 * nbytes

    def _add_sums(self) -> None:
        """Add reductions of both passes, except those to gradients of parameters."""
        gradients = self.loss.find_gradients()
        for index, node in enumerate(self.graph.nodes):
            if node.primitive not in REDUCTIONS:
                continue
            value = node.inputs[0]
            result = node.outputs[0]
            region = self.regions.find_region(value)
            if region is None:
                continue
            items = self.items[region]
            local = self.regions.to_local(value)
            axes = node.params["axes"]
            if index in self.loss.forward:
                # A reduction reads its operand, and its gradient writes an array of the same size.
                items.moved[_sort_groups(local)] += 2 * self.loss.count_bytes(value) * node.repeat
            if value not in self.loss.varying or not gradients.isdisjoint(node.outputs):
                continue
            summed = _sort_groups(
                local[dim] for dim in axes if not self._is_local_sum(value, dim, result)
            )
            if summed:
                groups = _sort_groups(group for dim, group in enumerate(local) if dim not in axes)
                items.sums[groups, summed].append(self.loss.count_bytes(result) * node.repeat)

    def _is_local_sum(self, value: int, dim: int, result: int) -> bool:
        """Return whether a device sums only over its samples, as in unsynchronised batch norm."""
        if self.sync_batch_norm or self.graph.values[result].size == 1:
            return False
        return self.regions.groups.get(value)[dim] in self.regions.sample_groups

    def _list_outputs(self) -> Iterator[LayerOutput]:
        """Yield the last value that each layer with parameters computes."""
        last: dict[str, int] = {}
        for index in sorted(self.loss.forward):
            node = self.graph.nodes[index]
            out = node.outputs[0]
            if out in self.loss.varying and self.loss.get_shape(out):
                last[find_layer(node.scope)] = out
        for layer in dict.fromkeys(path.rpartition("/")[0] for path in self.loss.params.values()):
            region = self.regions.find_region(last[layer]) if layer and layer in last else None
            if region is not None:
                yield LayerOutput(layer, region, self.regions.to_local(last[layer]))


def _can_shard(dim: OperatorDim, operand: Array, result: Array) -> bool:
    """Return whether the regions of operand and result can be sharded along a dimension."""
    places = ((dim.operand, operand), (dim.result, result))
    return all(place is None or array.groups[place] is not None for place, array in places)


def _sort_groups(groups: Iterable[int | None]) -> Groups:
    return tuple(sorted({group for group in groups if group is not None}))


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
