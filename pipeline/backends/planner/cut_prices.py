"""Prices of cuts: microseconds and bytes of memory of regions, operators and weights on a mesh.

An operator's cut gives, for each axis of the mesh, the dimension of the operator that it cuts; a
region's layout gives the group. What leads from one to the other is priced between them:

* region and operator: collectives that bring the operand to the layout that the cut needs, and its
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
from pipeline.backends.rates import CollectiveKind, DeviceGroup, Rates

COPIES = 2
"""Arrays of a parameter's size besides the optimizer's state: itself and its gradient."""


@dataclass(frozen=True, slots=True)
class Price:
    """Costs of one part of a plan: computing, collectives, collectives of gradients, and memory."""

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
        work_us = sum(
            self.rates.compute_us(
                self._piece(extent.flops, extent, layout),
                self._piece(extent.nbytes, extent, layout),
            )
            for extent in region.work
        )
        sums: list[Collective] = []
        gradients: list[Collective] = []
        for partial in region.sums:
            axes = tuple(axis for axis, group in enumerate(layout) if group in partial.summed)
            if axes:
                nbytes = partial.nbytes / pieces(layout, self.mesh, *partial.groups)
                sums += [Collective("all_reduce", nbytes / partial.count, axes)] * partial.count
        memory = sum(self._piece(extent.nbytes, extent, layout) for extent in region.saved)
        for extent in region.parameters:
            nbytes = self._piece(extent.nbytes, extent, layout)
            memory += self._stored_bytes(nbytes)
            work_us += self._update_us(nbytes)
            axes = tuple(
                axis
                for axis, group in enumerate(layout)
                if group is not None and group not in extent.groups
            )
            if axes:
                gradients.append(Collective("all_reduce", nbytes, axes))
        return Price(work_us, tuple(sums), tuple(gradients), memory)

    def operator(self, operator: Operator, cut: Layout, *, stored: bool) -> Price:
        """Price of an operator by itself; with `stored` also of holding its weight."""
        operand, weight, result = (
            self.mesh.num_pieces(self._positions(operator, cut, which))
            for which in ("operand", "weight", "result")
        )
        nbytes = operator.weight_bytes / weight
        if operator.kind == "look_up":
            # It reads and writes rows, and sets the gradient of the whole table to zero first.
            row = operator.result.nbytes / result
            work_us = self.rates.compute_us(0, 2 * row) + self.rates.compute_us(0, 2 * row + nbytes)
        else:
            passes = 3 if operator.operand_gradient else 2
            moved = operator.operand.nbytes / operand + operator.result.nbytes / result
            flops = operator.flops / self.mesh.num_pieces(cut)
            work_us = passes * self.rates.compute_us(flops, moved + nbytes)
        copies = self._axes_without(operator, cut, "weight")
        return Price(
            work_us + (self._update_us(nbytes) if stored else 0.0),
            gradients=(Collective("all_reduce", nbytes, copies),) if copies else (),
            memory_bytes=self._stored_bytes(nbytes) if stored else 0.0,
        )

    def operand(self, operator: Operator, layout: Layout, cut: Layout) -> Price:
        """Price of bringing an operand from its region to a cut, and its gradient back."""
        array = operator.operand
        source = seen_by(layout, array.groups)
        target = self._positions(operator, cut, "operand")
        steps = transfer(source, (), target, array.nbytes, self.mesh)
        if operator.operand_gradient:
            sums = self._axes_without(operator, cut, "operand")
            steps += transfer(target, sums, source, array.nbytes, self.mesh)
        return Price(collectives=steps)

    def result(self, operator: Operator, layout: Layout, cut: Layout) -> Price:
        """Price of bringing a result from a cut to its region, and its gradient to the cut."""
        array = operator.result
        target = seen_by(layout, array.groups)
        source = self._positions(operator, cut, "result")
        sums = self._axes_without(operator, cut, "result")
        forward = transfer(source, sums, target, array.nbytes, self.mesh)
        return Price(collectives=forward + transfer(target, (), source, array.nbytes, self.mesh))

    def weight(self, weight: Weight, layout: Layout) -> Price:
        """Price of holding a weight that several operators use, and of updating it."""
        nbytes = weight.nbytes / self.mesh.num_pieces(layout)
        return Price(self._update_us(nbytes), memory_bytes=self._stored_bytes(nbytes))

    def fetch(self, operator: Operator, cut: Layout, layout: Layout) -> Price:
        """Price of bringing a shared weight from its layout to a cut, and its gradient back."""
        target = self._positions(operator, cut, "weight")
        nbytes = operator.weight_bytes
        there = transfer(layout, (), target, nbytes, self.mesh)
        return Price(collectives=there + transfer(target, (), layout, nbytes, self.mesh))

    def us(self, price: Price) -> float:
        """Microseconds of a price: gradients by the share that the backward pass doesn't hide."""
        alone_us = (
            price.compute_us
            + sum(map(self._collective_us, price.collectives))
            + self.rates.exposed_share * sum(map(self._gradient_us, price.gradients))
        )
        return alone_us * self.rates.slowdown(self.mesh.devices)

    def bytes_by_kind(self, prices: Iterable[Price]) -> dict[str, float]:
        """Bytes in collectives, by the kind that the device runs."""
        total: defaultdict[str, float] = defaultdict(float)
        for price in prices:
            for collective in (*price.collectives, *price.gradients):
                total[self._kind(collective)] += collective.nbytes
        return dict(sorted(total.items()))

    def _kind(self, collective: Collective) -> CollectiveKind:
        scattered = collective.kind == "reduce_scatter" and not self.rates.scatters_sums
        return "all_reduce" if scattered else collective.kind

    def _collective_us(self, collective: Collective) -> float:
        group = self._group(collective.axes)
        return self.rates.collective_us(self._kind(collective), collective.nbytes, group)

    def _gradient_us(self, gradient: Collective) -> float:
        """The share of a gradient in one all-reduce of all gradients together."""
        axes = gradient.axes
        if axes not in self._shares:
            total = max(self.blocks.parameter_bytes, 1)
            us = self.rates.collective_us("all_reduce", total, self._group(axes))
            self._shares[axes] = us / total
        return gradient.nbytes * self._shares[axes]

    def _group(self, axes: tuple[int, ...]) -> DeviceGroup:
        stride = 1 if 1 in axes else self.mesh.model
        return DeviceGroup(self.mesh.size_of(axes), stride)

    def _piece(self, amount: float, extent: Extent, layout: Layout) -> float:
        return amount / pieces(layout, self.mesh, *extent.groups)

    def _stored_bytes(self, nbytes: float) -> float:
        return nbytes * (COPIES + self.state_ratio)

    def _update_us(self, nbytes: float) -> float:
        """Time of an update: it reads the gradient, and reads and writes parameter and state."""
        return self.rates.compute_us(0, nbytes * (3 + 2 * self.state_ratio))

    def _positions(self, operator: Operator, cut: Layout, which: str) -> Layout:
        """The layout of an operator's operand, weight or result under a cut."""
        return tuple(None if dim is None else getattr(operator.dims[dim], which) for dim in cut)

    def _axes_without(self, operator: Operator, cut: Layout, which: str) -> tuple[int, ...]:
        """Axes that cut a dimension which an operator's operand, weight or result doesn't have."""
        layout = self._positions(operator, cut, which)
        return tuple(a for a, dim in enumerate(cut) if dim is not None and layout[a] is None)
