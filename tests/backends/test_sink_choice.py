"""The choice of a sink from costs: never slower than none, never longer than is of use."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.backends.sink_choice import (
    TOLERANCE,
    Bounds,
    Cost,
    Costs,
    choose,
    count_dispatches,
    predict_ms,
)
from pipeline.engine.schedule import Event, RunSchedule

FREE = Bounds(total=100_000, periods=(), window_steps=1024, dispatch_s=1.0)


def costs(
    off_ms: float, dispatch_ms: float, step_ms: float, error: float = 0.0, soft: Cost | None = None
) -> Costs:
    loop = Cost("loop", dispatch_ms, step_ms)
    return Costs(off_ms, (loop, soft) if soft else (loop,), error)


def test_cost_fits_both_timed_dispatches() -> None:
    cost = Cost.fit("loop", single_ms=1.5, long_ms=101.0, steps=200)
    assert cost.step_ms == pytest.approx(0.5)
    assert cost.dispatch_ms + 1 * cost.step_ms == pytest.approx(1.5)
    assert cost.dispatch_ms + 200 * cost.step_ms == pytest.approx(101.0)


MEASURED_MS = st.floats(1e-4, 1e4)


@pytest.mark.slow
@given(single_ms=MEASURED_MS, long_ms=MEASURED_MS, off_ms=MEASURED_MS, steps=st.integers(2, 500))
@example(single_ms=2.0, long_ms=1.0, off_ms=2.0, steps=20)
def test_predicted_time_is_positive_despite_noise(
    single_ms: float, long_ms: float, off_ms: float, steps: int
) -> None:
    """On a busy machine one step may take longer than many."""
    cost = Cost.fit("loop", single_ms, long_ms, steps)
    choice = choose(Costs(off_ms, (cost,), error=0.0), FREE)
    assert cost.step_ms > 0
    assert choice.step_ms > 0


@pytest.mark.medium
@given(
    total=st.integers(1, 300),
    size=st.integers(1, 80),
    evaluate=st.integers(1, 90),
    save=st.integers(1, 90),
    longest=st.integers(1, 40),
)
def test_dispatch_count_matches_training(
    total: int, size: int, evaluate: int, save: int, longest: int
) -> None:
    """The schedule of a run is the oracle: its segments, each in at most `longest` steps."""
    every = {Event.EVALUATE: (evaluate,), Event.CHECKPOINT: (save,)}
    segments = RunSchedule(total, 10, size).segments(0, every)
    expected = sum(-(-(s.stop - s.start) // longest) for s in segments)
    assert count_dispatches(total, (size, evaluate, save), longest) == expected


def test_predicted_time_is_step_plus_share_of_the_dispatch() -> None:
    assert predict_ms(Cost("loop", 0.6, 0.1), 10, FREE) == pytest.approx(0.16)
    assert predict_ms(Cost("loop", 0.6, 0.1), 1, FREE) == pytest.approx(0.7)


def test_events_split_sinks_in_the_prediction() -> None:
    """Sinks of 10 split every 25 steps: dispatches of 10, 10, 5, 5, 10, 10 in 50 steps."""
    bounds = Bounds(total=1000, periods=(25,), window_steps=1024, dispatch_s=1.0)
    assert predict_ms(Cost("loop", 0.5, 1.0), 10, bounds) == pytest.approx(1.0 + 0.5 * 6 / 50)


def test_dispatch_time_limit_splits_sinks_in_the_prediction() -> None:
    """10 ms hold 5 steps of 2 ms, so a sink of 100 is 20 dispatches."""
    hasty = Bounds(total=1000, periods=(), window_steps=1024, dispatch_s=0.01)
    assert predict_ms(Cost("loop", 1.0, 2.0), 100, hasty) == pytest.approx(2.0 + 1.0 / 5)


def test_sink_size_is_long_for_cheap_and_short_for_expensive_steps() -> None:
    """The cost of a dispatch is divided until it is below the tolerance."""
    tiny = choose(costs(off_ms=0.5, dispatch_ms=0.45, step_ms=0.05), FREE)
    large = choose(costs(off_ms=50.5, dispatch_ms=0.45, step_ms=50.0), FREE)
    assert (tiny.size, large.size) == (1000, 2)
    assert tiny.gain == pytest.approx(0.5 / (0.05 + 0.45 / 1000))
    assert tiny.mechanism == large.mechanism == "loop"
    assert "longer ones save less than 0.5 %" in tiny.reason


LIMITS = {
    "the run": (Bounds(60, (), 1024, 1.0), 60, "the run has no more than 60 steps"),
    "events": (Bounds(10_000, (220, 500), 1024, 1.0), 220, "an event is due every 220 steps"),
    "memory": (Bounds(10_000, (), 53, 1.0), 53, "the device holds 53 batches at once"),
    "signals": (Bounds(10_000, (), 1024, 0.004), 80, "dispatch_seconds = 0.004, after 80 steps"),
}


@pytest.mark.parametrize(("bounds", "size", "why"), LIMITS.values(), ids=LIMITS.keys())
def test_sink_size_is_limited_by_the_dispatch(bounds: Bounds, size: int, why: str) -> None:
    choice = choose(costs(off_ms=0.5, dispatch_ms=0.45, step_ms=0.05), bounds)
    assert choice.size == size
    assert choice.reason.endswith(why)


def test_sink_divides_the_steps_between_events() -> None:
    """220 steps in two sinks of 110 cost less than 100, 100 and 20."""
    bounds = Bounds(22_000, (220,), 1024, 1.0)
    assert choose(costs(off_ms=0.5, dispatch_ms=0.3, step_ms=0.37), bounds).size == 110


NONE = {
    "slower": (costs(off_ms=1.0, dispatch_ms=0.1, step_ms=1.2), "no sink is sure to be faster"),
    "as fast": (costs(off_ms=1.0, dispatch_ms=0.0, step_ms=1.0), "no sink is sure to be faster"),
    "in the noise": (
        costs(off_ms=1.02, dispatch_ms=0.02, step_ms=1.0, error=0.05),
        "1.02x, the noise is 5 %",
    ),
    "slower loops": (
        costs(off_ms=4.0, dispatch_ms=-12.0, step_ms=16.0),
        "no sink is sure to be faster",
    ),
}


@pytest.mark.parametrize(("given_costs", "why"), NONE.values(), ids=NONE.keys())
def test_sink_is_off_unless_surely_faster(given_costs: Costs, why: str) -> None:
    choice = choose(given_costs, FREE)
    assert (choice.size, choice.mechanism, choice.gain) == (None, "none", 1.0)
    assert why in choice.reason


@pytest.mark.parametrize(
    "bounds",
    [Bounds(1, (), 1024, 1.0), Bounds(100, (1,), 1024, 1.0), Bounds(100, (), 1024, 1e-9)],
    ids=["one step", "an event each step", "signals"],
)
def test_sink_is_off_if_a_dispatch_holds_one_step(bounds: Bounds) -> None:
    choice = choose(costs(off_ms=1.0, dispatch_ms=0.5, step_ms=0.5), bounds)
    assert choice.size is None
    assert choice.reason.startswith("a sink would have one step, since ")


@pytest.mark.slow
def test_faster_mechanism_is_chosen_and_loop_at_a_tie() -> None:
    def mechanism(soft_step_ms: float) -> str:
        soft = Cost("soft", 0.1, soft_step_ms)
        return choose(costs(off_ms=2.0, dispatch_ms=0.1, step_ms=1.0, soft=soft), FREE).mechanism

    assert [mechanism(0.8), mechanism(1.2), mechanism(1.0)] == ["soft", "loop", "loop"]
    assert mechanism(1 - TOLERANCE / 2) == "loop"


MS = st.floats(0.001, 1e4)


@pytest.mark.slow
@given(
    off_ms=MS,
    single_ms=MS,
    step_ms=MS,
    soft_step_ms=MS,
    error=st.floats(0, 0.5),
    total=st.integers(1, 100_000),
    periods=st.lists(st.integers(1, 5000), max_size=4),
    window_steps=st.integers(1, 1024),
    dispatch_s=st.floats(0.001, 10),
)
def test_selected_sink_is_within_bounds_and_at_most_as_slow_as_none(
    off_ms: float,
    single_ms: float,
    step_ms: float,
    soft_step_ms: float,
    error: float,
    total: int,
    periods: list[int],
    window_steps: int,
    dispatch_s: float,
) -> None:
    soft = Cost("soft", single_ms - soft_step_ms, soft_step_ms)
    given_costs = costs(off_ms, single_ms - step_ms, step_ms, error, soft)
    bounds = Bounds(total, tuple(periods), window_steps, dispatch_s)
    choice = choose(given_costs, bounds)
    assert choice.reason
    assert choice.off_ms == off_ms
    if choice.size is None:
        assert (choice.mechanism, choice.step_ms) == ("none", off_ms)
        return
    (cost,) = [cost for cost in given_costs.sinks if cost.mechanism == choice.mechanism]
    assert choice.step_ms == predict_ms(cost, choice.size, bounds) < off_ms
    assert choice.gain > 1 + error
    assert 1 < choice.size <= min(total, window_steps, *periods)
    assert choice.size * cost.step_ms <= max(1000 * dispatch_s, cost.step_ms) * (1 + 1e-9)
    for size in (choice.size, 2, 5, 10, 100, 1000):
        if size <= bounds.find_longest(cost)[0]:
            assert choice.step_ms <= predict_ms(cost, size, bounds) * (1 + TOLERANCE) + 1e-12
