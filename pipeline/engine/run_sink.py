"""The run of a custom loop: its data, program, logs and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import jax
import numpy as np

from pipeline.backends.loading.loader import Loader
from pipeline.checkpoint.checkpointer import Checkpoints
from pipeline.checkpoint.host_state import LOGS, HostState
from pipeline.checkpoint.restore import warn_on_stderr
from pipeline.checkpoint.retention import Retention
from pipeline.core.errors import PipelineError, RunError
from pipeline.core.files.folder_lock import Lock
from pipeline.core.host.signals import Signals, handle_signals
from pipeline.data.columns import SampleUnit
from pipeline.engine.batches import BatchSource, open_source
from pipeline.engine.callbacks.events import Monitor, SinkReport
from pipeline.engine.history import History
from pipeline.engine.hooks import Hooks, Saves
from pipeline.engine.loop import Program, exhaust, train
from pipeline.engine.monitors.background import BackgroundMonitor, BestEffortMonitor
from pipeline.engine.monitors.metrics_log import MetricsLog
from pipeline.engine.monitors.monitors import LockMonitor
from pipeline.engine.monitors.tensorboard import TensorBoard
from pipeline.engine.non_finite_step import NonFiniteStepError
from pipeline.engine.schedule import Event, RunSchedule, Schedule
from pipeline.engine.sink_folder import (
    DATA,
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
from pipeline.engine.step_autopsy import examine_step
from pipeline.engine.step_checks import LOSS, check_state, trace_step
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
from pipeline.training.parallel.placement import DevicePlacement
from pipeline.training.telemetry import Telemetry, concatenate_columns

LEFT = "the loop was left"
"""Reason to stop if the caller leaves the loop."""
DISPATCH_SECONDS = 1.0
"""Longest time until a signal takes effect, and the length of a sink of "auto"."""
SAVE_SECONDS = 60.0
"""Time between checkpoints if no number of steps is set."""
KEEP = 5
"""Number of checkpoints that are kept."""
MEASURE_SECONDS = 0.2
"""Least time of a dispatch by which the time of a step is measured."""

STEPS = SampleUnit("steps", "steps")
"""Unit of a custom loop's speed."""


class SinkMetrics(Monitor):
    """The metrics of the steps since the last report."""

    def __init__(self) -> None:
        self._parts: list[Telemetry] = []

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        self._parts.append(telemetry)

    @property
    def last(self) -> Telemetry:
        """Newest steps. Raises IndexError before the first step."""
        return self._parts[-1]

    def take(self) -> dict[str, np.ndarray]:
        """Return the metrics by name, float32 (steps,), and clear them."""
        parts = self._parts
        self._parts = []
        return concatenate_columns(parts) if parts else {}


@dataclass(frozen=True)
class PreparedSink:
    """A checked custom loop; `state` is a copy on the host, at step 0."""

    step: UserStep
    state: CustomState
    spec: Any
    """State with `jax.ShapeDtypeStruct` as leaves."""
    source: BatchSource
    settings: SinkSettings


def prepare_sink(step: Step, state: Any, data: Any, settings: SinkSettings) -> PreparedSink:
    """Check a custom loop by tracing its step. Raises ValueError and DataError."""
    check_state(state)
    source = open_source(data, settings.batch_size, settings.seed)
    layout = StateLayout.from_state(state)
    leaves = {path: _copy_to_host(leaf) for path, leaf in layout.flatten(state).items()}
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    spec = jax.eval_shape(layout.arrange, shapes)
    signature = trace_step(step, spec, source.layout.spec)
    user_step = UserStep(step, signature, layout, source.layout)
    return PreparedSink(user_step, CustomState(np.int32(0), leaves), spec, source, settings)


def _copy_to_host(leaf: Any) -> np.ndarray:
    array = np.array(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def run_sink(prepared: PreparedSink) -> Iterator[SinkResult]:
    """Run a custom loop from its newest checkpoint, and yield a report per sink. Raises DataError,
    RunError and Interrupted as `sink` does."""
    settings = prepared.settings
    source = prepared.source
    signals = Signals()
    placement = DevicePlacement((default_device(),))
    with handle_signals(signals), ExitStack() as stack:
        before = _open_folder(prepared, stack)
        saved = before.saved
        state = prepared.state if saved is None else saved.state
        start = int(state.step)
        if start > settings.steps:
            raise ValueError(f"steps = {settings.steps}: the run in save has done {start}")
        state = copy_state(state, placement)
        if start == settings.steps:
            yield SinkResult(start, {}, 0.0, partial(_arrange, prepared, state))
            return
        if saved is not None:
            source.seek(start, saved.position)
        loader = source.open_loader(placement, start, settings.steps)
        stack.callback(loader.close)
        program, choice = compile_sink(prepared, state, loader, before.record)
        size = choose_size(settings, before.record, program, state, loader)
        run = RunSchedule(settings.steps, source.steps_per_epoch or settings.steps, size)
        if settings.save is not None and before.record is None:
            write_record(settings.save, SinkRecord(before.identity, choice, size))
        outputs = _open_outputs(prepared, before, start, stack)
        history = History(start)
        limit = _WindowLimit(loader, history, settings.steps)
        period_s = None if settings.save_every else SAVE_SECONDS
        saves = Saves(outputs.checkpoints, period_s, log_marks=outputs.marks)
        hooks = Hooks(monitors=outputs.monitors, saves=saves, signals=signals, agree=limit.decide)
        periods = {Event.CHECKPOINT: (settings.save_every,)} if settings.save_every else {}
        schedule = Schedule(run, periods, dispatch_seconds=DISPATCH_SECONDS)
        loop = Program(cast(Any, program), "soft" if program.single_steps else "loop")
        host = HostState() if saved is None else saved.host
        with signals.hold_stops():
            reports: Any = train(loop, cast(Any, state), schedule, hooks, host, history)
            yield from _read_reports(reports, prepared, program, outputs.metrics, signals)
        if limit.failure is not None:
            raise _make_early_end_error(limit.failure, history.step, settings)
        if history.status == "stopped" and history.reason != LEFT:
            signals.check()


def _read_reports(
    reports: Generator[SinkReport, None, CustomState],
    prepared: PreparedSink,
    program: SinkProgram,
    metrics: SinkMetrics,
    signals: Signals,
) -> Iterator[SinkResult]:
    """Yield a report for each sink; if the caller leaves the loop, save and end the run."""
    has_ended = False
    try:
        while True:
            try:
                report = next(reports)
            except StopIteration:
                has_ended = True
                return
            except NonFiniteStepError as error:
                has_ended = True
                text = _describe_non_finite_step(metrics, prepared.settings)
                with signals.allow_interrupts():
                    finding = _examine(prepared, program)
                raise RunError(f"{text}{finding}") from error
            except BaseException:
                has_ended = True
                raise
            read_state = cache(partial(_read_state, prepared, program, report.step))
            yield SinkResult(report.step, metrics.take(), report.seconds, read_state)
    finally:
        if not has_ended:
            signals.stop = LEFT
            exhaust(reports)


@dataclass(frozen=True)
class _Before:
    """The content of a run's directory before the run; without a directory it has no lock."""

    identity: SinkIdentity
    record: SinkRecord | None = None
    saved: SavedSink | None = None
    lock: Lock | None = None


def _open_folder(prepared: PreparedSink, stack: ExitStack) -> _Before:
    """Lock the directory and read the run in it. Raises DataError if it is another run."""
    folder = prepared.settings.save
    source = prepared.source
    identity = identify(prepared.step, prepared.state, source.describe())
    if folder is None:
        return _Before(identity)
    lock = stack.enter_context(hold_folder(folder))
    record = read_record(folder)
    if record is None:
        return _Before(identity, lock=lock)
    require_same(folder, record.identity, identity)
    return _Before(identity, record, restore_sink(folder, prepared.state, warn_on_stderr), lock)


def compile_sink(
    prepared: PreparedSink, state: CustomState, loader: Loader, record: SinkRecord | None
) -> tuple[SinkProgram, LoweringChoice]:
    """Compile the step with the lowerings that `record` has, or else the fastest."""
    device = default_device()
    single = has_slow_loop(prepared.step, prepared.spec, device)
    before = None if record is None else record.choice
    step, choice = lower_step(prepared.step, prepared.spec, device, before)
    program = SinkProgram(step, state, loader, DevicePlacement((device,)), single_steps=single)
    return program, choice


def default_device() -> jax.Device:
    """Return the device of new arrays, by `jax.default_device` if it is set."""
    return next(iter(jax.numpy.zeros(()).devices()))


def choose_size(
    settings: SinkSettings,
    record: SinkRecord | None,
    program: SinkProgram,
    state: CustomState,
    loader: Loader,
) -> int:
    """Return the steps of a sink; for "auto" the steps of about a second, which are measured on a
    copy of the state."""
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
            # A loss isn't finite, which the run will report.
            return 1
        # The first run of a length may be slower.
        started_at = time.perf_counter()
        trial, _ = program.run(trial, start, start + count, "loop")
        seconds = time.perf_counter() - started_at
        if seconds >= MEASURE_SECONDS or start + 2 * count > window.stop:
            break
        count *= 2
    program.latest = state  # Instead of the trial's.
    steps = max(1, int(DISPATCH_SECONDS * count / max(seconds, 1e-9)))
    return min(_round_down(steps), settings.steps)


def _round_down(steps: int) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, ... that is at most `steps`."""
    decade = 10 ** (len(str(steps)) - 1)
    return max(factor * decade for factor in (1, 2, 5) if factor * decade <= steps)


@dataclass(frozen=True)
class _Outputs:
    """The logs and checkpoints of a run."""

    metrics: SinkMetrics
    monitors: tuple[Monitor, ...]
    checkpoints: Checkpoints | None = None
    marks: Callable[[int], Mapping[str, Any]] | None = None


def _open_outputs(
    prepared: PreparedSink, before: _Before, start: int, stack: ExitStack
) -> _Outputs:
    """Open the logs and the checkpoints of a run, if it has a directory."""
    folder = prepared.settings.save
    metrics = SinkMetrics()
    if folder is None:
        return _Outputs(metrics, (metrics,))
    marks = None if before.saved is None else before.saved.host.logs
    log = MetricsLog(folder, None, start, marks)
    for findings in log.findings:
        warn_on_stderr(str(findings))
    board = BestEffortMonitor(
        TensorBoard(folder, start, batch_size=1, unit=STEPS), "TensorBoard", warn_on_stderr
    )
    assert before.lock is not None, "the directory is held"
    monitor = BackgroundMonitor([LockMonitor(folder, before.lock), log, board])
    stack.callback(monitor.close)
    identity = {"step": before.identity.step}
    checkpoints = stack.enter_context(Checkpoints(folder, Retention(KEEP), identity))

    def mark(step: int) -> dict[str, Any]:
        logs = monitor.submit_and_wait(partial(log.marks, step))
        return {LOGS: logs, DATA: prepared.source.position(step)}

    return _Outputs(metrics, (monitor, metrics), checkpoints, mark)


@dataclass
class _WindowLimit:
    """Ends each dispatch with its window, so that a run stops exactly at the end of its data."""

    loader: Loader
    history: History
    total: int
    failure: Exception | None = None
    """Error of the data before the end of the run."""

    def decide(self, make_decision: Callable[[], Any]) -> Any:
        """Return the fields of a `loop.Decision` whose next dispatch ends within the window."""
        steps, stop, *others = make_decision()
        step = self.history.step
        if stop is None and step < self.total:
            try:
                steps = min(steps, self.loader.get_window(step).stop - step)
            except Exception as error:  # of the user's iterator, raised once the state is saved
                self.failure = error
                stop = "the data ended"
        return [steps, stop, *others]


def _read_state(prepared: PreparedSink, program: SinkProgram, step: int) -> Any:
    """Return a copy of the state after a step. Raises RunError after the next dispatch."""
    state = program.latest
    if state.step.is_deleted() or int(state.step) != step:
        raise RunError(
            f"report.state: the memory of step {step} is used again by the next sink; "
            "read the state inside the loop body"
        )
    return _arrange(prepared, program.put(state))


def _arrange(prepared: PreparedSink, state: CustomState) -> Any:
    """Return a state in the structure that the step function has."""
    return prepared.step.state_layout.arrange(state.state)


def _describe_non_finite_step(metrics: SinkMetrics, settings: SinkSettings) -> str:
    last = metrics.last
    step = last.start + len(last)
    note = "; save=DIR would have kept the state before it"
    if settings.save is not None:
        note = f"; the state of step {step - 1} is saved in {settings.save}"
    return f"step {step} of {settings.steps}: {LOSS} is {last.loss[-1]!s}{note}"


def _examine(prepared: PreparedSink, program: SinkProgram) -> str:
    """Return a text on the first value that isn't finite; "" if the autopsy itself fails."""
    state = program.latest
    try:
        batch = program.read_non_finite_batch()
        finding = examine_step(prepared.step.function, _arrange(prepared, state), batch)
    except Exception as error:  # the step's failure matters more than any error here
        warn_on_stderr(f"no autopsy of the step: {type(error).__name__}: {error}")
        return ""
    return f"; {finding}"


def _make_early_end_error(failure: Exception, step: int, settings: SinkSettings) -> Exception:
    """Return the error for data that end before the run."""
    if not isinstance(failure, PipelineError):
        return failure
    note = f"; the state of step {step} is saved in {settings.save}" if settings.save else ""
    return type(failure)(f"{failure}{note}")
