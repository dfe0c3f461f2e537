"""The outlook of a run, printed before its first step: its end, its memory, its first checkpoint.

The time of a step is the one that the choice of sinks or the last run with the same step
has measured (record/kept_times.py). Without either, and for a long run, a few steps of the run's
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
from math import lcm, prod
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from pipeline.config.run_length import LENGTH_UNITS, check_deadline, list_event_periods
from pipeline.core.files.value_text import format_bytes, format_duration, format_moment
from pipeline.core.host.limits import find_usable_bytes
from pipeline.core.host.platforms import get_platform
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.events import Evaluation, Monitor
from pipeline.engine.history import History
from pipeline.engine.schedule import Event, is_due
from pipeline.stages.record.kept_times import KeptTimes, keep_times, locate_times, read_times
from pipeline.stages.runner.context import CompiledRun
from pipeline.training.state import TrainState
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
CHECKED_SHARE = 0.02
"""Share of the run after which the outlook is compared with the time of the steps, within
`LEAST_CHECKED_S` and `MOST_CHECKED_S`."""
LEAST_CHECKED_S = 1.0
MOST_CHECKED_S = 5.0
CORRECTED_S = 2.0
"""Remaining time from which on it is worth a correction."""
EARLY_S = 60.0
"""Time to the first line with a loss from which on a shorter sink is proposed; the
proposal's is the same."""
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
    count = sum(len(_list_multiples(period, first, total)) for period in different)
    return count - (
        len(_list_multiples(lcm(*different), first, total)) if len(different) > 1 else 0
    )


def _list_multiples(period: int, first: int, total: int) -> range:
    """Return the multiples of a period after boundary `first`, up to `total`."""
    return range((first // period + 1) * period, total + 1, period)


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
    has_memory = count_state_bytes(run) < STATE_SHARE * find_usable_bytes()
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
    if outlook.seconds < LONG_S:
        return
    yield from describe_first_loss(run, outlook)
    yield from describe_memory(run)
    if "checkpoint" in run.context.recipe.stages:
        yield describe_checkpoints(run, outlook, first)
    for change in list_shorter_runs(run, outlook):
        yield f"shorter: {change}"


def describe_first_loss(run: CompiledRun, outlook: Outlook) -> Iterator[str]:
    """Yield when the first line with a loss is due, unless that is soon, and the key that makes it
    earlier."""
    recipe = run.context.recipe
    sink_steps = run.built.run_schedule.sink_steps or 1
    # A line is due at an end of a sink, and not more often than every `loss_every` steps.
    due_step = -(-recipe.monitor.loss_every // sink_steps) * sink_steps
    due_s = min(due_step, outlook.steps) * outlook.step_s
    if due_s < EARLY_S or not due_step:
        return
    early_steps = max(1, int(EARLY_S / outlook.step_s))
    keys = {"train.sink_size": sink_steps, "monitor.loss_every": recipe.monitor.loss_every}
    cure = " ".join(f"{key}={early_steps}" for key, steps in keys.items() if steps > early_steps)
    text = f"the first line with a loss after {format_duration(due_s)}"
    # Sinks that are counted are the length of the run.
    if cure and recipe.train.sink_epochs is None:
        every = format_duration(early_steps * outlook.step_s)
        text += f"; {cure} prints one every {every}, and changes the speed alone"
    yield text


def describe_memory(run: CompiledRun) -> Iterator[str]:
    """Yield the memory that training takes, if the program runs on this machine's processors."""
    programs = [item for item in run.executable.report.programs if item.figures is None]
    if not programs or not get_platform(run.backend.device.platform).is_host:
        return
    temporary_bytes = max(program.temporary_bytes for program in programs)
    needed_bytes = count_state_bytes(run) + temporary_bytes + run.executable.loader.device_bytes
    usable_bytes = find_usable_bytes()
    verdict = "fits" if needed_bytes <= usable_bytes else "may not fit"
    available = f"{format_bytes(usable_bytes)} are available"
    yield f"{verdict} into memory: takes {format_bytes(needed_bytes)}, {available}"


def count_state_bytes(run: CompiledRun) -> int:
    """Return the bytes of the weights, the optimizer's state and everything else in a state."""
    leaves = jax.tree.leaves(run.built.state)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def describe_checkpoints(run: CompiledRun, outlook: Outlook, first: int) -> str:
    """Return when the next checkpoint is due, and how much work is lost at most."""
    recipe = run.context.recipe
    schedule = run.built.run_schedule
    periods = list_event_periods(recipe, schedule.steps_per_epoch)[Event.CHECKPOINT]
    nexts = [_list_multiples(period, first, schedule.total) for period in periods]
    next_s = [(steps[0] - first) * outlook.step_s for steps in nexts if steps]
    period_s = recipe.checkpoint.save_seconds
    longest_s = min([period_s, *(period * outlook.step_s for period in periods)])
    return (
        f"first checkpoint after {format_duration(min([period_s, *next_s]))}; a crash loses at "
        f"most {format_duration(longest_s)} of work"
    )


def list_shorter_runs(run: CompiledRun, outlook: Outlook) -> list[str]:
    """Return changes of a recipe that make a run shorter, each with its gain, at most three."""
    recipe = run.context.recipe
    changes = []
    gain = _count_enlarged(run)
    if gain is not None:
        changes.append(gain)
    share = outlook.evaluations_s / outlook.seconds
    every_epochs = recipe.eval.every_epochs
    if share > 0.05 and every_epochs is not None and outlook.evaluations > 1:
        saved = format_duration(0.9 * outlook.evaluations_s)
        changes.append(f"eval.every_epochs={10 * every_epochs} saves {saved}")
    hour_steps = int(3600 / outlook.step_s)
    if outlook.seconds > 2 * 3600 and hour_steps and _can_have_deadline(run):
        epochs = hour_steps / run.built.run_schedule.steps_per_epoch
        changes.append(
            f"train.minutes=60 trains what fits into an hour, {hour_steps:,} steps or "
            f"{epochs:,.2f} epochs"
        )
    if recipe.train.precision == "O0":
        changes.append("train.precision=bf16, whose gain `python -m pipeline forecast` predicts")
    return changes[:3]


def _can_have_deadline(run: CompiledRun) -> bool:
    """Return whether `train.minutes` may be the length of the run."""
    recipe = run.context.recipe
    train = recipe.train.model_copy(update={**dict.fromkeys(LENGTH_UNITS), "minutes": 60.0})
    is_valid = not list(check_deadline(recipe.model_copy(update={"train": train})))
    return is_valid and run.context.ranks.size == 1


def _count_enlarged(run: CompiledRun) -> str | None:
    """Return a text about map ops that enlarge images; None without any."""
    raw_image = run.dataset.raw_image
    if raw_image is None or run.dataset.inputs.image is None:
        return None
    raw = raw_image.shape[:2]
    shape = run.dataset.inputs.shape[:2]
    ratio = prod(shape) / max(1, prod(raw))
    if ratio < 2:
        return None
    size = "x".join(map(str, raw))
    return (
        f"images at their {size}, without the resize to {'x'.join(map(str, shape))}, have "
        f"{ratio:.0f} times fewer pixels"
    )


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
        due_s = CHECKED_SHARE * self.outlook.seconds if self.outlook is not None else 0.0
        if self.seconds < min(max(LEAST_CHECKED_S, due_s), MOST_CHECKED_S):
            return
        self.is_checked = True
        self._print_correction(self.seconds / self.steps)

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
        step_ms = history.step_ms
        step_s = None if step_ms is None else step_ms / 1e3
        keep_times(self.path, KeptTimes(step_s, min(self._evaluations_s, default=None)))
