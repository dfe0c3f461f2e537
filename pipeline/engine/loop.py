"""The training loop: it runs the schedule segment by segment, with each event at its exact step.

A signal to stop takes effect between two dispatches of training or of an evaluation. After an
interrupted evaluation, a resumed run begins with the remaining events of that boundary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipeline.checkpoint.host_state import HostState, PendingBoundary, Requests
from pipeline.core.errors import RunError
from pipeline.core.host.memory import HeapTrimmer
from pipeline.engine.callback_calls import change_rates, combine_changes, with_parameters
from pipeline.engine.callbacks.callback import SinkReport
from pipeline.engine.history import History, NonFiniteStepError, Progress, advise
from pipeline.engine.hooks import Hooks
from pipeline.engine.schedule import DispatchSize, Event, RunSchedule, Schedule, Segment
from pipeline.training.telemetry import Telemetry, count_skipped

if TYPE_CHECKING:
    import numpy as np

    from pipeline.backends.base import Executable, Mechanism
    from pipeline.training.component_specs import OptimizerRule, RateRule
    from pipeline.training.state import TrainState

T = TypeVar("T")
LOG = logging.getLogger(__name__)
RESUMED_EVENTS = frozenset({Event.EVALUATE, Event.CHECKPOINT})
"""Events that remain at a boundary whose evaluation was interrupted."""
SHOWING_EVENTS = frozenset({Event.DUMP, Event.COLLECT})
"""Events that only show the state: requests don't take effect at them, and nothing is saved."""


@dataclass(frozen=True)
class Program:
    """A compiled step with its batches, and the learning rates that callbacks may change."""

    executable: Executable
    mechanism: Mechanism = "loop"
    learning_rates: np.ndarray | None = None
    """Table, float32, with a row for each update; None if the rates can't be changed."""
    rate_rules: Sequence[OptimizerRule | RateRule] = ()
    """Rules of the table's columns after the first."""


@dataclass
class SinkClock:
    """Steps and seconds of the current sink so far."""

    seconds: float = 0.0
    steps: int = 0
    last: Telemetry | None = None

    def add(self, telemetry: Telemetry, seconds: float) -> None:
        """Record that the steps of `telemetry` took `seconds`."""
        self.seconds += seconds
        self.steps += len(telemetry)
        self.last = telemetry

    def report(self, step: int) -> SinkReport:
        """Return the report of the sink that ends at boundary `step`, and start a new sink."""
        last = self.last
        assert last is not None
        report = SinkReport(step, last.loss[-1], last.learning_rate[-1], self.seconds, self.steps)
        self.seconds = 0.0
        self.steps = 0
        return report


class Decision(NamedTuple):
    """Decisions by time or signal, which the first of several processes makes for all."""

    max_steps: int
    """The next dispatch has at most this many steps."""
    stop: str | None
    """Text about a signal to stop; None without a signal."""
    prune: str | None
    """Reason to end a run that isn't worth continuing; None if it continues."""
    save: bool
    """Whether a checkpoint is requested, or due by time."""
    evaluate: bool
    """Whether an evaluation is due by time."""


@dataclass(frozen=True)
class TrainingRun:
    """A run between its start and its end: everything that it calls, and its progress."""

    program: Program
    hooks: Hooks
    progress: Progress
    dispatch_size: DispatchSize
    sink: SinkClock = field(default_factory=SinkClock)
    heap: HeapTrimmer = field(default_factory=HeapTrimmer)


def train(
    program: Program,
    state: TrainState,
    schedule: Schedule,
    hooks: Hooks,
    host: HostState,
    history: History,
) -> Generator[SinkReport, None, TrainState]:
    """Train from `history.step` to the end; `host` is the host's part of a checkpoint.

    Yields the report of each sink before its boundary is saved. Updates `history`, and returns the
    state after saving it. Once the last finite state is saved, at which `history` ends, raises
    NonFiniteStepError if `train.on_nan` ends the run, and CallbackError if a failed callback does.
    """
    started_at = time.monotonic()
    progress = Progress.restore(state, host, history)
    progress.saved_at = progress.evaluated_at = started_at
    training = TrainingRun(program, hooks, progress, DispatchSize(schedule.dispatch_seconds))
    begin_run(training, host)
    # The first segment has the events that an earlier process left at this boundary.
    segment_events = RESUMED_EVENTS if progress.pending is not None else frozenset()
    segment = Segment(history.step, history.step, segment_events)

    while True:
        # Step, log, callbacks.
        has_steps = segment.start < segment.stop
        events = run_segment(training, segment, schedule.run) if has_steps else segment.events

        # The end of a sink, its evaluation.
        report = end_sink(training) if Event.SINK_END in events else None
        metrics = evaluate(training) if Event.EVALUATE in events else None

        # Save. Requests are granted first: a resumed run starts after this boundary's events.
        if events - SHOWING_EVENTS and progress.pending is None:
            if report is not None:
                yield report
            grant_requests(training)
            hooks.callbacks.write_scalars()
            if Event.CHECKPOINT in events or history.step in progress.granted.save_at:
                save(training, metrics)
            raise_failure(training)
        if schedule.shows_state(history.step):
            hooks.dump(progress.state, history.step)

        # Stop, or save and continue with the next dispatch.
        is_last = history.step == schedule.run.total
        decision = decide(training, is_last=is_last)
        is_over = hooks.early_stop.is_over or progress.granted.stop or decision.prune
        if is_last or decision.stop or (is_over and (events or not has_steps)):
            break
        if has_steps and decision.save:
            save(training)
            progress.num_answered_saves = hooks.signals.saves
        schedule = meet_deadline(training, schedule)
        granted = progress.granted
        requested = {Event.EVALUATE: granted.evaluate_at, Event.CHECKPOINT: granted.save_at}
        segment = schedule.next_segment(history.step, decision.max_steps, requested)
        if decision.evaluate:
            segment = replace(segment, events=segment.events | {Event.EVALUATE})

    return end_run(training, decision, started_at, is_last=is_last)


def begin_run(training: TrainingRun, host: HostState) -> None:
    """Restore the hooks and notify callbacks of the start; at step 0 also log, collect and save."""
    hooks = training.hooks
    progress = training.progress
    hooks.early_stop.progress = host.early_stop
    hooks.rollbacks.remember(host.rollbacks)
    hooks.callbacks.restore(host.callbacks)
    set_rates(training)
    hooks.callbacks.notify("on_begin", progress.state, progress.history.step)
    raise_failure(training)
    grant_requests(training)
    if progress.history.step == 0:
        hooks.callbacks.write_scalars()
        hooks.collect(progress.state, 0)
        if hooks.rollbacks.needs_start:
            save(training)


def run_segment(
    training: TrainingRun, segment: Segment, run_schedule: RunSchedule
) -> frozenset[Event]:
    """Run the steps of a segment, log them and notify callbacks.

    Returns the events of the boundary; none if a rollback ended the segment before it.
    """
    hooks = training.hooks
    progress = training.progress
    history = progress.history
    telemetry, seconds = dispatch(training.program, segment, progress)
    telemetry = hooks.measure(telemetry, seconds)
    training.dispatch_size.record(len(telemetry), seconds)
    training.heap.trim()
    for monitor in hooks.monitors:
        monitor.on_steps(telemetry, seconds)
    training.sink.add(telemetry, seconds)
    progress.recent.add(telemetry)
    answer_non_finite_step(training, run_schedule, telemetry)
    # After a rollback, the step may be before the boundary.
    events = segment.events if history.step == segment.stop else frozenset()
    hooks.callbacks.notify("on_steps", progress.state, history.step, telemetry)
    if Event.COLLECT in events:
        hooks.collect(progress.state, history.step)
    if events <= SHOWING_EVENTS:  # At other events, `train` raises it after saving.
        raise_failure(training)
    return events


def dispatch(program: Program, segment: Segment, progress: Progress) -> tuple[Telemetry, float]:
    """Run the steps of a segment; return their telemetry and the seconds that they took."""
    history = progress.history
    began_at = time.perf_counter()
    progress.state, telemetry = program.executable.run(
        progress.state, segment.start, segment.stop, program.mechanism
    )
    ended_at = time.perf_counter()
    seconds = ended_at - began_at
    last_step = segment.start + len(telemetry)
    LOG.debug("steps %d to %d in %.6f s", segment.start + 1, last_step, seconds)
    history.add_dispatch(len(telemetry), seconds, ended_at)
    history.step = segment.stop
    history.loss = float(telemetry.loss[-1])
    return telemetry, seconds


def end_sink(training: TrainingRun) -> SinkReport:
    """Report the sink that ends at this boundary to monitors and callbacks."""
    progress = training.progress
    report = training.sink.report(progress.history.step)
    for monitor in training.hooks.monitors:
        monitor.on_sink(report)
    training.hooks.callbacks.notify("on_sink", progress.state, progress.history.step, report)
    return report


def evaluate(training: TrainingRun) -> Mapping[str, float] | None:
    """Evaluate the state and return the metrics; None if a signal to stop interrupted it."""
    hooks = training.hooks
    progress = training.progress
    step = progress.history.step
    # Requests are granted before, since an interrupted evaluation would lose new parameters.
    grant_requests(training)
    evaluation = hooks.evaluate(progress.state)
    training.heap.trim()
    if evaluation is None:
        verdict = hooks.prune(progress.verdict) or progress.verdict
        progress.pending = PendingBoundary(progress.history.loss, verdict)
        return None
    progress.pending = None
    progress.history.evaluated = {step: evaluation}
    progress.evaluated_at = time.monotonic()
    hooks.early_stop.add(evaluation)
    for monitor in hooks.monitors:
        monitor.on_eval(step, evaluation)
    hooks.callbacks.notify("on_eval", progress.state, step, step, evaluation)
    return evaluation.scalars()


def save(training: TrainingRun, metrics: Mapping[str, float] | None = None) -> None:
    """Save the current state with the metrics of its evaluation."""
    training.hooks.saves.save(training.hooks, training.progress, metrics)
    training.progress.saved_at = time.monotonic()


def decide(training: TrainingRun, *, is_last: bool) -> Decision:
    """Return the first process's decision, without pruning at the end and in an evaluation."""
    hooks = training.hooks
    progress = training.progress
    can_prune = not is_last and progress.pending is None
    is_requested = hooks.signals.saves > progress.num_answered_saves
    every_s = hooks.saves.every_seconds
    now = time.monotonic()
    is_late = every_s is not None and now - progress.saved_at >= every_s
    eval_s = hooks.evaluate_seconds
    is_eval_due = eval_s is not None and now - progress.evaluated_at >= eval_s

    def make_decision() -> list[Any]:
        prune = hooks.prune(progress.verdict) if can_prune else None
        return [
            training.dispatch_size.max_steps,
            hooks.signals.stop,
            prune,
            is_requested or is_late,
            is_eval_due,
        ]

    return Decision._make(hooks.agree(make_decision))


def meet_deadline(training: TrainingRun, schedule: Schedule) -> Schedule:
    """Return the schedule with the steps that the deadline allows; report a change.

    Raises OSError if a change can't be recorded; the state is saved before, as by `raise_failure`.
    """
    hooks = training.hooks
    step = training.progress.history.step
    try:
        changed = hooks.deadline.move_end(schedule, step, training.dispatch_size)
    except OSError:
        if hooks.gather is None:
            save(training)
        raise
    if changed.run.total != schedule.run.total:
        for monitor in hooks.monitors:
            monitor.on_length(changed.run.total)
        hooks.callbacks.show_length(changed.run.total)
    return changed


def end_run(
    training: TrainingRun, decision: Decision, started_at: float, *, is_last: bool
) -> TrainState:
    """Record the status and the reason of a run's end, save and notify. Returns the state."""
    hooks = training.hooks
    progress = training.progress
    history = progress.history
    history.left_out = count_skipped(progress.state)
    if progress.pending is not None:
        history.status = "stopped"
        history.reason = decision.stop
    elif hooks.early_stop.is_over:
        history.reason = f"early stop: {hooks.early_stop.reason}"
    elif progress.granted.stop is not None:
        history.reason = f"a callback stopped it: {progress.granted.stop}"
    elif decision.prune:
        history.status = "pruned"
        history.reason = decision.prune
    elif not is_last:
        history.status = "stopped"
        history.reason = decision.stop
    save(training)
    history.train_s = time.monotonic() - started_at
    hooks.callbacks.notify("on_end", progress.state, history.step, history.status)
    if history.status != "stopped":
        # The scalars of a stopped run are in its checkpoint; the resumed run writes them.
        hooks.callbacks.write_scalars()
    raise_failure(training)
    return progress.state


def exhaust(steps: Generator[Any, None, T]) -> T:
    """Run a generator to its end, ignoring what it yields, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def grant_requests(training: TrainingRun) -> None:
    """Put the requests of callbacks into effect, in all processes of the run."""
    hooks = training.hooks
    progress = training.progress
    requests = hooks.callbacks.take_requests(hooks.agree)
    if requests is not None:
        progress.granted = add_requests(progress.granted, requests, progress.history.step)
        if requests.rates:
            set_rates(training)
    parameters = hooks.callbacks.take_parameters()
    if parameters is not None:
        progress.state = training.program.executable.put(
            with_parameters(progress.state, parameters)
        )
        hooks.callbacks.show_state(progress.state)
        progress.history.evaluated = {}


def add_requests(granted: Requests, requests: Requests, step: int) -> Requests:
    """Return all requests at boundary `step`, without evaluations and saves of earlier steps."""
    evaluations = {*granted.evaluate_at, *requests.evaluate_at}
    saves = {*granted.save_at, *requests.save_at}
    return Requests(
        stop=granted.stop or requests.stop,
        rates=combine_changes((*granted.rates, *requests.rates)),
        evaluate_at=tuple(sorted(later for later in evaluations if later > step)),
        save_at=tuple(sorted(later for later in saves if later >= step)),
    )


def set_rates(training: TrainingRun) -> None:
    """Pass the learning rates to callbacks, and to the device if they were changed."""
    program = training.program
    rates = program.learning_rates
    if rates is None:
        return
    changes = training.progress.granted.rates
    training.hooks.callbacks.show_rates(rates, changes)
    if changes:
        program.executable.set_learning_rates(change_rates(rates, changes, program.rate_rules))


def raise_failure(training: TrainingRun) -> None:
    """Save the state and raise the error of a callback, if one has ended the run.

    The state isn't saved if other processes have parts of it: they don't save at this step.
    """
    hooks = training.hooks
    if hooks.callbacks.failure is not None:
        if training.progress.history.step > 0 and hooks.gather is None:
            save(training)
        raise hooks.callbacks.failure


def answer_non_finite_step(
    training: TrainingRun, run_schedule: RunSchedule, telemetry: Telemetry
) -> None:
    """Roll back if `telemetry` has a step that isn't finite and wasn't skipped. If the run can't,
    save the state before that step and raise NonFiniteStepError."""
    step = telemetry.non_finite_step
    if step is None:
        return
    hooks = training.hooks
    progress = training.progress
    history = progress.history
    history.step = step
    problem = ""
    try:
        restored = hooks.rollbacks.go_back(step, progress.state)
        if restored is not None:
            for monitor in hooks.monitors:
                monitor.on_rollback(step, hooks.rollbacks.done[-1].to)
            progress.state = training.program.executable.put(restored)
            return
    except RunError as error:
        problem = f"; {error}"
    history.step = step - 1
    history.left_out = count_skipped(progress.state)
    # Callbacks aren't notified of the non-finite step, since a resumed run repeats it.
    finite_steps = telemetry.take_first(len(telemetry) - 1)
    if len(finite_steps):
        hooks.callbacks.notify("on_steps", progress.state, history.step, finite_steps)
    save(training)
    examined = hooks.examine(progress.state, step)
    cause = progress.recent.explain(examined)
    saved = f"; the state of step {step - 1} is saved" if hooks.saves.writer is not None else ""
    place = run_schedule.place(step)
    text = (  # MindSpore's words first
        f"epoch: {place.sink} step: {place.sink_step}. Invalid loss, terminating training. "
        f"Step {step} of {run_schedule.total}: loss is {telemetry.loss[-1]!s}, "
        f"gradient norm is {telemetry.grad_norm[-1]!s}{problem}{saved}"
    )
    advice = advise(examined, cause, step, hooks.on_non_finite_step)
    raise NonFiniteStepError(f"{text}; {cause}" if cause else text, advice)
