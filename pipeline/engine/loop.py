"""Train: run the schedule segment by segment, with each event at exactly its step.

The order at a boundary is fixed: telemetry to the monitors, weights and gradients to TensorBoard,
then what callbacks ask for, then evaluation, what they ask for then, the checkpoint (which holds
what the evaluation decided), and stopping. A signal to stop is answered between dispatches, those
of an evaluation too: the rest of its boundary is then saved with the state, and a resumed run
begins there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pipeline.backends.base import Executable, Mechanism
from pipeline.checkpoint.checkpointer import Checkpoints, NoCheckpoints
from pipeline.checkpoint.host_state import (
    HostState,
    KeptCallbacks,
    PendingBoundary,
    Requests,
)
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.host.signals import Signals
from pipeline.engine.bad_step import BadStepError, Examined, RecentSteps, advise
from pipeline.engine.callback_calls import (
    Callbacks,
    changed_rates,
    combined_changes,
    with_parameters,
)
from pipeline.engine.dispatch_size import DispatchSize
from pipeline.engine.early_stop import EarlyStop
from pipeline.engine.event_periods import event_periods
from pipeline.engine.history import History
from pipeline.engine.monitors.monitors import Evaluation, Monitor, Pruner, SinkReport
from pipeline.engine.rollback import Rollbacks
from pipeline.engine.schedule import Event, RunSchedule, Segment
from pipeline.engine.sink_clock import SinkClock
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry
from pipeline.training.update import num_skipped

T = TypeVar("T")
LOG = logging.getLogger(__name__)
UNFINISHED = "unfinished_boundary"
"""Key under which a checkpoint keeps that the evaluation of its step was interrupted."""
CALLBACKS = "callbacks"
"""Key under which a checkpoint keeps what callbacks remember and have asked for."""


@dataclass(frozen=True)
class Training:
    """Everything that training needs; `checkpoints` is None without the checkpoint stage."""

    recipe: Recipe
    run_schedule: RunSchedule
    executable: Executable
    mechanism: Mechanism
    monitors: Sequence[Monitor]
    evaluate: Callable[[TrainState], Evaluation | None]
    """Evaluate a state; returns None where a signal to stop has interrupted it."""
    checkpoints: Checkpoints | NoCheckpoints | None
    host: Mapping[str, Any] = field(default_factory=dict)
    """JSON that every checkpoint keeps for a resumed run, besides the state of the monitors."""
    signals: Signals = field(default_factory=Signals)
    """Requests from outside the process; training looks at them after every dispatch."""
    rollbacks: Rollbacks | None = None
    """The rollbacks, where the recipe answers bad steps by them."""
    examine: Callable[[TrainState, int], Examined] | None = None
    """Examine a step that ended the run, from the state before it."""
    dump: Callable[[TrainState, int], None] | None = None
    """Dump the step that follows a number of steps; the state stays as it is."""
    dump_at: frozenset[int] = frozenset()
    """Numbers of steps done at which there is a dump."""
    pruner: Pruner | None = None
    """The monitor that may end the run at a boundary, as not worth continuing."""
    log_marks: Callable[[int], Mapping[str, Any]] | None = None
    """Marks of the logs for the checkpoint of a step; a resumed run checks the logs by them."""
    callbacks: Callbacks | None = None
    """The callbacks, where the run has any; only the first of several processes calls them."""
    learning_rates: np.ndarray | None = None
    """The learning rates by update, which callbacks may change, or have changed."""
    collect: Callable[[TrainState, int], None] | None = None
    """Show the weights and gradients of a state after a number of steps, and leave it as it is."""
    agree: Agree = decide_alone
    """Of several processes, returns the first one's decision about what depends on time."""


def train(
    training: Training, state: TrainState, host: HostState, history: History
) -> Generator[SinkReport, None, TrainState]:
    """Train from `history.step` to the end; `host` is what a checkpoint kept of the host.

    Yields the report of each sink before what comes after it is saved. The state that is returned
    has been saved; `history` is updated. Raises BadStepError naming the step when a loss or
    gradient is not finite and the recipe does not say to go on; the state before that step has been
    saved then, and `history` ends there. Raises CallbackError where a callback fails that ends the
    run, once the state is saved.
    """
    return (yield from _Loop(training, state, host, history).run())


def exhaust(steps: Generator[Any, None, T]) -> T:
    """Run a generator to its end, without a look at what it yields, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class _Loop:
    """Mutable state of one call of `train`."""

    def __init__(
        self, training: Training, state: TrainState, host: HostState, history: History
    ) -> None:
        self._training, self._state, self._history = training, state, history
        self._signals = training.signals
        kept = host.early_stop
        self._early = EarlyStop(training.recipe.monitor.early_stop, kept.best, kept.waited)
        self._pending = host.unfinished_boundary
        self._kept_prune_reason = self._pending.verdict if self._pending else None
        if self._pending is not None:
            history.loss = self._pending.loss
        self._dispatch_size = DispatchSize(
            training.recipe.train.dispatch_seconds, history.newest_step_s
        )
        self._most_steps = 1
        self._stop: str | None = None
        self._pruned: str | None = None
        self._sink = SinkClock()
        self._recent = RecentSteps()
        self._started_at = self._saved_at = time.monotonic()
        self._answered_saves = 0
        if training.rollbacks is not None:
            training.rollbacks.remember(host.rollbacks)
        self._granted = host.callbacks.granted
        self._cuts_changed = False
        self._told_saved = history.step or None
        """The step of the newest checkpoint, of which callbacks know."""
        if training.callbacks is not None:
            training.callbacks.restore(host.callbacks)
        self._set_rates()

    def run(self) -> Generator[SinkReport, None, TrainState]:
        """Run the rest of the schedule; the state that is returned has been saved."""
        self._tell("on_begin")
        self._end_if_failed()
        self._grant()
        if self._history.step == 0:
            self._write_scalars()
            self._collect()
        if self._training.rollbacks is not None and self._history.step == 0:
            # The first state that a rollback can go back to.
            self._save()
        if self._pending is not None:
            here, due = self._history.step, frozenset({Event.EVALUATE, Event.CHECKPOINT})
            yield from self._at_boundary(Segment(here, here, due))
        self._agree()
        self._dump()
        for segment in self._segments():
            if self._is_over():
                break
            yield from self._run_segment(segment)
        self._conclude()
        self._tell("on_end", self._history.status)
        if self._history.status == "done":
            # A resumed run would not have it from one that is stopped.
            self._write_scalars()
        self._end_if_failed()
        return self._state

    def _segments(self) -> Iterator[Segment]:
        """Yield the segments that are left, cut again where a callback asks for an event."""
        run_schedule = self._training.run_schedule
        every = event_periods(self._training.recipe, run_schedule.steps_per_pass)
        if self._training.checkpoints is None:
            every[Event.CHECKPOINT] = ()
        while self._history.step < run_schedule.total:
            at = {
                Event.EVALUATE: self._granted.evaluate_at,
                Event.CHECKPOINT: self._granted.save_at,
                Event.DUMP: self._training.dump_at,
            }
            self._cuts_changed = False
            for segment in run_schedule.segments(self._history.step, every, at):
                yield segment
                if self._cuts_changed:
                    break

    def _agree(self) -> None:
        """Take over what the first process has decided: the next dispatch, and whether to stop."""
        pruner = self._training.pruner

        def decide() -> list[Any]:
            pruned = (pruner.prune_reason or self._kept_prune_reason) if pruner else None
            return [self._dispatch_size.max_steps, self._signals.stop, pruned]

        self._most_steps, self._stop, self._pruned = self._training.agree(decide)

    def _is_over(self) -> bool:
        asked = self._granted.stop
        return bool(self._stop or self._early.is_over or asked or self._prune_reason())

    def _prune_reason(self) -> str | None:
        """Why the run should be pruned here; one at its end never is."""
        at_end = self._history.step == self._training.run_schedule.total
        return None if at_end or self._pending is not None else self._pruned

    def _conclude(self) -> None:
        """Record how training has ended, and save the last state."""
        history, early = self._history, self._early
        if self._pending is not None:
            history.status, history.reason = "stopped", self._stop
        elif early.is_over:
            history.reason = f"early stop: {early.reason}"
        elif self._granted.stop is not None:
            history.reason = f"a callback stopped it: {self._granted.stop}"
        elif reason := self._prune_reason():
            history.status, history.reason = "pruned", reason
        elif history.step < self._training.run_schedule.total:
            history.status, history.reason = "stopped", self._stop
        self._save()
        history.left_out = num_skipped(self._state)
        history.train_s = time.monotonic() - self._started_at

    def _run_segment(self, segment: Segment) -> Iterator[SinkReport]:
        """Train up to a boundary and handle its events, as long as no signal says stop."""
        while self._history.step < segment.stop and not self._stop:
            telemetry = self._dispatch(segment.stop)
            self._answer_bad_step(telemetry)
            self._tell("on_steps", telemetry)
            if self._history.step == segment.stop:
                if Event.COLLECT in segment.events:
                    self._collect()
                if segment.events and segment.events <= {Event.DUMP, Event.COLLECT}:
                    # It is no boundary: requests take effect where they would without it.
                    self._end_if_failed()
                else:
                    # Before any other save: a resumed run starts after this boundary's events.
                    yield from self._at_boundary(segment)
                self._dump()
            else:
                self._end_if_failed()
            if self._is_save_due():
                self._save()
                self._saved_at, self._answered_saves = time.monotonic(), self._signals.saves
            self._agree()

    def _dump(self) -> None:
        """Dump the step that follows, where one is due."""
        if self._training.dump is not None and self._history.step in self._training.dump_at:
            self._training.dump(self._state, self._history.step)

    def _dispatch(self, until: int) -> Telemetry:
        """Run one dispatch towards `until`, short enough to answer a signal in time."""
        training, start = self._training, self._history.step
        stop = min(until, start + self._most_steps)
        started_at = time.perf_counter()
        self._state, telemetry = training.executable.run(
            self._state, start, stop, training.mechanism
        )
        ended_at = time.perf_counter()
        seconds = ended_at - started_at
        LOG.debug("steps %d to %d in %.6f s", start + 1, start + len(telemetry), seconds)
        self._dispatch_size.take_note(len(telemetry), seconds)
        self._history.add_dispatch(len(telemetry), seconds, ended_at)
        self._history.step, self._history.loss = stop, float(telemetry.loss[-1])
        if training.checkpoints is not None:
            # Not earlier: the first step would wait for it.
            training.checkpoints.prepare()
        for monitor in training.monitors:
            monitor.on_steps(telemetry, seconds)
        self._sink.add(telemetry, seconds)
        self._recent.add(telemetry)
        return telemetry

    def _at_boundary(self, segment: Segment) -> Iterator[SinkReport]:
        """Report the sink, evaluate, grant what was asked for, and save, where due.

        An evaluation that is interrupted ends this, and is kept for a resumed run.
        """
        report = metrics = None
        if Event.SINK_END in segment.events:
            report = self._sink.report(segment.stop)
            for monitor in self._training.monitors:
                monitor.on_sink(report)
            self._tell("on_sink", report)
        if Event.EVALUATE in segment.events:
            # Before it: a signal may interrupt it, and parameters that were set would be lost.
            self._grant()
            metrics = self._evaluate(segment.stop)
            if metrics is None:
                self._keep_boundary()
                return
        if report is not None:
            yield report
        self._grant()
        self._write_scalars()
        if Event.CHECKPOINT in segment.events or segment.stop in self._granted.save_at:
            self._save(metrics)
        self._end_if_failed()

    def _collect(self) -> None:
        if self._training.collect is not None:
            self._training.collect(self._state, self._history.step)

    def _evaluate(self, step: int) -> Mapping[str, float] | None:
        """Evaluate at a boundary and report it; returns None where a signal has interrupted it."""
        evaluation = self._training.evaluate(self._state)
        if evaluation is None:
            return None
        self._pending = None
        self._history.evaluated = {step: evaluation}
        self._early.take_note(evaluation)
        for monitor in self._training.monitors:
            monitor.on_eval(step, evaluation)
        self._tell("on_eval", step, evaluation)
        return evaluation.scalars()

    def _tell(self, event: str, *args: Any) -> None:
        if self._training.callbacks is not None:
            self._training.callbacks.tell(event, self._state, self._history.step, *args)

    def _write_scalars(self) -> None:
        if self._training.callbacks is not None:
            self._training.callbacks.write_scalars()

    def _grant(self) -> None:
        """Put what callbacks have asked for into effect, in all processes of the run."""
        callbacks = self._training.callbacks
        if callbacks is None:
            return
        asked = self._training.agree(callbacks.take_requests)
        if asked is not None:
            self._add_requests(Requests.model_validate(asked))
        parameters = callbacks.take_parameters()
        if parameters is not None:
            self._state = self._training.executable.put(with_parameters(self._state, parameters))
            callbacks.view.state = self._state
            self._history.evaluated = {}

    def _add_requests(self, asked: Requests) -> None:
        """Let requests take effect, those of steps that lie ahead when they are reached."""
        before, here = self._granted, self._history.step
        evaluations = {*before.evaluate_at, *asked.evaluate_at}
        saves = {*before.save_at, *asked.save_at}
        self._granted = Requests(
            stop=before.stop or asked.stop,
            rates=combined_changes((*before.rates, *asked.rates)),
            evaluate_at=tuple(sorted(step for step in evaluations if step > here)),
            save_at=tuple(sorted(step for step in saves if step >= here)),
        )
        self._cuts_changed |= bool(asked.evaluate_at or asked.save_at)
        if asked.rates:
            self._set_rates()

    def _set_rates(self) -> None:
        """Let the device and the callbacks know the learning rates as they are now."""
        rates, changes = self._training.learning_rates, self._granted.rates
        if rates is None:
            return
        if self._training.callbacks is not None:
            view = self._training.callbacks.view
            view.rates, view.granted_rates = rates, changes
        if changes:
            rules = self._training.recipe.train.lr_rules
            table = changed_rates(rates, changes, rules)
            self._training.executable.set_learning_rates(table)

    def _end_if_failed(self) -> None:
        """Raise the error of a callback that ends the run, once the state is saved."""
        callbacks = self._training.callbacks
        if callbacks is not None and callbacks.failure is not None:
            if self._history.step > 0:
                self._save()
            raise callbacks.failure

    def _keep_boundary(self) -> None:
        """Keep this boundary for a resumed run, with what the end of the sink has decided."""
        pruner = self._training.pruner
        reason = pruner.prune_reason if pruner is not None else None
        self._pending = PendingBoundary(
            loss=self._history.loss, verdict=reason or self._kept_prune_reason
        )

    def _is_save_due(self) -> bool:
        period_s = self._training.recipe.checkpoint.every_seconds
        overdue = period_s is not None and time.monotonic() - self._saved_at >= period_s
        return overdue or self._signals.saves > self._answered_saves

    def _save(self, metrics: Mapping[str, float] | None = None) -> None:
        training = self._training
        if training.checkpoints is None:
            return
        if self._told_saved != self._history.step:
            self._told_saved = self._history.step
            self._tell("on_checkpoint", self._history.step)
        # First the log: a resumed run appends to it from the checkpoint's step on.
        for monitor in training.monitors:
            monitor.flush()
        host_state = {**training.host, "early_stop": self._early.state()}
        if training.log_marks is not None:
            host_state |= training.log_marks(self._history.step)
        if training.rollbacks is not None:
            host_state |= training.rollbacks.kept()
        if self._pending is not None:
            host_state[UNFINISHED] = self._pending.model_dump()
        kept = KeptCallbacks(granted=self._granted)
        if training.callbacks is not None:
            kept = training.callbacks.kept(self._granted)
        if kept != KeptCallbacks():
            host_state[CALLBACKS] = kept.model_dump(mode="json")
        training.checkpoints.save(self._history.step, self._state, host_state, metrics)

    def _answer_bad_step(self, telemetry: Telemetry) -> None:
        """Roll back where the last step was bad. Raises RunError where it ends the run."""
        bad = telemetry.bad_step
        if bad is None:
            return
        self._history.step = bad
        why_not = ""
        if self._training.rollbacks is not None:
            try:
                self._roll_back(self._training.rollbacks, bad)
                return
            except RunError as error:
                why_not = f"; {error}"
        self._history.step, self._history.left_out = bad - 1, num_skipped(self._state)
        # A resumed run does the bad step again: no callback may know of it yet.
        good = telemetry.head(len(telemetry) - 1)
        if len(good):
            self._tell("on_steps", good)
        self._save()
        examine = self._training.examine
        examined = Examined() if examine is None else examine(self._state, bad)
        cause = self._recent.explain(examined)
        text = self._bad_step_text(telemetry, bad, why_not)
        advice = advise(examined, cause, bad, self._training.recipe.train.on_nan.name)
        raise BadStepError(f"{text}; {cause}" if cause else text, advice)

    def _roll_back(self, rollbacks: Rollbacks, bad: int) -> None:
        """Replace the state by that of a rollback, on the device, and notify the monitors."""
        restored = rollbacks.go_back(bad, self._state)
        rollback = rollbacks.done[-1]
        for monitor in self._training.monitors:
            monitor.on_rollback(rollback.step, rollback.to)
        self._state = self._training.executable.put(restored)

    def _bad_step_text(self, telemetry: Telemetry, bad: int, why_not: str) -> str:
        """The error text of a bad step that ends a run, the document's words first (C-02)."""
        run_schedule = self._training.run_schedule
        place = run_schedule.place(bad)
        kept = f"; the state of step {bad - 1} is saved" if self._training.checkpoints else ""
        return (
            f"epoch: {place.sink} step: {place.sink_step}. Invalid loss, terminating training. "
            f"Step {bad} of {run_schedule.total}: loss is {telemetry.loss[-1]!s}, "
            f"gradient norm is {telemetry.grad_norm[-1]!s}{why_not}{kept}"
        )
