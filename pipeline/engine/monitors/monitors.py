"""Monitors: notified of every step, every end of a sink and every evaluation of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy as np

from pipeline.backends.base import Estimate
from pipeline.core.errors import RunError
from pipeline.core.files.folder_lock import Lock
from pipeline.core.files.value_text import join_first
from pipeline.core.reporter import Bar, Reporter
from pipeline.data.columns import IMAGES, SampleUnit
from pipeline.engine.callbacks.events import Evaluation, Monitor, SinkReport
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry

SHOWN_FROM_S = 60
"""Remaining time, in seconds, above which lines show it."""


@contextmanager
def writing(file: str | Path) -> Iterator[None]:
    """Raise RunError if the system refuses to write a file in the body."""
    try:
        yield
    except OSError as error:
        where, why = error.filename or file, error.strerror or error
        raise RunError(f"{where}: can't write: {why}") from error


class LossMonitor(Monitor):
    """The documents' line: `epoch: 1 step: 195, loss is 1.9601055`.

    Printed at the end of a sink, whose number is the epoch, and at most once in `every` steps; 0
    never prints.
    """

    def __init__(self, reporter: Reporter, run_schedule: RunSchedule, every: int) -> None:
        self._reporter, self._run_schedule, self._every = reporter, run_schedule, every

    def on_sink(self, report: SinkReport) -> None:
        """Print the loss of the sink's last step under its true step number."""
        before = report.step - report.steps
        if self._every and report.step // self._every > before // self._every:
            position = self._run_schedule.place(report.step)
            # In the fewest digits of a float32: formatted, it would be a double's.
            loss = str(np.float32(report.loss))
            self._reporter.say(f"epoch: {position.sink} step: {position.sink_step}, loss is {loss}")


class TimeMonitor(Monitor):
    """The documents' line, then the run's position and speed.

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


class EvalMonitor(Monitor):
    """A line on the console for every evaluation during training."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Print accuracy and loss."""
        self._reporter.stage("eval", f"step {step}: {evaluation}")


class ProgressMonitor(Monitor):
    """The progress bar, on a terminal."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Advance the bar."""
        self._bar.advance_to(telemetry.start + len(telemetry), float(telemetry.loss[-1]))

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class LockMonitor(Monitor):
    """Check, before lines are written, that no other process has entered the run.

    The first of the monitors, since it is flushed before the logs. Raises RunError if the lock was
    removed and another process holds it now.
    """

    def __init__(self, run_dir: Path, lock: Lock) -> None:
        self._run_dir, self._lock = run_dir, lock

    def flush(self) -> None:
        """Check the lock, and take it again if its file was removed."""
        # If the file can't be created again, no other process can create it either; and the log
        # reports a directory that is gone.
        with suppress(OSError):
            if not self._lock.keep():
                raise RunError(
                    f"{self._run_dir}: another process is writing this run since its lock was "
                    "removed; this one ends here"
                )


SHOWN = 10
"""Most steps that a line names."""


class BadStepMonitor(Monitor):
    """Warn of updates that were skipped, at the end of a sink, and of every rollback.

    Overflows that the loss scale skips (`skips_overflow`) are normal and not reported.
    """

    def __init__(self, reporter: Reporter, *, skips_overflow: bool) -> None:
        self._reporter, self._skips_overflow = reporter, skips_overflow
        self._skipped: list[int] = []

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Collect the steps that were skipped."""
        skipped = telemetry.outcome(skips_overflow=self._skips_overflow).skipped_bad
        self._skipped += (telemetry.start + 1 + np.flatnonzero(skipped)).tolist()

    def on_sink(self, report: SinkReport) -> None:
        """Warn of the steps that were skipped, the first few by number."""
        steps, self._skipped = self._skipped, []
        if not steps:
            return
        named = join_first(list(map(str, steps)), SHOWN)
        number = "step" if len(steps) == 1 else "steps"
        self._reporter.warn(f"{number} {named}: not finite, no update was made")

    def on_rollback(self, step: int, to: int) -> None:
        """Warn of the rollback, and report the step that follows."""
        self._reporter.warn(
            f"step {step}: not finite; back to the weights of step {to}, on with the data after "
            f"step {step}"
        )


BANNER = f"{14 * '='} Starting Training {14 * '='}"
EVERY = 100
"""Batches from one line to the next, counted from 0 in every pass."""


class FunctionalMonitor(Monitor):
    """Print a banner, `loss: 2.302585 [100/1875]` every 100 batches, and the results of a test.

    With `every` 0 no losses are printed.
    """

    def __init__(
        self, say: Callable[[str], None], run_schedule: RunSchedule, every: int = EVERY
    ) -> None:
        self._say, self._run_schedule, self._every = say, run_schedule, every
        self._began = False

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Print the lines of steps; a sink's come together, after it."""
        if not self._began:
            self._began = True
            self._say(BANNER)
        if not self._every:
            return
        size = self._run_schedule.steps_per_pass
        for place, loss in enumerate(telemetry.loss.tolist(), start=telemetry.start):
            batch = place % size
            if batch % self._every == 0:
                self._say(f"loss: {loss:>7f} [{batch:>3d}/{size:>3d}]")

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Print accuracy, if there is one, and loss."""
        scalars = evaluation.scalars()
        said = [f"Accuracy: {100 * scalars['accuracy']:>0.1f}%"] if "accuracy" in scalars else []
        said += [f"Avg loss: {scalars['loss']:>8f}"] if "loss" in scalars else []
        self._say(f"Test:\n{', '.join(said)}")
