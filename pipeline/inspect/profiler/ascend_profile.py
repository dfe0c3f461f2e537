"""Profile of a step that is modelled for an Ascend, in the form of a measured profile."""

from __future__ import annotations

from collections import Counter, defaultdict

from pipeline.backends.ascend.estimate import AscendEstimate
from pipeline.backends.ascend.report.priced_step import name_layer
from pipeline.backends.ascend.report.report import Report
from pipeline.backends.base import Estimate
from pipeline.config.recipe import Recipe
from pipeline.inspect.profiler.step_profile import LayerTime, OperatorTime, PhaseTime, StepProfile
from pipeline.inspect.profiler.trace import IterationTimes


def modelled_profile(recipe: Recipe, estimate: Estimate | None) -> StepProfile | None:
    """Return the profile of an estimated step; None if the estimate isn't for an Ascend."""
    if not isinstance(estimate, AscendEstimate):
        return None
    report = estimate.report
    step_ms = report.step_ms
    iteration = report.iteration
    operators = _list_operators(report)
    times = IterationTimes(
        iteration=iteration.iteration_us / 1e3,
        data_tail=iteration.interval_us / 1e3,
        fp_bp=iteration.fp_bp_us / 1e3,
        update_tail=iteration.tail_us / 1e3,
    )
    idle_ms = step_ms - sum(report.phases.values())
    phase_ms = {**report.phases, "between operators": max(0.0, idle_ms)}
    return StepProfile(
        source="modelled",
        device=estimate.device,
        recipe=recipe.name,
        batch_size=recipe.train.batch_size,
        steps=0,
        step_ms=step_ms,
        traced_step_ms=None,
        phases=tuple(
            PhaseTime(phase, ms=ms, share=ms / step_ms, busy_ms=ms)
            for phase, ms in phase_ms.items()
        ),
        layers=_list_layers(report),
        operators=operators if recipe.profile.task_trace else (),
        iteration=times if recipe.profile.training_trace else None,
        memory={name: int(pool.used_bytes) for name, pool in report.memory.pools.items()},
        shares={str(kind): share for kind, share in report.shares.items()},
    )


def _list_operators(report: Report) -> tuple[OperatorTime, ...]:
    """Return the times of tasks by type, engine, layer and phase, the longest first."""
    sum_ms: dict[tuple[str, str, str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str, str, str]] = Counter()
    for cost in report.tasks:
        task = cost.task
        layer = name_layer(task)
        # A name in parentheses is of tasks outside all layers.
        if layer.startswith("("):
            layer = ""
        key = (task.type, task.engine, layer, task.phase)
        sum_ms[key] += cost.us / 1e3
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
        for (task_type, engine, layer, phase), ms in sum_ms.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.name, row.layer)))


def _list_layers(report: Report) -> tuple[LayerTime, ...]:
    """Return the times of layers, the longest first."""
    layer_phase_ms: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for cost in report.tasks:
        layer_phase_ms[name_layer(cost.task)][cost.task.phase] += cost.us / 1e3
    rows = []
    for layer, phase_ms in layer_phase_ms.items():
        ms = sum(phase_ms.values())
        share = ms / report.step_ms
        rows.append(LayerTime(layer, ms, share, phase_ms["forward"], phase_ms["backward"]))
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.layer)))
