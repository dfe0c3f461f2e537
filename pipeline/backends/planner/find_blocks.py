"""Find the blocks of a step in its traced loss and gradients.

A cotangent is sharded like its value, as with `with_sharding_constraint`, so the backward pass adds
prices but no decisions. It is traced to find the values that it reads, which need memory, and its
sums, which are all-reduced.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pipeline.backends.graph.graph import Node
from pipeline.backends.planner.blocks import (
    Array,
    Extent,
    LayerOutput,
    Operator,
    OperatorDim,
    OperatorUse,
    PartialSum,
    Region,
    RegionParameter,
    StepBlocks,
    Weight,
)
from pipeline.backends.planner.dimension_groups import REDUCTIONS
from pipeline.backends.planner.region_groups import RegionGroups, count_flops, list_dims
from pipeline.backends.planner.traced_loss import LossToPlan, TracedLoss
from pipeline.models.modules.name_stack import find_layer

PASSES = 3
"""Number of products in a step for each product of the forward pass: itself and two gradients."""
Groups = tuple[int, ...]
"""Groups of dimensions in a region, ascending."""


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
