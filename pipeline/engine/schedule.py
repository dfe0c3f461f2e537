"""Schedule of a run: the position of every step, and where a sink is cut for an event.

Counted from 1 are passes over the data, sinks (MindSpore's epochs, S-05) and steps; a *boundary*
is the number of steps done. Everything here is known before the run starts, so an event happens
at its exact step whatever the sink size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.recipe import TrainSpec


MAX_STEPS = 100_000_000


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
    """Position of a step. `sink_step` is MindSpore's `(cur_step - 1) % batch_num + 1` (C-02)."""

    step: int
    sink: int
    sink_step: int
    pass_: int
    pass_step: int


@dataclass(frozen=True)
class RunSchedule:
    """The whole run in steps; `sink_steps` is the sink's length, or None without sinks."""

    total: int
    steps_per_pass: int
    sink_steps: int | None

    def place(self, step: int) -> StepPosition:
        """Return the position of `step`, counted from 1; without sinks, a sink is a pass (S-07)."""
        sink, sink_step = divmod(step - 1, self.sink_steps or self.steps_per_pass)
        pass_, pass_step = divmod(step - 1, self.steps_per_pass)
        return StepPosition(step, sink + 1, sink_step + 1, pass_ + 1, pass_step + 1)

    @property
    def sinks(self) -> int:
        """The number of sinks, a shorter last one included."""
        return -(-self.total // (self.sink_steps or self.steps_per_pass))

    def segments(
        self,
        first: int,
        every: Mapping[Event, tuple[int, ...]],
        at: Mapping[Event, Collection[int]] = NOWHERE,
    ) -> Iterator[Segment]:
        """Cut the steps after boundary `first` at each event.

        `every` gives the periods in steps at which an event is due, `at` further steps; the ends of
        sinks are added here, the last one at the end. Without sinks every step is a segment of its
        own.
        """
        periods = {**every, Event.SINK_END: (self.sink_steps or 1,)}
        further = {event: frozenset(steps) for event, steps in at.items()}
        ahead = sorted({step for steps in further.values() for step in steps if step > first})
        start, position = first, 0
        while start < self.total:
            stop = min(_next_multiple(start, n) for due in periods.values() for n in due)
            if position < len(ahead) and ahead[position] <= stop:
                stop, position = ahead[position], position + 1
            stop = min(stop, self.total)
            events = {event for event, due in periods.items() if any(stop % n == 0 for n in due)}
            events |= {event for event, steps in further.items() if stop in steps}
            if stop == self.total:
                events.add(Event.SINK_END)
            yield Segment(start, stop, frozenset(events))
            start = stop


def _next_multiple(boundary: int, period: int) -> int:
    return (boundary // period + 1) * period


def schedule_run(train: TrainSpec, steps_per_pass: int) -> RunSchedule:
    """Return the schedule of a run over a dataset of `steps_per_pass` steps a pass.

    With a `sink_size` of auto a sink is a pass until its size is chosen.
    """
    size = _batches_of_sink(train) or steps_per_pass
    return RunSchedule(
        total_steps(train, steps_per_pass), steps_per_pass, size if train.sink else None
    )


def _batches_of_sink(train: TrainSpec) -> int | None:
    """Return the size that the recipe gives in batches; None for a pass (-1) and where it is
    chosen later (auto)."""
    size = train.sink_size
    return size if isinstance(size, int) and size > 0 else None


def total_steps(train: TrainSpec, steps_per_pass: int) -> int:
    """Return a run's length in steps; an epoch is a sink if `sink_size` > 0, else a pass (S-06).

    With `sink: false` the sink size is ignored, so an epoch is a pass then too (S-07). So it is
    with auto, since the length of a run must not depend on a measurement. Raises ValueError when no
    length is given, or one of more than `MAX_STEPS` steps.
    """
    sink_steps = _batches_of_sink(train) if train.sink else None
    if train.steps is not None:
        total = train.steps
    elif train.passes is not None:
        total = train.passes * steps_per_pass
    elif train.epochs is not None:
        total = train.epochs * (sink_steps or steps_per_pass)
    else:
        raise ValueError("one of epochs, passes and steps must be given")
    if total > MAX_STEPS:
        raise ValueError(f"{total} steps in all; must be at most {MAX_STEPS}")
    return total


def is_due(step: int, periods: Iterable[int]) -> bool:
    """Whether an event of one of these periods is due at a boundary; all are due at 0."""
    return any(step % period == 0 for period in periods)
