"""The status of a running run is in a file, at most once a second, and gone at the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.engine.monitors import live_status
from pipeline.engine.monitors.live_status import StatusMonitor
from pipeline.study.runs.recorded_run import read_live_status


class Steps(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.loss)


def steps(start: int, *losses: float) -> Any:
    return Steps(start=start, loss=np.array(losses, np.float32))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test sets."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(live_status.time, "monotonic", lambda: clock.now)
    return clock


def test_status_is_written_at_most_once_a_second(tmp_path: Path, clock: SimpleNamespace) -> None:
    monitor = StatusMonitor(tmp_path, total=100, first=20, started_at=98.0)
    monitor.on_steps(steps(20, 3.0, 2.0), seconds=0.5)
    status = read_live_status(tmp_path)
    assert status is not None
    assert (status.step, status.steps, status.loss, status.step_ms) == (22, 100, 2.0, 250.0)
    assert status.left_s == pytest.approx(2.0 / 2 * 78)
    clock.now = 100.9
    monitor.on_steps(steps(22, 1.0), seconds=0.5)
    assert read_live_status(tmp_path) == status
    clock.now = 101.1
    evaluation = SimpleNamespace(scalars=lambda: {"accuracy": 0.5, "loss": 1.5})
    monitor.on_eval(22, evaluation)  # type: ignore[arg-type]
    monitor.on_steps(steps(22, float("nan")), seconds=0.5)
    newer = read_live_status(tmp_path)
    assert newer is not None
    assert (newer.step, newer.loss) == (23, None)
    assert newer.evaluation == {"step": 22, "accuracy": 0.5, "loss": 1.5}
    assert str(newer) == (
        "step 23 of 100, 500 ms a step, accuracy 0.5000, loss 1.5000 at step 22, 80 s left"
    )
    monitor.close()
    assert list(tmp_path.iterdir()) == []
    monitor.close()
