"""A change that a verdict would advise, tried for a few steps before it is."""

from __future__ import annotations

import statistics
from dataclasses import replace
from io import StringIO

from rich.console import Console

from pipeline.autosink.timed_runs import TimedRuns, Variant
from pipeline.backends.base import Backend, Executable
from pipeline.config.compose import check_tree
from pipeline.config.recipe import Recipe
from pipeline.data.dataset import Dataset
from pipeline.errors import PipelineError
from pipeline.observe.reporter import Reporter
from pipeline.profiler.step_profile import PredictedChange, StepVerdict
from pipeline.profiler.verdict import Evidence
from pipeline.sink.schedule import RunSchedule
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.lower import lower

LONGEST_COMPILE_S, LONGEST_STEP_MS = 30.0, 200.0
ROUNDS, TRIAL_S = 5, 0.15
HELPS = 1.03
"""Gain below which a change is none."""


def try_change(
    verdict: StepVerdict,
    recipe: Recipe,
    dataset: Dataset,
    backend: Backend,
    executable: Executable,
    evidence: Evidence,
) -> StepVerdict:
    """Return the verdict with a change of precision that was tried here, or that does not help.

    Nothing is tried in a run that goes on, nor where compiling or a step takes long.
    """
    level = {"converting": "O0", "memory-bound": "bf16", "compute-bound": "bf16"}
    wanted = level.get(verdict.name)
    takes_long = (
        executable.report.compile_s > LONGEST_COMPILE_S or evidence.step_ms > LONGEST_STEP_MS
    )
    fixed = recipe.train.to_float or recipe.parallel.mode != "none"
    same = wanted == evidence.precision
    if wanted is None or recipe.profile.mode != "only" or takes_long or fixed or same:
        return verdict
    tree = recipe.model_dump(mode="json")
    tree["train"]["precision"] = wanted
    try:
        other = check_tree(tree)
        with Reporter(console=Console(file=StringIO())) as silent:
            built = lower(other, dataset, build(other, dataset, silent), backend, None, silent)
            changed = compile_programs(other, dataset, built, backend, silent)
        gain = _gain(recipe, other, built.run_schedule, executable, changed)
    except PipelineError:
        # It can't be had on this device, or its steps are not finite.
        return verdict
    what = f"train.precision={wanted}"
    change = PredictedChange(what, evidence.step_ms / gain, gain, "tried here")
    if gain < HELPS:
        return replace(verdict, change=None, tried=(change,))
    return replace(verdict, change=change)


def _gain(
    recipe: Recipe,
    other: Recipe,
    schedule: RunSchedule,
    before: Executable,
    after: Executable,
) -> float:
    """Return the median ratio of a step before and after, in alternating trials."""
    ratios = []
    with (
        TimedRuns(recipe, schedule, before, terminal=False) as old,
        TimedRuns(other, schedule, after, terminal=False) as new,
    ):
        single = max(1e-3, old.time(Variant(None, "none"), 4).step_ms)
        sink = max(1, int(1000 * TRIAL_S / 3 / single))
        variant = Variant(sink, "loop")
        for _ in range(ROUNDS):
            one = old.time(variant, 3 * sink).step_ms
            ratios.append(one / new.time(variant, 3 * sink).step_ms)
    return statistics.median(ratios)
