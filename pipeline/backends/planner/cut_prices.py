"""Prices of cuts: microseconds and bytes of memory of regions, operators and weights on a mesh.

An operator's cut gives, for each axis of the mesh, the dimension of the operator that it cuts; a
region's layout gives the group. What leads from one to the other is priced between them:

* region and operator: collectives that bring the operand to where the cut needs it, and its
  gradient back, which is a partial sum along axes that cut the operator's output;
* operator and region: the same for the result, a partial sum along axes that cut what is summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipeline.backends.planner.blocks import Extent, Operator, Region, StepBlocks, Weight
from pipeline.backends.planner.layouts import (
    Collective,
    Layout,
    Mesh,
    layouts_of,
    pieces,
    seen_by,
    transfer,
)
from pipeline.backends.rates import DeviceGroup, Rates

COPIES = 2
"""Arrays of a parameter's size besides the optimizer's state: itself and its gradient."""


@dataclass(frozen=True, slots=True)
class Price:
    """Costs of one part of a plan: collectives, those of gradients apart, computing, and memory."""

    compute_us: float = 0.0
    collectives: tuple[Collective, ...] = ()
    gradients: tuple[Collective, ...] = ()
    memory_bytes: float = 0.0


@dataclass
class CutPrices:
    """Prices on one mesh. `state_ratio` is the optimizer's state in bytes of parameters."""

    blocks: StepBlocks
    mesh: Mesh
    rates: Rates
    state_ratio: float
    _layouts: dict[Any, tuple[Layout, ...]] = field(default_factory=dict)
    _shares: dict[Any, float] = field(default_factory=dict)

    def layouts(self, sizes: tuple[int, ...], samples: int | None) -> tuple[Layout, ...]:
        """Layouts of dimensions of the given sizes on the mesh."""
        if (sizes, samples) not in self._layouts:
            self._layouts[sizes, samples] = layouts_of(sizes, self.mesh, samples)
        return self._layouts[sizes, samples]

    def region(self, region: Region, layout: Layout) -> Price:
        """Price of a region: its computation, sums, parameters and activations."""
        work = sum(
            self.rates.compute_us(self._piece(extent.flops, extent, layout),
                                  self._piece(extent.nbytes, extent, layout))
            for extent in region.work
        )  # fmt: skip
        sums, gradients = [], []
        for partial in region.sums:
            axes = self._axes(layout, partial.summed)
            if axes:
                nbytes = partial.nbytes / pieces(layout, self.mesh, *partial.groups)
                one = Collective("all_reduce", nbytes / partial.count, axes)
                sums += [one] * partial.count
        memory = sum(self._piece(extent.nbytes, extent, layout) for extent in region.saved)
        for extent in region.parameters:
            held = self._piece(extent.nbytes, extent, layout)
            memory += self._held(held)
            work += self._update_us(held)
            others = [group for group in layout if group is not None and group not in extent.groups]
            if axes := self._axes(layout, others):
                gradients.append(Collective("all_reduce", held, axes))
        return Price(work, tuple(sums), tuple(gradients), memory)

    def operator(self, operator: Operator, cut: Layout, *, stored: bool) -> Price:
        """Price of an operator by itself; with `stored` that of holding its weight too."""
        operand, weight, result = (
            self._by_roles(operator, cut, which) for which in ("operand", "weight", "result")
        )
        spread = self.mesh.size_of([axis for axis, dim in enumerate(cut) if dim is not None])
        moved = operator.operand.nbytes / operand + operator.result.nbytes / result
        held = operator.weight_bytes / weight
        memory, update = (self._held(held), self._update_us(held)) if stored else (0.0, 0.0)
        if operator.kind == "look_up":
            # It reads and writes rows, and sets the gradient of the whole table to zero first.
            row = operator.result.nbytes / result
            compute = self.rates.compute_us(0, 2 * row) + self.rates.compute_us(0, 2 * row + held)
        else:
            passes = 3 if operator.operand_gradient else 2
            one = self.rates.compute_us(operator.flops / spread, moved + held)
            compute = passes * one
        gradients: tuple[Collective, ...] = ()
        copies = tuple(
            axis
            for axis, dim in enumerate(cut)
            if dim is not None and operator.dims[dim].weight is None
        )
        if copies:
            gradients = (Collective("all_reduce", held, copies),)
        return Price(compute + update, (), gradients, memory)

    def operand(self, operator: Operator, layout: Layout, cut: Layout) -> Price:
        """Price of bringing an operand from its region to a cut, and its gradient back."""
        array = operator.operand
        have = seen_by(layout, array.groups)
        need = self._positions(operator, cut, "operand")
        steps = transfer(have, (), need, array.nbytes, self.mesh)
        if operator.operand_gradient:
            sums = tuple(
                axis
                for axis, dim in enumerate(cut)
                if dim is not None and operator.dims[dim].operand is None
            )
            steps += transfer(need, sums, have, array.nbytes, self.mesh)
        return Price(collectives=steps)

    def result(self, operator: Operator, layout: Layout, cut: Layout) -> Price:
        """Price of bringing a result from a cut to its region, and its gradient to the cut."""
        array = operator.result
        want = seen_by(layout, array.groups)
        made = self._positions(operator, cut, "result")
        sums = tuple(
            axis
            for axis, dim in enumerate(cut)
            if dim is not None and operator.dims[dim].result is None
        )
        forward = transfer(made, sums, want, array.nbytes, self.mesh)
        return Price(collectives=forward + transfer(want, (), made, array.nbytes, self.mesh))

    def weight(self, weight: Weight, layout: Layout) -> Price:
        """Price of holding a weight that several operators use, and of updating it."""
        held = weight.nbytes / pieces(layout, self.mesh, *range(len(weight.shape)))
        return Price(self._update_us(held), memory_bytes=self._held(held))

    def fetch(self, operator: Operator, cut: Layout, layout: Layout) -> Price:
        """Price of bringing a shared weight from its layout to a cut, and its gradient back."""
        need = self._positions(operator, cut, "weight")
        there = transfer(layout, (), need, operator.weight_bytes, self.mesh)
        return Price(
            collectives=there + transfer(need, (), layout, operator.weight_bytes, self.mesh)
        )

    def us(self, price: Price) -> float:
        """Microseconds of a price: gradients by the share that the backward pass doesn't hide."""
        exposed = self.rates.exposed_share
        alone = (
            price.compute_us
            + sum(self._collective_us(one) for one in price.collectives)
            + exposed * sum(self._gradient_us(one) for one in price.gradients)
        )
        return alone * self.rates.slowdown(self.mesh.devices)

    def bytes_by_kind(self, prices: Iterable[Price]) -> dict[str, float]:
        """Bytes in collectives, by the kind that the device runs."""
        total: defaultdict[str, float] = defaultdict(float)
        for price in prices:
            for one in (*price.collectives, *price.gradients):
                total[self._run(one).kind] += one.nbytes
        return dict(sorted(total.items()))

    def _run(self, one: Collective) -> Collective:
        if one.kind == "reduce_scatter" and not self.rates.scatters_sums:
            return Collective("all_reduce", one.nbytes, one.axes)
        return one

    def _collective_us(self, one: Collective) -> float:
        run = self._run(one)
        return self.rates.collective_us(run.kind, run.nbytes, self._group(run.axes))

    def _gradient_us(self, one: Collective) -> float:
        """The share of a gradient in one all-reduce of all gradients together."""
        if one.axes not in self._shares:
            total = max(self.blocks.parameter_bytes, 1)
            us = self.rates.collective_us("all_reduce", total, self._group(one.axes))
            self._shares[one.axes] = us / total
        return one.nbytes * self._shares[one.axes]

    def _group(self, axes: tuple[int, ...]) -> DeviceGroup:
        stride = 1 if 1 in axes else self.mesh.model
        return DeviceGroup(self.mesh.size_of(axes), stride)

    def _axes(self, layout: Layout, groups: Iterable[int]) -> tuple[int, ...]:
        wanted = set(groups)
        return tuple(axis for axis, group in enumerate(layout) if group in wanted)

    def _piece(self, amount: float, extent: Extent, layout: Layout) -> float:
        return amount / pieces(layout, self.mesh, *extent.groups)

    def _held(self, nbytes: float) -> float:
        return nbytes * (COPIES + self.state_ratio)

    def _update_us(self, nbytes: float) -> float:
        """Time of an update: it reads the gradient, and reads and writes parameter and state."""
        return self.rates.compute_us(0, nbytes * (3 + 2 * self.state_ratio))

    def _positions(self, operator: Operator, cut: Layout, which: str) -> Layout:
        return tuple(None if dim is None else getattr(operator.dims[dim], which) for dim in cut)

    def _by_roles(self, operator: Operator, cut: Layout, which: str) -> int:
        """Number of pieces that a cut makes of operand, weight or result."""
        layout = self._positions(operator, cut, which)
        axes = [axis for axis, dim in enumerate(layout) if dim is not None]
        return self.mesh.size_of(axes)
