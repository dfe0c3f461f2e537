"""Timed runs: training for the clock alone, which leaves no files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.engine.schedule import RunSchedule
from pipeline.stages.autosink.dispatch_costs import TimedRuns, Variant
from tests.stages.clockwork import Clockwork

Compose = Callable[..., Recipe]
COURSE = RunSchedule(total=1000, steps_per_epoch=6, sink_steps=6)


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()
    made.rule(monkeypatch)
    return made


@pytest.fixture
def trials(
    clockwork: Clockwork, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TimedRuns]:
    """Of a recipe with events at every step, in an empty working folder that stays empty."""
    monkeypatch.chdir(tmp_path)
    recipe = tiny("eval.every_steps=1", "checkpoint.every_steps=1", "monitor.tensorboard=true")
    with TimedRuns(recipe, COURSE, clockwork, is_terminal=False) as made:  # type: ignore[arg-type]
        yield made
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
def test_steps_without_sinks_are_dispatched_singly(trials: TimedRuns, clockwork: Clockwork) -> None:
    timing = trials.time(Variant(None, "none"), 10)
    assert clockwork.ran == [(1, "none")] * 10
    assert timing.step_ms == pytest.approx(1.1)
    assert timing.dispatch_ms == pytest.approx([1.1] * 9)


def test_first_sink_is_not_timed(trials: TimedRuns, clockwork: Clockwork) -> None:
    """Training begins with a step alone, to find out how many fit into a dispatch."""
    timing = trials.time(Variant(20, "loop"), 60)
    assert clockwork.ran == [(1, "loop"), (19, "loop"), (20, "loop"), (20, "loop")]
    assert timing.step_ms == pytest.approx(0.1 + 1.0 / 20)
    assert timing.dispatch_ms == pytest.approx([3.0, 3.0])


def test_trials_run_in_sequence(trials: TimedRuns) -> None:
    variants = [
        Variant(20, "loop"),
        Variant(None, "none"),
        Variant(20, "soft"),
        Variant(20, "loop"),
    ]
    times = [trials.time(variant, 60).step_ms for variant in variants]
    assert times == pytest.approx([0.15, 1.1, 0.1595, 0.15])


def test_non_finite_loss_is_an_error(trials: TimedRuns, clockwork: Clockwork) -> None:
    clockwork.nan_step = 3
    with pytest.raises(RunError, match=r"Invalid loss.*Step 3 of 10"):
        trials.time(Variant(None, "none"), 10)


def test_signal_ends_a_trial_immediately(trials: TimedRuns, clockwork: Clockwork) -> None:
    clockwork.signal_at = 3
    with pytest.raises(KeyboardInterrupt):
        trials.time(Variant(None, "none"), 1000)
    assert clockwork.steps == 3


def test_trials_print_nothing_on_a_terminal(
    clockwork: Clockwork, tiny: Compose, capfd: pytest.CaptureFixture[str]
) -> None:
    with TimedRuns(tiny(), COURSE, clockwork, is_terminal=True) as trials:  # type: ignore[arg-type]
        assert trials.time(Variant(20, "loop"), 60).step_ms == pytest.approx(0.15)
    assert capfd.readouterr() == ("", "")
