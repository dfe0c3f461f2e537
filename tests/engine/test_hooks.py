"""The steps that are done in time, and the early end of a run whose steps slow down.

Where a run goes back to, without a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.checkpointer import Checkpoints, Retention
from pipeline.checkpoint.restore import parse_host_state, read_state
from pipeline.core.errors import RunError
from pipeline.engine import hooks as deadline_module
from pipeline.engine.hooks import Deadline, MovableEnd, Rollbacks, bound_seconds, find_last_step
from pipeline.engine.schedule import DispatchSize, Event, RunSchedule, Schedule, Segment, is_due
from pipeline.training.features.non_finite_steps import NonFiniteStepCounts
from pipeline.training.state import TrainState

Patch = pytest.MonkeyPatch


def schedule_of(total: int, evals: int | None = None, saves: int | None = None) -> Schedule:
    every = {Event.EVALUATE: (evals,) if evals else (), Event.CHECKPOINT: (saves,) if saves else ()}
    return Schedule(RunSchedule(total, 10, 4), every)


@given(
    st.integers(1, 40),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 12),
    st.integers(0, 100),
    st.integers(0, 40),
)
def test_counted_steps_and_events_fit_the_deadline(
    total: int, evals: int | None, saves: int | None, left_s: int, first: int
) -> None:
    """Against adding up one step after the other; 2 s a step, 5 s an evaluation, 3 s a save."""
    first = min(first, total)
    time_s, last = 0, first
    for step in range(first + 1, total + 1):
        time_s += 2
        if time_s > left_s:
            break
        last = step
        time_s += 5 * (evals is not None and step % evals == 0)
        time_s += 3 * (saves is not None and step % saves == 0)
    event_s = {Event.EVALUATE: 5.0, Event.CHECKPOINT: 3.0}
    assert find_last_step(schedule_of(total, evals, saves), first, left_s, 2.0, event_s) == last


@given(
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 12),
    st.integers(0, 30),
    st.integers(1, 30),
)
def test_steps_end_within_the_bound(
    evals: int | None, saves: int | None, first: int, num_steps: int
) -> None:
    event_s = {Event.EVALUATE: 5.0, Event.CHECKPOINT: 3.0}
    schedule = schedule_of(first + num_steps, evals, saves)
    bound_s = bound_seconds(schedule, num_steps, 2.0, event_s)
    assert find_last_step(schedule, first, bound_s, 2.0, event_s) == first + num_steps


@pytest.mark.parametrize(
    ("now", "step", "step_s", "evals", "end"),
    [
        (0.0, 10, 2.0, None, 100),  # late by now, but there is time for steps to get faster
        (94.0, 50, 0.5, None, 100),  # another dispatch follows the next one
        (98.0, 50, 0.5, None, 54),
        (97.0, 50, 0.5, 52, 52),  # there is no time for the 2 s of an evaluation after step 52
        (97.0, 97, 0.5, 99, 99),
        (97.0, 97, 0.5, 100, 100),  # the last evaluation isn't in this time
        (99.9, 50, 1.0, None, 51),  # one step follows
        (200.0, 99, 1.0, None, 100),
        (97.0, 50, 0.0, 10, 70),  # steps too short for the clock: one evaluation, and no second
    ],
)
def test_run_is_shortened_to_fit_the_deadline(
    now: float, step: int, step_s: float, evals: int | None, end: int, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(perf_counter=lambda: now))
    ends: list[int] = []
    deadline = Deadline(100.0, {Event.EVALUATE: 2.0}, ends.append)
    shortened = deadline.move_end(schedule_of(100, evals), step, DispatchSize(2.0, step_s))
    assert shortened.run.total == end
    assert ends == ([end] if end < 100 else [])


def test_schedule_is_unchanged_without_a_deadline() -> None:
    schedule = schedule_of(100)
    assert Deadline().move_end(schedule, 3, DispatchSize(1.0, 1.0)) is schedule
    assert Deadline(0.0).move_end(schedule, 0, DispatchSize(1.0)) is schedule


def train_until(monkeypatch: Patch, paces: dict[float, float], planned: int) -> tuple[float, int]:
    """Train to a movable end at 100 s, at the seconds of a step from each time on.

    Evaluations take 2 s each 50 steps. Returns the time of the last step, and the steps.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    totals: list[int] = []
    end = MovableEnd(100.0, {Event.EVALUATE: 2.0}, totals.append, most_steps=10**6)
    schedule = schedule_of(planned, evals=50)
    size = DispatchSize(1.0)
    step = 0
    while step < schedule.run.total:
        segment = schedule.next_segment(step, size.max_steps, {})
        steps = segment.stop - step
        seconds = 0.0
        for _ in range(steps):
            seconds += next(s for at, s in reversed(paces.items()) if at <= clock.now + seconds)
        size.record(steps, seconds)
        clock.now += seconds
        step = segment.stop
        if step == schedule.run.total:
            break
        clock.now += 2.0 * (Event.EVALUATE in segment.events)
        schedule = end.move_end(schedule, step, size)
        assert schedule.run.total == ([planned, *totals])[-1] > step
    assert step == ([planned, *totals])[-1]
    assert len(totals) < 60
    return clock.now, step


@pytest.mark.parametrize("planned", [10, 200, 5000])
@pytest.mark.parametrize(
    "paces",
    [
        {0.0: 0.2},
        {0.0: 0.2, 50.0: 0.4},
        {0.0: 0.2, 50.0: 0.1},
        {0.0: 0.2, 90.0: 1.0, 95.0: 0.05},
        {float(at): 0.1 + 0.3 * (at % 2) for at in range(100)},
    ],
)
def test_movable_end_is_on_time_at_any_pace(
    planned: int, paces: dict[float, float], monkeypatch: Patch
) -> None:
    """Whatever the first number of steps; the last 2 s may be an evaluation that isn't begun."""
    seconds, steps = train_until(monkeypatch, paces, planned)
    assert 97.5 < seconds < 101.5
    assert steps > 100


def test_movable_end_has_at_most_its_most_steps(monkeypatch: Patch) -> None:
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    end = MovableEnd(100.0, {}, lambda steps: None, most_steps=64)
    schedule = end.move_end(schedule_of(20), 10, DispatchSize(1.0, 0.1))
    assert schedule.run.total == 64


def test_movable_end_waits_for_the_first_step(monkeypatch: Patch) -> None:
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    totals: list[int] = []
    end = MovableEnd(35.0, {}, totals.append, most_steps=10**6)
    assert end.move_end(schedule_of(2), 0, DispatchSize(1.0)).run.total == 2
    assert end.move_end(schedule_of(2), 1, DispatchSize(1.0, 10.0)).run.total == 4
    assert totals == [4]


def test_steps_far_from_the_end_look_at_no_events(monkeypatch: Patch) -> None:
    """A run of a million steps with an evaluation every 100, before its next choice is due."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    counts: list[int] = []
    segments = RunSchedule.segments

    def count_segments(self: RunSchedule, *args: Any) -> Iterator[Segment]:
        counts.append(1)
        return segments(self, *args)

    monkeypatch.setattr(RunSchedule, "segments", count_segments)
    end = MovableEnd(1e4, {Event.EVALUATE: 1.0}, lambda steps: None, most_steps=10**6)
    schedule = schedule_of(10**6, evals=100)
    size = DispatchSize(1.0, 0.01)
    schedule = end.move_end(schedule, 10, size)
    counts.clear()
    clock.now = 1.0
    assert end.move_end(schedule, 110, size) is schedule
    assert Deadline(1e4, {Event.EVALUATE: 1.0}).move_end(schedule, 110, size) is schedule
    assert counts == []


def state_at(step: int, skipped: int = 0, weight: float = 1.0) -> TrainState:
    counts = NonFiniteStepCounts(jnp.int32(0), jnp.int32(skipped))
    params = {"w": jnp.float32(weight)}
    return TrainState(jnp.int32(step), params, {}, (), {"non_finite_steps": counts})


def rollbacks(saved: dict[int, TrainState], most: int = 9, periods: Any = (5,)) -> Rollbacks:
    return Rollbacks(most, periods, lambda: sorted(saved), lambda step, _: saved[step])


def test_rollback_restores_the_weights_of_the_checkpoint() -> None:
    found = rollbacks({5: state_at(5, skipped=2, weight=3.0)}).go_back(8, state_at(7))
    assert (int(found.step), float(found.params["w"])) == (8, 3.0)
    assert int(found.features["non_finite_steps"].left_out) == 2 + 3


def test_unscheduled_checkpoints_are_skipped() -> None:
    saved = {step: state_at(step) for step in (0, 5, 6, 7)}
    back = rollbacks(saved)
    back.go_back(8, state_at(7))
    assert back.done[0].to == 5


def test_checkpoints_with_non_finite_weights_are_skipped() -> None:
    saved = {0: state_at(0), 5: state_at(5, weight=np.inf), 10: state_at(10, weight=np.nan)}
    back = rollbacks(saved)
    back.go_back(11, state_at(10))
    assert back.done[0].to == 0


def test_checkpoint_is_used_by_one_rollback_only() -> None:
    back = rollbacks({0: state_at(0), 5: state_at(5)})
    for step in (7, 9):
        back.go_back(step, state_at(step - 1))
    assert [gone.to for gone in back.done] == [5, 0]
    with pytest.raises(RunError, match="there is no checkpoint left to go back to"):
        back.go_back(10, state_at(9))


def test_number_of_rollbacks_is_limited() -> None:
    back = rollbacks({step: state_at(step) for step in range(0, 50, 5)}, most=2)
    for step in (12, 23):
        back.go_back(step, state_at(step - 1))
    with pytest.raises(RunError, match="went back 2 times already, as often as it may"):
        back.go_back(34, state_at(33))


@pytest.mark.medium
@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(31, 60), unique=True, max_size=6))
def test_resumed_run_restores_its_rollbacks(steps: list[int]) -> None:
    saved = {step: state_at(step) for step in range(0, 60, 5)}
    unbroken = rollbacks(saved)
    for step in sorted(steps):
        before = rollbacks(saved)
        before.remember(parse_host_state(unbroken.state()).rollbacks)
        before.go_back(step, state_at(step - 1))
        unbroken.go_back(step, state_at(step - 1))
        assert before.done == unbroken.done


@pytest.mark.medium
def test_rollback_checkpoints_are_retained(tmp_path: Path) -> None:
    retention = Retention(2, holds=partial(is_due, periods=(5,)))
    with Checkpoints(tmp_path, retention) as checkpoints:
        for step in (0, 5, 10, 11, 12, 13):
            checkpoints.save(step, state_at(step), {}, None)
        assert list(checkpoints.list_steps()) == [5, 10, 12, 13]
    found = read_state(tmp_path, 5, state_at(13))
    assert int(found.step) == 5
