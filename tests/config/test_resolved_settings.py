from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import count_total_steps, schedule_events, schedule_run
from pipeline.data.order import SampleOrder
from pipeline.engine.schedule import Event, RunSchedule

Compose = Callable[..., Recipe]


@dataclass
class Length:
    """As much of the recipe's train section as decides the schedule of a run."""

    epochs: int | None = None
    sink_epochs: int | None = None
    steps: int | None = None
    deadline: str | None = None
    end_step: int | None = None
    sink: bool = True
    sink_size: int | str = -1


@pytest.mark.parametrize("sink", [True, False])
def test_sink_epochs_count_sinks(sink: bool) -> None:
    """S-06: 10 sink epochs of 1000 batches over 1875 an epoch are 10,000 steps, 5.33 epochs."""
    length = Length(sink_epochs=10, sink_size=1000, sink=sink)
    assert count_total_steps(length, 1875) == 10_000


@pytest.mark.parametrize("sink_size", [-1, "auto"])
def test_sink_epochs_need_a_size_of_sinks(sink_size: int | str) -> None:
    with pytest.raises(ValueError, match=rf"is {sink_size}; set it, .* with train.epochs=10"):
        count_total_steps(Length(sink_epochs=10, sink_size=sink_size), 1875)


@pytest.mark.parametrize(
    "length",
    [
        Length(epochs=10),
        Length(epochs=10, sink=False, sink_size=1000),
        Length(epochs=10, sink_size="auto"),
        Length(epochs=10, sink_size=1000),
    ],
)
def test_epochs_are_readings_of_the_data_at_any_size_of_sinks(length: Length) -> None:
    """S-04 with sink_size -1, S-07 without sinks, and if the size isn't chosen yet."""
    assert count_total_steps(length, 1875) == 18_750


def test_total_steps_without_a_length_is_refused() -> None:
    with pytest.raises(
        ValueError, match="one of epochs, sink_epochs, steps, minutes and until must"
    ):
        count_total_steps(Length(), 10)


def test_excessive_length_is_refused() -> None:
    with pytest.raises(ValueError, match="100000001 steps in all; must be at most 100000000"):
        count_total_steps(Length(steps=100_000_001), 10)


def test_next_sink_continues_at_the_next_batch() -> None:
    """S-06: epoch offsets at the boundaries of sinks of 1000 over 1875 batches."""
    run = schedule_run(Length(sink_epochs=10, sink_size=1000), 1875)
    offsets = [run.place(1000 * (sink + 1)).epoch_step for sink in range(10)]
    assert offsets == [1000, 125, 1125, 250, 1250, 375, 1375, 500, 1500, 625]
    assert [run.place(1000 * k).sink_step for k in range(1, 11)] == [1000] * 10
    assert [run.place(1000 * k).sink for k in range(1, 11)] == list(range(1, 11))


def test_sinks_read_the_batches_of_epochs_one_after_the_other() -> None:
    """S-05: sinks of 4 over 6 batches an epoch. The third has the last two and the first two."""
    order = SampleOrder(
        seed=3,
        samples=12,
        batch_size=2,
        shuffle=True,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
    )
    run = schedule_run(Length(sink_epochs=3, sink_size=4), order.steps_per_epoch)
    sinks = [segment for segment in run.segments(0, {}) if Event.SINK_END in segment.events]
    assert [(sink.start, sink.stop) for sink in sinks] == [(0, 4), (4, 8), (8, 12)]
    batches = [order.batches(sink.start, sink.stop - sink.start).indices for sink in sinks]
    epochs = np.concatenate(batches).reshape(2, 12)
    assert [sorted(epoch) for epoch in epochs.tolist()] == 2 * [list(range(12))]


def test_auto_sink_size_defaults_to_an_epoch() -> None:
    assert schedule_run(Length(epochs=2, sink_size="auto"), 7).sink_steps == 7


def test_sink_size_minus_one_is_a_sink_per_epoch() -> None:
    run = schedule_run(Length(epochs=2), 7)
    ends = [s.stop for s in run.segments(0, {}) if Event.SINK_END in s.events]
    assert (run.sink_steps, ends) == (7, [7, 14])


def test_segments_without_sinks_are_single_steps() -> None:
    run = schedule_run(Length(steps=4, sink=False), 3)
    segments = list(run.segments(0, {}))
    assert [(s.start, s.stop) for s in segments] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [Event.SINK_END in s.events for s in segments] == [True] * 4
    assert (run.place(4).sink, run.place(4).sink_step) == (2, 1)


def test_scheduled_events_are_plain_numbers(tiny: Compose) -> None:
    """Without the checkpoint stage no segment is split for a save."""
    recipe = tiny("eval.every_epochs=2", "checkpoint.every_steps=5", "train.dispatch_seconds=0.5")
    run = RunSchedule(20, 6, 8)
    schedule = schedule_events(recipe, run, (3, 4))
    assert (schedule.run, schedule.dispatch_seconds) == (run, 0.5)
    assert schedule.every[Event.EVALUATE] == (12,)
    assert schedule.every[Event.CHECKPOINT] == (5,)
    assert schedule.at[Event.DUMP] == (3, 4)
    stages = tuple(stage for stage in recipe.stages if stage != "checkpoint")
    unsaved = recipe.model_copy(update={"stages": stages})
    assert schedule_events(unsaved, run).every[Event.CHECKPOINT] == ()
