"""Observers: the monitors of a run, by its settings, and monitors that call others.

They call others on another thread, or only until one fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from pipeline.checkpoint.host_state import LOGS
from pipeline.core.errors import PipelineError
from pipeline.core.files.atomic_write import Lock
from pipeline.core.reporter import Reporter
from pipeline.data.columns import IMAGES, SampleUnit
from pipeline.engine.callbacks.callback import Monitor, MonitorRelay
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
    from pipeline.backends.base import Estimate
    from pipeline.engine.monitors.tensorboard import TensorBoard

Lines = Literal["plain", "callbacks", "functional"]
PERIOD_S = 0.1
"""Time between two batches of calls, so that many steps are written at once."""
LIMIT_BYTES = 64 << 20
"""Bytes of calls since the last flush, above which training waits for a flush."""
CALL_BYTES = 1 << 10
"""Upper bound of the bytes of a queued call, without its telemetry."""
T = TypeVar("T")
M = TypeVar("M", bound=Monitor)


@dataclass(frozen=True)
class ObserverSettings:
    """Settings of the lines and files of a run."""

    batch_size: int
    trains: bool
    """Whether the run trains, so that a terminal shows a progress bar."""
    lines: Lines
    """Style of the lines: this package's, or of MindSpore's callbacks or functional loop."""
    loss_every: int
    """Sinks with a multiple of this number of steps have a line with a loss; 0: no such lines."""
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


class BackgroundMonitor(MonitorRelay):
    """Passes every event on to other monitors, in the same order, on another thread.

    The monitors are flushed after each batch of queued calls. After an error of a monitor no more
    calls are made, and the next method that the caller uses raises the error.
    """

    def __init__(self, monitors: Iterable[Monitor]) -> None:
        self.monitors = tuple(monitors)
        self._calls: Queue[Callable[[], None]] = Queue()
        self._unflushed_bytes = 0
        self._is_urgent = threading.Event()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._has_raised = False
        self._thread = threading.Thread(target=self._work, name="monitors", daemon=True)
        self._thread.start()

    def relay(self, event: Callable[[Any], None], size_bytes: int = 0) -> None:
        self.submit(partial(self._call_monitors, event), size_bytes)

    def submit(self, call: Callable[[], None], size_bytes: int = 0) -> None:
        """Queue a call, with arrays of `size_bytes`; the thread makes it after the calls before."""
        self._raise_failure()
        self._calls.put(call)
        self._unflushed_bytes += CALL_BYTES + size_bytes
        if self._unflushed_bytes > LIMIT_BYTES:
            self.flush()

    def submit_and_wait(self, call: Callable[[], T]) -> T:
        """Queue a call, wait until the thread has made it, and return its result."""
        results: list[T] = []
        self.submit(lambda: results.append(call()))
        self.flush()
        return results[0]

    def flush(self) -> None:
        """Wait until every queued call is made and every monitor is flushed."""
        self._unflushed_bytes = 0
        self._is_urgent.set()
        self._calls.join()
        self._raise_failure()

    def close(self) -> None:
        """Make the queued calls, close every monitor and end the thread."""
        self._is_closing = True
        self._is_urgent.set()
        self._thread.join()
        if not self._has_raised:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._has_raised = True
            raise self._failure

    def _call_monitors(self, event: Callable[[Monitor], None]) -> None:
        for monitor in self.monitors:
            event(monitor)

    def _work(self) -> None:
        """Make the queued calls in batches until the monitor closes."""
        is_closing = False
        while not is_closing:
            self._is_urgent.wait(PERIOD_S)
            self._is_urgent.clear()
            is_closing = self._is_closing
            calls = [self._calls.get() for _ in range(self._calls.qsize())]
            num_calls = len(calls)
            if calls:
                calls.append(partial(self._call_monitors, lambda monitor: monitor.flush()))
            for call in calls:
                if self._failure is None:
                    self._attempt(call)
            for _ in range(num_calls):
                self._calls.task_done()
        for monitor in self.monitors:
            self._attempt(monitor.close)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Make a call, and store the first error, of any kind, for the caller of the monitor."""
        try:
            call()
        except BaseException as error:
            if self._failure is None:
                self._failure = error


@dataclass
class BestEffortMonitor(MonitorRelay, Generic[M]):
    """Passes every event on to a monitor until it fails; then warns, and continues without it.

    `what` is the monitor's name in the warning.
    """

    monitor: M | None
    what: str
    warn: Callable[[str], None]

    def flush(self) -> None:
        self.relay(lambda monitor: monitor.flush())

    def close(self) -> None:
        self.relay(lambda monitor: monitor.close())

    def relay(self, event: Callable[[M], None], size_bytes: int = 0) -> None:
        """Call `event(monitor)`, unless the monitor has failed before."""
        monitor = self.monitor
        if monitor is None:
            return
        try:
            event(monitor)
        except Exception as error:  # any error: it must not end training
            self.monitor = None
            with suppress(Exception):
                monitor.close()
            is_plain = isinstance(error, PipelineError)
            reason = str(error) if is_plain else f"{type(error).__name__}: {error}"
            self.warn(f"{self.what} failed and has ended; training continues: {reason}")
