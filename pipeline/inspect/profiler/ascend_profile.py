"""Profile of a step that is modelled for an Ascend, with the figures of a measured profile."""

from __future__ import annotations

from collections import Counter, defaultdict

from pipeline.backends.ascend.estimate import AscendEstimate
from pipeline.backends.ascend.report.priced_step import name_layer
from pipeline.backends.ascend.report.report import Report
from pipeline.backends.base import Estimate
from pipeline.config.recipe import Recipe
from pipeline.inspect.profiler.iterations import IterationTimes
from pipeline.inspect.profiler.step_profile import LayerTime, OperatorTime, PhaseTime, StepProfile


def modelled_profile(recipe: Recipe, estimate: Estimate | None) -> StepProfile | None:
    """Return the profile of an estimated step; None if the estimate isn't for an Ascend."""
    if not isinstance(estimate, AscendEstimate):
        return None
    report = estimate.report
    step_ms = report.step_ms
    trace = report.iteration
    times_us = (trace.iteration_us, trace.interval_us, trace.fp_bp_us, trace.tail_us)
    operators = _list_operators(report)
    idle_ms = step_ms - sum(report.phases.values())
    phases = {**report.phases, "between operators": max(0.0, idle_ms)}
    return StepProfile(
        source="modelled",
        device=estimate.device,
        recipe=recipe.name,
        batch_size=recipe.train.batch_size,
        steps=0,
        step_ms=step_ms,
        traced_step_ms=None,
        phases=tuple(PhaseTime(name, ms, ms / step_ms, ms) for name, ms in phases.items()),
        layers=_list_layers(report),
        operators=operators if recipe.profile.task_trace else (),
        iteration=IterationTimes(*(us / 1e3 for us in times_us)),
        memory={limit.pool: int(limit.used_bytes) for limit in report.memory.pools.values()},
        shares={str(kind): share for kind, share in report.shares.items()},
    )


def _list_operators(report: Report) -> tuple[OperatorTime, ...]:
    """Return the times of tasks by type, engine, layer and phase, the longest first."""
    spent: dict[tuple[str, str, str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str, str, str]] = Counter()
    for task in report.tasks:
        layer = name_layer(task)
        key = task.type, task.engine, "" if layer.startswith("(") else layer, task.phase
        spent[key] += task.us / 1e3
        calls[key] += task.repeat
    rows = [
        OperatorTime(
            name=task_type,
            kind=engine,
            layer=layer,
            phase=phase,
            calls=calls[task_type, engine, layer, phase],
            ms=ms,
            share=ms / report.step_ms,
            busy_ms=ms,
        )
        for (task_type, engine, layer, phase), ms in spent.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.name, row.layer)))


def _list_layers(report: Report) -> tuple[LayerTime, ...]:
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for task in report.tasks:
        spent[name_layer(task)][task.phase] += task.us / 1e3
    rows = []
    for layer, phase_ms in spent.items():
        ms = sum(phase_ms.values())
        share = ms / report.step_ms
        rows.append(LayerTime(layer, ms, share, phase_ms["forward"], phase_ms["backward"]))
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.layer)))
