from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipeline.engine.callbacks.events import Evaluation, Monitor, SinkReport
from pipeline.engine.monitors import background
from pipeline.engine.monitors.background import BackgroundMonitor
from pipeline.training.telemetry import Telemetry
from tests.engine.monitors.test_monitors import EVALUATION
from tests.step_rows import telemetry_of

REPORT = SinkReport(2, 1.0, 0.1, seconds=1.0, steps=2)


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
    monkeypatch.setattr(background, "LIMIT_BYTES", 3 * background.CALL_BYTES)
    diary = Diary()
    monitor = BackgroundMonitor([diary])
    for step in range(50):
        monitor.on_sink(SinkReport(step, 1.0, 0.1, 1.0, 1))
        assert step + 1 - len(events_of(diary)) <= 3
    monitor.close()


def test_telemetry_counts_towards_the_limit_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LIMIT_BYTES", 10_000)
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
