"""Choice of the sinks of a run: the recipe's, or with auto the fastest, measured or modelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pipeline.backends.base import Backend, Estimate, Executable, Mechanism, SinkPrice
from pipeline.backends.sink_choice import (
    Bounds,
    Cost,
    Costs,
    SinkChoice,
    SinkMechanism,
    choose,
    choose_no_sink,
)
from pipeline.checkpoint.host_state import SinkState
from pipeline.config.recipe import Recipe, TrainSpec
from pipeline.config.run_length import list_event_periods
from pipeline.core.errors import RunError
from pipeline.core.reporter import Reporter
from pipeline.engine.schedule import Event, RunSchedule
from pipeline.stages.autosink.dispatch_costs import (
    LONGEST,
    TimedRuns,
    count_least_steps,
    measure,
    time_single_step,
)

BUDGET_SHARE = 0.05
"""Share of a run's time for measuring, within `LEAST_BUDGET_S` and `MOST_BUDGET_S`."""
LEAST_BUDGET_S = 0.6
MOST_BUDGET_S = 3.0
MOST_SHARE = 0.1
"""Nothing is measured if the shortest measurement takes more than this share of a run's steps."""

SINGLE_STEPS_REASON = "one asynchronous dispatch per step: its convolutions are slow in a loop"

SINK_KEY = "sink"
"""Key in a checkpoint for sinks that were measured or modelled."""


@dataclass(frozen=True)
class SinkPlan:
    """The sinks of a run, and their predicted times if they were measured."""

    size: int | None
    """Steps of a sink; None without sinks."""
    mechanism: Mechanism
    reason: str
    choice: SinkChoice | None = None
    host_entry: Mapping[str, Any] = field(default_factory=dict)
    """JSON for a checkpoint, so that a resumed run has these sinks; {} for the recipe's sinks."""

    def __str__(self) -> str:
        return "off" if self.size is None else f"{self.size:,} steps, {self.mechanism}"

    def summary(self) -> dict[str, Any]:
        """Return the section `sink` of summary.json."""
        section: dict[str, Any] = {
            "size": self.size,
            "mechanism": self.mechanism,
            "why": self.reason,
        }
        if self.choice is not None:
            names = ("off_ms", "step_ms", "gain")
            section["predicted"] = {name: getattr(self.choice, name) for name in names}
        return section


def chooses_sink(train: TrainSpec) -> bool:
    """Return whether a recipe leaves the choice of its sinks to this module (auto)."""
    return train.sink and train.sink_size == "auto"


def choose_sink(
    recipe: Recipe,
    run_schedule: RunSchedule,
    executable: Executable,
    backend: Backend,
    estimate: Estimate | None,
    reporter: Reporter,
) -> SinkPlan:
    """Choose the sinks of a run: the recipe's, or with auto the fastest.

    An emulated device has an `estimate`. Raises KeyboardInterrupt if a signal stops a measurement.
    """
    train = recipe.train
    if not chooses_sink(train):
        if train.sink and executable.report.single_steps:
            return SinkPlan(run_schedule.sink_steps, "soft", SINGLE_STEPS_REASON)
        mechanism, reason = backend.choose_mechanism(train.mechanism, sink=train.sink)
        return SinkPlan(run_schedule.sink_steps, mechanism, reason)
    mechanisms = list_mechanisms(train.mechanism, executable)
    if estimate is not None and estimate.choice is not None:
        # The size is best for the emulated device, the mechanism for the host that runs the steps.
        choice = estimate.choice
        requested = mechanisms[0] if len(mechanisms) == 1 else "auto"
        mechanism, _ = backend.choose_mechanism(requested, sink=choice.size is not None)
        plan = SinkPlan(choice.size, mechanism, f"modelled for {estimate.device}: {choice.reason}")
        return _report(plan, reporter)
    bounds = make_bounds(recipe, run_schedule, executable)
    is_terminal = reporter.console.is_terminal
    with reporter.clock("measuring sinks"):
        try:
            with TimedRuns(recipe, run_schedule, executable, is_terminal=is_terminal) as trials:
                choice = _measure_choice(bounds, mechanisms, trials)
            plan = SinkPlan(choice.size, choice.mechanism, choice.reason, choice)
        except RunError as error:
            # The run itself may still succeed: timed steps aren't its steps.
            reason = f"not measured: a step that was run only to time it failed: {error}"
            plan = SinkPlan(None, "none", reason)
    return _report(plan, reporter)


def resume_sink(saved: SinkState, reporter: Reporter) -> SinkPlan:
    """Return the sinks that were chosen when a resumed run began, as its checkpoint has them."""
    plan = SinkPlan(saved.size, saved.mechanism, "as chosen when the run began")
    return _report(plan, reporter)


def _report(plan: SinkPlan, reporter: Reporter) -> SinkPlan:
    """Report chosen sinks; return them with `host_entry`."""
    reporter.print_stage("sink", f"{plan}; {plan.reason}")
    return replace(plan, host_entry={SINK_KEY: {"size": plan.size, "mechanism": plan.mechanism}})


def _measure_choice(
    bounds: Bounds, mechanisms: tuple[SinkMechanism, ...], trials: TimedRuns
) -> SinkChoice:
    """Measure which sinks are fastest, within a share of the run's time and steps."""
    single_ms = time_single_step(trials)
    total = bounds.total
    num_steps = count_least_steps(mechanisms)
    reason = explain_one_step_sinks(single_ms, bounds)
    if reason is None and num_steps > MOST_SHARE * total:
        reason = f"not measured: that takes {num_steps} steps, and the run has {total:,}"
    if reason is not None:
        return choose_no_sink(single_ms, reason)
    budget_s = np.clip(BUDGET_SHARE * total * single_ms / 1e3, LEAST_BUDGET_S, MOST_BUDGET_S)
    return choose(measure(trials, single_ms, mechanisms, float(budget_s)).costs, bounds)


def explain_one_step_sinks(single_ms: float, bounds: Bounds) -> str | None:
    """Return why a dispatch would hold only one step; None if it would hold more."""
    longest, bound = bounds.find_longest(Cost("loop", 0.0, single_ms))
    return f"a sink would hold one step: {bound}" if longest == 1 else None


def list_mechanisms(
    mechanism: SinkMechanism | Literal["auto"], executable: Executable
) -> tuple[SinkMechanism, ...]:
    """List the mechanisms that recipe and programs permit, the preferred mechanism first."""
    if executable.report.single_steps:
        return ("soft",)
    return ("loop", "soft") if mechanism == "auto" else (mechanism,)


def make_bounds(
    recipe: Recipe, run_schedule: RunSchedule, executable: Executable | None = None
) -> Bounds:
    """Return the bounds of a dispatch. No window of batches limits it on an emulated device, which
    has no executable."""
    total = run_schedule.total
    window_steps = total if executable is None else executable.loader.get_window(0).max_steps
    events = list_event_periods(recipe, run_schedule.steps_per_epoch)
    saves = events[Event.CHECKPOINT] if "checkpoint" in recipe.stages else ()
    periods = (*events[Event.EVALUATE], *saves, *events[Event.COLLECT])
    return Bounds(total, periods, window_steps, recipe.train.dispatch_seconds)


def make_modelled_costs(price: SinkPrice) -> Costs:
    """Fit costs, without an error, to the modelled times of a step in sinks of 1 and `LONGEST`."""
    loop = Cost.fit("loop", price(1), LONGEST * price(LONGEST), LONGEST)
    return Costs(price(None), (loop,), 0.0)
