from __future__ import annotations

import ast
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG

from pipeline.config.observer_settings import make_observer_settings
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.engine import monitors
from pipeline.engine.callbacks.events import Monitor
from pipeline.engine.monitors.background import BestEffortMonitor
from pipeline.engine.monitors.metrics_log import MetricsLog
from pipeline.engine.monitors.monitors import (
    EvalMonitor,
    LossMonitor,
    NonFiniteStepMonitor,
    StepMonitor,
    TimeMonitor,
)
from pipeline.engine.monitors.observers import Observers, open_observers
from pipeline.engine.schedule import RunSchedule
from tests.engine.monitors.test_monitors import EVALUATION

Compose = Callable[..., Recipe]


def opened(recipe: Recipe, run_dir: Path, *, terminal: bool = False) -> Observers:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    settings = make_observer_settings(recipe)
    return open_observers(settings, run_dir, RunSchedule(12, 6, 3), 0, Reporter(console=console))


def kinds(observers: Observers) -> list[type]:
    return [type(monitor) for monitor in observers.monitor.monitors]


def show_samples(observers: Observers, images: np.ndarray) -> None:
    observers.show(lambda board: board.add_images(images))


def add_hparams(observers: Observers, parameters: dict[str, int]) -> None:
    observers.show(lambda board: board.add_hparams(parameters, EVALUATION.scalars()))


ALWAYS = [
    MetricsLog,
    StepMonitor,
    EvalMonitor,
    NonFiniteStepMonitor,
    BestEffortMonitor,
]


def test_run_is_monitored_as_its_recipe_says(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny(), tmp_path) as observers:
        assert kinds(observers) == ALWAYS
    with opened(tiny("monitor.lines=callbacks"), tmp_path) as observers:
        assert kinds(observers)[1:4] == [LossMonitor, TimeMonitor, EvalMonitor]
    with opened(tiny("monitor.tensorboard=true"), tmp_path) as observers:
        assert kinds(observers) == [*ALWAYS, BestEffortMonitor]


def test_progress_bar_is_shown_on_a_terminal_with_steps(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny(), tmp_path, terminal=True) as observers:
        assert kinds(observers) == [*ALWAYS, BestEffortMonitor]
    stages = "stages=[data,build,compile,eval]"
    evaluates = tiny(stages, "checkpoint.restore=somewhere")
    with opened(evaluates, tmp_path, terminal=True) as observers:
        assert kinds(observers) == ALWAYS[:-1]


def test_monitors_are_closed_if_the_run_fails(tiny: Compose, tmp_path: Path) -> None:
    closed = []

    class Watcher(Monitor):
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
        show_samples(observers, np.zeros((2, 4, 4, 1), np.float32))
        observers.monitor.on_eval(3, EVALUATION)
        add_hparams(observers, {"seed": 2})
    accumulated = EventAccumulator(str(tmp_path)).Reload()
    assert set(accumulated.Tags()["images"]) == {"train/images", "eval/confusion"}
    assert accumulated.Tags()["tensors"] == ["recipe/text_summary", "custom_scalars__config__"]
    assert accumulated.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.plugin_name == "hparams"
    assert '"step": 3' in (tmp_path / "evals.jsonl").read_text()


def test_tensorboard_names_a_run_by_its_directory(tiny: Compose, tmp_path: Path) -> None:
    names = ("2026-11-21/14-46-29_one", "2026-11-22/09-00-00_two")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        with opened(tiny("monitor.tensorboard=true"), tmp_path / name):
            pass
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    assert set(multiplexer.Runs()) == set(names)


def test_empty_samples_and_hparams_are_not_written(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny("monitor.tensorboard=true"), tmp_path) as observers:
        show_samples(observers, np.zeros((0, 4, 4, 1), np.float32))
        add_hparams(observers, {})
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert (tags["images"], tags["tensors"]) == ([], ["recipe/text_summary"])


def test_events_are_not_written_without_tensorboard(tiny: Compose, tmp_path: Path) -> None:
    with opened(tiny(), tmp_path) as observers:
        show_samples(observers, np.zeros((2, 4, 4, 1), np.float32))
        add_hparams(observers, {"seed": 2})
    assert not list(tmp_path.glob("events.*"))


def test_monitors_import_no_recipe_packages() -> None:
    files = sorted(Path(monitors.__file__).parent.glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    assert "pathlib" in imported
    above = ("pipeline.config", "pydantic", "hydra", "omegaconf")
    assert [name for name in sorted(imported) if name.startswith(above)] == []
