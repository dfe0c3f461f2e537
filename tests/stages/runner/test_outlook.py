"""The outlook before the first step: when a run ends, if it fits, when it is saved."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.engine.history import History
from pipeline.stages.autosink.sink_plan import SinkPlan
from pipeline.stages.record.kept_times import KeptTimes, keep_times, locate_times, read_times
from pipeline.stages.runner import outlook as module
from pipeline.stages.runner.outlook import (
    Outlook,
    OutlookMonitor,
    count_multiples,
    time_steps,
)
from tests import outcome
from tests.conftest import MLP
from tests.stages.clockwork import Clockwork
from tests.step_rows import telemetry_of
from tests.whole_run import run

Compose = Callable[..., Recipe]
NOW = datetime(2026, 11, 28, 14, 0)
DEVICE = "cpu:0 cpu"


def lines_of(folder: Path) -> list[str]:
    log = (folder / "run.log").read_text().splitlines()
    return [line[20:] for line in log if line[9:].startswith("outlook ")]


def test_end_includes_steps_evaluations_and_the_rest() -> None:
    outlook = Outlook(steps=140_580, step_s=4.3, evaluations=90, evaluation_s=60.0, further_s=5.0)
    assert outlook.seconds == 140_580 * 4.3 + 90 * 60 + 5
    assert outlook.describe(NOW) == (
        "about 4.3 s a step, 7.1 days in all; ends at about Sat 5 Dec 15:24"
    )
    assert Outlook(1000, 0.0042, further_s=0.0).describe(NOW) == (
        "about 4.2 ms a step, 4.2 s in all; ends at about 14:00:04"
    )


def test_steps_are_timed_for_a_hundredth_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms a step: 1 s of 10,000 steps. Their batches are those of the first window."""
    clockwork = Clockwork(dispatch_s=0.0, step_s=0.01)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clockwork.now))
    assert time_steps(fake_run(clockwork, 10_000), PLAN, 0) == pytest.approx(0.01)
    assert 0.6 < clockwork.now <= 1.1


@pytest.mark.parametrize(("total", "timed"), [(20, 1), (1000, 2)])
def test_long_steps_are_timed_once_or_twice(
    monkeypatch: pytest.MonkeyPatch, total: int, timed: int
) -> None:
    """A second step of 25 s only if that is a hundredth of the run."""
    clockwork = Clockwork(dispatch_s=0.0, step_s=25.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clockwork.now))
    assert time_steps(fake_run(clockwork, total), PLAN, 0) == 25.0
    assert clockwork.steps == timed


@pytest.mark.parametrize(
    ("periods", "first", "total", "count"),
    [
        ((), 0, 100, 0),
        ((7,), 0, 20, 2),
        ((7,), 7, 21, 2),
        ((4, 6), 0, 24, 8),
        ((4, 4), 0, 24, 6),
        ((1, 10), 0, 100_000_000, 100_000_000),
    ],
)
def test_steps_with_an_evaluation_are_counted_once(
    periods: tuple[int, ...], first: int, total: int, count: int
) -> None:
    assert count_multiples(periods, first, total) == count


PLAN = SinkPlan(200, "loop", "")


def fake_run(clockwork: Clockwork, total: int) -> Any:
    built = SimpleNamespace(run_schedule=SimpleNamespace(total=total))
    return SimpleNamespace(executable=clockwork, built=built)


@pytest.mark.slow
def test_run_says_its_end_before_the_first_step(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once from a few steps that leave no trace, then from the first run's times."""
    monkeypatch.setattr(module, "SHOWN_S", 0.0)
    keys = (*MLP, "train.steps=60", "eval.every_steps=20", f"cache.root={tmp_path}")
    plain = run(tiny(*keys, "cache.compiled=false"), tmp_path / "plain")
    run(tiny(*keys), tmp_path / "first")
    outcome.assert_same_run(tmp_path / "plain", tmp_path / "first")
    kept = read_times(locate_times(tiny(*keys), DEVICE))
    assert kept.step_s is not None
    assert kept.evaluation_s is not None
    assert "training step" in kept.compile_s
    for name in ("plain", "first"):
        (line,) = lines_of(tmp_path / name)
        assert re.match(r"about [\d.]+ m?s a step, [\d.]+ s in all; ends at about", line)
        log = (tmp_path / name / "run.log").read_text()
        assert log.index("outlook ") < log.index("train  ")
    # The run reads them instead of timing steps.
    keep_times(locate_times(tiny(*keys), DEVICE), KeptTimes((0.5,) * 5, 1.0))
    monkeypatch.setattr(module, "time_steps", None)
    run(tiny(*keys), tmp_path / "again")
    # 60 steps of 0.5 s, some evaluations of 1 s.
    (line,) = lines_of(tmp_path / "again")
    assert re.match(r"about 500 ms a step, 3[3-9] s in all; ends at", line)
    assert plain.status == "done"


@pytest.mark.slow
def test_short_and_planned_runs_have_no_outlook(tiny: Compose, tmp_path: Path) -> None:
    """It would be longer than they are; a deadline says the end."""
    for name, keys in (("short", ["train.steps=9"]), ("planned", ["train.planned_for=x"])):
        run(tiny(*MLP, *keys), tmp_path / name)
        assert lines_of(tmp_path / name) == []


def stop_at_once() -> Any:
    from pipeline.core.host.signals import Signals

    class StopInTraining(Signals):
        """Asks to stop once training looks at `stop` itself."""

        @property
        def stop(self) -> str | None:  # type: ignore[override]
            return "SIGINT received" if self.is_held else None

        @stop.setter
        def stop(self, text: str | None) -> None:
            pass

    return StopInTraining()


@pytest.mark.parametrize(("step_s", "is_corrected"), [(0.012, False), (0.02, True), (0.005, True)])
def test_other_pace_is_reported_in_a_run_of_seconds(
    capsys: pytest.CaptureFixture[str], step_s: float, *, is_corrected: bool
) -> None:
    """2,000 steps of 10 ms are expected."""
    monitor = OutlookMonitor(Reporter(), Outlook(2000, 0.01), None)
    for start in range(0, 2000, 50):
        rows = np.ones((50, 5), np.float32)
        monitor.on_steps(telemetry_of(start, rows), 900.0 if start == 0 else 50 * step_s)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == is_corrected


def test_imports_of_monitors_do_not_correct_the_outlook(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """6,600 steps of 1.4 ms are expected; the first ones take 1.6 times that, for 2 s of imports
    on another thread."""
    monitor = OutlookMonitor(Reporter(), Outlook(6600, 0.0014), None)
    for start in range(0, 6600, 50):
        rows = np.ones((50, 5), np.float32)
        monitor.on_steps(telemetry_of(start, rows), 50 * (0.0022 if start < 900 else 0.0014))
    assert capsys.readouterr().out == ""


def test_other_pace_of_a_run_of_hours_is_reported_within_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """880,000 steps of 36.6 ms are expected; after 440 steps of 12 ms a line has the new end."""
    monitor = OutlookMonitor(Reporter(), Outlook(880_000, 0.0366), None)
    for start in range(0, 450, 10):
        monitor.on_steps(telemetry_of(start, np.ones((10, 5), np.float32)), 10 * 0.012)
    (line,) = capsys.readouterr().out.splitlines()
    assert "steps are faster than expected: about 12 ms a step, 2 h 5" in line


@pytest.mark.parametrize(("step_s", "lines"), [(0.15, 1), (0.05, 0)])
def test_run_of_slow_operations_says_its_end_after_a_second(
    capsys: pytest.CaptureFixture[str], step_s: float, lines: int
) -> None:
    """Few operations promised a short run, whose 36 steps of 150 ms take 5 s. Of 50 ms they take
    2 s, and an end that is so close isn't shown."""
    monitor = OutlookMonitor(Reporter(), None, None, partial(Outlook, 36))
    for start in range(0, 36, 4):
        monitor.on_steps(telemetry_of(start, np.ones((4, 5), np.float32)), 4 * step_s)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == lines
    # 24 steps are left after the first dispatch of 4 and two more.
    assert all("about 150 ms a step, 4.1 s in all" in line for line in shown)


def test_run_without_outlook_stays_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a run with a deadline."""
    monitor = OutlookMonitor(Reporter(), None, None)
    for start in range(0, 100, 10):
        monitor.on_steps(telemetry_of(start, np.ones((10, 5), np.float32)), 10.0)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_long_run_times_its_steps_although_the_last_run_kept_them(
    tiny: Compose, tmp_path: Path
) -> None:
    """On a busy machine its steps took 3.66 s, which would be four days."""
    keys = (*MLP, "train.steps=100_000", f"cache.root={tmp_path}")
    keep_times(locate_times(tiny(*keys), DEVICE), KeptTimes((3.66,), 0.1))
    ended = run(tiny(*keys), tmp_path / "run", signals=stop_at_once())
    assert ended.status == "stopped"
    line = lines_of(tmp_path / "run")[0]
    assert re.match(r"about [\d.]+ ms a step, ", line)


@pytest.mark.parametrize(("step_s", "is_corrected"), [(1.2, False), (2.0, True), (0.5, True)])
def test_other_pace_is_reported_once(
    capsys: pytest.CaptureFixture[str], step_s: float, *, is_corrected: bool
) -> None:
    """The first dispatch, which is slower, doesn't count."""
    monitor = OutlookMonitor(Reporter(), Outlook(1000, 1.0), None)
    for start in range(0, 200, 10):
        rows = np.ones((10, 5), np.float32)
        monitor.on_steps(telemetry_of(start, rows), 900.0 if start == 0 else 10 * step_s)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == is_corrected
    if is_corrected:
        name = "slower" if step_s > 1 else "faster"
        step = "2 s" if step_s > 1 else "500 ms"
        assert lines[0].startswith(
            f"outlook    steps are {name} than expected: about {step} a step"
        )


def test_shortest_evaluation_and_mean_step_are_kept(tmp_path: Path) -> None:
    """The first evaluation may include its compilation."""
    monitor = OutlookMonitor(Reporter(), None, tmp_path / "a.json")
    waits = iter([0.2, 0.01])

    def evaluate(state: Any) -> Any:
        time.sleep(next(waits))
        return state

    timed = monitor.time_evaluations(evaluate)
    states: Any = ["a", "b"]
    assert [timed(state) for state in states] == states
    history = History(0)
    history.add_dispatch(1, 5.0, 0.0)
    history.add_dispatch(4, 2.0, 0.0)
    monitor.keep(history)
    kept = read_times(tmp_path / "a.json")
    assert kept.step_s == 0.5
    assert kept.evaluation_s is not None
    assert 0.01 <= kept.evaluation_s < 0.2
