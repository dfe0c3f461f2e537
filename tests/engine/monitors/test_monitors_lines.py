from __future__ import annotations

import numpy as np

from pipeline.engine.callbacks.callback import Evaluation
from pipeline.engine.monitors.monitors import BANNER, FunctionalMonitor
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry
from tests.step_rows import telemetry_of


def losses(start: int, values: list[float]) -> Telemetry:
    rows = np.ones((len(values), 5), np.float32)
    rows[:, 0] = values
    return telemetry_of(start, rows)


def test_loss_lines_have_the_documented_format() -> None:
    lines: list[str] = []
    monitor = FunctionalMonitor(lines.append, RunSchedule(500, 250, 125))
    monitor.on_steps(losses(0, [2.302585, *[1.0] * 99, 0.5]), 1.0)
    monitor.on_steps(losses(101, [0.25] * 200), 1.0)
    assert lines == [
        "============== Starting Training ==============",
        "loss: 2.302585 [  0/250]",
        "loss: 0.500000 [100/250]",
        "loss: 0.250000 [200/250]",
        "loss: 0.250000 [  0/250]",
    ]


def test_losses_of_every_100_batches_precede_accuracy_and_mean_loss() -> None:
    """C-06."""
    lines: list[str] = []
    monitor = FunctionalMonitor(lines.append, RunSchedule(210, 210, None))
    monitor.on_steps(losses(0, [0.5] * 210), 1.0)
    monitor.on_eval(210, Evaluation({"accuracy": 0.853, "loss": 0.528851, "count": 9}, None))
    monitor.on_eval(210, Evaluation({"rmse": 1.0, "loss": 0.25, "count": 9}, None))
    assert lines == [
        BANNER,
        *(f"loss: 0.500000 [{batch:>3d}/210]" for batch in (0, 100, 200)),
        "Test:\nAccuracy: 85.3%, Avg loss: 0.528851",
        "Test:\nAvg loss: 0.250000",
    ]


def test_losses_are_not_printed_if_disabled() -> None:
    lines: list[str] = []
    monitor = FunctionalMonitor(lines.append, RunSchedule(10, 10, None), every_batches=0)
    monitor.on_steps(losses(0, [1.0]), 1.0)
    assert lines == [BANNER]
