from __future__ import annotations

import ast
import io
import threading
import time
from collections.abc import Callable
from functools import partial
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
from pipeline.engine.callbacks.callback import Evaluation, Monitor, SinkReport
from pipeline.engine.monitors import observers
from pipeline.engine.monitors.metrics_log import MetricsLog
from pipeline.engine.monitors.monitors import (
    EvalMonitor,
    LossMonitor,
    NonFiniteStepMonitor,
    StepMonitor,
    TimeMonitor,
)
from pipeline.engine.monitors.observers import (
    BackgroundMonitor,
    BestEffortMonitor,
    Observers,
    open_observers,
)
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry
from tests.engine.monitors.test_monitors import EVALUATION
from tests.step_rows import telemetry_of

Compose = Callable[..., Recipe]
REPORT = SinkReport(2, 1.0, 0.1, seconds=1.0, steps=2)


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


def telemetry(start: int, steps: int = 1) -> Telemetry:
    return telemetry_of(start, np.tile([1.0, 1.0, 1.0, 1.0, 0.0], (steps, 1)))


class Diary(Monitor):
    """Writes down its events; may be held up, or fail at one of its calls."""

    def __init__(self, entries: list[str] | None = None, fails_at: str = "") -> None:
        self.entries = [] if entries is None else entries
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._fails_at = fails_at

    def note(self, entry: str) -> None:
        assert self.goes_on.wait(10)
        self.entries.append(entry)
        if entry == self._fails_at:
            raise OSError(28, "No space left on device")

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        self.note(f"steps {telemetry.start + 1}-{telemetry.start + len(telemetry)}")

    def on_sink(self, report: SinkReport) -> None:
        self.note(f"sink {report.step}")

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        self.note(f"eval {step}")

    def flush(self) -> None:
        self.note("flush")

    def close(self) -> None:
        self.note("close")


def events_of(diary: Diary) -> list[str]:
    return [entry for entry in diary.entries if entry != "flush"]


def test_calls_are_forwarded_in_order_then_closed() -> None:
    diary = Diary()
    monitor = BackgroundMonitor([diary])
    monitor.on_steps(telemetry(0, 2), 1.0)
    monitor.on_sink(REPORT)
    monitor.on_eval(2, EVALUATION)
    monitor.submit(partial(diary.note, "something else"))
    monitor.on_steps(telemetry(2), 1.0)
    monitor.close()
    assert events_of(diary) == [
        "steps 1-2",
        "sink 2",
        "eval 2",
        "something else",
        "steps 3-3",
        "close",
    ]
    assert diary.entries[-2:] == ["flush", "close"]


def test_monitors_are_notified_in_sequence() -> None:
    """So that lines of several monitors stay in order on the console."""
    entries: list[str] = []
    monitor = BackgroundMonitor([Diary(entries), Diary(entries)])
    monitor.on_sink(REPORT)
    monitor.on_eval(2, EVALUATION)
    monitor.close()
    said = [entry for entry in entries if entry not in ("flush", "close")]
    assert said == ["sink 2", "sink 2", "eval 2", "eval 2"]


def test_training_does_not_wait_for_a_slow_monitor() -> None:
    diary = Diary()
    diary.goes_on.clear()
    monitor = BackgroundMonitor([diary])
    for step in range(1000):
        monitor.on_steps(telemetry(step), 1.0)
    assert diary.entries == []
    diary.goes_on.set()
    monitor.close()
    assert events_of(diary) == [*(f"steps {step}-{step}" for step in range(1, 1001)), "close"]


def test_training_waits_if_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded: here room for three calls."""
    monkeypatch.setattr(observers, "LIMIT_BYTES", 3 * observers.CALL_BYTES)
    diary = Diary()
    monitor = BackgroundMonitor([diary])
    for step in range(50):
        monitor.on_sink(SinkReport(step, 1.0, 0.1, 1.0, 1))
        assert step + 1 - len(events_of(diary)) <= 3
    monitor.close()


def test_telemetry_counts_towards_the_limit_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "LIMIT_BYTES", 10_000)
    diary = Diary()
    monitor = BackgroundMonitor([diary])
    monitor.on_steps(telemetry(0, 1000), 1.0)
    assert events_of(diary) == ["steps 1-1000"]
    monitor.close()


def test_flush_returns_after_all_calls_are_forwarded() -> None:
    diary = Diary()
    monitor = BackgroundMonitor([diary])
    for step in range(3):
        monitor.on_steps(telemetry(step), 1.0)
        monitor.flush()
        assert diary.entries[-2:] == [f"steps {step + 1}-{step + 1}", "flush"]
    monitor.close()


def test_monitors_work_on_another_thread() -> None:
    threads = []
    monitor = BackgroundMonitor([])
    monitor.submit(lambda: threads.append(threading.current_thread()))
    monitor.close()
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


@pytest.mark.parametrize("event", ["sink 2", "flush", "close"])
def test_failure_is_raised_and_ends_forwarding(event: str) -> None:
    diary = Diary(fails_at=event)
    monitor = BackgroundMonitor([diary])

    def send() -> None:
        monitor.on_sink(REPORT)
        monitor.flush()
        monitor.on_eval(1, EVALUATION)
        monitor.close()

    with pytest.raises(OSError, match="No space left"):
        send()
    monitor.close()
    assert diary.entries.count("close") == 1
    assert ("eval 1" in diary.entries) is (event == "close")


def test_failure_is_raised_at_the_next_call() -> None:
    diary = Diary(fails_at="sink 2")
    monitor = BackgroundMonitor([diary])
    monitor.on_sink(REPORT)
    deadline = time.monotonic() + 10

    def send_on() -> None:
        while time.monotonic() < deadline:
            monitor.on_steps(telemetry(0), 1.0)

    with pytest.raises(OSError, match="No space left"):
        send_on()
    monitor.close()


def test_monitors_are_closed_after_another_fails_to_close() -> None:
    entries: list[str] = []
    monitor = BackgroundMonitor([Diary(entries, fails_at="close"), Diary(entries)])
    with pytest.raises(OSError, match="No space left"):
        monitor.close()
    assert entries == ["close", "close"]


def test_interrupt_reaches_the_training_thread() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monitor = BackgroundMonitor([])
    monitor.submit(interrupted)
    with pytest.raises(KeyboardInterrupt):
        monitor.flush()
    monitor.close()


def test_answers_come_in_order_from_the_thread() -> None:
    diary = Diary()
    monitor = BackgroundMonitor([diary])
    monitor.on_sink(REPORT)
    assert monitor.submit_and_wait(lambda: ("after", *diary.entries)) == (
        "after",
        "sink 2",
    )
    assert monitor.submit_and_wait(threading.current_thread).name == "monitors"

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        monitor.submit_and_wait(fail)
    monitor.close()


def test_log_is_complete_after_close(tmp_path: Path) -> None:
    from pipeline.engine.monitors.metrics_log import MetricsLog
    from pipeline.engine.schedule import RunSchedule

    monitor = BackgroundMonitor([MetricsLog(tmp_path, RunSchedule(5000, 100, 10), 0)])
    for start in range(0, 5000, 10):
        monitor.on_steps(telemetry(start, 10), 1.0)
    monitor.close()
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 5000
