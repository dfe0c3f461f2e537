"""Monitors that print the lines of a run or check its lock, and texts about classes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.errors import RunError, printable, shorten
from pipeline.core.files.atomic_write import Lock
from pipeline.core.files.value_text import format_duration, join_first
from pipeline.core.reporter import Bar, Reporter
from pipeline.data.columns import IMAGES, SampleUnit
from pipeline.engine.callbacks.callback import Evaluation, Monitor, SinkReport
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry

if TYPE_CHECKING:
    from pipeline.backends.base import Estimate

SHOWN_FROM_S = 60
"""Lines show the remaining time if it is at least this long, in seconds."""
MAX_NAMED_STEPS = 10
"""Largest number of steps that a line names."""
MOST_ROWS = 20
"""Largest number of classes that a table has."""
MOST_NAMED = 5
"""Largest number of classes that a warning names."""
WIDEST_NAME = 30
"""Largest number of characters of a class name in a table."""
BANNER = f"{14 * '='} Starting Training {14 * '='}"
EVERY_BATCHES = 100
"""Batches between two lines of the functional loop, counted from 0 in every epoch."""


@dataclass
class SpeedMeter:
    """The speed of a run since its last line, and the time that remains."""

    batch_size: int
    estimate: Estimate | None = None
    """Modelled times of an emulated device, which are shown beside the measured ones."""
    unit: SampleUnit = IMAGES
    started_at: float = field(default_factory=lambda: time.monotonic())
    steps_done: int = 0
    seconds: float = 0.0
    """Seconds since the last line."""
    steps: int = 0
    """Steps since the last line."""

    def add(self, report: SinkReport) -> None:
        self.seconds += report.seconds
        self.steps += report.steps
        self.steps_done += report.steps

    @property
    def step_ms(self) -> float:
        """Milliseconds a step since the last line."""
        return 1000 * self.seconds / self.steps

    def describe(self, report: SinkReport, total: int) -> str:
        """Return the speed, the learning rate, and the remaining and the modelled time as text."""
        unit = self.unit
        samples_per_s = self.batch_size * unit.per_sample * self.steps / self.seconds
        text = f"{samples_per_s:,.0f} {unit.speed_unit}/s, lr {report.learning_rate:.6g}"
        # Evaluations and checkpoints are included.
        step_s = (time.monotonic() - self.started_at) / self.steps_done
        remaining_s = step_s * (total - report.step)
        if remaining_s >= SHOWN_FROM_S:
            text += f", {format_duration(remaining_s)} left"
        if (estimate := self.estimate) is not None:
            text += (
                f" | modelled for {estimate.device}: {estimate.step_ms:.3f} ms a step, "
                f"{estimate.samples_per_s * unit.per_sample:,.0f} {unit.speed_unit}/s"
            )
        return text

    def restart(self) -> None:
        """Begin to measure the next line."""
        self.seconds = 0.0
        self.steps = 0


@dataclass
class StepMonitor(Monitor):
    """Prints a line at the end of a sink, or of a step without sinks: step, epoch, loss and speed.

    Only sinks with a multiple of `every_steps`, and the run's last one, have a line; 0: none.
    """

    reporter: Reporter
    run_schedule: RunSchedule
    every_steps: int
    meter: SpeedMeter

    def on_sink(self, report: SinkReport) -> None:
        self.meter.add(report)
        start = report.step - self.meter.steps
        total = self.run_schedule.total
        is_due = self.every_steps and report.step // self.every_steps > start // self.every_steps
        if not is_due and not (self.every_steps and report.step == total):
            return
        steps_per_epoch = self.run_schedule.steps_per_epoch
        loss = str(np.float32(report.loss))  # It has fewer digits than a Python float.
        self.reporter.print_progress(
            "train",
            f"step {report.step:,}/{total:,}, epoch {report.step / steps_per_epoch:,.2f}/"
            f"{total / steps_per_epoch:,.2f}: loss {loss}, {self.meter.step_ms:.4g} ms a step, "
            f"{self.meter.describe(report, total)}",
        )
        self.meter.restart()

    def on_length(self, total: int) -> None:
        self.run_schedule = replace(self.run_schedule, total=total)


@dataclass
class LossMonitor(Monitor):
    """Prints MindSpore's line at the end of a sink: `epoch: 1 step: 195, loss is 1.9601055`.

    The epoch is the sink's number. Sinks with a multiple of `every_steps` have a line; 0: none.
    """

    reporter: Reporter
    run_schedule: RunSchedule
    every_steps: int

    def on_sink(self, report: SinkReport) -> None:
        start = report.step - report.steps
        if self.every_steps and report.step // self.every_steps > start // self.every_steps:
            place = self.run_schedule.place(report.step)
            loss = str(np.float32(report.loss))  # It has fewer digits than a Python float.
            text = f"epoch: {place.sink} step: {place.sink_step}, loss is {loss}"
            self.reporter.print_lines(text)


@dataclass
class TimeMonitor(Monitor):
    """Prints MindSpore's line with the time of a sink, then the run's position and speed.

    On an emulated device the line ends with the modelled time.
    """

    reporter: Reporter
    run_schedule: RunSchedule
    meter: SpeedMeter

    def on_sink(self, report: SinkReport) -> None:
        self.meter.add(report)
        schedule = self.run_schedule
        # Without sinks, only ends of epochs have a line.
        is_inside_epoch = schedule.sink_steps is None and report.step % schedule.steps_per_epoch
        if is_inside_epoch and report.step != schedule.total:
            return
        position = schedule.place(report.step)
        sink = ""
        if schedule.sink_steps:
            sink = f"sink {position.sink}/{-(-schedule.total // schedule.sink_steps)}, "
        self.reporter.print_lines(
            f"epoch time: {1000 * self.meter.seconds:5.3f} ms, "
            f"per step time: {self.meter.step_ms:5.3f} ms | {sink}"
            f"step {report.step}/{schedule.total} | "
            f"{self.meter.describe(report, schedule.total)}"
        )
        self.meter.restart()

    def on_length(self, total: int) -> None:
        self.run_schedule = replace(self.run_schedule, total=total)


@dataclass
class EvalMonitor(Monitor):
    """Prints a line for every evaluation during training."""

    reporter: Reporter

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        self.reporter.print_stage("eval", f"step {step:,}: {evaluation}")


@dataclass
class ProgressMonitor(Monitor):
    """Advances the progress bar on a terminal."""

    bar: Bar

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        self.bar.advance_to(telemetry.start + len(telemetry), float(telemetry.loss[-1]))

    def on_length(self, total: int) -> None:
        self.bar.set_total(total)

    def close(self) -> None:
        self.bar.close()


@dataclass
class LockMonitor(Monitor):
    """Checks that no other process writes the run. It must be flushed first, before the logs."""

    run_dir: Path
    lock: Lock

    def flush(self) -> None:
        """Check the lock, and acquire it again if its file was removed. Raises RunError if another
        process holds it."""
        # If the file can't be created again, no other process can do so. A removed directory is
        # an error of the log.
        with suppress(OSError):
            if not self.lock.keep():
                raise RunError(
                    f"{self.run_dir}: another process is writing this run since its lock was "
                    "removed; this one ends here"
                )


@dataclass
class NonFiniteStepMonitor(Monitor):
    """Warns of skipped updates at the end of a sink or of the process, and of every rollback.

    Overflows that the loss scale skips (`skips_overflow`) are normal and aren't reported.
    """

    reporter: Reporter
    skips_overflow: bool
    skipped: list[int] = field(default_factory=list)
    """Steps since the last warning."""

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        skipped = telemetry.classify_steps(skips_overflow=self.skips_overflow).skipped_non_finite
        self.skipped += (telemetry.start + 1 + np.flatnonzero(skipped)).tolist()

    def on_sink(self, report: SinkReport) -> None:
        self.close()

    def close(self) -> None:
        """Warn of the steps since the last warning."""
        if self.skipped:
            numbers = join_first(list(map(str, self.skipped)), MAX_NAMED_STEPS)
            noun = "step" if len(self.skipped) == 1 else "steps"
            self.reporter.warn(f"{noun} {numbers}: not finite, no update was made")
            self.skipped.clear()

    def on_rollback(self, step: int, to: int) -> None:
        self.reporter.warn(
            f"step {step}: not finite; back to the weights of step {to}, on with the data after "
            f"step {step}"
        )


@dataclass
class FunctionalMonitor(Monitor):
    """Prints a banner, `loss: 2.302585 [100/1875]` every 100 batches, and the results of a test.

    If `every_batches` is 0, no losses are printed.
    """

    print_lines: Callable[[str], None]
    run_schedule: RunSchedule
    every_batches: int = EVERY_BATCHES
    has_begun: bool = False

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.print_lines(BANNER)
        if not self.every_batches:
            return
        num_batches = self.run_schedule.steps_per_epoch
        for index, loss in enumerate(telemetry.loss.tolist(), start=telemetry.start):
            batch = index % num_batches
            if batch % self.every_batches == 0:
                self.print_lines(f"loss: {loss:>7f} [{batch:>3d}/{num_batches:>3d}]")

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Print the accuracy and the loss, if the evaluation has them."""
        scalars = evaluation.scalars()
        texts = [f"Accuracy: {100 * scalars['accuracy']:>0.1f}%"] if "accuracy" in scalars else []
        texts += [f"Avg loss: {scalars['loss']:>8f}"] if "loss" in scalars else []
        self.print_lines(f"Test:\n{', '.join(texts)}")


def format_class_table(evaluation: Evaluation) -> list[str]:
    """Return a heading and a line for each class: precision, recall, F1 and number of labels.

    Empty for an evaluation without classes or with more than MOST_ROWS classes.
    """
    names = _list_classes(evaluation)
    confusion = evaluation.confusion
    if confusion is None or not 0 < len(names) <= MOST_ROWS:
        return []
    titles = [shorten(printable(name), WIDEST_NAME) for name in names]
    width = max(map(len, ("class", *titles)))
    columns = [evaluation.metrics[key]["per_class"] for key in ("precision", "recall", "f1")]
    lines = [f"{'class':<{width}}  precision  recall      f1  {evaluation.unit:>9}"]
    for label, name in enumerate(names):
        precision, recall, f1 = (column[name] for column in columns)
        count = int(confusion[label].sum())
        lines.append(
            f"{titles[label]:<{width}}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}  {count:9,}"
        )
    return lines


def describe_never_predicted(evaluation: Evaluation) -> str | None:
    """Return a warning of classes that have samples but are never predicted; None without any."""
    names = _list_classes(evaluation)
    confusion = evaluation.confusion
    if confusion is None or not names:
        return None
    actual = confusion.sum(axis=1).tolist()
    predicted = confusion.sum(axis=0).tolist()
    missed = [
        f"{printable(name)} ({count:,} {evaluation.unit})"
        for name, count, num_predicted in zip(names, actual, predicted, strict=True)
        if count and not num_predicted
    ]
    return f"never predicted: {join_first(missed, MOST_NAMED)}" if missed else None


def _list_classes(evaluation: Evaluation) -> Sequence[str]:
    """Return the names of the classes in the order of their labels; empty without classes."""
    recall = evaluation.metrics.get("recall")
    return list(recall.get("per_class", ())) if isinstance(recall, dict) else []
