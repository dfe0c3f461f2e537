"""A table of the plans that a search compared, for `explain`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.backends.planner.parallel_plan import ParallelPlan, axes_text
from pipeline.backends.planner.search import GIB, SearchedPlans

MOST_RULES = 12
MIB = 2**20


def plan_table(found: SearchedPlans) -> str:
    """The plan, its price and memory, the runners-up, and what it cuts, as lines of text."""
    return "\n".join(_lines(found))


def _lines(found: SearchedPlans) -> Iterator[str]:
    best = found.best
    bound = "" if found.memory_bytes == float("inf") else f" of {found.memory_bytes / GIB:.2f}"
    yield (
        f"MODELLED, not measured: {found.name} on {found.devices} devices, {found.blocks} blocks "
        f"searched in {found.seconds:.1f} s"
    )
    yield f"  plan       mesh {best.mesh} (data x model), {best.strategy}"
    speed_up = found.one_device.step_ms / best.step_ms
    yield f"  step       {best.step_ms:.3g} ms, {speed_up:.2f}x one device"
    yield f"  memory     {best.memory_bytes / GIB:.2f}{bound} GiB a device"
    yield f"  collectives {moved_text(best)}"
    yield f"  {'mesh':>10} {'ms':>10} {'GiB':>8} {'MiB moved':>10}  plan"
    for plan, mark in _rows(found):
        moved = sum(plan.collective_bytes.values()) / MIB
        yield (
            f"  {plan.mesh!s:>10} {plan.step_ms:>10.3f} {plan.memory_bytes / GIB:>8.2f} "
            f"{moved:>10.1f}  {plan.strategy}{mark}"
        )
    rules = [(rule, "specs") for rule in best.specs]
    rules += [(rule, "constraints") for rule in best.constraints]
    for rule, key in rules[:MOST_RULES]:
        yield f"  {key:<11} {rule.pattern} {axes_text(rule.axes)}"
    if len(rules) > MOST_RULES:
        yield f"  ... and {len(rules) - MOST_RULES} more rules"


def _rows(found: SearchedPlans) -> Iterator[tuple[ParallelPlan, str]]:
    yield found.best, "  <- chosen"
    for plan in found.runners_up:
        yield plan, ""
    data = found.data_parallel
    if data is not None and data not in (found.best, *found.runners_up):
        yield data, "" if data.memory_bytes <= found.memory_bytes else "  does not fit"
    if found.devices > 1:
        yield found.one_device, ""


def moved_text(plan: ParallelPlan) -> str:
    """The bytes of a plan's collectives by kind."""
    listed = [
        f"{kind.replace('_', '-')} {nbytes / MIB:.1f} MiB"
        for kind, nbytes in plan.collective_bytes.items()
    ]
    return ", ".join(listed) or "none"
