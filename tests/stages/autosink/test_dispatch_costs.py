"""Measurements find the costs that a simulated clock was given."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest

from pipeline.backends.sink_choice import Costs, SinkMechanism
from pipeline.config.recipe import Recipe
from pipeline.engine.schedule import RunSchedule
from pipeline.stages.autosink.dispatch_costs import (
    LEAST_ROUNDS,
    OFF,
    TimedRuns,
    Timing,
    Variant,
    count_least_steps,
    estimate_gain_error,
    fit_costs,
    measure,
    time_single_step,
)
from tests.stages.clockwork import Clockwork

Compose = Callable[..., Recipe]
Measured = tuple[Costs, np.ndarray]
BOTH: tuple[SinkMechanism, ...] = ("loop", "soft")


@pytest.fixture
def measured(
    tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Clockwork, float], Measured]:
    """Measure a run on its own clock, in `budget_s` seconds of it."""

    def go(clockwork: Clockwork, budget_s: float) -> Measured:
        clockwork.rule(monkeypatch)
        run_schedule = RunSchedule(total=100_000, steps_per_epoch=6, sink_steps=6)
        with TimedRuns(tiny(), run_schedule, clockwork, is_terminal=False) as trials:  # type: ignore[arg-type]
            return measure(trials, time_single_step(trials), BOTH, budget_s)

    return go


@pytest.mark.parametrize("step_s", [2e-5, 1e-3, 0.05])
def test_costs_are_measured_for_both_mechanisms(
    step_s: float, measured: Callable[[Clockwork, float], Measured]
) -> None:
    clockwork = Clockwork(dispatch_s=4e-4, step_s=step_s, soft_s=1e-4)
    costs, _ = measured(clockwork, 0.5)
    loop, soft = costs.sinks
    assert costs.off_ms == pytest.approx(1000 * (4e-4 + step_s))
    assert (loop.mechanism, soft.mechanism) == BOTH
    assert loop.step_ms == pytest.approx(1000 * step_s)
    assert loop.dispatch_ms == pytest.approx(0.4)
    assert soft.step_ms == pytest.approx(1000 * (step_s + 1e-4))
    assert costs.error == pytest.approx(0, abs=1e-9)


def test_single_dispatch_times_are_stored(
    measured: Callable[[Clockwork, float], Measured],
) -> None:
    _, singles_ms = measured(Clockwork(dispatch_s=4e-4, step_s=1e-3), 0.5)
    assert len(singles_ms) >= 3 * LEAST_ROUNDS
    assert singles_ms == pytest.approx(np.full(len(singles_ms), 1.4))


@pytest.mark.medium
def test_measurement_takes_about_its_time_budget(
    measured: Callable[[Clockwork, float], Measured],
) -> None:
    clockwork = Clockwork(dispatch_s=4e-4, step_s=1e-3)
    measured(clockwork, 2.0)
    assert 1.0 < clockwork.now < 3.0


def test_slow_steps_are_measured_few_times(
    measured: Callable[[Clockwork, float], Measured],
) -> None:
    clockwork = Clockwork(dispatch_s=1e-3, step_s=1.0)
    measured(clockwork, 0.5)
    assert count_least_steps(BOTH) <= clockwork.steps <= 1.2 * count_least_steps(BOTH)


def test_disturbed_rounds_are_ignored() -> None:
    """And what slows a whole round down leaves its ratios alone."""
    slow = [1.0, 1.0, 3.0, 2.0, 1.0]
    rounds = [
        {
            OFF: Timing(2.0 * factor, np.zeros(0)),
            Variant(1, "loop"): Timing(1.5 * factor, np.zeros(0)),
            Variant(10, "loop"): Timing(1.05 * factor, np.zeros(0)),
        }
        for factor in slow
    ]
    costs = fit_costs(rounds, ["loop"], 10)
    (loop,) = costs.sinks
    assert (costs.off_ms, costs.error) == (2.0, pytest.approx(0, abs=1e-12))
    assert (loop.step_ms, loop.dispatch_ms) == pytest.approx((1.0, 0.5))


def test_estimated_gain_error_matches_simulation() -> None:
    """Normal errors of 3 %: medians of 25 scatter as the formula says."""
    draws = np.random.default_rng(0).normal(1.0, 0.03, (2000, 25))
    scatter = float(np.std(np.median(draws, axis=1)))
    estimated = statistics.mean(estimate_gain_error(row.tolist(), [1.0] * 25) for row in draws)
    assert estimated == pytest.approx(scatter, rel=0.1)
