"""Monitors: notified of every step, every end of a sink and every evaluation of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.backends.base import Estimate
from pipeline.core.errors import RunError
from pipeline.core.reporter import Bar, Reporter
from pipeline.data.columns import IMAGES, SampleUnit
from pipeline.engine.schedule import RunSchedule
from pipeline.training.part_specs import METRICS
from pipeline.training.telemetry import Telemetry

SHOWN_FROM_S = 60
"""Remaining time, in seconds, from which on lines show it."""
TRAINED = "train_"
"""Prefix of the metrics of training samples."""


@dataclass(frozen=True)
class SinkReport:
    """A sink (or, without sinks, a step) that ended at boundary `step`."""

    step: int
    loss: float
    learning_rate: float
    seconds: float
    steps: int


@dataclass(frozen=True)
class Evaluation:
    """Metrics by the names of `summarize`, and the confusion matrix, int (C, C) samples by true
    and predicted class; None where there are too many classes."""

    metrics: Mapping[str, Any]
    confusion: np.ndarray | None
    counted: str = "samples"
    """Plural of what `count` counts: samples, or tokens that have a label each."""

    def scalars(self) -> dict[str, float]:
        """Return the metrics that a recipe can name; precision, recall and F1 as macro averages."""
        values = {name: value for name, value in self.metrics.items() if name != "count"}
        return {k: v["macro"] if isinstance(v, Mapping) else v for k, v in values.items()}

    def __str__(self) -> str:
        scalars = self.scalars()
        unsaid = [name for name in METRICS if name not in ("accuracy", "top5", "loss")]
        unsaid += [f"{TRAINED}{name}" for name in ("top5", *unsaid)]
        shown = ", ".join(f"{k} {value:.4f}" for k, value in scalars.items() if k not in unsaid)
        return f"{shown} over {self.metrics['count']:,} {self.counted}"


class Monitor(Protocol):
    """Receiver of a run's events, which can't change the run (C-01)."""

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Steps were done in `seconds`; a sink may come in several such chunks."""

    def on_sink(self, report: SinkReport) -> None:
        """A sink ended."""

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation was done after `step` steps."""

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Callbacks have logged scalars by name, up to boundary `step`."""

    def on_rollback(self, step: int, to: int) -> None:
        """Bad step `step` rolled the state back to boundary `to`; training goes on after `step`."""

    def flush(self) -> None:
        """Write all events so far to where they outlive the process."""

    def close(self) -> None:
        """The run ended: write the rest and release everything."""


class Pruner(Monitor, Protocol):
    """Monitor that may decide that a run isn't worth continuing."""

    @property
    def prune_reason(self) -> str | None:
        """The reason to end the run at this boundary; None while it should go on."""


@contextmanager
def writing(file: str | Path) -> Iterator[None]:
    """Raise RunError where the system refuses to write a file in the body."""
    try:
        yield
    except OSError as error:
        where, why = error.filename or file, error.strerror or error
        raise RunError(f"{where}: can't write: {why}") from error


class MonitorBase:
    """Base of monitors, which ignores every event that a subclass does not override."""

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Ignore it."""

    def on_sink(self, report: SinkReport) -> None:
        """Ignore it."""

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Ignore it."""

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Ignore it."""

    def on_rollback(self, step: int, to: int) -> None:
        """Ignore it."""

    def flush(self) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Ignore it."""


class LossMonitor(MonitorBase):
    """The documents' line (C-02): `epoch: 1 step: 195, loss is 1.9601055`.

    Printed at the end of a sink, whose number is the epoch (S-05), and not more often than every
    `every` steps; 0 never prints.
    """

    def __init__(self, reporter: Reporter, run_schedule: RunSchedule, every: int) -> None:
        self._reporter, self._run_schedule, self._every = reporter, run_schedule, every

    def on_sink(self, report: SinkReport) -> None:
        """Print the loss of the sink's last step under its true step number."""
        before = report.step - report.steps
        if self._every and report.step // self._every > before // self._every:
            position = self._run_schedule.place(report.step)
            # As float32 in its fewest digits: formatted, it would be a double's.
            loss = str(np.float32(report.loss))
            self._reporter.say(f"epoch: {position.sink} step: {position.sink_step}, loss is {loss}")


class TimeMonitor(MonitorBase):
    """The documents' line (C-03), then the run's position and speed.

    On an emulated device the line ends with the time of the device, marked as modelled.
    """

    def __init__(
        self,
        reporter: Reporter,
        run_schedule: RunSchedule,
        batch_size: int,
        estimate: Estimate | None = None,
        unit: SampleUnit = IMAGES,
    ) -> None:
        self._reporter, self._run_schedule = reporter, run_schedule
        self._counted, self._per_step = unit.counted, batch_size * unit.each
        self._modelled = f" | {_modelled(estimate, unit)}" if estimate else ""
        self._seconds, self._steps = 0.0, 0
        self._started_at, self._steps_done = time.monotonic(), 0

    def on_sink(self, report: SinkReport) -> None:
        """Print the time of a sink; without sinks, of a pass."""
        self._seconds += report.seconds
        self._steps += report.steps
        self._steps_done += report.steps
        run_schedule = self._run_schedule
        sinkless_inside_pass = (
            run_schedule.sink_steps is None and report.step % run_schedule.steps_per_pass
        )
        if sinkless_inside_pass and report.step != run_schedule.total:
            return
        place = run_schedule.place(report.step)
        epoch_ms, step_ms = 1000 * self._seconds, 1000 * self._seconds / self._steps
        sink = f"sink {place.sink}/{run_schedule.sinks}, " if run_schedule.sink_steps else ""
        self._reporter.say(
            f"epoch time: {epoch_ms:5.3f} ms, per step time: {step_ms:5.3f} ms | {sink}"
            f"step {report.step}/{run_schedule.total}, pass {place.pass_} | "
            f"{self._per_step * self._steps / self._seconds:,.0f} {self._counted}/s, "
            f"lr {report.learning_rate:.6g}{self._remaining(report.step)}{self._modelled}"
        )
        self._seconds, self._steps = 0.0, 0

    def _remaining(self, step: int) -> str:
        """Return the time to the last step, at the pace so far; nothing if it is short.

        The pace includes evaluations and checkpoints.
        """
        pace_s = (time.monotonic() - self._started_at) / self._steps_done
        remaining_s = round(pace_s * (self._run_schedule.total - step))
        return f", {timedelta(seconds=remaining_s)} left" if remaining_s >= SHOWN_FROM_S else ""


def _modelled(estimate: Estimate, unit: SampleUnit) -> str:
    return (
        f"modelled for {estimate.device}: {estimate.step_ms:.3f} ms a step, "
        f"{estimate.samples_per_s * unit.each:,.0f} {unit.counted}/s"
    )


class EvalMonitor(MonitorBase):
    """A line on the console for every evaluation during training."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Print accuracy and loss."""
        self._reporter.stage("eval", f"step {step}: {evaluation}")


class ProgressMonitor(MonitorBase):
    """The progress bar, on a terminal."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Advance the bar."""
        self._bar.advance_to(telemetry.start + len(telemetry), float(telemetry.loss[-1]))

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
