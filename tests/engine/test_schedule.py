from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.schedule import Event, RunSchedule, schedule_run, total_steps


@dataclass
class Length:
    """As much of the recipe's train section as decides the schedule of a run."""

    epochs: int | None = None
    passes: int | None = None
    steps: int | None = None
    sink: bool = True
    sink_size: int | str = -1


def test_epochs_count_sinks_when_sink_size_is_positive() -> None:
    """S-06: 10 epochs of 1000 batches over 1875 a pass are 10,000 steps, 5.33 passes."""
    assert total_steps(Length(epochs=10, sink_size=1000), 1875) == 10_000


@pytest.mark.parametrize(
    "length",
    [
        Length(epochs=10),
        Length(epochs=10, sink=False, sink_size=1000),
        Length(epochs=10, sink_size="auto"),
        Length(passes=10),
    ],
)
def test_epochs_count_passes_otherwise(length: Length) -> None:
    """S-04 with sink_size -1, S-07 without sinks, and where the sink is not chosen yet."""
    assert total_steps(length, 1875) == 18_750


def test_total_steps_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="one of epochs, passes and steps must be given"):
        total_steps(Length(), 10)


def test_a_length_beyond_all_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="100000001 steps in all; must be at most 100000000"):
        total_steps(Length(steps=100_000_001), 10)


def test_a_sink_longer_than_a_pass_is_not_cut_at_its_end() -> None:
    run = RunSchedule(total=50, steps_per_pass=7, sink_steps=20)
    assert [s.stop for s in run.segments(0, {})] == [20, 40, 50]


def test_sinks_continue_where_the_last_one_stopped() -> None:
    """S-06: pass offsets at the boundaries of sinks of 1000 over 1875 batches."""
    run = schedule_run(Length(epochs=10, sink_size=1000), 1875)
    offsets = [run.place(1000 * (sink + 1)).pass_step for sink in range(10)]
    assert offsets == [1000, 125, 1125, 250, 1250, 375, 1375, 500, 1500, 625]
    assert [run.place(1000 * k).sink_step for k in range(1, 11)] == [1000] * 10
    assert [run.place(1000 * k).sink for k in range(1, 11)] == list(range(1, 11))


def test_a_sink_that_is_not_chosen_yet_is_a_pass() -> None:
    assert schedule_run(Length(passes=2, sink_size="auto"), 7).sink_steps == 7


def test_sink_size_minus_one_is_a_sink_per_pass() -> None:
    run = schedule_run(Length(passes=2), 7)
    ends = [s.stop for s in run.segments(0, {}) if Event.SINK_END in s.events]
    assert (run.sink_steps, run.sinks, ends) == (7, 2, [7, 14])


def test_without_sinks_every_step_is_a_segment() -> None:
    run = schedule_run(Length(steps=4, sink=False), 3)
    segments = list(run.segments(0, {}))
    assert [(s.start, s.stop) for s in segments] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [Event.SINK_END in s.events for s in segments] == [True] * 4
    assert (run.place(4).sink, run.place(4).sink_step) == (2, 1)


def test_a_sink_is_cut_at_each_event() -> None:
    run = RunSchedule(total=25, steps_per_pass=100, sink_steps=10)
    every = {Event.CHECKPOINT: (7,), Event.EVALUATE: (12,)}
    segments = list(run.segments(0, every))
    assert [s.stop for s in segments] == [7, 10, 12, 14, 20, 21, 24, 25]
    assert [s.stop for s in segments if Event.CHECKPOINT in s.events] == [7, 14, 21]
    assert [s.stop for s in segments if Event.EVALUATE in s.events] == [12, 24]
    assert [s.stop for s in segments if Event.SINK_END in s.events] == [10, 20, 25]


@given(
    total=st.integers(1, 200),
    per_pass=st.integers(1, 50),
    sink=st.one_of(st.none(), st.integers(1, 60)),
    save=st.integers(1, 40),
    evaluate=st.integers(1, 40),
    first=st.integers(0, 199),
)
def test_events_do_not_depend_on_the_sink_size_or_on_resuming(
    total: int, per_pass: int, sink: int | None, save: int, evaluate: int, first: int
) -> None:
    run = RunSchedule(total, per_pass, sink)
    segments = list(
        run.segments(min(first, total), {Event.CHECKPOINT: (save,), Event.EVALUATE: (evaluate,)})
    )
    steps = [step for s in segments for step in range(s.start, s.stop)]
    assert steps == list(range(min(first, total), total))
    for event, period in ((Event.CHECKPOINT, save), (Event.EVALUATE, evaluate)):
        happened = [s.stop for s in segments if event in s.events]
        assert happened == [n for n in range(min(first, total) + 1, total + 1) if n % period == 0]
