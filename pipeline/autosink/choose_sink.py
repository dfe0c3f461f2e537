"""Sinking: settle the sinks of a run, where the recipe says auto by what dispatches cost here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.autosink.dispatch_costs import LONGEST, first_look, least_steps, measure
from pipeline.autosink.timed_runs import TimedRuns
from pipeline.backends.base import Backend, Estimate, Executable, Mechanism, SinkPrice
from pipeline.config.recipe import Recipe
from pipeline.errors import RunError
from pipeline.observe.reporter import Reporter
from pipeline.sink.choice import Bounds, Choice, Cost, Costs, SinkMechanism, choose, no_sink
from pipeline.sink.schedule import Event, RunSchedule
from pipeline.stages.checkpoint.host_state import KeptSink
from pipeline.stages.train.event_periods import event_periods

BUDGET_SHARE, BUDGET_S = 0.05, (0.6, 3.0)
"""A run measures for about this share of its time, within these bounds."""
MOST_SHARE = 0.1
"""No more than this share of a run's steps is taken once more for the clock alone."""

KEPT = "sink"
"""Where a checkpoint keeps sinks that were chosen."""


@dataclass(frozen=True)
class Sinkable:
    """A run that is ready to train; `estimate` on an emulated device."""

    recipe: Recipe
    run_schedule: RunSchedule
    executable: Executable
    backend: Backend
    estimate: Estimate | None


@dataclass(frozen=True)
class SinkPlan:
    """The sinks of a run, and what was expected of them where they were measured."""

    size: int | None
    mechanism: Mechanism
    why: str
    choice: Choice | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint keeps, so that a resumed run goes on with sinks that were chosen."""

    def __str__(self) -> str:
        return "off" if self.size is None else f"{self.size:,} steps, {self.mechanism}"

    def summary(self) -> dict[str, Any]:
        """What summary.json holds under `sink`."""
        told: dict[str, Any] = {"size": self.size, "mechanism": self.mechanism, "why": self.why}
        if self.choice is not None:
            choice = self.choice
            told["predicted"] = {
                "off_ms": choice.off_ms,
                "step_ms": choice.step_ms,
                "gain": choice.gain,
            }
        return told


def chooses_sink(recipe: Recipe) -> bool:
    """Does the recipe leave the size of a sink to be chosen?"""
    return recipe.train.sink and recipe.train.sink_size == "auto"


def choose_sink(run: Sinkable, before: KeptSink | None, reporter: Reporter) -> SinkPlan:
    """The sinks of a run: the recipe's, or those that are found to be best where that is auto.

    `before` is what a checkpoint kept: a resumed run goes on with the sinks that it had. Raises
    KeyboardInterrupt when a signal stops a measurement.
    """
    train = run.recipe.train
    if not chooses_sink(run.recipe):
        mechanism, why = run.backend.mechanism(train.mechanism, sink=train.sink)
        return SinkPlan(run.run_schedule.sink_steps, mechanism, why)
    if before is not None:
        settled = SinkPlan(before.size, before.mechanism, "as chosen when the run began")
    elif run.estimate is not None and run.estimate.choice is not None:
        settled = _modelled(run, run.estimate.device, run.estimate.choice)
    else:
        with reporter.clock("measuring sinks"):
            settled = _measured(run, terminal=reporter.console.is_terminal)
    reporter.stage("sink", f"{settled}; {settled.why}")
    return replace(settled, kept={KEPT: {"size": settled.size, "mechanism": settled.mechanism}})


def _modelled(run: Sinkable, device: str, choice: Choice) -> SinkPlan:
    """The sinks that are best on the emulated device, run by whatever runs in its place."""
    asked, sink = run.recipe.train.mechanism, choice.size is not None
    mechanism, _ = run.backend.mechanism(asked, sink=sink)
    return SinkPlan(choice.size, mechanism, f"modelled for {device}: {choice.why}")


def _measured(run: Sinkable, *, terminal: bool) -> SinkPlan:
    """The best sinks, looked for in a share of the time that the run will take."""
    try:
        with TimedRuns(run.recipe, run.run_schedule, run.executable, terminal=terminal) as trials:
            choice = _choose(run, trials)
    except RunError as error:
        return SinkPlan(None, "none", f"not measured, steps that were only timed failed: {error}")
    return SinkPlan(choice.size, choice.mechanism, choice.why, choice)


def _choose(run: Sinkable, trials: TimedRuns) -> Choice:
    bounds, mechanisms = measured_bounds(run), mechanisms_of(run.recipe)
    single_ms, total = first_look(trials), run.run_schedule.total
    least = least_steps(mechanisms)
    reason = unmeasurable(single_ms, bounds)
    if reason is None and least > MOST_SHARE * total:
        reason = f"not measured: that takes {least} steps, and the run has {total:,}"
    if reason is not None:
        return no_sink(single_ms, reason)
    budget_s = np.clip(BUDGET_SHARE * total * single_ms / 1e3, *BUDGET_S)
    return choose(measure(trials, single_ms, mechanisms, float(budget_s)).costs, bounds)


def unmeasurable(single_ms: float, bounds: Bounds) -> str | None:
    """Why there is nothing to measure, where no dispatch would hold more than one step."""
    longest, bound = bounds.longest(Cost("loop", 0.0, single_ms))
    return f"a sink would hold one step: {bound}" if longest == 1 else None


def mechanisms_of(recipe: Recipe) -> tuple[SinkMechanism, ...]:
    """Those that the recipe leaves to choose from, the one to prefer first."""
    asked = recipe.train.mechanism
    return ("loop", "soft") if asked == "auto" else (asked,)


def measured_bounds(run: Sinkable) -> Bounds:
    """What ends a dispatch here besides the end of its sink."""
    window = run.executable.feed.window(0)
    return bounds_of(run.recipe, run.run_schedule, window.stop - window.start)


def modelled_bounds(recipe: Recipe, run_schedule: RunSchedule) -> Bounds:
    """What ends a dispatch on an emulated device, where a queue of any length feeds it."""
    return bounds_of(recipe, run_schedule, run_schedule.total)


def bounds_of(recipe: Recipe, run_schedule: RunSchedule, window_steps: int) -> Bounds:
    """What ends a dispatch besides the end of its sink, `window_steps` batches being at hand."""
    every = event_periods(recipe, run_schedule.steps_per_pass)
    saves = every[Event.CHECKPOINT] if "checkpoint" in recipe.stages else ()
    periods = (*every[Event.EVALUATE], *saves)
    return Bounds(run_schedule.total, periods, window_steps, recipe.train.dispatch_seconds)


def modelled_chooser(recipe: Recipe, run_schedule: RunSchedule) -> Callable[[SinkPrice], Choice]:
    """What chooses the sinks on an emulated device."""
    bounds = modelled_bounds(recipe, run_schedule)
    return lambda price: choose(modelled_costs(price), bounds)


def modelled_costs(price: SinkPrice) -> Costs:
    """The costs behind modelled times of a step."""
    loop = Cost.between("loop", price(1), LONGEST * price(LONGEST), LONGEST)
    return Costs(price(None), (loop,), 0.0)
