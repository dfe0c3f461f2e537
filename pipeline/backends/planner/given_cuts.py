"""Price of cuts that a recipe gives, as `parallel.mode=semi_auto` has them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.backends.planner.blocks import LayerOutput, OperatorUse, StepBlocks
from pipeline.backends.planner.cut_prices import CutPrices
from pipeline.backends.planner.decisions import Decisions
from pipeline.backends.planner.find_blocks import find_blocks
from pipeline.backends.planner.layouts import Layout, Mesh, seen_by
from pipeline.backends.planner.parallel_plan import (
    Axes,
    CutRule,
    ParallelPlan,
    axes_of,
    axes_of_samples,
    largest_region,
)
from pipeline.backends.planner.search import best_plan, data_parallel_plan
from pipeline.backends.planner.traced_loss import LossToPlan
from pipeline.backends.rates import Rates
from pipeline.models.layers.path_patterns import covers
from pipeline.training.parallel.parallel_spec import AXES


@dataclass(frozen=True)
class PricedCuts:
    """The fastest plan that has the given cuts, and data parallelism beside it."""

    plan: ParallelPlan
    data_parallel: ParallelPlan | None
    """None if the batch does not divide by the devices."""


def price_cuts(
    step: LossToPlan,
    mesh: Mesh,
    batch: tuple[str, ...],
    specs: tuple[CutRule, ...],
    constraints: tuple[CutRule, ...],
    rates: Rates,
) -> PricedCuts | None:
    """Price a step whose batch is cut along some axes, and weights and layers' outputs by rules.

    What is left open, as the layouts of other activations, is chosen as it costs least;
    XLA may choose otherwise. Biases and scales are cut as what they are added to. Returns None if
    the planner knows no computation with these cuts.
    """
    blocks = find_blocks(step)
    ratio = step.state_bytes / max(blocks.parameter_bytes, 1)
    prices = CutPrices(blocks, mesh, rates, ratio)
    # Constraints may have the network gather the batch at once.
    for cut_along in (batch, ()):
        fixed = _FixedCuts(blocks, mesh, cut_along, specs, constraints)
        decisions = Decisions(prices, fixed.keeps_cut, fixed.keeps_region, fixed.keeps_weight)
        if (plan := best_plan(decisions)) is not None:
            return PricedCuts(plan, data_parallel_plan(blocks, mesh.devices, rates, ratio))
    return None


@dataclass(frozen=True)
class _FixedCuts:
    """Which layouts agree with a recipe's cuts."""

    blocks: StepBlocks
    mesh: Mesh
    batch: tuple[str, ...]
    specs: tuple[CutRule, ...]
    constraints: tuple[CutRule, ...]

    def keeps_cut(self, use: OperatorUse, cut: Layout) -> bool:
        """Whether a cut of an operator finds its weight as it lies, and cuts the batch.

        Where a constraint says how its layer's output is cut, that is what counts. A weight with
        several uses is brought to each.
        """
        weight = self.blocks.weights[use.weight]
        samples = use.operator.samples
        layout = tuple(None if d is None else use.operator.dims[d].weight for d in cut)
        layer = weight.path.rpartition("/")[0]
        constrained = any(fnmatchcase(layer, rule.pattern) for rule in self.constraints)
        cuts_batch = all(
            name not in self.batch or size == 1 or dim == samples or weight_dim is not None
            for name, size, dim, weight_dim in zip(AXES, self.mesh.sizes, cut, layout, strict=True)
        )
        if not (samples is None or constrained or cuts_batch):
            return False
        return weight.uses > 1 or self.keeps_weight(use.weight, layout)

    def keeps_weight(self, number: int, layout: Layout) -> bool:
        """Whether a layout of a weight is as the last rule that covers it says."""
        weight = self.blocks.weights[number]
        path = tuple(weight.path.split("/"))
        rank = len(weight.shape)
        axes: Axes = ((),) * rank
        for rule in self.specs:
            if covers(rule.pattern, path):
                axes = rule.axes
        return axes_of(layout, rank) == self._used_axes(axes)

    def keeps_region(self, number: int, layout: Layout) -> bool:
        """Whether a layout of a region has the batch cut, and its layers' outputs as asked for.

        The batch is cut as the samples of the largest region, as in a plan.
        """
        region = self.blocks.regions[number]
        if number == largest_region(self.blocks) and region.samples is not None:
            (used,) = self._used_axes((self.batch,))
            if axes_of_samples(region, layout) != used:
                return False
        return all(
            axes_of(seen_by(layout, output.groups), len(output.groups)) == axes
            for output in self.blocks.outputs
            if output.region == number and (axes := self._constraint_of(output)) is not None
        )

    def _constraint_of(self, output: LayerOutput) -> Axes | None:
        fitting = [
            rule.axes
            for rule in self.constraints
            if fnmatchcase(output.layer, rule.pattern) and len(rule.axes) == len(output.groups)
        ]
        return self._used_axes(fitting[-1]) if fitting else None

    def _used_axes(self, axes: Axes) -> Axes:
        """Axes of more than one device, in the order of the mesh; others cut nothing."""
        sizes = dict(zip(AXES, self.mesh.sizes, strict=True))
        return tuple(
            tuple(axis for axis in AXES if axis in names and sizes[axis] > 1) for names in axes
        )
