"""The deadline of training: the steps that are done in time, and an early end if they slow down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pipeline.engine.schedule import DispatchSize, Event, Schedule

NO_COST: Mapping[Event, float] = {}


@dataclass(frozen=True)
class Deadline:
    """The end of the time for training; by default there is none."""

    stop_at: float | None = None
    """Time by `time.perf_counter` at which the last step has to be done; None: never."""
    event_s: Mapping[Event, float] = field(default_factory=dict)
    """Seconds of each event that is before the last step."""
    note_end: Callable[[int], None] = lambda step: None
    """Records that training ends after a step, before its schedule does."""

    def shorten(self, schedule: Schedule, step: int, dispatch_size: DispatchSize) -> Schedule:
        """Return the schedule from boundary `step` on, with fewer steps if the last would be late.

        Steps may get faster again. So the schedule is cut only if there isn't time for the next
        dispatch, its events and one more dispatch. At least one step follows.
        """
        step_s = dispatch_size.step_s
        if self.stop_at is None or step_s is None:
            return schedule
        left_s = self.stop_at - time.perf_counter()
        required = _end_at(schedule, step + dispatch_size.max_steps + 1)
        spare_s = left_s - dispatch_size.dispatch_s
        if find_last_step(required, step, spare_s, step_s, self.event_s) >= required.run.total:
            return schedule
        end = max(step + 1, find_last_step(schedule, step, left_s, step_s, self.event_s))
        if end >= schedule.run.total:
            return schedule
        self.note_end(end)
        return _end_at(schedule, end)


def _end_at(schedule: Schedule, step: int) -> Schedule:
    """Return the schedule up to a step."""
    return replace(schedule, run=replace(schedule.run, total=min(step, schedule.run.total)))


def find_last_step(
    schedule: Schedule,
    first: int,
    left_s: float,
    step_s: float,
    event_s: Mapping[Event, float] = NO_COST,
) -> int:
    """Return the last step that ends within `left_s` seconds after boundary `first`.

    A step takes `step_s`, and the events between two steps `event_s`. Events after the last step
    don't count.
    """
    step = first
    unsplit = replace(schedule.run, sink_steps=schedule.run.total)  # The end of a sink is free.
    for segment in unsplit.segments(first, schedule.every):
        steps = int(left_s / step_s)
        if step + steps <= segment.stop:
            return step + max(0, steps)
        step = segment.stop
        left_s -= (step - segment.start) * step_s
        left_s -= sum(event_s.get(event, 0.0) for event in segment.events)
        if left_s <= 0:
            break
    return step
