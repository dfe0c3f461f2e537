from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG

from pipeline.config.recipe import Recipe
from pipeline.observe.bad_steps import BadStepMonitor
from pipeline.observe.best_effort import BestEffortMonitor
from pipeline.observe.metrics_log import MetricsLog
from pipeline.observe.monitors import EvalMonitor, LossMonitor, MonitorBase, TimeMonitor
from pipeline.observe.observers import Observers, open_observers
from pipeline.observe.reporter import Reporter
from pipeline.sink.schedule import RunSchedule
from tests.observe.test_monitors import EVALUATION

Compose = Callable[..., Recipe]


def opened(recipe: Recipe, run_dir: Path, *, terminal: bool = False) -> Observers:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    return open_observers(recipe, run_dir, RunSchedule(12, 6, 3), 0, Reporter(console=console))


def kinds(observers: Observers) -> list[type]:
    return [type(monitor) for monitor in observers.monitor.monitors]


ALWAYS = [MetricsLog, LossMonitor, TimeMonitor, EvalMonitor, BadStepMonitor]


def test_a_run_is_watched_as_its_recipe_says(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny(), tmp_path) as observers:
        assert kinds(observers) == ALWAYS
    with opened(tiny("monitor.tensorboard=true"), tmp_path) as observers:
        assert kinds(observers) == [*ALWAYS, BestEffortMonitor]


def test_a_terminal_gets_a_bar_where_there_are_steps(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny(), tmp_path, terminal=True) as observers:
        assert kinds(observers) == [*ALWAYS, BestEffortMonitor]
    stages = "stages=[data,build,compile,eval]"
    evaluates = tiny(stages, "checkpoint.restore=somewhere")
    with opened(evaluates, tmp_path, terminal=True) as observers:
        assert kinds(observers) == ALWAYS


def test_everything_is_closed_also_when_the_run_fails(tiny: Compose, tmp_path: Path) -> None:
    closed = []

    class Watcher(MonitorBase):
        def close(self) -> None:
            closed.append(self)

    def fail() -> None:
        with Observers([Watcher(), Watcher()], None):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(closed) == 2


def test_tensorboard_gets_samples_recipe_and_hparams(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny("monitor.tensorboard=true"), tmp_path) as observers:
        observers.show_samples(np.zeros((2, 4, 4, 1), np.float32))
        observers.monitor.on_eval(3, EVALUATION)
        observers.add_hparams({"seed": 2}, EVALUATION)
    accumulated = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(accumulated.Tags()["images"]) == {"train/images", "eval/confusion"}
    assert accumulated.Tags()["tensors"] == ["recipe/text_summary", "custom_scalars__config__"]
    assert accumulated.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.plugin_name == "hparams"
    assert '"step": 3' in (tmp_path / "evals.jsonl").read_text()


def test_without_parameters_and_samples_there_are_none(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny("monitor.tensorboard=true"), tmp_path) as observers:
        observers.show_samples(np.zeros((0, 4, 4, 1), np.float32))
        observers.add_hparams({}, EVALUATION)
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()
    assert (tags["images"], tags["tensors"]) == ([], ["recipe/text_summary"])


def test_without_tensorboard_nothing_is_written_for_it(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny(), tmp_path) as observers:
        observers.show_samples(np.zeros((2, 4, 4, 1), np.float32))
        observers.add_hparams({"seed": 2}, EVALUATION)
    assert not (tmp_path / "tensorboard").exists()
