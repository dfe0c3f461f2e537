"""The decisions of a plan on one mesh, as variables, and their prices as tables to be added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pipeline.backends.planner.blocks import OperatorUse
from pipeline.backends.planner.cut_prices import CutPrices, Price
from pipeline.backends.planner.elimination import Factor, Table
from pipeline.backends.planner.layouts import Layout


@dataclass(frozen=True)
class Decided:
    """A layout for each region, a cut for each operator, a layout for each shared weight."""

    regions: tuple[Layout, ...]
    cuts: tuple[Layout, ...]
    shared: Mapping[int, Layout]


KeepsCut = Callable[[OperatorUse, Layout], bool]
KeepsLayout = Callable[[int, Layout], bool]
"""Of the region, or the weight, of a number."""


def cuts_samples_alone(use: OperatorUse, cut: Layout) -> bool:
    """Whether a cut of an operator is that of data parallelism."""
    return set(cut) <= {use.operator.samples, None} and use.operator.samples in cut


class Decisions:
    """Variables of one mesh: regions first, operators next, then weights with several uses."""

    def __init__(
        self,
        prices: CutPrices,
        keeps_cut: KeepsCut = lambda use, cut: True,
        keeps_region: KeepsLayout = lambda number, layout: True,
        keeps_weight: KeepsLayout = lambda number, layout: True,
    ) -> None:
        """Only what is kept may be decided on; a variable may be left without a state."""
        self.prices, self.blocks = prices, prices.blocks
        self.shared = tuple(i for i, w in enumerate(self.blocks.weights) if w.uses > 1)
        of_regions = [
            tuple(layout for layout in self._layouts_of_region(i) if keeps_region(i, layout))
            for i in range(len(self.blocks.regions))
        ]
        of_operators = [
            tuple(cut for cut in self._cuts(use) if keeps_cut(use, cut))
            for use in self.blocks.operators
        ]
        of_shared = [
            tuple(layout for layout in self._layouts_of_shared(i) if keeps_weight(i, layout))
            for i in self.shared
        ]
        self.states: list[tuple[Layout, ...]] = [*of_regions, *of_operators, *of_shared]
        self._tables: dict[Any, Table] = {}

    @property
    def sizes(self) -> list[int]:
        """Numbers of states of the variables."""
        return [len(states) for states in self.states]

    def factors(self) -> list[Factor]:
        """The tables whose sum is the price of a plan."""
        found = [
            self._unary(number, ("region", region), partial(self.prices.region, region))
            for number, region in enumerate(self.blocks.regions)
        ]
        for number, use in enumerate(self.blocks.operators):
            found += self._of_operator(number, use)
        for place, index in enumerate(self.shared):
            weight = self.blocks.weights[index]
            key = ("weight", weight.shape, weight.nbytes)
            price = partial(self.prices.weight, weight)
            found.append(self._unary(self._first_weight + place, key, price))
        return found

    def decided(self, states: Mapping[int, int]) -> Decided:
        """The layouts and cuts of chosen states."""
        chosen = [self.states[v][states[v]] for v in range(len(self.states))]
        regions = len(self.blocks.regions)
        rest = chosen[self._first_weight :]
        return Decided(
            tuple(chosen[:regions]),
            tuple(chosen[regions : self._first_weight]),
            dict(zip(self.shared, rest, strict=True)),
        )

    def prices_of(self, decided: Decided) -> list[Price]:
        """The prices that add up to that of a plan."""
        prices = self.prices
        found = [
            prices.region(region, layout)
            for region, layout in zip(self.blocks.regions, decided.regions, strict=True)
        ]
        for use, cut in zip(self.blocks.operators, decided.cuts, strict=True):
            operator = use.operator
            shared = decided.shared.get(use.weight)
            found.append(prices.operator(operator, cut, stored=shared is None))
            found.append(prices.operand(operator, decided.regions[use.source], cut))
            found.append(prices.result(operator, decided.regions[use.target], cut))
            if shared is not None:
                found.append(prices.fetch(operator, cut, shared))
        found += [prices.weight(self.blocks.weights[i], at) for i, at in decided.shared.items()]
        return found

    @property
    def _first_weight(self) -> int:
        return len(self.blocks.regions) + len(self.blocks.operators)

    def _layouts_of_region(self, index: int) -> tuple[Layout, ...]:
        region = self.blocks.regions[index]
        return self.prices.layouts(region.sizes, region.samples)

    def _cuts(self, use: OperatorUse) -> tuple[Layout, ...]:
        dims = tuple(dim.size for dim in use.operator.dims)
        return self.prices.layouts(dims, use.operator.samples)

    def _layouts_of_shared(self, index: int) -> tuple[Layout, ...]:
        return self.prices.layouts(self.blocks.weights[index].shape, None)

    def _of_operator(self, number: int, use: OperatorUse) -> list[Factor]:
        operator, me = use.operator, len(self.blocks.regions) + number
        stored = use.weight not in self.shared
        prices, kind = self.prices, (operator, stored)
        found = [
            self._unary(me, kind, partial(prices.operator, operator, stored=stored)),
            self._pair(use.source, me, ("operand", operator), partial(prices.operand, operator)),
            self._pair(use.target, me, ("result", operator), partial(prices.result, operator)),
        ]
        if not stored:
            place = self._first_weight + self.shared.index(use.weight)
            found.append(
                self._pair(me, place, ("fetch", operator), partial(prices.fetch, operator))
            )
        return found

    def _unary(self, variable: int, key: Any, price: Callable[[Layout], Price]) -> Factor:
        """A table over one variable; equal keys stand for equal prices."""
        states = self.states[variable]
        table = self._table((key, states), lambda: [price(state) for state in states], len(states))
        return Factor((variable,), table)

    def _pair(
        self, first: int, second: int, key: Any, price: Callable[[Layout, Layout], Price]
    ) -> Factor:
        """A table over two variables, of which the first has the smaller number."""
        left, right = self.states[first], self.states[second]
        table = self._table(
            (key, left, right),
            lambda: [price(a, b) for a in left for b in right],
            len(left),
            len(right),
        )
        return Factor((first, second), table)

    def _table(self, key: Any, every: Callable[[], Sequence[Price]], *shape: int) -> Table:
        if key not in self._tables:
            prices = every()
            time = np.array([self.prices.us(price) for price in prices])
            memory = np.array([price.memory_bytes for price in prices])
            self._tables[key] = Table.of(time.reshape(shape), memory.reshape(shape))
        return self._tables[key]
