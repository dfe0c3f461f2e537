"""Schedule of a run: the position of every step, and the events that split a sink.

Epochs, sinks and steps are counted from 1. A *boundary* is a number of steps done. An event happens
at its exact step with any sink size, since a sink is split there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

LEAST_S = 1e-9
"""Least time of a step in seconds, since the clock may not advance during a short dispatch."""


class Event(Enum):
    """An event between two steps."""

    SINK_END = "sink end"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    COLLECT = "collect"
    DUMP = "dump"


@dataclass(frozen=True)
class Segment:
    """Steps `start + 1 .. stop`, between which there is no event, and the events after them."""

    start: int
    stop: int
    events: frozenset[Event]


@dataclass(frozen=True)
class StepPosition:
    """Position of a step. `sink_step` is MindSpore's `(cur_step - 1) % batch_num + 1`."""

    sink: int
    sink_step: int
    epoch: int
    epoch_step: int


@dataclass(frozen=True)
class RunSchedule:
    """The steps of a run."""

    total: int
    steps_per_epoch: int
    sink_steps: int | None
    """Number of steps of a sink; None if the run doesn't sink."""

    def place(self, step: int) -> StepPosition:
        """Return the position of `step`, counted from 1; without sinks, a sink is an epoch."""
        sink, sink_step = divmod(step - 1, self.sink_steps or self.steps_per_epoch)
        epoch, epoch_step = divmod(step - 1, self.steps_per_epoch)
        return StepPosition(sink + 1, sink_step + 1, epoch + 1, epoch_step + 1)

    def segments(
        self,
        first: int,
        every: Mapping[Event, tuple[int, ...]],
        at: Mapping[Event, Collection[int]] = MappingProxyType({}),
    ) -> Iterator[Segment]:
        """Split the steps after boundary `first` at each event and at each end of a sink.

        `every` has the periods, in steps, at which an event is due, and `at` further steps. Every
        step is a segment if the run doesn't sink.
        """
        event_periods = {**every, Event.SINK_END: (self.sink_steps or 1,)}
        all_periods = {period for periods in event_periods.values() for period in periods}
        all_steps = {self.total} | {step for steps in at.values() for step in steps}
        while first < self.total:
            ends = [(first // period + 1) * period for period in all_periods]
            ends += [step for step in all_steps if step > first]
            stop = min(ends)
            events = {event for event, periods in event_periods.items() if is_due(stop, periods)}
            events |= {event for event, steps in at.items() if stop in steps}
            if stop == self.total:
                events.add(Event.SINK_END)
            yield Segment(first, stop, frozenset(events))
            first = stop


@dataclass(frozen=True)
class Schedule:
    """A run and the steps of its events."""

    run: RunSchedule
    every: Mapping[Event, tuple[int, ...]] = field(default_factory=dict)
    """Periods, in steps, at which an event is due."""
    at: Mapping[Event, Collection[int]] = field(default_factory=dict)
    """Further steps at which an event is due."""
    dispatch_seconds: float = 1.0
    """Seconds that a dispatch should take at most: a signal takes effect at its end."""

    def shows_state(self, step: int) -> bool:
        """Return whether the state at boundary `step`, also the start, is dumped."""
        is_named = step in self.at.get(Event.DUMP, ())
        return is_named or is_due(step, self.every.get(Event.DUMP, ()))

    def next_segment(
        self, first: int, max_steps: int, requested: Mapping[Event, Collection[int]]
    ) -> Segment:
        """Return the steps after boundary `first` up to the next event, with its events.

        `requested` has the steps at which callbacks have requested events, besides `at`. A segment
        of more than `max_steps` is cut after `max_steps`, and has no events.
        """
        at = {event: {*self.at.get(event, ()), *requested.get(event, ())} for event in Event}
        segment = next(self.run.segments(first, self.every, at))
        if segment.stop - first > max_steps:
            return Segment(first, first + max_steps, frozenset())
        return segment


def list_multiples(period: int, first: int, total: int) -> range:
    """Return the multiples of a period after boundary `first`, up to `total`."""
    return range((first // period + 1) * period, total + 1, period)


def is_due(step: int, periods: Iterable[int]) -> bool:
    """Return whether an event with these periods, in steps, is due at boundary `step`."""
    return any(step % period == 0 for period in periods)


@dataclass
class DispatchSize:
    """The largest number of steps (or batches of an evaluation) that fit into `dispatch_s` seconds.

    The host checks for signals between dispatches, so a dispatch must not take much longer.
    """

    dispatch_s: float
    step_s: float | None = None
    """Seconds per step of the newest dispatch."""

    def record(self, steps: int, seconds: float) -> None:
        """Record that a dispatch of `steps` steps took `seconds`."""
        self.step_s = seconds / steps

    @property
    def max_steps(self) -> int:
        """Number of steps that fit into a dispatch, at least 1; 1 before the first is recorded."""
        if self.step_s is None:
            return 1
        return max(1, int(self.dispatch_s / max(self.step_s, LEAST_S)))
