"""The decisions of a plan on one mesh, as variables, and their prices, as tables that are added.

The sharding of an operator has, for each axis of the mesh, the dimension of the operator that the
axis shards. The layout of a region has, for each axis, the group that it shards. Transfers have a
price for each pair of a layout and a sharding:

* region to operator: the operand is brought to the sharding, and its gradient back to the layout.
  The gradient is a partial sum along axes that shard output dimensions.
* operator to region: the result is brought to the layout, and its gradient back to the sharding.
  The result is a partial sum along axes that shard contracted dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np

from pipeline.backends.planner.blocks import (
    Extent,
    Operator,
    OperatorUse,
    Region,
    StepBlocks,
    Weight,
)
from pipeline.backends.planner.dimension_groups import (
    Collective,
    Layout,
    Mesh,
    convert_region_layout,
    count_pieces,
    find_transfer,
    list_layouts,
)
from pipeline.backends.planner.elimination import Factor, Scope, Table
from pipeline.backends.rates import CollectiveKind, DeviceGroup, Rates

COPIES = 2
"""Number of arrays of a parameter's size besides the optimizer's state: parameter and gradient."""
KeepsSharding = Callable[[OperatorUse, Layout], bool]
"""Returns whether an operator may have a sharding."""
KeepsLayout = Callable[[int, Layout], bool]
"""Returns whether a region, or a weight, by its number, may have a layout."""


@dataclass(frozen=True, slots=True)
class Price:
    """Costs of a part of a plan."""

    compute_us: float = 0.0
    collectives: tuple[Collective, ...] = ()
    gradients: tuple[Collective, ...] = ()
    """All-reduces of gradients, which the backward pass can hide."""
    memory_bytes: float = 0.0


ArrayRole = Literal["operand", "weight", "result"]
"""An array of an operator; the names are fields of its dims."""


def locate_array(operator: Operator, sharding: Layout, role: ArrayRole) -> Layout:
    """Return the layout of an operator's array under a sharding."""
    return tuple(None if dim is None else getattr(operator.dims[dim], role) for dim in sharding)


@dataclass
class ShardingPrices:
    """Prices on one mesh."""

    blocks: StepBlocks
    mesh: Mesh
    rates: Rates
    state_ratio: float
    """Bytes of the optimizer's state for each byte of parameters."""

    def price_region(self, region: Region, layout: Layout) -> Price:
        """Return the price of a region: its work, sums, parameters and activations."""
        work_us = sum(
            self.rates.compute_us(
                self._divide_amount(extent.flops, extent, layout),
                self._divide_amount(extent.nbytes, extent, layout),
            )
            for extent in region.work
        )
        sums: list[Collective] = []
        gradients: list[Collective] = []
        for reduced in region.sums:
            axes = tuple(axis for axis, group in enumerate(layout) if group in reduced.summed)
            if axes:
                nbytes = reduced.nbytes / count_pieces(layout, self.mesh, *reduced.groups)
                sums += [Collective("all_reduce", nbytes / reduced.count, axes)] * reduced.count
        saved = (self._divide_amount(extent.nbytes, extent, layout) for extent in region.saved)
        memory_bytes = sum(saved)
        for extent in region.parameters:
            nbytes = self._divide_amount(extent.nbytes, extent, layout)
            memory_bytes += self._count_stored_bytes(nbytes)
            work_us += self._compute_update_us(nbytes)
            # Along axes that shard only other groups, gradients are partial sums.
            whole = (None, *extent.groups)
            axes = tuple(axis for axis, group in enumerate(layout) if group not in whole)
            if axes:
                gradients.append(Collective("all_reduce", nbytes, axes))
        return Price(work_us, tuple(sums), tuple(gradients), memory_bytes)

    def price_operator(self, operator: Operator, sharding: Layout, *, stored: bool) -> Price:
        """Return the price of an operator without transfers; `stored` adds its weight's storage."""

        def count_array_pieces(role: ArrayRole) -> int:
            return self.mesh.count_pieces(locate_array(operator, sharding, role))

        weight_bytes = operator.weight_bytes / count_array_pieces("weight")
        moved_bytes = operator.result.nbytes / count_array_pieces("result")
        if operator.kind == "look_up":
            # Rows are read and written. The backward pass also sets the table's gradient to zero.
            moved_bytes *= 2
            forward_us = self.rates.compute_us(0, moved_bytes)
            work_us = forward_us + self.rates.compute_us(0, moved_bytes + weight_bytes)
        else:
            # The result, the weight's gradient and the operand's gradient are a product each.
            passes = 3 if operator.operand_gradient else 2
            moved_bytes += operator.operand.nbytes / count_array_pieces("operand")
            flops = operator.flops / self.mesh.count_pieces(sharding)
            work_us = passes * self.rates.compute_us(flops, moved_bytes + weight_bytes)
        memory_bytes = 0.0
        if stored:
            work_us += self._compute_update_us(weight_bytes)
            memory_bytes = self._count_stored_bytes(weight_bytes)
        axes = self._find_free_axes(operator, sharding, "weight")
        gradients = (Collective("all_reduce", weight_bytes, axes),) if axes else ()
        return Price(work_us, gradients=gradients, memory_bytes=memory_bytes)

    def price_operand(self, operator: Operator, layout: Layout, sharding: Layout) -> Price:
        """Return the price of moving an operand from its region, and its gradient back."""
        array = operator.operand
        source = convert_region_layout(layout, array.groups)
        target = locate_array(operator, sharding, "operand")
        steps = find_transfer(source, (), target, array.nbytes, self.mesh)
        if operator.operand_gradient:
            sums = self._find_free_axes(operator, sharding, "operand")
            steps += find_transfer(target, sums, source, array.nbytes, self.mesh)
        return Price(collectives=steps)

    def price_result(self, operator: Operator, layout: Layout, sharding: Layout) -> Price:
        """Return the price of moving a result to its region, and its gradient back."""
        array = operator.result
        target = convert_region_layout(layout, array.groups)
        source = locate_array(operator, sharding, "result")
        sums = self._find_free_axes(operator, sharding, "result")
        forward = find_transfer(source, sums, target, array.nbytes, self.mesh)
        backward = find_transfer(target, (), source, array.nbytes, self.mesh)
        return Price(collectives=forward + backward)

    def price_weight(self, weight: Weight, layout: Layout) -> Price:
        """Return the price of storing and updating a weight that several operators use."""
        nbytes = weight.nbytes / self.mesh.count_pieces(layout)
        return Price(self._compute_update_us(nbytes), memory_bytes=self._count_stored_bytes(nbytes))

    def price_fetch(self, operator: Operator, sharding: Layout, layout: Layout) -> Price:
        """Return the price of moving a shared weight to a sharding, and its gradient back."""
        target = locate_array(operator, sharding, "weight")
        nbytes = operator.weight_bytes
        forward = find_transfer(layout, (), target, nbytes, self.mesh)
        return Price(collectives=forward + find_transfer(target, (), layout, nbytes, self.mesh))

    def to_us(self, price: Price) -> float:
        """Return the microseconds of a price, without the hidden share of gradients."""
        alone_us = (
            price.compute_us
            + sum(map(self._compute_collective_us, price.collectives))
            + self.rates.exposed_share * sum(map(self._compute_gradient_us, price.gradients))
        )
        return alone_us * self.rates.slowdown(self.mesh.devices)

    def sum_bytes_by_kind(self, prices: Iterable[Price]) -> dict[str, float]:
        """Return the bytes of all collectives by the kind that the devices use."""
        total: defaultdict[str, float] = defaultdict(float)
        for price in prices:
            for collective in (*price.collectives, *price.gradients):
                total[self._choose_kind(collective)] += collective.nbytes
        return dict(sorted(total.items()))

    def _choose_kind(self, collective: Collective) -> CollectiveKind:
        scattered = collective.kind == "reduce_scatter" and not self.rates.scatters_sums
        return "all_reduce" if scattered else collective.kind

    def _compute_collective_us(self, collective: Collective) -> float:
        group = self._make_group(collective.axes)
        return self.rates.collective_us(self._choose_kind(collective), collective.nbytes, group)

    def _compute_gradient_us(self, gradient: Collective) -> float:
        """Return a gradient's share of the time of one all-reduce of all gradients."""
        total = max(self.blocks.parameter_bytes, 1)
        us = self.rates.collective_us("all_reduce", total, self._make_group(gradient.axes))
        return gradient.nbytes * (us / total)

    def _make_group(self, axes: tuple[int, ...]) -> DeviceGroup:
        """Return the devices along axes; those along axis 1, `model`, are next to each other."""
        return DeviceGroup(self.mesh.count_along(axes), 1 if 1 in axes else self.mesh.model)

    def _divide_amount(self, amount: float, extent: Extent, layout: Layout) -> float:
        return amount / count_pieces(layout, self.mesh, *extent.groups)

    def _count_stored_bytes(self, nbytes: float) -> float:
        return nbytes * (COPIES + self.state_ratio)

    def _compute_update_us(self, nbytes: float) -> float:
        """Return the time to read a gradient, and to read and write parameter and state."""
        return self.rates.compute_us(0, nbytes * (3 + 2 * self.state_ratio))

    def _find_free_axes(
        self, operator: Operator, sharding: Layout, role: ArrayRole
    ) -> tuple[int, ...]:
        """Return the sharding's axes that don't divide an array."""
        layout = locate_array(operator, sharding, role)
        return tuple(
            axis for axis, dim in enumerate(sharding) if dim is not None and layout[axis] is None
        )


@dataclass(frozen=True)
class PlanLayouts:
    """Layouts of regions, shardings of operators, and layouts of weights with several uses."""

    regions: tuple[Layout, ...]
    shardings: tuple[Layout, ...]
    shared: Mapping[int, Layout]


Term = tuple[Scope, Any, Callable[..., Price]]
"""Variables of a term, a key that equal terms share, and a function from layouts to a price."""


def is_data_parallel_sharding(use: OperatorUse, sharding: Layout) -> bool:
    """Return whether a sharding of an operator shards only its batch dimension."""
    return set(sharding) <= {use.operator.samples, None} and use.operator.samples in sharding


class Decisions:
    """The variables of a mesh: regions, operators and weights with several uses, in this order."""

    def __init__(
        self,
        prices: ShardingPrices,
        keeps_sharding: KeepsSharding = lambda use, sharding: True,
        keeps_region: KeepsLayout = lambda number, layout: True,
        keeps_weight: KeepsLayout = lambda number, layout: True,
    ) -> None:
        """Make the variables. Their states are those that the filters allow; there may be none."""
        self.prices = prices
        self.blocks = prices.blocks
        weights = enumerate(self.blocks.weights)
        self.shared = tuple(index for index, weight in weights if weight.uses > 1)
        self.states: list[tuple[Layout, ...]] = []
        """Layouts or shardings of each variable."""
        for number, region in enumerate(self.blocks.regions):
            layouts = list_layouts(region.sizes, prices.mesh, region.samples)
            self.states.append(tuple(layout for layout in layouts if keeps_region(number, layout)))
        for use in self.blocks.operators:
            dims = tuple(dim.size for dim in use.operator.dims)
            shardings = list_layouts(dims, prices.mesh, use.operator.samples)
            self.states.append(
                tuple(sharding for sharding in shardings if keeps_sharding(use, sharding))
            )
        for index in self.shared:
            layouts = list_layouts(self.blocks.weights[index].shape, prices.mesh, None)
            self.states.append(tuple(layout for layout in layouts if keeps_weight(index, layout)))
        self._tables: dict[Any, Table] = {}

    @property
    def sizes(self) -> list[int]:
        return [len(states) for states in self.states]

    def list_factors(self) -> list[Factor]:
        """Return the tables whose sum is the price of a plan."""
        return [
            Factor(variables, self._make_table(key, variables, price))
            for variables, key, price in self._list_terms()
        ]

    def to_plan_layouts(self, states: Mapping[int, int]) -> PlanLayouts:
        """Return the layouts of a choice, which maps a variable to the index of its state."""
        layouts = [options[states[variable]] for variable, options in enumerate(self.states)]
        regions = len(self.blocks.regions)
        weights = regions + len(self.blocks.operators)
        return PlanLayouts(
            tuple(layouts[:regions]),
            tuple(layouts[regions:weights]),
            dict(zip(self.shared, layouts[weights:], strict=True)),
        )

    def list_prices(self, states: Mapping[int, int]) -> list[Price]:
        """Return the prices whose sum is the price of a plan."""
        return [
            price(*(self.states[variable][states[variable]] for variable in variables))
            for variables, _, price in self._list_terms()
        ]

    def _list_terms(self) -> Iterator[Term]:
        prices = self.prices
        for number, region in enumerate(self.blocks.regions):
            yield (number,), ("region", region), partial(prices.price_region, region)
        operators = len(self.blocks.regions)
        weights = operators + len(self.blocks.operators)
        for number, use in enumerate(self.blocks.operators, operators):
            operator = use.operator
            is_stored = use.weight not in self.shared
            price = partial(prices.price_operator, operator, stored=is_stored)
            yield (number,), (operator, is_stored), price
            price = partial(prices.price_operand, operator)
            yield (use.source, number), ("operand", operator), price
            yield (use.target, number), ("result", operator), partial(prices.price_result, operator)
            if not is_stored:
                variables = (number, weights + self.shared.index(use.weight))
                yield variables, ("fetch", operator), partial(prices.price_fetch, operator)
        for number, index in enumerate(self.shared, weights):
            weight = self.blocks.weights[index]
            key = ("weight", weight.shape, weight.nbytes)
            yield (number,), key, partial(prices.price_weight, weight)

    def _make_table(self, key: Any, variables: Scope, price: Callable[..., Price]) -> Table:
        states = tuple(self.states[variable] for variable in variables)
        if (key, states) not in self._tables:
            prices = [price(*layouts) for layouts in product(*states)]
            shape = [len(layouts) for layouts in states]
            time = np.reshape([self.prices.to_us(price) for price in prices], shape)
            memory = np.reshape([price.memory_bytes for price in prices], shape)
            self._tables[key, states] = Table.from_arrays(time, memory)
        return self._tables[key, states]
