"""Search for the fastest plan on all meshes of some devices, and prices of fixed shardings."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.backends.planner.blocks import LayerOutput, LossToPlan, OperatorUse, StepBlocks
from pipeline.backends.planner.decisions import (
    COPIES,
    Decisions,
    ShardingPrices,
    is_data_parallel_sharding,
    locate_array,
)
from pipeline.backends.planner.dimension_groups import (
    Layout,
    Mesh,
    convert_region_layout,
    list_meshes,
)
from pipeline.backends.planner.elimination import Eliminator, find_fastest
from pipeline.backends.planner.find_blocks import find_blocks
from pipeline.backends.planner.parallel_plan import (
    Axes,
    ParallelPlan,
    ShardingRule,
    find_largest_region,
    find_sample_axes,
    format_axes,
    make_plan,
    to_axes,
)
from pipeline.backends.rates import GroupError, Rates
from pipeline.core.errors import RecipeError
from pipeline.models.layers.path_patterns import covers
from pipeline.training.parallel.parallel_spec import AXES

POINTS = 64
"""Largest number of points of time and memory for a state of a table, if memory is short."""
MAX_RUNNERS_UP = 4
MIN_GAIN = 0.02
"""Data parallelism, the simpler plan, is preferred if other plans gain at most this share of its
time. Errors of prices are larger."""
MAX_RULES = 12
"""Largest number of rules in the table of plans."""
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class SearchedPlans:
    """The fastest plan that fits, and the plans that it was compared with."""

    name: str
    devices: int
    best: ParallelPlan
    runners_up: tuple[ParallelPlan, ...]
    """The next plans, the fastest first."""
    data_parallel: ParallelPlan | None
    """The best data-parallel plan, even if too large; None if devices don't divide the batch."""
    one_device: ParallelPlan
    """The step on one device, even if it doesn't fit."""
    memory_bytes: float
    """Memory of a device, which a plan must fit in."""
    blocks: int
    """Number of regions and operators."""
    seconds: float


def search(
    step: LossToPlan, devices: int, rates: Rates, memory_bytes: float = math.inf
) -> SearchedPlans:
    """Search for the fastest plan of a step on a number of devices.

    Parameters, their gradients, the optimizer's state and the activations that the backward pass
    reads must fit in `memory_bytes` on each device. No device is needed for the search. Equal
    arguments lead to equal plans. Raises RecipeError if no plan fits or uses all devices.
    """
    blocks = find_blocks(step)
    start_s = time.perf_counter()
    state_ratio = step.state_bytes / max(blocks.parameter_bytes, 1)
    plans: list[ParallelPlan] = []
    least_bytes = math.inf
    for mesh in list_meshes(devices):
        try:
            decisions = Decisions(ShardingPrices(blocks, mesh, rates, state_ratio))
            plan = find_best_plan(decisions, memory_bytes)
        except GroupError:  # The links don't support this mesh.
            continue
        if plan is not None:
            plans.append(plan)
        elif not plans:  # The error names the least memory that a plan needs.
            choice = Eliminator(slope=math.inf).find_best(decisions.list_factors(), decisions.sizes)
            least_bytes = min(least_bytes, math.inf if choice is None else choice.memory)
    one_device = find_data_parallel_plan(blocks, 1, rates, state_ratio)
    assert one_device is not None
    if not plans:
        problem = _explain_nothing_fits(
            blocks, one_device, devices, state_ratio, memory_bytes, least_bytes
        )
        raise RecipeError([problem])
    data_parallel = find_data_parallel_plan(blocks, devices, rates, state_ratio)
    fits = data_parallel is not None and data_parallel.memory_bytes <= memory_bytes
    ranked = _rank_plans(plans, data_parallel if fits else None)
    return SearchedPlans(
        name=step.name,
        devices=devices,
        best=ranked[0],
        runners_up=tuple(ranked[1 : 1 + MAX_RUNNERS_UP]),
        data_parallel=data_parallel,
        one_device=one_device,
        memory_bytes=memory_bytes,
        blocks=len(blocks.regions) + len(blocks.operators),
        seconds=time.perf_counter() - start_s,
    )


def _rank_plans(
    plans: list[ParallelPlan], data_parallel: ParallelPlan | None
) -> list[ParallelPlan]:
    """Return distinct plans, the fastest first; `data_parallel` before all if they gain little."""
    distinct: list[ParallelPlan] = []
    for plan in (*plans, data_parallel):
        if plan is not None and not any(_is_equal(plan, other) for other in distinct):
            distinct.append(plan)
    ranked = sorted(distinct, key=lambda plan: plan.step_ms)
    if data_parallel is not None and data_parallel.step_ms <= (1 + MIN_GAIN) * ranked[0].step_ms:
        ranked = [data_parallel, *(plan for plan in ranked if not plan.is_data_parallel)]
    return ranked


def find_best_plan(
    decisions: Decisions, memory_bytes: float = math.inf, points: int = POINTS
) -> ParallelPlan | None:
    """Return the fastest plan of some decisions that fits; None if none fits."""
    if not all(decisions.states):
        return None
    choice = find_fastest(decisions.list_factors(), decisions.sizes, memory_bytes, points)
    if choice is None:
        return None
    prices = decisions.prices
    kinds = prices.sum_bytes_by_kind(decisions.list_prices(choice.states))
    layouts = decisions.to_plan_layouts(choice.states)
    return make_plan(decisions.blocks, prices.mesh, layouts, choice.time, choice.memory, kinds)


def _is_equal(plan: ParallelPlan, other: ParallelPlan) -> bool:
    """Return whether two plans have equal times, memory and bytes of collectives."""
    moved_bytes = sum(plan.collective_bytes.values())
    other_moved_bytes = sum(other.collective_bytes.values())
    return (
        math.isclose(plan.step_ms, other.step_ms, rel_tol=1e-6)
        and math.isclose(plan.memory_bytes, other.memory_bytes, rel_tol=1e-6)
        and math.isclose(moved_bytes, other_moved_bytes, rel_tol=1e-6)
    )


def find_data_parallel_plan(
    blocks: StepBlocks, devices: int, rates: Rates, state_ratio: float
) -> ParallelPlan | None:
    """Return the best data-parallel plan; None if the devices don't divide the batch."""
    prices = ShardingPrices(blocks, Mesh(devices, 1), rates, state_ratio)
    decisions = Decisions(prices) if devices == 1 else Decisions(prices, is_data_parallel_sharding)
    plan = find_best_plan(decisions)
    return plan if plan is not None and (plan.is_data_parallel or devices == 1) else None


def _explain_nothing_fits(
    blocks: StepBlocks,
    one_device: ParallelPlan,
    devices: int,
    state_ratio: float,
    limit_bytes: float,
    least_bytes: float,
) -> str:
    """Return why no plan fits. `least_bytes` is infinite if the links support no mesh."""
    if math.isinf(least_bytes):
        return f"parallel.devices = {devices}: the links support no mesh of these devices"
    largest = blocks.largest
    stored = blocks.parameter_bytes * (COPIES + state_ratio)
    return (
        f"parallel.devices = {devices}: no plan fits in {limit_bytes / GIB:.2f} GiB a device; the "
        f"leanest needs {least_bytes / GIB:.2f} GiB. On one device parameters, gradients and the "
        f"optimizer's state take {stored / GIB:.2f} GiB, activations "
        f"{(one_device.memory_bytes - stored) / GIB:.2f} GiB; the largest tensor is "
        f"{largest.path} {list(largest.shape)}, {largest.nbytes / GIB:.2f} GiB. Use more devices, "
        "or a smaller batch or model"
    )


def format_plan_table(plans: SearchedPlans) -> str:
    """Return the plan, its price and memory, the runners-up and its rules as lines of text."""
    best = plans.best
    speed_up = plans.one_device.step_ms / best.step_ms
    bound = "" if plans.memory_bytes == float("inf") else f" of {plans.memory_bytes / GIB:.2f}"
    rows = [(best, "  <- chosen"), *((plan, "") for plan in plans.runners_up)]
    data_parallel = plans.data_parallel
    if data_parallel is not None and data_parallel not in (best, *plans.runners_up):
        fits = data_parallel.memory_bytes <= plans.memory_bytes
        rows.append((data_parallel, "" if fits else "  does not fit"))
    if plans.devices > 1:
        rows.append((plans.one_device, ""))
    keys = ["specs"] * len(best.specs) + ["constraints"] * len(best.constraints)
    rules = [
        f"  {key:<11} {rule.pattern} {format_axes(rule.axes)}"
        for key, rule in zip(keys, (*best.specs, *best.constraints), strict=True)
    ]
    if len(rules) > MAX_RULES:
        rules[MAX_RULES:] = [f"  ... and {len(rules) - MAX_RULES} more rules"]
    lines = [
        f"MODELLED, not measured: {plans.name} on {plans.devices} devices, {plans.blocks} blocks "
        f"searched in {plans.seconds:.1f} s",
        f"  plan       mesh {best.mesh} (data x model), {best.strategy}",
        f"  step       {best.step_ms:.3g} ms, {speed_up:.2f}x one device",
        f"  memory     {best.memory_bytes / GIB:.2f}{bound} GiB a device",
        f"  collectives {format_moved(best)}",
        f"  {'mesh':>10} {'ms':>10} {'GiB':>8} {'MiB moved':>10}  plan",
        *(
            f"  {plan.mesh!s:>10} {plan.step_ms:>10.3f} {plan.memory_bytes / GIB:>8.2f} "
            f"{sum(plan.collective_bytes.values()) / MIB:>10.1f}  {plan.strategy}{mark}"
            for plan, mark in rows
        ),
        *rules,
    ]
    return "\n".join(lines)


def format_moved(plan: ParallelPlan) -> str:
    """Return the bytes of a plan's collectives by kind, as text."""
    kinds = plan.collective_bytes.items()
    texts = [f"{kind.replace('_', '-')} {nbytes / MIB:.1f} MiB" for kind, nbytes in kinds]
    return ", ".join(texts) or "none"


def price_shardings(
    step: LossToPlan,
    mesh: Mesh,
    batch: tuple[str, ...],
    specs: tuple[ShardingRule, ...],
    constraints: tuple[ShardingRule, ...],
    rates: Rates,
) -> tuple[ParallelPlan, ParallelPlan | None] | None:
    """Price a step with fixed shardings of the batch, the weights and layers' outputs.

    The layouts of other activations are chosen for the least time. XLA may choose other layouts.
    Biases and scales are sharded like the arrays that they are added to. Returns None if no plan
    has these shardings, else the plan and, for comparison, the plan of data parallelism, which is
    None if the devices don't divide the batch.
    """
    blocks = find_blocks(step)
    state_ratio = step.state_bytes / max(blocks.parameter_bytes, 1)
    prices = ShardingPrices(blocks, mesh, rates, state_ratio)
    # Second, with the batch gathered at the network's start, which constraints may cause.
    for batch_axes in (batch, ()):
        fixed = _FixedShardings(blocks, mesh, batch_axes, specs, constraints)
        decisions = Decisions(prices, fixed.keeps_sharding, fixed.keeps_region, fixed.keeps_weight)
        plan = find_best_plan(decisions)
        if plan is not None:
            return plan, find_data_parallel_plan(blocks, mesh.devices, rates, state_ratio)
    return None


@dataclass(frozen=True)
class _FixedShardings:
    """Filters of the layouts that agree with a recipe's shardings."""

    blocks: StepBlocks
    mesh: Mesh
    batch: tuple[str, ...]
    specs: tuple[ShardingRule, ...]
    constraints: tuple[ShardingRule, ...]

    def keeps_sharding(self, use: OperatorUse, sharding: Layout) -> bool:
        """Return whether a sharding shards the batch, and its weight has the axes of the specs.

        A layer whose output has a constraint may leave the batch unsharded. A weight with several
        uses may have other axes.
        """
        weight = self.blocks.weights[use.weight]
        samples = use.operator.samples
        layout = locate_array(use.operator, sharding, "weight")
        layer = weight.path.rpartition("/")[0]
        is_constrained = any(fnmatchcase(layer, rule.pattern) for rule in self.constraints)
        if samples is not None and not is_constrained:
            (batch_axes,) = self._keep_used_axes((self.batch,))
            for name, dim, weight_dim in zip(AXES, sharding, layout, strict=True):
                # An axis of the batch must shard the samples or, instead, the weight.
                if name in batch_axes and dim != samples and weight_dim is None:
                    return False
        return weight.uses > 1 or self.keeps_weight(use.weight, layout)

    def keeps_weight(self, number: int, layout: Layout) -> bool:
        """Return whether a layout of a weight has the axes of the last rule that covers it."""
        weight = self.blocks.weights[number]
        path = tuple(weight.path.split("/"))
        rank = len(weight.shape)
        axes: Axes = ((),) * rank
        for rule in self.specs:
            if covers(rule.pattern, path):
                axes = rule.axes
        return to_axes(layout, rank) == self._keep_used_axes(axes)

    def keeps_region(self, number: int, layout: Layout) -> bool:
        """Return whether a layout of a region agrees with the batch's axes and the constraints.

        As in a plan, the batch is sharded like the samples of the largest region.
        """
        region = self.blocks.regions[number]
        if number == find_largest_region(self.blocks) and region.samples is not None:
            (used,) = self._keep_used_axes((self.batch,))
            if find_sample_axes(region, layout) != used:
                return False
        for output in self.blocks.outputs:
            axes = self._find_constraint(output) if output.region == number else None
            if axes is None:
                continue
            output_layout = convert_region_layout(layout, output.groups)
            if to_axes(output_layout, len(output.groups)) != axes:
                return False
        return True

    def _find_constraint(self, output: LayerOutput) -> Axes | None:
        """Return the axes of the last constraint on a layer's output; None if none exists."""
        fitting = [
            rule.axes
            for rule in self.constraints
            if fnmatchcase(output.layer, rule.pattern) and len(rule.axes) == len(output.groups)
        ]
        return self._keep_used_axes(fitting[-1]) if fitting else None

    def _keep_used_axes(self, axes: Axes) -> Axes:
        """Return the axes of more than one device, in the order of the mesh."""
        sizes = dict(zip(AXES, self.mesh.sizes, strict=True))
        return tuple(
            tuple(axis for axis in AXES if axis in names and sizes[axis] > 1) for names in axes
        )
