"""The decisions of a plan on one mesh, as variables, and their prices as tables to be added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
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
Term = tuple[tuple[int, ...], Any, Callable[..., Price]]
"""Variables of a term of the price, a key that equal terms share, and its price by layouts."""


def cuts_samples_alone(use: OperatorUse, cut: Layout) -> bool:
    """Whether a cut of an operator is data parallelism's."""
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
        """Make variables of the layouts that the filters allow; one may have no state."""
        self.prices = prices
        self.blocks = prices.blocks
        self.shared = tuple(i for i, w in enumerate(self.blocks.weights) if w.uses > 1)
        self.states: list[tuple[Layout, ...]] = []
        for number, region in enumerate(self.blocks.regions):
            layouts = prices.layouts(region.sizes, region.samples)
            self.states.append(tuple(x for x in layouts if keeps_region(number, x)))
        for use in self.blocks.operators:
            dims = tuple(dim.size for dim in use.operator.dims)
            cuts = prices.layouts(dims, use.operator.samples)
            self.states.append(tuple(cut for cut in cuts if keeps_cut(use, cut)))
        for index in self.shared:
            layouts = prices.layouts(self.blocks.weights[index].shape, None)
            self.states.append(tuple(x for x in layouts if keeps_weight(index, x)))
        self._tables: dict[Any, Table] = {}

    @property
    def sizes(self) -> list[int]:
        """Numbers of states of the variables."""
        return [len(states) for states in self.states]

    def factors(self) -> list[Factor]:
        """The tables whose sum is the price of a plan."""
        return [
            Factor(variables, self._table(key, variables, price))
            for variables, key, price in self._terms()
        ]

    def layouts_of(self, states: Mapping[int, int]) -> Decided:
        """The layouts and cuts of a choice of states."""
        layouts = [self.states[v][states[v]] for v in range(len(self.states))]
        regions = len(self.blocks.regions)
        weights = regions + len(self.blocks.operators)
        return Decided(
            tuple(layouts[:regions]),
            tuple(layouts[regions:weights]),
            dict(zip(self.shared, layouts[weights:], strict=True)),
        )

    def prices_of(self, states: Mapping[int, int]) -> list[Price]:
        """The prices that add up to the price of a plan."""
        return [
            price(*(self.states[v][states[v]] for v in variables))
            for variables, _, price in self._terms()
        ]

    def _terms(self) -> Iterator[Term]:
        prices = self.prices
        for number, region in enumerate(self.blocks.regions):
            yield (number,), ("region", region), partial(prices.region, region)
        operators = len(self.blocks.regions)
        weights = operators + len(self.blocks.operators)
        for number, use in enumerate(self.blocks.operators, operators):
            operator = use.operator
            stored = use.weight not in self.shared
            yield (number,), (operator, stored), partial(prices.operator, operator, stored=stored)
            yield (use.source, number), ("operand", operator), partial(prices.operand, operator)
            yield (use.target, number), ("result", operator), partial(prices.result, operator)
            if not stored:
                variables = (number, weights + self.shared.index(use.weight))
                yield variables, ("fetch", operator), partial(prices.fetch, operator)
        for number, index in enumerate(self.shared, weights):
            weight = self.blocks.weights[index]
            key = ("weight", weight.shape, weight.nbytes)
            yield (number,), key, partial(prices.weight, weight)

    def _table(self, key: Any, variables: tuple[int, ...], price: Callable[..., Price]) -> Table:
        states = tuple(self.states[v] for v in variables)
        if (key, states) not in self._tables:
            prices = [price(*layouts) for layouts in product(*states)]
            shape = [len(layouts) for layouts in states]
            time = np.array([self.prices.us(price) for price in prices])
            memory = np.array([price.memory_bytes for price in prices])
            self._tables[key, states] = Table.of(time.reshape(shape), memory.reshape(shape))
        return self._tables[key, states]
