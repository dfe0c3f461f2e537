"""Hooks: functions and objects that a run calls between steps, such as deadline and rollback.

By default they do nothing. The deadline says how many steps end in time, and ends training earlier
if steps get slower. After a non-finite step the state is rolled back to a checkpoint, and the data
continues.

Training continues with the batch after the non-finite step, and steps keep their numbers. The
learning rate depends on the number of updates in the state, so it goes back too. Only checkpoints
at the recipe's steps are used (`checkpoint.every_steps`, `every_epochs`, and the start), not those
that a signal or the time caused, so that a resumed run goes back to the same step as an
uninterrupted one. If training diverges again, an older checkpoint is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.checkpoint.host_state import CallbackState
from pipeline.core.errors import DataError, RunError
from pipeline.core.host.signals import Signals
from pipeline.engine.callback_calls import NoCallbacks
from pipeline.engine.callbacks.callback import Evaluation, Monitor
from pipeline.engine.early_stop import EarlyStop
from pipeline.engine.history import Examination, Progress
from pipeline.engine.schedule import LEAST_S, DispatchSize, Event, Schedule, is_due
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.telemetry import NON_FINITE_STEPS

if TYPE_CHECKING:
    from pipeline.checkpoint.checkpointer import Checkpoints, NoCheckpoints
    from pipeline.training.state import TrainState
    from pipeline.training.telemetry import Telemetry

ROLLBACKS = "rollbacks"
"""Key in a checkpoint for the rollbacks before it."""
UNFINISHED = "unfinished_boundary"
"""Key in a checkpoint for the interrupted evaluation at its step."""
CALLBACKS = "callbacks"
"""Key in a checkpoint for the states of callbacks and their requests."""


@dataclass(frozen=True)
class Deadline:
    """The end of the time for training; by default there is none."""

    stop_at: float | None = None
    """Time by `time.perf_counter` by which the last step must be done; None: no deadline."""
    event_s: Mapping[Event, float] = field(default_factory=dict)
    """Seconds that each event takes."""
    note_end: Callable[[int], None] = lambda step: None
    """Records the step after which training ends, if the schedule is cut."""

    def move_end(self, schedule: Schedule, step: int, dispatch_size: DispatchSize) -> Schedule:
        """Return the schedule from boundary `step` on, with fewer steps if the last would be late.

        The schedule is cut only if there isn't time for the next dispatch, its events and one more
        dispatch, since steps may get faster again. At least one step follows.
        """
        if self.stop_at is None or dispatch_size.step_s is None:
            return schedule
        step_s = max(dispatch_size.step_s, LEAST_S)
        left_s = self.stop_at - time.perf_counter()
        spare_s = left_s - dispatch_size.dispatch_s
        num_next = dispatch_size.max_steps + 1
        if bound_seconds(schedule, num_next, step_s, self.event_s) <= spare_s:
            return schedule
        next_dispatch = _end_at(schedule, step + num_next)
        last_step = find_last_step(next_dispatch, step, spare_s, step_s, self.event_s)
        if last_step >= next_dispatch.run.total:
            return schedule
        end = max(step + 1, find_last_step(schedule, step, left_s, step_s, self.event_s))
        if end >= schedule.run.total:
            return schedule
        self.note_end(end)
        return _end_at(schedule, end)


@dataclass
class MovableEnd:
    """The deadline of a run whose learning rates don't depend on its number of steps.

    The number of steps is chosen again, by the time of a step since the last choice, when half of
    the time that remained then is over, or the next two dispatches may reach the end or be late.
    """

    stop_at: float
    """Time by `time.perf_counter` by which the last step must be done."""
    event_s: Mapping[Event, float]
    """Seconds that each event takes."""
    note_end: Callable[[int], None]
    """Records the new number of steps."""
    most_steps: int
    _chosen_at: float | None = None
    """Time of the last choice, after `_chosen_step` steps."""
    _chosen_step: int = 0
    _due_at: float = 0.0
    """Time at which the number is chosen again."""

    def move_end(self, schedule: Schedule, step: int, dispatch_size: DispatchSize) -> Schedule:
        """Return the schedule with another number of steps; limit the time of next dispatches."""
        if dispatch_size.step_s is None:
            return schedule
        now = time.perf_counter()
        left_s = self.stop_at - now
        if self._chosen_at is None:
            # The first step is slower, so times of steps are measured from here on.
            self._note_choice(now, step)
        # A dispatch is planned for at most a quarter of the time, so a slow one can't use it up.
        dispatch_size.dispatch_s = min(schedule.dispatch_seconds, max(left_s, 0.0) / 4)
        step_s = max(dispatch_size.step_s, LEAST_S)
        soon = step + 2 * dispatch_size.max_steps
        if now < self._due_at and soon < schedule.run.total:
            if bound_seconds(schedule, soon + 1 - step, step_s, self.event_s) <= left_s:
                return schedule
            next_dispatches = _end_at(schedule, soon + 1)
            if find_last_step(next_dispatches, step, left_s, step_s, self.event_s) > soon:
                return schedule
        if step > self._chosen_step:
            # The shorter time of a step: too many steps are reduced later, too few may be the end.
            step_s = max(min(step_s, self._measure_step_s(schedule, now, step)), LEAST_S)
        self._note_choice(now, step)
        longest = replace(schedule, run=replace(schedule.run, total=self.most_steps))
        end = max(step + 1, find_last_step(longest, step, left_s, step_s, self.event_s))
        if end == schedule.run.total:
            return schedule
        self.note_end(end)
        return replace(schedule, run=replace(schedule.run, total=end))

    def _note_choice(self, now: float, step: int) -> None:
        self._chosen_at = now
        self._chosen_step = step
        self._due_at = (now + self.stop_at) / 2

    def _measure_step_s(self, schedule: Schedule, now: float, step: int) -> float:
        """Return the mean seconds of a step since the last choice, without events.

        At most half of the time is subtracted for events, since their seconds are estimates.
        """
        assert self._chosen_at is not None
        first = self._chosen_step
        seconds = now - self._chosen_at
        events_s = sum(
            event_s * (step // period - first // period)
            for event, event_s in self.event_s.items()
            for period in schedule.every.get(event, ())
        )
        return max(seconds - events_s, seconds / 2) / (step - first)


def bound_seconds(
    schedule: Schedule, num_steps: int, step_s: float, event_s: Mapping[Event, float]
) -> float:
    """Return a time in which `num_steps` steps and their events end, from any boundary.

    Unlike `find_last_step`, this is fast enough to be called after each dispatch.
    """
    events_s = (
        event_s.get(event, 0.0) * (num_steps // period + 1)
        for event, periods in schedule.every.items()
        for period in periods
    )
    return num_steps * step_s + sum(events_s)


def _end_at(schedule: Schedule, step: int) -> Schedule:
    """Return the schedule, ended after `step` or at its own end."""
    return replace(schedule, run=replace(schedule.run, total=min(step, schedule.run.total)))


def find_last_step(
    schedule: Schedule,
    first: int,
    left_s: float,
    step_s: float,
    event_s: Mapping[Event, float],
) -> int:
    """Return the last step that ends within `left_s` seconds after boundary `first`.

    A step takes `step_s` seconds, an event before the last step `event_s[event]` seconds.
    """
    step = first
    # One sink, since the end of a sink takes no time.
    unsplit = replace(schedule.run, sink_steps=schedule.run.total)
    every = {event: due for event, due in schedule.every.items() if event_s.get(event)}
    for segment in unsplit.segments(first, every):
        steps = int(left_s / step_s)
        if step + steps <= segment.stop:
            return step + max(0, steps)
        step = segment.stop
        left_s -= (step - segment.start) * step_s
        left_s -= sum(event_s.get(event, 0.0) for event in segment.events)
        if left_s <= 0:
            break
    return step


@dataclass(frozen=True)
class RollbackRecord:
    """A rollback: the updates after boundary `to` up to the non-finite step `step` were undone."""

    step: int
    to: int


class NoRollbacks:
    """The rollbacks of a run that doesn't go back: a non-finite step is skipped or ends it."""

    needs_start = False
    """Whether the state before the first step must be saved."""
    done: Sequence[RollbackRecord] = ()
    """Rollbacks so far, in order."""

    def remember(self, rollbacks: Iterable[tuple[int, int]]) -> None:
        """Do nothing."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: nothing."""
        return {}

    def go_back(self, step: int, state: TrainState) -> TrainState | None:
        """Return the state to continue with after `step`; None if the run ends."""
        return None


@dataclass
class Rollbacks(NoRollbacks):
    """The rollbacks of a run, and the checkpoints that it can go back to.

    The first of several processes chooses the checkpoint; all read it.
    """

    needs_start = True
    most: int
    """Largest number of rollbacks of a run."""
    periods: Sequence[int]
    """Periods of the recipe's checkpoints, in steps."""
    steps: Callable[[], Sequence[int]]
    """Lists the steps of the complete checkpoints."""
    read: Callable[[int, TrainState], TrainState]
    """Reads the checkpoint of a step in the structure of a state. Raises DataError."""
    agree: Agree = decide_alone
    done: list[RollbackRecord] = field(default_factory=list)

    def remember(self, rollbacks: Iterable[tuple[int, int]]) -> None:
        """Restore the rollbacks of a checkpoint, pairs (non-finite step, boundary)."""
        self.done = [RollbackRecord(step, to) for step, to in rollbacks]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as JSON."""
        return {ROLLBACKS: [[rollback.step, rollback.to] for rollback in self.done]}

    def go_back(self, step: int, state: TrainState) -> TrainState:
        """Return the state to continue with after `step`, on the host.

        `state` is the state before `step`, whose structure is restored. Raises RunError with the
        reason if the run can't go back.
        """
        if len(self.done) == self.most:
            raise RunError(f"train.on_nan: went back {self.most} times already, as often as it may")
        boundary = self.agree(lambda: self._find_boundary(step, state))
        if boundary is None:
            raise RunError("train.on_nan: there is no checkpoint left to go back to")
        self.done.append(RollbackRecord(step, boundary))
        return _advance_to(self.read(boundary, state), step)

    def _find_boundary(self, step: int, state: TrainState) -> int | None:
        """Return the newest unused checkpoint's step before `step` with finite weights, or None."""
        used = {rollback.to for rollback in self.done}
        for boundary in sorted(self.steps(), reverse=True):
            if boundary >= step or boundary in used or not is_due(boundary, self.periods):
                continue
            try:
                if _is_finite(self.read(boundary, state)):
                    return boundary
            except DataError:
                continue  # The checkpoint is damaged: an older one may be readable.
        return None


def _is_finite(state: TrainState) -> bool:
    """Return whether all weights of a state are finite. With a finite loss, some may not be."""
    trained = state.variables, state.opt_state
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trained)]
    return all(
        np.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _advance_to(state: TrainState, step: int) -> TrainState:
    """Return the state with `step` as its step; `left_out` grows by the steps in between."""
    before = state.features[NON_FINITE_STEPS]
    left_out = jnp.int32(before.left_out + step - state.step)
    counts = before._replace(in_a_row=jnp.int32(0), left_out=left_out)
    return replace(state, step=jnp.int32(step)).replace_part(NON_FINITE_STEPS, counts)


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run. Each has everything that a resumed run needs."""

    writer: Checkpoints | NoCheckpoints | None = None
    """Writer of the checkpoints; None if the run saves nothing."""
    every_seconds: float | None = None
    """Longest time without a checkpoint; None: no limit."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """JSON that every checkpoint has, besides the state of the hooks."""
    log_marks: Callable[[int], Mapping[str, Any]] | None = None
    """Function from a step to JSON for a checkpoint, by which a resumed run checks the logs."""

    def save(self, hooks: Hooks, run: Progress, metrics: Mapping[str, float] | None = None) -> None:
        """Notify callbacks, write the logs, then save the current state and `metrics`."""
        if self.writer is None:
            return
        step = run.history.step
        if run.saved_step != step:
            run.saved_step = step
            hooks.callbacks.notify("on_checkpoint", run.state, step, step)
        # First, since a resumed run appends to logs that must reach the checkpoint's step.
        for monitor in hooks.monitors:
            monitor.flush()
        host_state = {**self.host, "early_stop": asdict(hooks.early_stop.progress)}
        if self.log_marks is not None:
            host_state |= self.log_marks(step)
        host_state |= hooks.rollbacks.state()
        if run.pending is not None:
            host_state[UNFINISHED] = asdict(run.pending)
        callbacks = hooks.callbacks.state(run.granted)
        if callbacks != CallbackState():
            host_state[CALLBACKS] = asdict(callbacks)
        state = run.state if hooks.gather is None else hooks.gather(run.state)
        self.writer.save(step, state, host_state, metrics)


def refuse_evaluation(state: TrainState) -> Evaluation | None:
    """Raise ValueError: no function for evaluations is set."""
    raise ValueError("an evaluation is due, and no evaluation is set")


def examine_nothing(state: TrainState, step: int) -> Examination:
    """Return an examination without findings."""
    return Examination()


def do_nothing(state: TrainState, step: int) -> None:
    """Do nothing at a step."""


@dataclass(frozen=True)
class Hooks:
    """Functions and objects that a run calls between steps."""

    monitors: Sequence[Monitor] = ()
    evaluate: Callable[[TrainState], Evaluation | None] = refuse_evaluation
    """Evaluates a state; returns None if a signal to stop has interrupted it."""
    evaluate_seconds: float | None = None
    """Longest time without an evaluation; None: no limit."""
    saves: Saves = field(default_factory=Saves)
    callbacks: NoCallbacks = field(default_factory=NoCallbacks)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    prune: Callable[[str | None], str | None] = lambda verdict: None
    """Returns the reason to end the run at this boundary; None if it should continue. The argument
    is the reason that was returned before an evaluation was interrupted."""
    deadline: Deadline | MovableEnd = field(default_factory=Deadline)
    rollbacks: NoRollbacks = field(default_factory=NoRollbacks)
    on_non_finite_step: str = "stop"
    """The recipe's `train.on_nan`, on which the advice after a non-finite step depends."""
    examine: Callable[[TrainState, int], Examination] = examine_nothing
    """Examines the step that ended the run, from the state before it."""
    dump: Callable[[TrainState, int], None] = do_nothing
    """Dumps the step that follows a state, from the state and the number of steps done."""
    collect: Callable[[TrainState, int], None] = do_nothing
    """Shows the weights and gradients of a state, from the state and the number of steps done."""
    measure: Callable[[Telemetry, float], Telemetry] = lambda telemetry, seconds: telemetry
    """Adds columns to the telemetry of steps that took a number of seconds."""
    gather: Callable[[TrainState], TrainState] | None = None
    """Returns a state that this process can read; all processes call it. None: it reads any."""
    signals: Signals = field(default_factory=Signals)
    """Signals to stop or to save, which training checks after every dispatch."""
    agree: Agree = decide_alone
    """Returns in all processes what a function returns in the first one."""
