from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline.core.reporter import Reporter
from pipeline.data.columns import SampleUnit
from pipeline.engine.callbacks.callback import Evaluation, Monitor, SinkReport
from pipeline.engine.monitors.monitors import (
    EvalMonitor,
    LossMonitor,
    ProgressMonitor,
    SpeedMeter,
    StepMonitor,
    TimeMonitor,
)
from pipeline.engine.schedule import RunSchedule
from tests.step_rows import telemetry_of


def averages(macro: float) -> dict[str, object]:
    return {"macro": macro, "micro": 0.75, "per_class": {"cat": 1.0, "dog": 2 * macro - 1.0}}


EVALUATION = Evaluation(
    {
        "accuracy": 0.75,
        "top5": 1.0,
        "loss": 0.5,
        "count": 10_000,
        "precision": averages(0.625),
        "recall": averages(0.875),
        "f1": averages(0.7),
    },
    np.array([[3, 1], [0, 0]]),
)


class Page:
    """A console without a terminal, and what was written to it."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.reporter = Reporter(console=Console(file=self._file))

    @property
    def lines(self) -> list[str]:
        return self._file.getvalue().splitlines()


def ended(step: int, loss: float = 1.0, *, steps: int = 1, seconds: float = 1.0) -> SinkReport:
    """A report with the loss as it comes from telemetry: float32."""
    return SinkReport(step, np.float32(loss), np.float32(0.1), seconds, steps)


def test_loss_line_has_the_documented_format() -> None:
    """C-02, S-16: five epochs of 195 steps as sinks."""
    page = Page()
    monitor = LossMonitor(page.reporter, RunSchedule(975, 195, 195), every_steps=1)
    losses = [1.9601055, 1.8555021, 1.6707983, 1.8162166, 1.393667]
    for sink, loss in enumerate(losses, start=1):
        monitor.on_sink(ended(195 * sink, loss, steps=195))
    assert page.lines == [
        "epoch: 1 step: 195, loss is 1.9601055",
        "epoch: 2 step: 195, loss is 1.8555021",
        "epoch: 3 step: 195, loss is 1.6707983",
        "epoch: 4 step: 195, loss is 1.8162166",
        "epoch: 5 step: 195, loss is 1.393667",
    ]


def test_loss_line_counts_sinks_shorter_than_an_epoch() -> None:
    """S-05, S-16: sinks of 1000 over 1875 batches an epoch print step 1000, not epoch offsets."""
    page = Page()
    monitor = LossMonitor(page.reporter, RunSchedule(10_000, 1875, 1000), every_steps=1)
    monitor.on_sink(ended(1000, 0.5399815, steps=1000))
    monitor.on_sink(ended(2000, 0.110185064, steps=1000))
    assert page.lines == [
        "epoch: 1 step: 1000, loss is 0.5399815",
        "epoch: 2 step: 1000, loss is 0.110185064",
    ]


def test_loss_line_is_printed_every_step_without_sinks() -> None:
    """S-07: the sink epoch is an epoch then."""
    page = Page()
    monitor = LossMonitor(page.reporter, RunSchedule(4, 3, None), every_steps=1)
    for step in range(1, 5):
        monitor.on_sink(ended(step, 0.5))
    assert [line.partition(",")[0] for line in page.lines] == [
        "epoch: 1 step: 1",
        "epoch: 1 step: 2",
        "epoch: 1 step: 3",
        "epoch: 2 step: 1",
    ]


def test_loss_every_prints_only_every_nth_step() -> None:
    page = Page()
    monitor = LossMonitor(page.reporter, RunSchedule(10, 100, None), every_steps=4)
    for step in range(1, 11):
        monitor.on_sink(ended(step))
    assert [line.partition(",")[0] for line in page.lines] == [
        "epoch: 1 step: 4",
        "epoch: 1 step: 8",
    ]


def test_loss_every_prints_at_the_end_of_the_sink_that_reaches_it() -> None:
    page = Page()
    monitor = LossMonitor(page.reporter, RunSchedule(30, 100, 10), every_steps=15)
    for step in (10, 20, 30):
        monitor.on_sink(ended(step, steps=10))
    assert [line.partition(" step")[0] for line in page.lines] == ["epoch: 2", "epoch: 3"]


def test_loss_every_zero_never_prints() -> None:
    page = Page()
    monitor = LossMonitor(page.reporter, RunSchedule(10, 10, 5), every_steps=0)
    monitor.on_sink(ended(5, steps=5))
    monitor.on_sink(ended(10, steps=5))
    assert page.lines == []


def test_time_line_has_documented_format_position_and_speed() -> None:
    """C-03: MindSpore's epoch is a sink."""
    page = Page()
    monitor = TimeMonitor(page.reporter, RunSchedule(3000, 1875, 1000), SpeedMeter(32))
    monitor.on_sink(ended(2000, steps=1000, seconds=3.5))
    assert page.lines == [
        "epoch time: 3500.000 ms, per step time: 3.500 ms | sink 2/3, step 2000/3000 | "
        "9,143 images/s, lr 0.1"
    ]


def test_time_line_of_a_long_run_has_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 160.0, 180.0])
    monkeypatch.setattr("pipeline.engine.monitors.monitors.time.monotonic", lambda: next(clock))
    page = Page()
    # Resumed at step 1000: 10 s for the first 1000 steps of this process, 60 s for 2000.
    monitor = TimeMonitor(page.reporter, RunSchedule(400_000, 1875, 1000), SpeedMeter(32))
    for step in (2000, 3000):
        monitor.on_sink(ended(step, steps=1000, seconds=3.5))
    assert [line.rpartition("lr 0.1")[2] for line in page.lines] == [
        ", 66 min left",
        ", 3 h 18 min left",
    ]


def test_time_line_is_printed_at_epoch_end_without_sinks() -> None:
    page = Page()
    monitor = TimeMonitor(page.reporter, RunSchedule(4, 3, None), SpeedMeter(10))
    for step in range(1, 5):
        monitor.on_sink(ended(step, seconds=0.5))
    per_step = "per step time: 500.000 ms"
    assert page.lines == [
        f"epoch time: 1500.000 ms, {per_step} | step 3/4 | 20 images/s, lr 0.1",
        f"epoch time: 500.000 ms, {per_step} | step 4/4 | 20 images/s, lr 0.1",
    ]


def test_line_has_step_epoch_loss_and_speed() -> None:
    """Sinks change neither the epoch nor the step."""
    page = Page()
    monitor = StepMonitor(page.reporter, RunSchedule(3000, 1875, 1000), 1, SpeedMeter(32))
    monitor.on_sink(ended(2000, steps=1000, seconds=3.5))
    assert page.lines == [
        "train      step 2,000/3,000, epoch 1.07/1.60: loss 1.0, 3.5 ms a step, "
        "9,143 images/s, lr 0.1"
    ]


def test_notebook_replaces_the_line_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[str] = []
    monkeypatch.setattr(Reporter, "print_progress", lambda _, name, text: replaced.append(text))
    page = Page()
    monitor = StepMonitor(page.reporter, RunSchedule(14, 7, 7), 1, SpeedMeter(1))
    for step in (7, 14):
        monitor.on_sink(ended(step, steps=7))
    assert [text.partition(",")[0] for text in replaced] == ["step 7/14", "step 14/14"]
    assert page.lines == []


@pytest.mark.parametrize(
    ("every_steps", "steps"), [(0, []), (1, [4, 8, 12, 14]), (5, [8, 12, 14]), (100, [14])]
)
def test_lines_are_at_least_a_number_of_steps_apart(every_steps: int, steps: list[int]) -> None:
    """And one line ends the run, unless there are none."""
    page = Page()
    monitor = StepMonitor(page.reporter, RunSchedule(14, 7, 4), every_steps, SpeedMeter(1))
    for step, count in ((4, 4), (8, 4), (12, 4), (14, 2)):
        monitor.on_sink(ended(step, steps=count))
    assert [int(line.split()[2].partition("/")[0]) for line in page.lines] == steps


def test_evaluation_line_has_metrics_and_sample_count() -> None:
    page = Page()
    EvalMonitor(page.reporter).on_eval(195, EVALUATION)
    assert page.lines == [
        "eval       step 195: accuracy 0.7500, top5 1.0000, loss 0.5000 over 10,000 samples"
    ]


def test_scalars_are_the_metrics_a_recipe_can_name() -> None:
    assert EVALUATION.scalars() == {
        "accuracy": 0.75,
        "top5": 1.0,
        "loss": 0.5,
        "precision": 0.625,
        "recall": 0.875,
        "f1": 0.7,
    }


def test_progress_advances_with_every_chunk_and_ends_with_the_run() -> None:
    class Bar:
        calls: list[object] = []  # noqa: RUF012

        def advance_to(self, step: int, loss: float) -> None:
            self.calls.append((step, loss))

        def close(self) -> None:
            self.calls.append("closed")

    monitor = ProgressMonitor(Bar())  # type: ignore[arg-type]
    monitor.on_steps(telemetry_of(10, np.array([[2, 0, 0, 1, 0], [1, 0, 0, 1, 0]])), 0.1)
    monitor.close()
    assert Bar.calls == [(12, 1.0), "closed"]


@pytest.mark.parametrize("event", ["on_steps", "on_sink", "on_eval", "flush", "close"])
def test_monitor_methods_are_optional(event: str) -> None:
    """C-01: a monitor overrides what it cares for."""

    class Quiet(Monitor):
        pass

    arguments = {"on_steps": (None, 0.0), "on_sink": (None,), "on_eval": (1, None)}
    assert getattr(Quiet(), event)(*arguments.get(event, ())) is None


class Modelled:
    """The estimate of an emulated device."""

    device = "8 x Ascend 910A"
    step_ms = 2.5
    interval_ms = (2.0, 3.125)
    samples_per_s = 102_400.0

    def summary(self) -> dict[str, object]:
        return {"step_ms": self.step_ms}

    def save(self, folder: Path) -> tuple[str, ...]:
        return ()


def test_time_line_ends_with_the_modelled_time() -> None:
    """Beside what was measured, which stays as it is."""
    lines = []
    for estimate in (None, Modelled()):
        page = Page()
        monitor = TimeMonitor(page.reporter, RunSchedule(200, 100, 100), SpeedMeter(32, estimate))
        monitor.on_sink(ended(100, steps=100, seconds=2.0))
        lines += page.lines
    measured, both = lines
    assert "modelled" not in measured
    assert both == (f"{measured} | modelled for 8 x Ascend 910A: 2.500 ms a step, 102,400 images/s")


def test_speed_is_in_the_unit_of_the_data() -> None:
    page = Page()
    unit = SampleUnit("windows", "tokens", 128)
    monitor = TimeMonitor(page.reporter, RunSchedule(20, 10, 10), SpeedMeter(4, unit=unit))
    monitor.on_sink(ended(10, steps=10, seconds=2.0))
    assert "| 2,560 tokens/s, lr" in page.lines[0]


def test_evaluation_reports_its_counts() -> None:
    evaluation = Evaluation({"loss": 1.5, "count": 2_000, "perplexity": 4.48}, None, "tokens")
    assert str(evaluation) == "loss 1.5000, perplexity 4.4800 over 2,000 tokens"
