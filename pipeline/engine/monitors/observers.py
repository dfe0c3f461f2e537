"""Observers: the monitors of a run, by its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pipeline.backends.base import Estimate
from pipeline.checkpoint.host_state import LOGS
from pipeline.core.files.folder_lock import Lock
from pipeline.core.reporter import Reporter
from pipeline.data.columns import IMAGES, SampleUnit
from pipeline.engine.callbacks.events import Monitor
from pipeline.engine.monitors.background import BackgroundMonitor, BestEffortMonitor
from pipeline.engine.monitors.live_status import STATUS, StatusMonitor
from pipeline.engine.monitors.metrics_log import MetricsLog
from pipeline.engine.monitors.monitors import (
    EVERY_BATCHES,
    EvalMonitor,
    FunctionalMonitor,
    LockMonitor,
    LossMonitor,
    NonFiniteStepMonitor,
    ProgressMonitor,
    SpeedMeter,
    StepMonitor,
    TimeMonitor,
)
from pipeline.engine.schedule import RunSchedule

if TYPE_CHECKING:
    from pipeline.engine.monitors.tensorboard import TensorBoard

Lines = Literal["plain", "callbacks", "functional"]


@dataclass(frozen=True)
class ObserverSettings:
    """Settings of the lines and files of a run."""

    batch_size: int
    trains: bool
    """Whether the run trains, so that a terminal shows a progress bar."""
    lines: Lines
    """Style of the lines: this package's, or of MindSpore's callbacks or functional loop."""
    loss_every: int
    """Least number of steps between two lines with a loss; 0: no such lines."""
    skips_overflow: bool
    """Whether the loss scale skips overflows. They aren't reported then."""
    board: Mapping[str, Any] | None
    """Recipe for TensorBoard to show; None: nothing is written for TensorBoard."""
    has_scalars: bool = False
    """Whether callbacks may log scalars."""
    is_unfinished: bool = False
    """Whether the evaluation of the first boundary was interrupted, and is repeated."""
    unit: SampleUnit = IMAGES
    """Unit of the speed."""
    estimate: Estimate | None = None
    """Modelled times, which are shown beside the measured ones."""
    lock: Lock | None = None
    """Lock that keeps other processes out of the directory."""


class Observers:
    """The monitors of a run, on another thread, and TensorBoard if it is on."""

    def __init__(
        self,
        monitors: Sequence[Monitor],
        tensorboard: BestEffortMonitor[TensorBoard] | None,
        log: MetricsLog | None = None,
    ) -> None:
        self.monitor = BackgroundMonitor(monitors)
        self._log = log
        self._tensorboard = tensorboard

    def log_flaws(self) -> dict[str, Any]:
        """Return the findings about the logs when they were opened, by file, as JSON."""
        findings = self._log.findings if self._log is not None else []
        return {log.path.name: log.to_dict() for log in findings}

    def log_marks(self, step: int) -> dict[str, Any]:
        """Return the marks of the logs for the checkpoint of `step`, as JSON."""
        if self._log is None:
            return {}
        return {LOGS: self.monitor.submit_and_wait(partial(self._log.marks, step))}

    def show(self, call: Callable[[TensorBoard], None]) -> None:
        """Call `call(tensorboard)` on the monitors' thread, if TensorBoard is on."""
        if self._tensorboard is not None:
            self.monitor.submit(partial(self._tensorboard.relay, call))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.monitor.close()


def _make_line_monitors(
    settings: ObserverSettings, run_schedule: RunSchedule, reporter: Reporter
) -> list[Monitor]:
    """Return the monitors that print lines of training and evaluations."""
    if settings.lines == "functional":
        every_batches = EVERY_BATCHES if settings.loss_every else 0
        return [FunctionalMonitor(reporter.print_lines, run_schedule, every_batches)]
    meter = SpeedMeter(settings.batch_size, settings.estimate, settings.unit)
    if settings.lines == "callbacks":
        return [
            LossMonitor(reporter, run_schedule, settings.loss_every),
            TimeMonitor(reporter, run_schedule, meter),
            EvalMonitor(reporter),
        ]
    return [StepMonitor(reporter, run_schedule, settings.loss_every, meter), EvalMonitor(reporter)]


def open_observers(
    settings: ObserverSettings,
    run_dir: Path,
    run_schedule: RunSchedule,
    first: int,
    reporter: Reporter,
    marks: Mapping[str, Any] | None = None,
) -> Observers:
    """Open the observers of a run that continues from boundary `first`.

    `marks` of the logs are from the checkpoint at `first`; None if the run begins there. A log that
    can't be written ends the run. If TensorBoard, the live status or the progress bar fails, the
    run continues.
    """
    log = MetricsLog(
        run_dir,
        run_schedule,
        first,
        marks,
        has_scalars=settings.has_scalars,
        is_unfinished=settings.is_unfinished,
    )
    for finding in log.findings:
        reporter.warn(str(finding))
    monitors: list[Monitor] = []
    if settings.lock is not None:
        monitors.append(LockMonitor(run_dir, settings.lock))
    non_finite_steps = NonFiniteStepMonitor(reporter, skips_overflow=settings.skips_overflow)
    monitors += [log, *_make_line_monitors(settings, run_schedule, reporter), non_finite_steps]
    if settings.trains:
        status = StatusMonitor(run_dir, run_schedule.total, first)
        monitors.append(BestEffortMonitor(status, STATUS, reporter.warn))
        bar = reporter.open_bar(run_schedule.total, first)
        if bar is not None:
            progress = ProgressMonitor(bar)
            monitors.append(BestEffortMonitor(progress, "the progress bar", reporter.warn))
    tensorboard = None
    if settings.board is not None:
        # Imported here, since runs without TensorBoard don't need it.
        from pipeline.engine.monitors.tensorboard import TensorBoard

        board = TensorBoard(
            run_dir,
            first,
            settings.batch_size,
            settings.estimate,
            settings.unit,
            is_unfinished=settings.is_unfinished,
        )
        tensorboard = BestEffortMonitor(board, "TensorBoard", reporter.warn)
        monitors.append(tensorboard)
    observers = Observers(monitors, tensorboard, log)
    observers.show(lambda board: board.add_recipe(settings.board or {}))
    return observers
