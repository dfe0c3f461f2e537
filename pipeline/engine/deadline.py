"""The deadline of training: how many steps end in time, and an earlier end if steps get slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pipeline.engine.schedule import LEAST_S, DispatchSize, Event, Schedule


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
        step_s = dispatch_size.step_s
        if self.stop_at is None or step_s is None:
            return schedule
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
