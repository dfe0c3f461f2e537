from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.callback import SinkReport
from pipeline.engine.monitors.monitors import NonFiniteStepMonitor
from pipeline.engine.monitors.tensorboard import TensorBoard
from tests.step_rows import telemetry_of

NAN, INF = np.nan, np.inf
ROWS = [
    [1.0, 0.1, 1.0, 1.0, 0.0],
    [NAN, 0.1, NAN, 1.0, 1.0],
    [1.0, 0.1, INF, 1.0, 1.0],
]
"""A good step, a loss that is no number, and a gradient that overflows; both skipped."""


def warnings(skips_overflow: bool, start: int = 10, times: int = 1) -> list[str]:
    written = StringIO()
    reporter = Reporter(None, Console(file=written, soft_wrap=True))
    monitor = NonFiniteStepMonitor(reporter, skips_overflow=skips_overflow)
    for i in range(times):
        monitor.on_steps(telemetry_of(start + 3 * i, np.array(ROWS)), 1.0)
    monitor.on_sink(SinkReport(start + 3 * times, 1.0, 0.1, 1.0, 3 * times))
    monitor.on_sink(SinkReport(start + 3 * times + 1, 1.0, 0.1, 1.0, 1))
    return written.getvalue().splitlines()


def test_steps_without_an_update_are_reported_once_per_sink() -> None:
    assert warnings(skips_overflow=False) == [
        "warning    steps 12, 13: not finite, no update was made"
    ]


def test_steps_after_the_last_sink_are_reported_at_the_end() -> None:
    written = StringIO()
    monitor = NonFiniteStepMonitor(
        Reporter(None, Console(file=written, soft_wrap=True)), skips_overflow=False
    )
    monitor.on_steps(telemetry_of(10, np.array(ROWS)), 1.0)
    monitor.close()
    assert written.getvalue() == "warning    steps 12, 13: not finite, no update was made\n"


def test_overflows_skipped_by_the_loss_scale_are_not_reported() -> None:
    assert warnings(skips_overflow=True) == ["warning    step 12: not finite, no update was made"]


def test_long_list_of_steps_is_truncated() -> None:
    (line,) = warnings(skips_overflow=True, times=30)
    assert line.endswith("39 and 20 more: not finite, no update was made")


def test_rollback_is_reported() -> None:
    written = StringIO()
    reporter = Reporter(None, Console(file=written, soft_wrap=True))
    NonFiniteStepMonitor(reporter, skips_overflow=False).on_rollback(17, 10)
    assert written.getvalue() == (
        "warning    step 17: not finite; back to the weights of step 10, on with the data after "
        "step 17\n"
    )


def test_tensorboard_has_a_point_for_a_rollback(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0, 8)
    board.on_rollback(17, 10)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/updates_undone")] == [(17, 7.0)]
