"""Runs with a deadline: their steps are frozen, and repeat with `train.steps`."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import UNPLANNED_STEPS
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.host.signals import Signals
from pipeline.engine.callbacks.callback import Callback, RunControl, SinkReport
from pipeline.engine.hooks import Deadline, MovableEnd
from pipeline.engine.schedule import DispatchSize, Schedule
from pipeline.stages import choose_steps
from pipeline.stages.autosink.dispatch_costs import Timing, Variant
from pipeline.stages.autosink.sink_plan import SinkPlan
from pipeline.stages.choose_steps import Pace
from pipeline.stages.record.recorded_recipe import write_recipe
from tests import outcome
from tests.conftest import MLP
from tests.whole_run import run

Compose = Callable[..., Recipe]
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.slow

COSINE = (*MLP, "schedule=cosine", "train.sink_size=5", "eval.every_steps=7")
LOGS = ("metrics.jsonl", "evals.jsonl")


@pytest.fixture
def pace(monkeypatch: Patch) -> Callable[..., None]:
    """Replace the measured pace, so that the number of steps depends little on the machine."""

    def set_pace(step_s: float, closing_s: float = 0.0) -> None:
        measured = Pace(step_s, 0.0, 0.0, closing_s)
        monkeypatch.setattr(choose_steps, "measure_pace", lambda *_: measured)

    return set_pace


def read_train(run_dir: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((run_dir / "recipe.yaml").read_text())["train"]
    return tree


def read_logs(run_dir: Path) -> list[bytes]:
    return [(run_dir / name).read_bytes() for name in LOGS]


class StopAtStep(Callback):
    """Sends the signal to stop at the end of a sink."""

    def __init__(self, signals: Signals, step: int) -> None:
        self.signals, self.step = signals, step

    def on_sink(self, control: RunControl, report: SinkReport) -> None:
        if report.step >= self.step:
            self.signals.stop = "SIGTERM"


class SoonEnd(MovableEnd):
    """Ends `soon_s` after step 20."""

    soon_s = 1.0
    is_soon = False

    def move_end(self, schedule: Schedule, step: int, dispatch_size: DispatchSize) -> Schedule:
        if step >= 20 and not self.is_soon:
            self.is_soon = True
            self.stop_at = time.perf_counter() + self.soon_s
        return super().move_end(schedule, step, dispatch_size)


@pytest.mark.parametrize("sink", ["1", "7", "-1"])
def test_chosen_steps_are_recorded_and_reproducible(
    tiny: Compose, pace: Any, tmp_path: Path, sink: str
) -> None:
    """The recipe of the run has the steps; the rates end at the last value of their schedule."""
    pace(1.5)
    sinks = f"train.sink_size={sink}"
    summary = run(tiny(*COSINE, sinks, "train.minutes=1"), tmp_path / "run")
    train = read_train(tmp_path / "run")
    assert 30 <= summary.steps <= 39
    assert (summary.status, summary.reason) == ("done", None)
    lengths = (train["steps"], train["minutes"], train["end_step"], train["planned_for"])
    assert lengths == (summary.steps, None, None, "minutes = 1")
    run(tiny(*COSINE, sinks, f"train.steps={summary.steps}"), tmp_path / "repeated")
    assert read_logs(tmp_path / "run") == read_logs(tmp_path / "repeated")


@pytest.mark.parametrize("schedule", ["constant", "exponential"])
def test_steps_follow_the_pace_if_rates_do_not_need_them(
    tiny: Compose, pace: Any, tmp_path: Path, monkeypatch: Patch, schedule: str
) -> None:
    """At most 5 steps are chosen first, and then more."""
    monkeypatch.setattr(choose_steps, "MovableEnd", SoonEnd)
    pace(10.0)
    keys = (*MLP, f"schedule={schedule}", "train.sink_size=5", "eval.every_epochs=50")
    summary = run(tiny(*keys, "train.minutes=1"), tmp_path / "run")
    train = read_train(tmp_path / "run")
    assert (summary.status, summary.reason) == ("done", None)
    assert summary.steps == train["steps"] > 20
    run(tiny(*keys, f"train.steps={summary.steps}"), tmp_path / "repeated")
    assert read_logs(tmp_path / "run") == read_logs(tmp_path / "repeated")


@pytest.mark.parametrize(
    ("keys", "is_movable"),
    [
        (("schedule=constant",), True),
        (("schedule=constant", "train.schedule.warmup_steps=4"), True),
        (("schedule=exponential",), True),
        (("schedule=cosine", "train.schedule.warmup_steps=400"), False),
        (("schedule=polynomial", "train.schedule.warmup_steps=400"), False),
        (("schedule=constant", "dump.steps=3"), False),
        (("schedule=constant", "monitor.collect_every=10", "monitor.tensorboard=true"), False),
    ],
)
def test_only_rates_that_never_depend_on_the_end_let_it_move(
    tiny: Compose,
    pace: Any,
    tmp_path: Path,
    monkeypatch: Patch,
    keys: tuple[str, ...],
    is_movable: bool,
) -> None:
    """Also if all steps that were chosen first are in a warmup. The run ends before it trains."""
    pace(1.5)
    opened: list[type] = []

    def stop(context: Any, **changes: Any) -> Any:
        if "deadline" in changes:
            opened.append(type(changes["deadline"]))
            raise RunError("chosen")
        return dataclasses.replace(context, **changes)

    monkeypatch.setattr(choose_steps, "replace", stop)
    with pytest.raises(RunError, match="chosen"):
        run(tiny(*MLP, *keys, "train.minutes=1"), tmp_path / "run")
    assert opened == [MovableEnd if is_movable else Deadline]


def test_recipe_of_a_run_that_ends_in_its_warmup_repeats_it(
    tiny: Compose, pace: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(choose_steps, "MovableEnd", SoonEnd)
    monkeypatch.setattr(SoonEnd, "soon_s", 0.0)
    pace(0.5)
    keys = (*MLP, "schedule=constant", "train.schedule.warmup_steps=30", "train.sink_size=5")
    summary = run(tiny(*keys, "train.minutes=1"), tmp_path / "run")
    train = read_train(tmp_path / "run")
    assert summary.steps == train["end_step"] < 30 < train["steps"]
    ends = (f"train.steps={train['steps']}", f"train.end_step={summary.steps}")
    run(tiny(*keys, *ends), tmp_path / "repeated")
    assert read_logs(tmp_path / "run") == read_logs(tmp_path / "repeated")


def test_more_steps_than_compiled_rates_are_reproducible(
    tiny: Compose, pace: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    for module in ("pipeline.config.resolved_settings", "pipeline.stages.choose_steps"):
        monkeypatch.setattr(f"{module}.UNPLANNED_STEPS", 8)
    pace(1.5)
    steps = run(tiny(*COSINE, "train.minutes=1"), tmp_path / "run").steps
    assert steps > 8
    run(tiny(*COSINE, f"train.steps={steps}"), tmp_path / "repeated")
    assert read_logs(tmp_path / "run") == read_logs(tmp_path / "repeated")


def test_run_ended_early_is_reproducible(
    tiny: Compose, pace: Any, tmp_path: Path, monkeypatch: Patch, capsys: Any
) -> None:
    """All but a moment of the time is kept for the end, so that every step is late."""
    monkeypatch.setattr(choose_steps, "LATE_SHARE", -1.0)
    pace(1.5)
    summary = run(tiny(*COSINE, "train.minutes=1"), tmp_path / "run")
    train = read_train(tmp_path / "run")
    assert summary.status == "done"
    assert summary.steps == train["end_step"] < train["steps"]
    assert summary.reason == f"the deadline: {summary.steps} of {train['steps']} steps"
    line = "deadline   steps are slower than measured: training ends by step"
    assert capsys.readouterr().out.count(line) == 1
    ends = (f"train.steps={train['steps']}", f"train.end_step={summary.steps}")
    again = run(tiny(*COSINE, *ends), tmp_path / "repeated")
    assert again.metrics == summary.metrics
    assert read_logs(tmp_path / "run") == read_logs(tmp_path / "repeated")


def test_end_that_is_not_recorded_keeps_the_last_step(
    tiny: Compose, pace: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The disk is full when an earlier end is written into the recipe."""

    def fail_to_end(run_dir: Path, recipe: Recipe) -> None:
        if recipe.train.end_step is not None:
            raise OSError(errno.ENOSPC, "No space left on device", str(run_dir / "recipe.yaml"))
        write_recipe(run_dir, recipe)

    monkeypatch.setattr(choose_steps, "write_recipe", fail_to_end)
    monkeypatch.setattr(choose_steps, "LATE_SHARE", -1.0)
    pace(1.5)
    with pytest.raises(RunError, match=r"/recipe\.yaml: No space left on device$"):
        run(tiny(*COSINE, "train.minutes=1"), tmp_path)
    summary = outcome.read_summary(tmp_path)
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)
    assert outcome.checkpoints(tmp_path) == [len(outcome.metrics(tmp_path))]


@pytest.mark.parametrize("is_named", [True, False])
def test_resumed_run_keeps_its_steps(
    tiny: Compose, pace: Any, tmp_path: Path, monkeypatch: Patch, is_named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    pace(1.5)
    signals = Signals()
    run_dir = Path("outputs/day/run")
    stopped = run(
        tiny(*COSINE, "train.minutes=1"),
        run_dir,
        signals=signals,
        callbacks=[StopAtStep(signals, 10)],
    )
    assert stopped.status == "stopped"
    pace(0.5)
    resume = f"train.resume={run_dir if is_named else 'auto'}"
    summary = run(tiny(*COSINE, "train.minutes=1", resume))
    assert summary.resumed_from is not None
    assert summary.steps == read_train(run_dir)["steps"] < 40
    run(tiny(*COSINE, f"train.steps={summary.steps}"), tmp_path / "repeated")
    assert read_logs(run_dir) == read_logs(tmp_path / "repeated")
    with pytest.raises(RecipeError, match=r"train\.minutes = 2: .*run has its length for minute"):
        run(tiny(*COSINE, "train.minutes=2", f"train.resume={run_dir}"))


def test_run_length_is_chosen_from_the_measured_pace(
    tiny: Compose, tmp_path: Path, capsys: Any
) -> None:
    """Nothing is replaced; other work on this machine may change the pace afterwards."""
    summary = run(tiny(*MLP, "schedule=cosine", "train.minutes=0.15"), tmp_path / "run")
    train = read_train(tmp_path / "run")
    assert summary.status == "done"
    assert 1 <= summary.steps <= train["steps"] <= UNPLANNED_STEPS
    assert "steps for minutes = 0.15: " in capsys.readouterr().out


@pytest.mark.parametrize(("step_s", "warnings"), [(20.0, 1), (0.1, 0)])
def test_deadline_that_leaves_few_steps_is_warned_of(
    tiny: Compose, pace: Any, tmp_path: Path, capsys: Any, step_s: float, warnings: int
) -> None:
    """At most 3 steps of 20 s fit into a minute."""
    pace(step_s)
    run(tiny(*COSINE, "train.minutes=1"), tmp_path / "run")
    assert capsys.readouterr().out.count("train next to nothing; 10 take 3.3 minutes") == warnings


def test_deadline_too_short_for_a_step_is_refused(tiny: Compose, pace: Any, tmp_path: Path) -> None:
    pace(1e3, closing_s=5.0)
    rule = (
        r"train\.minutes = 0\.2: must leave time for a step; it takes at least 16\.\d minutes here$"
    )
    with pytest.raises(RecipeError, match=rule):
        run(tiny(*COSINE, "train.minutes=0.2"), tmp_path / "run")
    past = r"train\.until = 2026-01-01T00:00: is past; must be a later time$"
    with pytest.raises(RecipeError, match=past):
        run(tiny(*COSINE, "train.until='2026-01-01T00:00'"), tmp_path / "late")


def test_step_longer_than_the_deadline_is_refused_before_evaluations(
    tiny: Compose, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(choose_steps, "time_steps", lambda *_: 1e3)
    with pytest.raises(RecipeError, match=r"it takes at least 16\.\d minutes here$"):
        run(tiny(*COSINE, "train.minutes=0.2"), tmp_path / "run")
    assert "evaluation:" not in (tmp_path / "run" / "run.log").read_text()


PLAN = SinkPlan(200, "loop", "")


@pytest.fixture
def clock(monkeypatch: Patch) -> list[float]:
    """The seconds on a simulated clock."""
    now = [0.0]
    monkeypatch.setattr(choose_steps.time, "perf_counter", lambda: now[0])
    return now


def test_steps_that_take_all_the_time_are_timed_twice_alone(clock: list[float]) -> None:
    """Two of 4 s instead of 2.7 s: not two more of them."""
    ran = []

    def time_trial(variant: Variant, steps: int) -> Timing:
        ran.append(steps)
        clock[0] += 4.0 * steps
        return Timing(4000.0, np.full(steps - 1, 4000.0))

    trials: Any = SimpleNamespace(time=time_trial)
    assert choose_steps.time_steps(trials, PLAN, 2.7) == 4.0
    assert ran == [2]


def test_evaluations_are_not_timed_between_long_steps(tiny: Compose, monkeypatch: Patch) -> None:
    """Of 0.1 s, with a step of 0.5 s before each: three rounds of six would take 9 s of 2.7."""
    monkeypatch.setattr(choose_steps, "time_evaluation", lambda *_: 0.1)
    order = SimpleNamespace(steps_per_epoch=5)
    run: Any = SimpleNamespace(
        context=SimpleNamespace(recipe=tiny(*MLP)),
        dataset=SimpleNamespace(eval_order=order),
        executable=None,
        built=SimpleNamespace(step_config=SimpleNamespace(metrics=())),
    )
    trials: Any = SimpleNamespace(state=None)  # has no `time`
    assert choose_steps._time_whole_evaluation(run, PLAN, trials, 0.5, 2.7) == 0.1


@pytest.mark.parametrize(("save_s", "saved"), [(10.0, [1]), (1.0, [1, 2])])
def test_long_checkpoint_is_timed_once(
    tiny: Compose, clock: list[float], monkeypatch: Patch, save_s: float, saved: list[int]
) -> None:
    steps = []

    class SlowCheckpoints(choose_steps.Checkpoints):
        def save(self, step: int, *_: object) -> None:
            steps.append(step)
            clock[0] += save_s

    monkeypatch.setattr(choose_steps, "Checkpoints", SlowCheckpoints)
    run: Any = SimpleNamespace(context=SimpleNamespace(recipe=tiny(*MLP)))
    trials: Any = SimpleNamespace(state=None)
    assert choose_steps._time_save(run, trials, 2.7) == save_s
    assert steps == saved
