"""The run of a custom loop: its data, program, logs and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import numpy as np

from pipeline.backends.loading.loader import Loader
from pipeline.checkpoint.checkpointer import Checkpoints, Retention
from pipeline.checkpoint.host_state import LOGS, HostState
from pipeline.checkpoint.restore import set_others_aside, warn_on_stderr
from pipeline.core.errors import PipelineError, RunError
from pipeline.core.files.atomic_write import Lock, convert_write_errors
from pipeline.core.host.process_start import require_usable_clock
from pipeline.core.host.signals import (
    Interrupted,
    Signals,
    handle_signals,
    replace_interrupt_traceback,
)
from pipeline.data.columns import SampleUnit
from pipeline.engine.batches import BatchSource, open_source
from pipeline.engine.callbacks.callback import Monitor, SinkReport
from pipeline.engine.history import History, NonFiniteStepError
from pipeline.engine.hooks import Hooks, Saves
from pipeline.engine.loop import Decision, Program, exhaust, train
from pipeline.engine.monitors.log_lines import METRICS, read_last_line
from pipeline.engine.monitors.metrics_log import MetricsLog
from pipeline.engine.monitors.monitors import LockMonitor
from pipeline.engine.monitors.observers import BackgroundMonitor, BestEffortMonitor
from pipeline.engine.monitors.tensorboard import TensorBoard
from pipeline.engine.schedule import Event, RunSchedule, Schedule
from pipeline.engine.sink_folder import (
    DATA,
    INFINITE,
    SavedSink,
    SinkIdentity,
    SinkRecord,
    hold_folder,
    identify,
    read_record,
    require_same,
    restore_sink,
    write_record,
)
from pipeline.engine.sink_settings import SinkResult, SinkSettings
from pipeline.engine.step_checks import (
    LOSS,
    check_saved_state,
    check_state,
    examine_step,
    narrow_dtype,
    trace_step,
)
from pipeline.engine.user_step import (
    CustomState,
    SinkProgram,
    StateLayout,
    Step,
    UserStep,
    copy_state,
    has_slow_loop,
    lower_step,
)
from pipeline.models.lowerings.tune.tuner import LoweringChoice
from pipeline.training.parallel.state_sharing import DevicePlacement
from pipeline.training.telemetry import Telemetry, concatenate_columns

LEFT = "the loop was left"
"""Reason to stop if the caller leaves the loop."""
DISPATCH_SECONDS = 1.0
"""Seconds that a dispatch should take at most: a signal takes effect at its end. A sink of size
"auto" takes about as long."""
SAVE_SECONDS = 60.0
"""Time between checkpoints if `save_every` isn't set."""
MAX_CHECKPOINTS = 5
"""Number of newest checkpoints that aren't deleted."""
MEASURE_SECONDS = 0.2
"""Least time of the dispatch that measures the time of a step."""
STEPS = SampleUnit("steps", "steps")
"""Unit of a custom loop's speed."""


class SinkMetrics(Monitor):
    """The metrics of the steps since the last report."""

    def __init__(self) -> None:
        self._parts: list[Telemetry] = []
        self._last: Telemetry | None = None

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        self._parts.append(telemetry)
        self._last = telemetry

    def list_infinite(self, step: int) -> dict[str, str]:
        """Return the metrics of `step` that are infinite, by name, as "inf" or "-inf"; none unless
        the last dispatch did the step, or the non-finite one after it."""
        telemetry = self._last
        if telemetry is None or not telemetry.start < step <= telemetry.start + len(telemetry):
            return {}
        index = step - telemetry.start - 1
        values = {name: float(column[index]) for name, column in telemetry.columns.items()}
        return {name: str(value) for name, value in values.items() if math.isinf(value)}

    def take(self) -> dict[str, np.ndarray]:
        """Return the metrics by name, float32 (steps,), and start the next report."""
        parts = self._parts
        self._parts = []
        return concatenate_columns(parts) if parts else {}


@dataclass(frozen=True)
class PreparedSink:
    """A checked custom loop."""

    step: UserStep
    state: CustomState
    """Copy of the caller's state on the host, at step 0."""
    spec: Any
    """The caller's state with `jax.ShapeDtypeStruct` as leaves."""
    source: BatchSource
    settings: SinkSettings


def prepare_sink(step: Step, state: Any, data: Any, settings: SinkSettings) -> PreparedSink:
    """Check a custom loop by tracing its step. Raises ValueError and DataError."""
    check_state(state)
    if settings.save is not None:
        check_saved_state(state)
        require_usable_clock()
    source = open_source(data, settings.batch_size, settings.seed)
    layout = StateLayout.from_state(state)
    leaves = {
        path: narrow_dtype(f"state/{path}", np.array(leaf))
        for path, leaf in layout.flatten(state).items()
    }
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    spec = jax.eval_shape(layout.arrange, shapes)
    signature = trace_step(step, spec, source.spec)
    user_step = UserStep(step, signature, layout, source.spec)
    return PreparedSink(user_step, CustomState(np.int32(0), leaves), spec, source, settings)


def run_sink(prepared: PreparedSink) -> Iterator[SinkResult]:
    """Run a custom loop from its newest checkpoint, and yield a report per sink. Raises the errors
    of `pipeline.sink`."""
    settings = prepared.settings
    source = prepared.source
    signals = Signals()
    replace_interrupt_traceback()
    placement = DevicePlacement((default_device(),))
    with handle_signals(signals), ExitStack() as stack:
        earlier = _open_folder(prepared, stack)
        saved = earlier.saved
        state = prepared.state if saved is None else saved.state
        start = int(state.step)
        if start > settings.steps:
            raise ValueError(f"steps = {settings.steps}: the run in save has done {start}")
        state = copy_state(state, placement)
        if start == settings.steps:
            infinite = {} if saved is None else saved.infinite
            last = _read_last_metrics(prepared, infinite)
            yield SinkResult(start, last, 0.0, partial(_arrange, prepared, state))
            return
        if saved is not None:
            source.seek(start, saved.position)
        loader = source.open_loader(placement, start, settings.steps)
        stack.callback(loader.close)
        program, choice = compile_sink(prepared, state, loader, earlier.record)
        size = choose_size(settings, earlier.record, program, state, loader)
        run = RunSchedule(settings.steps, source.steps_per_epoch or settings.steps, size)
        if settings.save is not None and earlier.record is None:
            write_record(settings.save, SinkRecord(earlier.identity, choice, size))
        metrics, monitors, saves = _open_outputs(prepared, earlier, start, stack)
        history = History(start)
        limit = _WindowLimit(loader, history, settings.steps)
        hooks = Hooks(monitors=monitors, saves=saves, signals=signals, agree=limit.decide)
        periods = {Event.CHECKPOINT: (settings.save_every,)} if settings.save_every else {}
        schedule = Schedule(run, periods, dispatch_seconds=DISPATCH_SECONDS)
        loop = Program(cast(Any, program), "soft" if program.single_steps else "loop")
        host = HostState() if saved is None else saved.host
        with signals.hold_stops():
            reports: Any = train(loop, cast(Any, state), schedule, hooks, host, history)
            yield from _read_reports(reports, prepared, program, metrics, history, signals)
        if isinstance(limit.failure, PipelineError) and settings.save is not None:
            note = f"the state of step {history.step} is saved in {settings.save}"
            raise type(limit.failure)(f"{limit.failure}; {note}")
        if limit.failure is not None:
            raise limit.failure
        if history.status == "stopped" and history.reason != LEFT:
            where = f"is saved in {settings.save}; the same call continues from there"
            saved_text = "isn't saved, without save" if settings.save is None else where
            raise Interrupted(f"{signals.reason}; the state of step {history.step:,} {saved_text}")


def _read_reports(
    reports: Generator[SinkReport, None, CustomState],
    prepared: PreparedSink,
    program: SinkProgram,
    metrics: SinkMetrics,
    history: History,
    signals: Signals,
) -> Iterator[SinkResult]:
    """Yield a report for each sink; if the caller leaves the loop, save and end the run."""
    try:
        for report in reports:
            read_state = partial(_read_state, prepared, program, report.step)
            try:
                yield SinkResult(report.step, metrics.take(), report.seconds, read_state)
            except BaseException:
                signals.stop = LEFT
                exhaust(reports)
                raise
    except NonFiniteStepError as error:
        text = _describe_non_finite_step(history, prepared.settings)
        with signals.allow_interrupts():
            finding = _examine(prepared, program)
        raise RunError(f"{text}{finding}") from error


@dataclass(frozen=True)
class _EarlierRun:
    """The content of a run's directory when the run starts or continues."""

    identity: SinkIdentity
    """Identity of the run that starts."""
    record: SinkRecord | None = None
    """None for a new run."""
    saved: SavedSink | None = None
    lock: Lock | None = None
    """None if the run has no directory."""


def _open_folder(prepared: PreparedSink, stack: ExitStack) -> _EarlierRun:
    """Lock the directory and read the run in it. Raises DataError if it is another run."""
    folder = prepared.settings.save
    identity = identify(prepared.step, prepared.state, prepared.source.describe())
    if folder is None:
        return _EarlierRun(identity)
    lock = stack.enter_context(hold_folder(folder))
    record = read_record(folder)
    if record is None:
        return _EarlierRun(identity, lock=lock)
    require_same(folder, record.identity, identity)
    return _EarlierRun(identity, record, restore_sink(folder, prepared.state, warn_on_stderr), lock)


def compile_sink(
    prepared: PreparedSink, state: CustomState, loader: Loader, record: SinkRecord | None
) -> tuple[SinkProgram, LoweringChoice]:
    """Compile the step with the lowerings of `record`, or without it the fastest; return both."""
    device = default_device()
    has_single_steps = has_slow_loop(prepared.step, prepared.spec, device)
    recorded_choice = None if record is None else record.choice
    step, choice = lower_step(prepared.step, prepared.spec, device, recorded_choice)
    placement = DevicePlacement((device,))
    return SinkProgram(step, state, loader, placement, single_steps=has_single_steps), choice


def default_device() -> jax.Device:
    """Return the device on which jax makes new arrays."""
    return next(iter(jax.numpy.zeros(()).devices()))


def choose_size(
    settings: SinkSettings,
    record: SinkRecord | None,
    program: SinkProgram,
    state: CustomState,
    loader: Loader,
) -> int:
    """Return the number of steps of a sink; for "auto" the number in `record`, or else of steps
    that take about a second, measured on a copy of the state."""
    if settings.size == "all":
        return settings.steps
    if settings.size != "auto":
        return settings.size
    if record is not None:
        return min(record.size, settings.steps)
    start = int(state.step)
    trial = program.put(state)
    window = loader.get_window(start)
    count = 1
    while True:
        trial, telemetry = program.run(trial, start, start + count, "loop")
        if len(telemetry) < count:
            return 1  # A loss isn't finite. The run will report it.
        # The dispatch above isn't timed, since the first one of a length may be slower.
        started_at = time.perf_counter()
        trial, _ = program.run(trial, start, start + count, "loop")
        seconds = time.perf_counter() - started_at
        if seconds >= MEASURE_SECONDS or start + 2 * count > window.stop:
            break
        count *= 2
    program.latest = state
    steps = max(1, int(DISPATCH_SECONDS * count / max(seconds, 1e-9)))
    return min(_round_down(steps), settings.steps)


def _round_down(steps: int) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, ... that is at most `steps`."""
    decade = 10 ** (len(str(steps)) - 1)
    return max(factor * decade for factor in (1, 2, 5) if factor * decade <= steps)


def _open_outputs(
    prepared: PreparedSink, earlier: _EarlierRun, start: int, stack: ExitStack
) -> tuple[SinkMetrics, tuple[Monitor, ...], Saves]:
    """Open the logs and checkpoints of a run; without a directory it has only `SinkMetrics`."""
    folder = prepared.settings.save
    metrics = SinkMetrics()
    if folder is None:
        return metrics, (metrics,), Saves()
    with convert_write_errors(folder):
        set_others_aside(folder, start, warn_on_stderr)
    saved_marks = None if earlier.saved is None else earlier.saved.host.logs
    log = MetricsLog(folder, None, start, saved_marks)
    for finding in log.findings:
        warn_on_stderr(str(finding))
    board = BestEffortMonitor(
        TensorBoard(folder, start, batch_size=1, unit=STEPS), "TensorBoard", warn_on_stderr
    )
    assert earlier.lock is not None, "the directory is held"
    monitor = BackgroundMonitor([LockMonitor(folder, earlier.lock), log, board])
    stack.callback(monitor.close)
    identity = {"step": earlier.identity.step}
    checkpoints = stack.enter_context(Checkpoints(folder, Retention(MAX_CHECKPOINTS), identity))

    def mark(step: int) -> dict[str, Any]:
        logs = monitor.submit_and_wait(partial(log.marks, step))
        marks = {LOGS: logs, DATA: prepared.source.position(step)}
        infinite = metrics.list_infinite(step)
        return {**marks, INFINITE: infinite} if infinite else marks

    every_s = None if prepared.settings.save_every else SAVE_SECONDS
    return metrics, (monitor, metrics), Saves(checkpoints, every_s, log_marks=mark)


@dataclass
class _WindowLimit:
    """Ends each dispatch with its window, so that a run stops exactly at the end of its data."""

    loader: Loader
    history: History
    total: int
    failure: Exception | None = None
    """Error of the data before the end of the run; raised once the state is saved."""

    def decide(self, make_decision: Callable[[], Any]) -> Decision:
        """Return a decision of the training loop whose next dispatch ends within the window."""
        decision = Decision._make(make_decision())
        step = self.history.step
        if decision.stop is not None or step >= self.total:
            return decision
        try:
            left_in_window = self.loader.get_window(step).stop - step
        except Exception as error:  # of the user's iterator
            self.failure = error
            return decision._replace(stop="the data ended")
        return decision._replace(max_steps=min(decision.max_steps, left_in_window))


def _read_state(prepared: PreparedSink, program: SinkProgram, step: int) -> Any:
    """Return a copy of the state after a step. Raises RunError if another dispatch has run."""
    state = program.latest
    if state.step.is_deleted() or int(state.step) != step:
        raise RunError(
            f"report.state: the memory of step {step} is used again by the next sink; "
            "read the state inside the loop body"
        )
    return _arrange(prepared, program.put(state))


def _read_last_metrics(
    prepared: PreparedSink, infinite: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Return the metrics of a finished run's last step, float32 (1,); NaN for those that neither
    its log nor `infinite`, of its checkpoint, has."""
    settings = prepared.settings
    log = None if settings.save is None else settings.save / METRICS
    line = None if log is None else read_last_line(log, settings.steps)
    numbers = line.numbers() if line is not None and line.step == settings.steps else {}
    names = prepared.step.signature.metrics
    values = {name: infinite.get(name, numbers.get(name)) for name in names}
    return {
        name: np.array([np.nan if value is None else value], np.float32)
        for name, value in values.items()
    }


def _arrange(prepared: PreparedSink, state: CustomState) -> Any:
    """Return a state in the structure of the step function's argument."""
    return prepared.step.state_layout.arrange(state.state)


def _describe_non_finite_step(history: History, settings: SinkSettings) -> str:
    note = "; save=DIR would have kept the state before it"
    if settings.save is not None:
        note = f"; the state of step {history.step} is saved in {settings.save}"
    return f"step {history.step + 1} of {settings.steps}: {LOSS} is {history.loss}{note}"


def _examine(prepared: PreparedSink, program: SinkProgram) -> str:
    """Return a text about the first value that isn't finite; "" if the autopsy itself fails."""
    state = program.latest
    try:
        batch = program.read_non_finite_batch()
        rows = prepared.source.list_rows(int(state.step))
        finding = examine_step(prepared.step.function, _arrange(prepared, state), batch, rows)
    except Exception as error:  # The caller must raise the step's error instead.
        warn_on_stderr(f"no autopsy of the step: {type(error).__name__}: {error}")
        return ""
    return f"; {finding}"
