"""Choice of a run's sinks: the recipe's, or for `auto` the fastest, measured or modelled; and its
explanation: cost, memory and gain, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pipeline.backends.base import (
    MECHANISM_TEXTS,
    Backend,
    Estimate,
    Executable,
    Mechanism,
    SinkPrice,
)
from pipeline.backends.rates import Communication
from pipeline.backends.sink_choice import (
    SHOWN,
    Bounds,
    Cost,
    Costs,
    SinkChoice,
    SinkMechanism,
    choose,
    choose_no_sink,
    predict_ms,
)
from pipeline.checkpoint.host_state import HostState, SinkState
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_event_periods
from pipeline.core.errors import RunError
from pipeline.core.files.value_text import count_noun, format_bytes
from pipeline.core.reporter import Reporter
from pipeline.engine.schedule import Event, RunSchedule
from pipeline.stages.autosink.dispatch_costs import (
    LONGEST,
    TimedRuns,
    count_least_steps,
    measure,
    time_single_step,
)
from pipeline.stages.autosink.sink_plan import SinkPlan, chooses_sink, make_sink_plan
from pipeline.stages.runner.context import CompiledRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.state import COLUMNS

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
    """Return the sinks of the recipe, or for `auto` the fastest.

    `estimate` is None unless the device is emulated. Raises KeyboardInterrupt if a signal stops a
    measurement.
    """
    train = recipe.train
    if not chooses_sink(train):
        return make_sink_plan(train, run_schedule, executable, backend)
    mechanisms = list_mechanisms(train.mechanism, executable)
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


TELEMETRY_BYTES = 4 * len(COLUMNS)
"""Bytes of telemetry per step: a float32 for each column of its record."""


@dataclass(frozen=True)
class Dispatch:
    """Time that the host takes to dispatch one step without sinks."""

    median_us: float
    p90_us: float


@dataclass(frozen=True)
class Memory:
    """Memory of batches on the device."""

    resident: bool
    """Whether all samples are on the device. A batch is then a list of indices."""
    data_bytes: int
    """Bytes of the samples on the device."""
    batch_bytes: int
    """Bytes of a batch, or of its list of indices."""
    window_steps: int
    """Batches on the device at once; doesn't depend on the sink."""


@dataclass(frozen=True)
class Calendar:
    """The events of a run, in summary."""

    counts: Mapping[str, int]
    """Number of events by name."""
    first: tuple[tuple[int, str], ...]
    """The first boundaries with an event, each with the names of its events."""
    longest: int
    """The most steps between two events."""
    total: int
    """Steps of the run."""


@dataclass(frozen=True)
class Achieved:
    """Measured gain of sinks. Times are lower quartiles over alternating runs."""

    off_ms: float
    """Time of a step without sinks."""
    step_ms: float
    """Time of a step with sinks."""
    rounds: int
    """Number of alternating runs."""
    error: float
    """Relative error of the gain."""

    @property
    def gain(self) -> float:
        """Speed-up over no sinks."""
        return self.off_ms / self.step_ms


@dataclass(frozen=True)
class ExplainedRun:
    """The run that is explained."""

    recipe: str
    device: str
    batch_size: int
    """Samples of a batch, on all devices together."""
    asked: int | None
    """Steps of a sink in the recipe; None for off and auto."""


@dataclass(frozen=True)
class Explanation:
    """The sinks of a run, and why they are these; fields without a measurement are None."""

    run: ExplainedRun
    bounds: Bounds
    calendar: Calendar
    choice: SinkChoice
    costs: Costs | None = None
    dispatch: Dispatch | None = None
    memory: Memory | None = None
    achieved: Achieved | None = None
    modelled: bool = False
    """Whether the times come from the model of an emulated device."""
    track_record: str = ""
    """How far published steps were from modelled ones; "" if the times are measured."""
    time_range: str = ""
    """How long the step takes in tuned code and in other code; "" if the times are measured."""
    communication: Communication | None = None
    """All-reduces between emulated devices; None for a single device."""

    def predictions(self) -> dict[int, float]:
        """Return milliseconds a step by sink size: `SHOWN`, the recipe's size, the chosen size."""
        if self.costs is None:
            return {}
        cost = self.costs.find(self.choice.mechanism)
        sizes = {size for size in (*SHOWN, self.run.asked, self.choice.size) if size}
        return {size: predict_ms(cost, size, self.bounds) for size in sorted(sizes)}

    def to_dict(self) -> dict[str, Any]:
        """Return explain.json. Keys of expected times begin with `modelled_` or `predicted_`."""
        expected = "modelled" if self.modelled else "predicted"
        return {
            **vars(self.run),
            "sink": {"size": self.choice.size, "mechanism": self.choice.mechanism},
            "why": self.choice.reason,
            **({"track_record": self.track_record} if self.track_record else {}),
            **({"time_range": self.time_range} if self.time_range else {}),
            f"{expected}_off_ms": self.choice.off_ms,
            f"{expected}_ms": self.predictions(),
            f"{expected}_gain": self.choice.gain,
            "achieved_gain": self.achieved.gain if self.achieved else None,
            "dispatch_us": vars(self.dispatch) if self.dispatch else None,
            f"{expected}_costs": {
                cost.mechanism: {"dispatch_ms": cost.dispatch_ms, "step_ms": cost.step_ms}
                for cost in (self.costs.sinks if self.costs else ())
            },
            "communication": vars(self.communication) if self.communication else None,
            "memory": vars(self.memory) if self.memory else None,
            "events": {**vars(self.calendar), "first": dict(self.calendar.first)},
            "achieved": vars(self.achieved) if self.achieved else None,
        }

    def __str__(self) -> str:
        run = self.run
        origin = "MODELLED, not measured: " if self.modelled else ""
        head = f"{origin}{run.recipe} on {run.device}, batch {run.batch_size:,}"
        if self.communication is not None:
            head += f" ({run.batch_size // self.communication.devices:,} a device)"
        lines = [f"  {name:<11} {text}" for name, text in self._list_facts()]
        return "\n".join([head, *lines, "", *self._format_table(), *self._format_conclusions()])

    def _list_facts(self) -> Iterator[tuple[str, str]]:
        """Yield a heading and a text for each known part."""
        if self.costs is None:
            yield "step", f"{self.choice.off_ms:.4g} ms without sinks"
        else:
            sinks = self.costs.sinks
            steps = ", ".join(
                f"{cost.step_ms:.4g} ms {MECHANISM_TEXTS[cost.mechanism]}" for cost in sinks
            )
            yield "step", f"{steps}, in a long sink"
            if self.time_range:
                yield "range", self.time_range
            if self.track_record:
                yield "so far", self.track_record
            costs = ", ".join(
                f"{1000 * cost.dispatch_ms:.0f} us {MECHANISM_TEXTS[cost.mechanism]}"
                for cost in sinks
            )
            single = ""
            if self.dispatch is not None:
                single = (
                    f"{self.dispatch.median_us:.0f} us on the host for each step without sinks "
                    f"(90 % are below {self.dispatch.p90_us:.0f} us), "
                )
            yield "to start", f"{single}for each sink {costs}"
        if self.communication is not None:
            yield "all-reduce", str(self.communication)
        if self.memory is not None:
            yield "memory", _format_memory(self.memory, self.choice.size)
        calendar = self.calendar
        counts = [f"{name} {count:,} times" for name, count in calendar.counts.items() if count]
        text = f"{', '.join(counts) or 'none'} in {count_noun(calendar.total, 'step')}"
        yield "events", f"{text}; at most {count_noun(calendar.longest, 'step')} between two"
        if calendar.first:
            yield "", "; ".join(f"step {step:,}: {names}" for step, names in calendar.first)

    def _format_table(self) -> Iterator[str]:
        predicted = self.predictions()
        if not predicted:
            return
        off_ms = self.choice.off_ms
        yield f"  {'sink':<11} {'ms/step':>9}  {'gain':>6}"
        yield f"  {'none':<11} {off_ms:>9.4f}   1.00x{self._format_mark(None)}"
        for size, ms in predicted.items():
            yield f"  {size:<11,} {ms:>9.4f}  {off_ms / ms:>5.2f}x{self._format_mark(size)}"
        yield ""

    def _format_mark(self, size: int | None) -> str:
        marks = ["chosen"] if size == self.choice.size else []
        marks += ["the recipe's"] if size is not None and size == self.run.asked else []
        return f"  <- {', '.join(marks)}" if marks else ""

    def _format_conclusions(self) -> Iterator[str]:
        choice = self.choice
        achieved = self.achieved
        size = "no sinks"
        if choice.size is not None:
            size = f"sinks of {count_noun(choice.size, 'step')} {MECHANISM_TEXTS[choice.mechanism]}"
        yield f"  {'chosen':<11} {size}: {choice.reason}"
        if choice.size is not None:
            error = self.costs.error if self.costs is not None else 0.0
            name = "modelled" if self.modelled else "predicted"
            yield f"  {name:<11} {choice.gain:.3f}x{_format_error(error)}"
        if achieved is not None:
            off_by = 100 * (choice.gain / achieved.gain - 1)
            yield (
                f"  {'achieved':<11} {achieved.gain:.3f}x{_format_error(achieved.error)}: "
                f"{achieved.step_ms:.4g} ms a step, {achieved.off_ms:.4g} without sinks, in "
                f"{achieved.rounds} rounds; the prediction is off by {off_by:+.1f} %"
            )


def _format_error(error: float) -> str:
    return f", give or take {100 * error:.1f} %" if error else ""


def _format_memory(memory: Memory, sink_steps: int | None) -> str:
    batches = count_noun(memory.window_steps, "batch", "batches")
    window_bytes = format_bytes(memory.window_steps * memory.batch_bytes)
    text = f"{batches} of samples, {window_bytes}"
    if memory.resident:
        samples = f"all samples, {format_bytes(memory.data_bytes)}"
        text = f"{samples}, and {batches} as lists of their numbers, {window_bytes}"
    logs = ""
    if sink_steps is not None:
        logged_bytes = format_bytes(sink_steps * TELEMETRY_BYTES)
        logs = f"; logs of a sink take {logged_bytes} more"
    return f"the device holds {text}, whatever the sink{logs}"
