"""The outlook of a run, printed before its first step: its end, its memory, its first checkpoint.

The time of a step is the one that the choice of sinks or the last runs with the same step
have measured (record/kept_times.py). Without either, and for a long run, a few steps of the run's
program are timed on a separate state, for about a hundredth of the run. If training turns out to be
slower or faster than the outlook, a line corrects it once. A run whose operations promised a short
one, but whose steps are slow, says its end after its first steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.resolved_settings import list_event_periods
from pipeline.core.files.value_text import format_duration, format_moment
from pipeline.core.host.limits import find_usable_bytes
from pipeline.core.host.platforms import get_platform
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.callback import Evaluation, Monitor
from pipeline.engine.history import History
from pipeline.engine.schedule import Event, is_due, list_multiples
from pipeline.stages.record.kept_times import KeptTimes, keep_times, locate_times, read_times
from pipeline.stages.runner.context import CompiledRun
from pipeline.training.state import TrainState, count_bytes
from pipeline.training.telemetry import Telemetry

if TYPE_CHECKING:
    from pipeline.stages.autosink.sink_plan import SinkPlan

SHOWN_S = 1.0
"""Runs of at least about a second have an outlook."""
LONG_S = 600.0
"""Runs of at least this many seconds show memory, checkpoints, and what would be shorter."""
FLOPS = 1e11
"""Floating-point operations a second, of which few processors have more, in a guess of whether a
run is long enough for an outlook."""
TRIAL_SHARE = 0.01
"""Share of a run for timing a few steps, within `LEAST_TRIAL_S` and `MOST_TRIAL_S`."""
STATE_SHARE = 0.1
"""Largest share of the usable memory that a second state may take."""
LEAST_TRIAL_S = 0.05
MOST_TRIAL_S = 10.0
SHORT_STEP_S = 0.5
"""Time of a first dispatch up to which a second one is timed in any run."""
NUM_ROUNDS = 3
"""Rounds of timed steps. The fastest counts, as other work slows steps."""
CLOSING_S = 0.5
"""Seconds from the last evaluation to the end of a run."""
FORWARD_SHARE = 1 / 3
"""Share of the forward pass in a step's work, of which an evaluation consists."""
EVALUATION_COMPILE_SHARE = 0.25
"""Time of compiling an evaluation, as a share of compiling the step."""
CHECKED_SHARE = 0.4
"""Share of the run after which the outlook is compared with the time of the steps, at most
`CHECKED_S`. The first half of that time doesn't count: imports of monitors slow its steps."""
CHECKED_S = 5.0
UNKNOWN_S = 1.0
"""Seconds of steps after which a run without an outlook gets one."""
CORRECTED_S = 2.0
"""Remaining time from which on it is worth a correction."""
TOLERANCE = 0.25
"""Relative difference of a step's time up to which the outlook isn't corrected."""


@dataclass(frozen=True)
class Outlook:
    """The expected times of the rest of a run."""

    steps: int
    step_s: float
    evaluations: int = 0
    evaluation_s: float = 0.0
    further_s: float = CLOSING_S
    """Seconds besides steps and evaluations."""

    @property
    def evaluations_s(self) -> float:
        return self.evaluations * self.evaluation_s

    @property
    def seconds(self) -> float:
        """Seconds until the end of the run."""
        return self.steps * self.step_s + self.evaluations_s + self.further_s

    def describe(self, now: datetime) -> str:
        """Return the time of a step, the time that the run takes, and the time of its end."""
        return (
            f"about {_format_step(self.step_s)} a step, {format_duration(self.seconds)} in all; "
            f"ends at about {format_moment(self.seconds, now)}"
        )


def open_outlook(run: CompiledRun, sink: SinkPlan, first: int) -> OutlookMonitor:
    """Print the outlook of a run that continues from boundary `first`; return its monitor.

    A run with a deadline, which has said when it ends, and a profiled run have no outlook. Raises
    KeyboardInterrupt if a signal stops the timing of steps.
    """
    context = run.context
    recipe = context.recipe
    is_profiled = recipe.profile.mode != "off"
    if not context.ranks.is_first or recipe.train.planned_for is not None or is_profiled:
        return OutlookMonitor(context.reporter, None, None)
    path = locate_times(recipe, run.backend.describe()["device"])
    kept = read_times(path)
    step_s = _find_step_s(run, sink, kept, first)
    outlook = None if step_s is None else make_outlook(run, step_s, kept, first)
    if outlook is not None and outlook.seconds >= SHOWN_S:
        for line in list_lines(run, outlook, first):
            context.reporter.print_stage("outlook", line)
    remake = None if outlook else partial(make_outlook, run, kept=kept, first=first)
    return OutlookMonitor(context.reporter, outlook, path, remake)


def make_outlook(run: CompiledRun, step_s: float, kept: KeptTimes, first: int) -> Outlook:
    """Return the outlook of a run after boundary `first`, whose steps take `step_s` seconds."""
    recipe = run.context.recipe
    schedule = run.built.run_schedule
    periods = list_event_periods(recipe, schedule.steps_per_epoch)[Event.EVALUATE]
    evaluations = count_multiples(periods, first, schedule.total)
    if "eval" in recipe.stages and not is_due(schedule.total, periods):
        evaluations += 1
    evaluation_s = kept.evaluation_s
    if evaluation_s is None:
        batches = run.dataset.eval_order.steps_per_epoch * run.dataset.eval_order.batch_size
        evaluation_s = FORWARD_SHARE * step_s * batches / recipe.train.batch_size
        evaluation_s *= 2 if recipe.eval.on_train else 1
    further_s = CLOSING_S + (_find_later_compile_s(run, kept) if evaluations else 0.0)
    return Outlook(schedule.total - first, step_s, evaluations, evaluation_s, further_s)


def count_multiples(periods: Sequence[int], first: int, total: int) -> int:
    """Return how many steps after boundary `first`, up to `total`, are multiples of a period; of
    two periods, steps that are multiples of both count once."""
    different = set(periods)
    count = sum(len(list_multiples(period, first, total)) for period in different)
    return count - (len(list_multiples(lcm(*different), first, total)) if len(different) > 1 else 0)


def _find_later_compile_s(run: CompiledRun, kept: KeptTimes) -> float:
    """Return the seconds of compiling the evaluation, if it is compiled once training has begun."""
    compile_s = {program.name: program.compile_s for program in run.executable.report.programs}
    if "evaluation" in compile_s or not compile_s:
        return 0.0
    guess_s = EVALUATION_COMPILE_SHARE * compile_s.get("training step", 0.0)
    return kept.compile_s.get("evaluation", guess_s)


def _find_step_s(run: CompiledRun, sink: SinkPlan, kept: KeptTimes, first: int) -> float | None:
    """Return the seconds of a step; None for a short run, or if its steps can't be timed."""
    if sink.choice is not None:
        return sink.choice.step_ms / 1e3
    num_steps = run.built.run_schedule.total - first
    if kept.step_s is not None:
        # The last run may have shared the machine with others, so a long run times steps anew.
        is_worth_timing = num_steps * kept.step_s >= LONG_S and num_steps * TRIAL_SHARE >= 1
    else:
        flops = {program.name: program.flops for program in run.executable.report.programs}
        step_flops = flops.get("training step")
        is_short = step_flops is not None and num_steps * step_flops / FLOPS < SHOWN_S / 2
        is_worth_timing = num_steps >= 1 and not is_short
    if not is_worth_timing or not _can_time_steps(run):
        return kept.step_s
    with run.context.reporter.clock("timing a step"):
        return time_steps(run, sink, first)


def _can_time_steps(run: CompiledRun) -> bool:
    """Return whether a second state may train: on the host, in one process, and
    if memory isn't short."""
    context = run.context
    recipe = context.recipe
    is_alone = context.ranks.size == 1
    is_host = get_platform(run.backend.device.platform).is_host
    is_graph = recipe.train.mode == "graph"
    if not (is_alone and is_host and is_graph) or run.backend.placement.mesh is not None:
        return False
    has_memory = count_bytes(run.built.state) < STATE_SHARE * find_usable_bytes()
    return has_memory and recipe.train.memory is None


def time_steps(run: CompiledRun, sink: SinkPlan, first: int) -> float:
    """Time a few steps after boundary `first` on a separate state; return the seconds of a step.

    They use the first window of batches, which the run then finds ready.
    """
    executable = run.executable
    stop = min(executable.loader.get_window(first).stop, run.built.run_schedule.total)
    state = executable.init()

    def time_next(begin: int, end: int) -> float:
        nonlocal state
        began_at = time.perf_counter()
        state, telemetry = executable.run(state, begin, end, sink.mechanism)
        return (time.perf_counter() - began_at) / max(1, len(telemetry))

    step_s = time_next(first, first + 1)
    begin = first + 1
    if step_s < SHORT_STEP_S and begin < stop:
        # The first dispatch allocates memory, which takes longer than a short step.
        step_s = min(step_s, time_next(begin, begin + 1))
        begin += 1
    run_s = step_s * (run.built.run_schedule.total - first)
    budget_s = min(max(TRIAL_SHARE * run_s, LEAST_TRIAL_S), MOST_TRIAL_S)
    num_steps = max(1, int(budget_s / step_s / NUM_ROUNDS))
    num_rounds = 0 if TRIAL_SHARE * run_s < step_s else NUM_ROUNDS
    deadline = time.perf_counter() + budget_s
    for start in range(begin, stop - num_steps + 1, num_steps)[:num_rounds]:
        if time.perf_counter() < deadline:
            step_s = min(step_s, time_next(start, start + num_steps))
    return step_s


def list_lines(run: CompiledRun, outlook: Outlook, first: int) -> Iterator[str]:
    """Yield the lines of an outlook: one for a short run."""
    now = datetime.now()
    yield outlook.describe(now)
    if outlook.seconds >= LONG_S:
        from pipeline.stages.runner.long_outlook import list_long_lines

        yield from list_long_lines(run, outlook, first)


def _format_step(step_s: float) -> str:
    return f"{1e3 * step_s:.3g} ms" if step_s < 1 else f"{step_s:.3g} s"


@dataclass
class OutlookMonitor(Monitor):
    """Corrects the outlook once if steps take another time, and keeps the times of the run."""

    reporter: Reporter
    outlook: Outlook | None
    path: Path | None
    """File of the times; None to keep none."""
    remake: Callable[[float], Outlook] | None = None
    """Returns an outlook by the seconds of a step, for a run that began without one; None for
    neither outlook nor correction."""
    first_steps: int = 0
    """Steps of the first dispatch."""
    steps: int = 0
    """Steps since then."""
    seconds: float = 0.0
    early: tuple[int, float] = (0, 0.0)
    """Part of `steps` and `seconds` that doesn't count."""
    is_checked: bool = False
    _evaluations_s: list[float] = field(default_factory=list)

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Compare the time of the steps so far with the outlook, once there are enough of them;
        a run without one gets it now.

        The first dispatch doesn't count, as it is slower.
        """
        if not self.first_steps:
            self.first_steps = len(telemetry)
            return
        self.steps += len(telemetry)
        self.seconds += seconds
        if self.is_checked or (self.outlook is None and self.remake is None):
            return
        due_s = min(CHECKED_SHARE * self.outlook.seconds, CHECKED_S) if self.outlook else UNKNOWN_S
        if self.outlook and self.seconds < due_s / 2:
            self.early = (self.steps, self.seconds)
        elif self.seconds >= due_s:
            self.is_checked = True
            steps, early_s = self.early
            self._print_correction((self.seconds - early_s) / (self.steps - steps))

    def _print_correction(self, step_s: float) -> None:
        """Print the end of a run whose steps take `step_s` seconds, unless it is as expected."""
        outlook, comment = self.outlook, ""
        if outlook is None and self.remake is not None:
            outlook = self.remake(step_s)
        assert outlook is not None
        ratio = step_s / outlook.step_s
        if self.outlook is not None:
            if abs(ratio - 1) <= TOLERANCE:
                return
            comment = f"steps are {'slower' if ratio > 1 else 'faster'} than expected: "
        steps = outlook.steps - self.first_steps - self.steps
        left = replace(
            outlook, steps=steps, step_s=step_s, evaluation_s=ratio * outlook.evaluation_s
        )
        if left.seconds >= CORRECTED_S:
            self.reporter.print_stage("outlook", f"{comment}{left.describe(datetime.now())}")

    def time_evaluations(
        self, evaluate: Callable[[TrainState], Evaluation | None]
    ) -> Callable[[TrainState], Evaluation | None]:
        """Return the function, which then notes how long it takes."""

        def evaluate_and_time(state: TrainState) -> Evaluation | None:
            began_at = time.perf_counter()
            evaluation = evaluate(state)
            if evaluation is not None:
                self._evaluations_s.append(time.perf_counter() - began_at)
            return evaluation

        return evaluate_and_time

    def keep(self, history: History) -> None:
        """Keep the times of the run. The first evaluation may have been compiled, so the shortest
        counts."""
        steps_s = () if history.step_ms is None else (history.step_ms / 1e3,)
        keep_times(self.path, KeptTimes(steps_s, min(self._evaluations_s, default=None)))
