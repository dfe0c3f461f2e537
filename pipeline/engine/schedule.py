"""Schedule of a run: the position of every step, and the events that split a sink.

Counted from 1 are epochs, sinks and steps; a *boundary* is the number of steps done. Everything
here is known before the run starts, so an event happens at its exact step at any sink size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

LEAST_S = 1e-9
"""Least time of a step, in seconds: a clock may stand still for a short dispatch."""


class Event(Enum):
    """An event between two steps."""

    SINK_END = "sink end"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    COLLECT = "collect"
    DUMP = "dump"


NOWHERE: Mapping[Event, Collection[int]] = MappingProxyType({})


@dataclass(frozen=True)
class Segment:
    """Steps `start + 1 .. stop`, which run without the host; the events happen after them."""

    start: int
    stop: int
    events: frozenset[Event]


@dataclass(frozen=True)
class StepPosition:
    """Position of a step. `sink_step` is MindSpore's `(cur_step - 1) % batch_num + 1`."""

    step: int
    sink: int
    sink_step: int
    epoch: int
    epoch_step: int


@dataclass(frozen=True)
class RunSchedule:
    """The whole run in steps; `sink_steps` is the sink's length, or None without sinks."""

    total: int
    steps_per_epoch: int
    sink_steps: int | None

    def place(self, step: int) -> StepPosition:
        """Return the position of `step`, counted from 1; without sinks, a sink is an epoch."""
        sink, sink_step = divmod(step - 1, self.sink_steps or self.steps_per_epoch)
        epoch, epoch_step = divmod(step - 1, self.steps_per_epoch)
        return StepPosition(step, sink + 1, sink_step + 1, epoch + 1, epoch_step + 1)

    @property
    def sinks(self) -> int:
        """The number of sinks, a shorter last one included."""
        return -(-self.total // (self.sink_steps or self.steps_per_epoch))

    def segments(
        self,
        first: int,
        every: Mapping[Event, tuple[int, ...]],
        at: Mapping[Event, Collection[int]] = NOWHERE,
    ) -> Iterator[Segment]:
        """Split the steps after boundary `first` at each event.

        `every` has the periods in steps at which an event is due, `at` further steps; the ends of
        sinks are added here, the last one at the end. Without sinks every step is a segment.
        """
        periods = {**every, Event.SINK_END: (self.sink_steps or 1,)}
        while first < self.total:
            ends = [(first // n + 1) * n for due in periods.values() for n in due]
            ends += [step for steps in at.values() for step in steps if step > first]
            stop = min([self.total, *ends])
            events = {event for event, due in periods.items() if is_due(stop, due)}
            events |= {event for event, steps in at.items() if stop in steps}
            if stop == self.total:
                events.add(Event.SINK_END)
            yield Segment(first, stop, frozenset(events))
            first = stop


@dataclass(frozen=True)
class Schedule:
    """A run and its events, as plain numbers."""

    run: RunSchedule
    every: Mapping[Event, tuple[int, ...]] = field(default_factory=dict)
    """Periods, in steps, at which an event is due."""
    at: Mapping[Event, Collection[int]] = field(default_factory=dict)
    """Further steps at which an event is due."""
    dispatch_seconds: float = 1.0
    """The longest time of a dispatch: a signal waits for its end."""

    def dumps_at(self, step: int) -> bool:
        """Return whether there is a dump after `step` steps."""
        return step in self.at.get(Event.DUMP, ())

    def next_segment(
        self, first: int, max_steps: int, further: Mapping[Event, Collection[int]]
    ) -> Segment:
        """Return the steps after boundary `first` up to the next event, or the next of `further`
        steps.

        If they are more than `max_steps`, only the first of them, which no event follows.
        """
        segment = next(self.run.segments(first, self.every, {**self.at, **further}))
        if segment.stop - first > max_steps:
            return Segment(first, first + max_steps, frozenset())
        return segment


def is_due(step: int, periods: Iterable[int]) -> bool:
    """Whether an event of one of these periods is due at a boundary; all are due at 0."""
    return any(step % period == 0 for period in periods)


@dataclass
class DispatchSize:
    """The largest number of steps (or batches of an evaluation) that fit into `dispatch_s` seconds.

    The host looks for signals between dispatches, so none may take much longer.
    """

    dispatch_s: float
    step_s: float | None = None
    """Seconds per step of the newest dispatch."""

    def take_note(self, steps: int, seconds: float) -> None:
        """Record that a dispatch of `steps` steps took `seconds`."""
        self.step_s = seconds / steps

    @property
    def max_steps(self) -> int:
        """Steps that fit into a dispatch; 1 before the first, whose time is not known yet."""
        if self.step_s is None:
            return 1
        return max(1, int(self.dispatch_s / max(self.step_s, LEAST_S)))
