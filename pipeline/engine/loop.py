"""The training loop: it runs the schedule segment by segment, with each event at its exact step.

A signal to stop takes effect between dispatches, also in an evaluation. The remaining events
of the boundary are saved with the state, and a resumed run begins with them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipeline.checkpoint.host_state import HostState, PendingBoundary, Requests
from pipeline.core.errors import RunError
from pipeline.engine.callback_calls import change_rates, combine_changes, with_parameters
from pipeline.engine.callbacks.events import SinkReport
from pipeline.engine.history import History, Progress
from pipeline.engine.hooks import Hooks
from pipeline.engine.non_finite_step import NonFiniteStepError, advise
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
"""Events that change nothing, and at which requests don't take effect."""


@dataclass(frozen=True)
class Program:
    """A compiled step with its batches, and the learning rates that callbacks may change."""

    executable: Executable
    mechanism: Mechanism = "loop"
    learning_rates: np.ndarray | None = None
    """Table, float32, with a row for each update; None if it can't be changed."""
    rate_rules: Sequence[OptimizerRule | RateRule] = ()
    """Rules of the columns after the first."""


@dataclass
class SinkClock:
    """Steps and seconds of the current sink so far, with its newest telemetry."""

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
    """Signal to stop, as text."""
    prune: str | None
    """Reason to end a run that isn't worth continuing."""
    save: bool
    """Whether a checkpoint is requested, or due by time."""


@dataclass(frozen=True)
class TrainingRun:
    """A run between its start and its end: what it calls, and how far it is."""

    program: Program
    hooks: Hooks
    run: Progress
    dispatch_size: DispatchSize
    sink: SinkClock = field(default_factory=SinkClock)


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
    state after saving it. Raises NonFiniteStepError if a loss or gradient isn't finite and the
    policy doesn't continue, and CallbackError if a callback fails that ends the run. In both cases
    the last finite state has been saved, and `history` ends at it.
    """
    started_at = time.monotonic()
    run = Progress.restore(state, host, history)
    run.saved_at = started_at
    dispatch_size = DispatchSize(schedule.dispatch_seconds, history.newest_step_s)
    training = TrainingRun(program, hooks, run, dispatch_size)
    begin_run(training, host)
    # The first segment has the events that an earlier process left at this boundary.
    segment_events = RESUMED_EVENTS if run.pending is not None else frozenset()
    segment = Segment(history.step, history.step, segment_events)

    while True:
        # Step, log, callbacks.
        has_steps = segment.start < segment.stop
        events = run_segment(training, segment, schedule.run) if has_steps else segment.events

        # The end of a sink, its evaluation.
        report = end_sink(training) if Event.SINK_END in events else None
        metrics = evaluate(training) if Event.EVALUATE in events else None

        # Save. Requests are granted first: a resumed run starts after this boundary's events.
        if events - SHOWING_EVENTS and run.pending is None:
            if report is not None:
                yield report
            grant_requests(training)
            hooks.callbacks.write_scalars()
            if Event.CHECKPOINT in events or history.step in run.granted.save_at:
                save(training, metrics)
            raise_failure(training)
        if schedule.dumps_at(history.step):
            hooks.dump(run.state, history.step)

        # Stop, or save and continue with the next dispatch.
        is_last = history.step == schedule.run.total
        decision = decide(training, is_last=is_last)
        is_over = hooks.early_stop.is_over or run.granted.stop or decision.prune
        if is_last or decision.stop or (is_over and (events or not has_steps)):
            break
        if has_steps and decision.save:
            save(training)
            run.num_answered_saves = hooks.signals.saves
        schedule = meet_deadline(training, schedule)
        requested = {Event.EVALUATE: run.granted.evaluate_at, Event.CHECKPOINT: run.granted.save_at}
        segment = schedule.next_segment(history.step, decision.max_steps, requested)

    return end_run(training, decision, started_at, is_last=is_last)


def begin_run(training: TrainingRun, host: HostState) -> None:
    """Restore the hooks and notify callbacks of the start; at step 0 also log, collect and save."""
    hooks = training.hooks
    run = training.run
    hooks.early_stop.restore(host.early_stop)
    hooks.rollbacks.remember(host.rollbacks)
    hooks.callbacks.restore(host.callbacks)
    set_rates(training)
    hooks.callbacks.notify("on_begin", run.state, run.history.step)
    raise_failure(training)
    grant_requests(training)
    if run.history.step == 0:
        hooks.callbacks.write_scalars()
        hooks.collect(run.state, 0)
        if hooks.rollbacks.needs_start:
            save(training)


def run_segment(
    training: TrainingRun, segment: Segment, run_schedule: RunSchedule
) -> frozenset[Event]:
    """Run the steps of a segment, log them and notify callbacks.

    Returns the events of the boundary; none after a rollback.
    """
    hooks = training.hooks
    run = training.run
    history = run.history
    telemetry, seconds = dispatch(training.program, segment, run)
    training.dispatch_size.record(len(telemetry), seconds)
    hooks.saves.prepare()  # not earlier: the first step would wait for it
    for monitor in hooks.monitors:
        monitor.on_steps(telemetry, seconds)
    training.sink.add(telemetry, seconds)
    run.recent.add(telemetry)
    answer_non_finite_step(training, run_schedule, telemetry)
    # A rollback ends before the boundary.
    events = segment.events if history.step == segment.stop else frozenset()
    hooks.callbacks.notify("on_steps", run.state, history.step, telemetry)
    if Event.COLLECT in events:
        hooks.collect(run.state, history.step)
    if events <= SHOWING_EVENTS:  # Other events save first.
        raise_failure(training)
    return events


def dispatch(program: Program, segment: Segment, run: Progress) -> tuple[Telemetry, float]:
    """Run the steps of a segment; return their telemetry and the seconds that they took."""
    history = run.history
    began_at = time.perf_counter()
    run.state, telemetry = program.executable.run(
        run.state, segment.start, segment.stop, program.mechanism
    )
    ended_at = time.perf_counter()
    seconds = ended_at - began_at
    stop = segment.start + len(telemetry)
    LOG.debug("steps %d to %d in %.6f s", segment.start + 1, stop, seconds)
    history.add_dispatch(len(telemetry), seconds, ended_at)
    history.step = segment.stop
    history.loss = float(telemetry.loss[-1])
    return telemetry, seconds


def end_sink(training: TrainingRun) -> SinkReport:
    """Report the sink that ends at this boundary to monitors and callbacks."""
    run = training.run
    report = training.sink.report(run.history.step)
    for monitor in training.hooks.monitors:
        monitor.on_sink(report)
    training.hooks.callbacks.notify("on_sink", run.state, run.history.step, report)
    return report


def evaluate(training: TrainingRun) -> Mapping[str, float] | None:
    """Evaluate the state and return the metrics; None if a signal to stop interrupted it."""
    hooks = training.hooks
    run = training.run
    step = run.history.step
    # Before the evaluation: a signal that interrupts it would lose new parameters.
    grant_requests(training)
    evaluation = hooks.evaluate(run.state)
    if evaluation is None:
        verdict = hooks.prune(run.verdict) or run.verdict
        run.pending = PendingBoundary(run.history.loss, verdict)
        return None
    run.pending = None
    run.history.evaluated = {step: evaluation}
    hooks.early_stop.add(evaluation)
    for monitor in hooks.monitors:
        monitor.on_eval(step, evaluation)
    hooks.callbacks.notify("on_eval", run.state, step, step, evaluation)
    return evaluation.scalars()


def save(training: TrainingRun, metrics: Mapping[str, float] | None = None) -> None:
    """Save the current state with the metrics of its evaluation."""
    training.hooks.saves.save(training.hooks, training.run, metrics)
    training.run.saved_at = time.monotonic()


def decide(training: TrainingRun, *, is_last: bool) -> Decision:
    """Return the first process's decision; a run at its end is never pruned."""
    hooks = training.hooks
    run = training.run
    can_prune = not is_last and run.pending is None
    is_requested = hooks.signals.saves > run.num_answered_saves
    is_due = is_requested or hooks.saves.is_due(time.monotonic() - run.saved_at)

    def make_decision() -> list[Any]:
        prune = hooks.prune(run.verdict) if can_prune else None
        return [training.dispatch_size.max_steps, hooks.signals.stop, prune, is_due]

    return Decision._make(hooks.agree(make_decision))


def meet_deadline(training: TrainingRun, schedule: Schedule) -> Schedule:
    """Return the schedule with the steps that the deadline allows; show monitors a new number."""
    hooks = training.hooks
    step = training.run.history.step
    changed = hooks.deadline.shorten(schedule, step, training.dispatch_size)
    if changed.run.total != schedule.run.total:
        for monitor in hooks.monitors:
            monitor.on_length(changed.run.total)
    return changed


def end_run(
    training: TrainingRun, decision: Decision, started_at: float, *, is_last: bool
) -> TrainState:
    """Record the status and the reason of a run's end, save and notify. Returns the state."""
    hooks = training.hooks
    run = training.run
    history = run.history
    history.left_out = count_skipped(run.state)
    if run.pending is not None:
        history.status = "stopped"
        history.reason = decision.stop
    elif hooks.early_stop.is_over:
        history.reason = f"early stop: {hooks.early_stop.reason}"
    elif run.granted.stop is not None:
        history.reason = f"a callback stopped it: {run.granted.stop}"
    elif decision.prune:
        history.status = "pruned"
        history.reason = decision.prune
    elif not is_last:
        history.status = "stopped"
        history.reason = decision.stop
    save(training)
    history.train_s = time.monotonic() - started_at
    hooks.callbacks.notify("on_end", run.state, history.step, history.status)
    if history.status == "done":
        # A stopped run has its scalars in its checkpoint, and a resumed run writes them.
        hooks.callbacks.write_scalars()
    raise_failure(training)
    return run.state


def exhaust(steps: Generator[Any, None, T]) -> T:
    """Run a generator to its end, ignoring what it yields, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def grant_requests(training: TrainingRun) -> None:
    """Grant the requests of callbacks, in all processes of the run."""
    hooks = training.hooks
    run = training.run
    requests = hooks.callbacks.take_requests(hooks.agree)
    if requests is not None:
        run.granted = add_requests(run.granted, requests, run.history.step)
        if requests.rates:
            set_rates(training)
    parameters = hooks.callbacks.take_parameters()
    if parameters is not None:
        run.state = training.program.executable.put(with_parameters(run.state, parameters))
        hooks.callbacks.show_state(run.state)
        run.history.evaluated = {}


def add_requests(granted: Requests, requests: Requests, step: int) -> Requests:
    """Return the requests that are in effect at a boundary, without those for earlier steps."""
    evaluations = {*granted.evaluate_at, *requests.evaluate_at}
    saves = {*granted.save_at, *requests.save_at}
    return Requests(
        stop=granted.stop or requests.stop,
        rates=combine_changes((*granted.rates, *requests.rates)),
        evaluate_at=tuple(sorted(later for later in evaluations if later > step)),
        save_at=tuple(sorted(later for later in saves if later >= step)),
    )


def set_rates(training: TrainingRun) -> None:
    """Pass the current learning rates to the device and the callbacks."""
    program = training.program
    rates = program.learning_rates
    if rates is None:
        return
    changes = training.run.granted.rates
    training.hooks.callbacks.show_rates(rates, changes)
    if changes:
        program.executable.set_learning_rates(change_rates(rates, changes, program.rate_rules))


def raise_failure(training: TrainingRun) -> None:
    """Raise the error of a callback that ends the run, once the state is saved.

    The state isn't saved if other processes have parts of it, as they don't know of the error.
    """
    hooks = training.hooks
    if hooks.callbacks.failure is not None:
        if training.run.history.step > 0 and hooks.gather is None:
            save(training)
        raise hooks.callbacks.failure


def answer_non_finite_step(
    training: TrainingRun, run_schedule: RunSchedule, telemetry: Telemetry
) -> None:
    """Roll back if the last step was non-finite. Raises NonFiniteStepError if the step ends the
    run, after saving the state before it."""
    step = telemetry.non_finite_step
    if step is None:
        return
    hooks = training.hooks
    run = training.run
    history = run.history
    history.step = step
    problem = ""
    try:
        restored = hooks.rollbacks.go_back(step, run.state)
        if restored is not None:
            for monitor in hooks.monitors:
                monitor.on_rollback(step, hooks.rollbacks.done[-1].to)
            run.state = training.program.executable.put(restored)
            return
    except RunError as error:
        problem = f"; {error}"
    history.step = step - 1
    history.left_out = count_skipped(run.state)
    # Without the non-finite step: a resumed run repeats it, and then notifies callbacks.
    finite_steps = telemetry.take_first(len(telemetry) - 1)
    if len(finite_steps):
        hooks.callbacks.notify("on_steps", run.state, history.step, finite_steps)
    save(training)
    examined = hooks.examine(run.state, step)
    cause = run.recent.explain(examined)
    saved = f"; the state of step {step - 1} is saved" if hooks.saves.writer is not None else ""
    place = run_schedule.place(step)
    text = (  # MindSpore's words first
        f"epoch: {place.sink} step: {place.sink_step}. Invalid loss, terminating training. "
        f"Step {step} of {run_schedule.total}: loss is {telemetry.loss[-1]!s}, "
        f"gradient norm is {telemetry.grad_norm[-1]!s}{problem}{saved}"
    )
    advice = advise(examined, cause, step, hooks.on_non_finite_step)
    raise NonFiniteStepError(f"{text}; {cause}" if cause else text, advice)
