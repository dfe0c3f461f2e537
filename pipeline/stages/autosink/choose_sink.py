"""Choice of a run's sinks for `train.sink_size=auto`: the fastest, measured or modelled."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

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
from pipeline.checkpoint.host_state import HostState, SinkState
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_event_periods
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
from pipeline.stages.autosink.sink_plan import SinkPlan
from pipeline.stages.runner.context import CompiledRun
from pipeline.stages.runner.run_feature import RunFeature

BUDGET_SHARE = 0.05
"""Share of a run's time for measuring, within `LEAST_BUDGET_S` and `MOST_BUDGET_S`."""
LEAST_BUDGET_S = 0.6
MOST_BUDGET_S = 3.0
MOST_STEPS_SHARE = 0.1
"""Nothing is measured if that takes at least more than this share of the run's number of steps."""

SINK_KEY = "sink"
"""Key of a checkpoint's host state, for sinks that were measured or modelled."""


def choose_sink(
    recipe: Recipe,
    run_schedule: RunSchedule,
    executable: Executable,
    backend: Backend,
    estimate: Estimate | None,
    reporter: Reporter,
) -> SinkPlan:
    """Return the fastest sinks of a recipe with `train.sink_size=auto`.

    `estimate` is None unless the device is emulated. Raises KeyboardInterrupt if a signal stops a
    measurement.
    """
    mechanisms = list_mechanisms(recipe.train.mechanism, executable)
    if estimate is not None and estimate.choice is not None:
        # The size is best for the emulated device, the mechanism for the host that runs the steps.
        choice = estimate.choice
        mechanism = _choose_mechanism(mechanisms, backend, sink=choice.size is not None)
        plan = SinkPlan(choice.size, mechanism, f"modelled for {estimate.device}: {choice.reason}")
        return _report_plan(plan, reporter)
    bounds = make_bounds(recipe, run_schedule, executable)
    is_terminal = reporter.console.is_terminal
    with reporter.clock("measuring sinks"):
        try:
            with TimedRuns(recipe, run_schedule, executable, is_terminal=is_terminal) as trials:
                choice = _measure_choice(bounds, mechanisms, trials)
            plan = SinkPlan(choice.size, choice.mechanism, choice.reason, choice)
        except RunError as error:
            # The run itself may still succeed: timed steps aren't a part of it.
            reason = f"not measured: a step that was run only to time it failed: {error}"
            plan = SinkPlan(None, "none", reason)
    return _report_plan(plan, reporter)


def _choose_mechanism(
    mechanisms: tuple[SinkMechanism, ...], backend: Backend, *, sink: bool
) -> Mechanism:
    """Return the only mechanism that is permitted, or the device's preferred one."""
    requested = mechanisms[0] if len(mechanisms) == 1 else "auto"
    return backend.choose_mechanism(requested, sink=sink)[0]


def resume_sink(saved: SinkState, reporter: Reporter) -> SinkPlan:
    """Return the sinks of a resumed run, which were chosen when it began."""
    plan = SinkPlan(saved.size, saved.mechanism, "as chosen when the run began")
    return _report_plan(plan, reporter)


def _report_plan(plan: SinkPlan, reporter: Reporter) -> SinkPlan:
    """Report chosen sinks, and return them with a `host_entry`."""
    reporter.print_stage("sink", f"{plan}; {plan.reason}")
    return replace(plan, host_entry={SINK_KEY: {"size": plan.size, "mechanism": plan.mechanism}})


def _measure_choice(
    bounds: Bounds, mechanisms: tuple[SinkMechanism, ...], trials: TimedRuns
) -> SinkChoice:
    """Return the fastest sinks, measured within a share of the run's time and steps."""
    single_ms = time_single_step(trials)
    num_steps = count_least_steps(mechanisms)
    reason = explain_one_step_sinks(single_ms, bounds)
    if reason is None and num_steps > MOST_STEPS_SHARE * bounds.total:
        reason = f"not measured: that takes {num_steps} steps, and the run has {bounds.total:,}"
    if reason is not None:
        return choose_no_sink(single_ms, reason)
    run_s = bounds.total * single_ms / 1e3
    budget_s = np.clip(BUDGET_SHARE * run_s, LEAST_BUDGET_S, MOST_BUDGET_S)
    costs, _ = measure(trials, single_ms, mechanisms, float(budget_s))
    return choose(costs, bounds)


def explain_one_step_sinks(single_ms: float, bounds: Bounds) -> str | None:
    """Return why no sink could have more than one step; None if it could."""
    longest, bound = bounds.find_longest(Cost("loop", 0.0, single_ms))
    return f"a sink would have one step, since {bound}" if longest == 1 else None


def list_mechanisms(
    mechanism: SinkMechanism | Literal["auto"], executable: Executable
) -> tuple[SinkMechanism, ...]:
    """Return the mechanisms that recipe and programs permit, the preferred mechanism first."""
    if executable.report.single_steps:
        return ("soft",)
    return ("loop", "soft") if mechanism == "auto" else (mechanism,)


def make_bounds(
    recipe: Recipe, run_schedule: RunSchedule, executable: Executable | None = None
) -> Bounds:
    """Return the limits of a dispatch; without an executable, no window of batches limits it."""
    total = run_schedule.total
    window_steps = total if executable is None else executable.loader.get_window(0).max_steps
    events = list_event_periods(recipe, run_schedule.steps_per_epoch)
    periods = (*events[Event.EVALUATE], *events[Event.CHECKPOINT], *events[Event.COLLECT])
    return Bounds(total, periods, window_steps, recipe.train.dispatch_seconds)


def make_modelled_costs(price: SinkPrice) -> Costs:
    """Return the costs that fit the modelled times of a step in sinks of 1 and `LONGEST` steps."""
    loop = Cost.fit("loop", price(1), LONGEST * price(LONGEST), LONGEST)
    return Costs(price(None), (loop,), 0.0)


class SinkSearch(RunFeature):
    """The sinks of a run with `train.sink_size = auto`."""

    def choose_sinks(
        self, run: CompiledRun, estimate: Estimate | None, host: HostState
    ) -> SinkPlan:
        """Return the fastest sinks. With several processes, a sink is an epoch."""
        context = run.context
        schedule = run.built.run_schedule
        if context.ranks.size > 1:
            mechanisms = list_mechanisms(context.recipe.train.mechanism, run.executable)
            mechanism = _choose_mechanism(mechanisms, run.backend, sink=True)
            reason = "not measured by several processes"
            plan = SinkPlan(schedule.steps_per_epoch, mechanism, reason)
            # An epoch is the same in a resumed run, so checkpoints need no entry.
            context.reporter.print_stage("sink", f"{plan}; {reason}")
            return plan
        if host.sink is not None:
            return resume_sink(host.sink, context.reporter)
        return choose_sink(
            context.recipe, schedule, run.executable, run.backend, estimate, context.reporter
        )
