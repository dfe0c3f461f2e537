from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.schedule import Event, RunSchedule, Schedule, Segment


def test_sink_longer_than_an_epoch_is_not_split_at_its_end() -> None:
    run = RunSchedule(total=50, steps_per_epoch=7, sink_steps=20)
    assert [s.stop for s in run.segments(0, {})] == [20, 40, 50]


def test_sink_is_split_at_each_event() -> None:
    run = RunSchedule(total=25, steps_per_epoch=100, sink_steps=10)
    every = {Event.CHECKPOINT: (7,), Event.EVALUATE: (12,)}
    segments = list(run.segments(0, every))
    assert [s.stop for s in segments] == [7, 10, 12, 14, 20, 21, 24, 25]
    assert [s.stop for s in segments if Event.CHECKPOINT in s.events] == [7, 14, 21]
    assert [s.stop for s in segments if Event.EVALUATE in s.events] == [12, 24]
    assert [s.stop for s in segments if Event.SINK_END in s.events] == [10, 20, 25]


@pytest.mark.medium
@given(
    total=st.integers(1, 200),
    steps_per_epoch=st.integers(1, 50),
    sink=st.one_of(st.none(), st.integers(1, 60)),
    save=st.integers(1, 40),
    evaluate=st.integers(1, 40),
    first=st.integers(0, 199),
)
def test_events_do_not_depend_on_the_sink_size_or_on_resuming(
    total: int, steps_per_epoch: int, sink: int | None, save: int, evaluate: int, first: int
) -> None:
    run = RunSchedule(total, steps_per_epoch, sink)
    segments = list(
        run.segments(min(first, total), {Event.CHECKPOINT: (save,), Event.EVALUATE: (evaluate,)})
    )
    steps = [step for s in segments for step in range(s.start, s.stop)]
    assert steps == list(range(min(first, total), total))
    for event, period in ((Event.CHECKPOINT, save), (Event.EVALUATE, evaluate)):
        happened = [s.stop for s in segments if event in s.events]
        assert happened == [n for n in range(min(first, total) + 1, total + 1) if n % period == 0]


@pytest.mark.medium
@given(
    run=st.builds(
        RunSchedule,
        st.integers(1, 60),
        st.integers(1, 20),
        st.one_of(st.none(), st.integers(1, 70)),
    ),
    save=st.integers(1, 20),
    further=st.sets(st.integers(0, 80), max_size=5),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_events_do_not_depend_on_dispatch_size(
    run: RunSchedule, save: int, further: set[int], sizes: list[int]
) -> None:
    """Split afresh after each dispatch: an event has its step, and no part of a segment has any."""
    every, at = {Event.CHECKPOINT: (save,)}, {Event.EVALUATE: further}
    whole = {s.stop: s.events for s in run.segments(0, every, at)}
    schedule, happened, step = Schedule(run, every), {}, 0
    while step < run.total:
        max_steps = sizes[step % len(sizes)]
        segment = schedule.next_segment(step, max_steps, at)
        assert segment.start == step < segment.stop <= step + max_steps
        step = segment.stop
        if segment.events:
            happened[step] = segment.events
    assert happened == whole


def test_schedule_has_dumps_only_at_its_steps() -> None:
    schedule = Schedule(RunSchedule(20, 6, 8), at={Event.DUMP: (3,)})
    assert schedule.next_segment(0, 20, {}) == Segment(0, 3, frozenset({Event.DUMP}))


def test_requested_steps_are_besides_those_of_the_schedule() -> None:
    schedule = Schedule(RunSchedule(20, 6, 20), at={Event.EVALUATE: (3, 5)})
    asked = {Event.EVALUATE: (4,), Event.CHECKPOINT: (5,)}
    segments = [schedule.next_segment(step, 20, asked) for step in (0, 3, 4, 5)]
    assert [(segment.stop, segment.events) for segment in segments] == [
        (3, {Event.EVALUATE}),
        (4, {Event.EVALUATE}),
        (5, {Event.EVALUATE, Event.CHECKPOINT}),
        (20, {Event.SINK_END}),
    ]
