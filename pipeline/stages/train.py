"""Train: run the course segment by segment, and let things happen at exactly their steps.

The order at a boundary is fixed: telemetry to the monitors, then evaluation, then the checkpoint
(which holds what the evaluation decided), then stopping.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pipeline.backends.base import Executable, Mechanism
from pipeline.config.recipe import EarlyStopSpec, Recipe
from pipeline.errors import RunError
from pipeline.observe.monitors import Evaluation, Judge, Monitor, SinkReport
from pipeline.signals import Signals
from pipeline.sink.schedule import Course, Event, Segment
from pipeline.sink.telemetry import Telemetry
from pipeline.stages.checkpoint import Checkpoints
from pipeline.stages.rollback import Rollbacks
from pipeline.training.spec import METRICS
from pipeline.training.state import TrainState
from pipeline.training.update import left_out

DISPATCHES_KEPT = 4096
"""Of so many the median is taken: runs of millions of dispatches take no more memory."""


@dataclass
class History:
    """What became of a run."""

    step: int
    status: Literal["done", "stopped", "pruned"] = "done"
    reason: str | None = None
    left_out: int = 0
    """Steps that have no update, or none any more, because of a bad step."""
    loss: float | None = None
    train_s: float = 0.0
    """From the first dispatch to the last save, evaluations and all."""
    first_dispatch_s: float | None = None
    first_step_at: float | None = None
    """When the first dispatch ended, by `time.perf_counter`."""
    step_seconds: deque[float] = field(default_factory=partial(deque, maxlen=DISPATCHES_KEPT))
    """Seconds per step of the newest dispatches, the first of all left out."""
    evaluated: dict[int, Evaluation] = field(default_factory=dict)
    """The last evaluation by its step."""

    @property
    def step_ms(self) -> float | None:
        """The median time of a step over the newest dispatches."""
        return 1000 * statistics.median(self.step_seconds) if self.step_seconds else None


@dataclass
class EarlyStop:
    """Has a metric stopped getting better? The only monitor that decides something."""

    spec: EarlyStopSpec
    best: float | None = None
    waited: int = 0

    def stops(self, evaluation: Evaluation) -> bool:
        """Take note of an evaluation; true when patience has run out."""
        if self.spec.metric is None:
            return False
        value = evaluation.scalars()[self.spec.metric]
        sign = 1 if METRICS[self.spec.metric] == "max" else -1
        if self.best is None or sign * (value - self.best) > self.spec.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Has patience run out, in this process or before a checkpoint was saved?"""
        return self.spec.metric is not None and self.waited >= self.spec.patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return {"best": self.best, "waited": self.waited}


@dataclass(frozen=True)
class Training:
    """What training is done with; `checkpoints` is None without the checkpoint stage."""

    recipe: Recipe
    course: Course
    executable: Executable
    mechanism: Mechanism
    monitors: Sequence[Monitor]
    evaluate: Callable[[TrainState], Evaluation]
    checkpoints: Checkpoints | None
    host: Mapping[str, Any] = field(default_factory=dict)
    """What every checkpoint keeps for a resumed run, besides the state of the monitors."""
    signals: Signals = field(default_factory=Signals)
    """What was asked for from outside; training looks behind every dispatch."""
    rollbacks: Rollbacks | None = None
    """What can be gone back to, where bad steps are to be answered so."""
    examine: Callable[[TrainState, int], None] | None = None
    """Look into a step that ended the run, from the state before it."""
    judge: Judge | None = None
    """The one of the monitors that may end the run at a boundary, as not worth going on."""


def train(
    training: Training, state: TrainState, host: Mapping[str, Any], history: History
) -> TrainState:
    """Train from `history.step` to the end; `host` is what a checkpoint kept of the host.

    The state that is returned has been saved, and `history` tells how it came about. Raises
    RunError naming the step when a loss or gradient is not finite and the recipe does not say to go
    on; the state before that step has been saved then, and `history` ends there.
    """
    early = EarlyStop(training.recipe.monitor.early_stop, **host.get("early_stop", {}))
    begun = saved_at = time.monotonic()
    signals, saves = training.signals, 0
    if training.rollbacks is not None:
        training.rollbacks.remember(host)
        if history.step == 0:
            # The first that can be gone back to.
            _save(training, 0, state, early, None)
    sink, stops, verdict = _SinkClock(), early.is_over, None
    left = () if stops else training.course.segments(history.step, _periods(training))
    for segment in left:
        while history.step < segment.stop and not signals.stop:
            state, telemetry, seconds = _dispatch(training, state, segment.stop, history)
            sink.add(telemetry, seconds)
            state = _behind_bad_step(training, state, telemetry, early, history)
            if history.step == segment.stop:
                # Before any other save: a resumed run starts behind what happens here.
                stops = _at_boundary(training, segment, state, early, history, sink)
            if _due(training, saved_at) or signals.saves > saves:
                saves = signals.saves
                _save(training, history.step, state, early, None)
                saved_at = time.monotonic()
        verdict = _verdict(training, history)
        if signals.stop or stops or verdict:
            break
    if stops:
        history.reason = f"early stop: {early.spec.metric} no better than {early.best}"
    elif verdict:
        history.status, history.reason = "pruned", verdict
    elif history.step < training.course.total:
        history.status, history.reason = "stopped", signals.stop
    _save(training, history.step, state, early, None)
    history.left_out = left_out(state)
    history.train_s = time.monotonic() - begun
    return state


def _verdict(training: Training, history: History) -> str | None:
    """Why the run should end here; a run that has ended is never pruned."""
    if training.judge is None or history.step == training.course.total:
        return None
    return training.judge.verdict


def _periods(training: Training) -> dict[Event, tuple[int, ...]]:
    every = event_periods(training.recipe, training.course.steps_per_pass)
    return every if training.checkpoints else {**every, Event.CHECKPOINT: ()}


def event_periods(recipe: Recipe, per_pass: int) -> dict[Event, tuple[int, ...]]:
    """How often, in steps, evaluations and checkpoints are due."""
    evals = _in_steps(recipe.eval.every_steps, recipe.eval.every_passes, per_pass)
    saves = _in_steps(recipe.checkpoint.every_steps, recipe.checkpoint.every_passes, per_pass)
    if recipe.checkpoint.best is not None:
        saves += evals
    return {Event.EVALUATE: evals, Event.CHECKPOINT: saves}


def _in_steps(steps: int | None, passes: int | None, per_pass: int) -> tuple[int, ...]:
    return tuple(n for n in (steps, passes and passes * per_pass) if n)


def _dispatch(
    training: Training, state: TrainState, until: int, history: History
) -> tuple[TrainState, Telemetry, float]:
    """Run towards boundary `until`, so far that a signal is still answered in time."""
    start = history.step
    stop = min(until, start + _affordable(training, history))
    begun = time.perf_counter()
    state, telemetry = training.executable.run(state, start, stop, training.mechanism)
    seconds = time.perf_counter() - begun
    if history.first_dispatch_s is None:
        history.first_dispatch_s, history.first_step_at = seconds, begun + seconds
    else:
        history.step_seconds.append(seconds / len(telemetry))
    history.step, history.loss = stop, float(telemetry.loss[-1])
    for monitor in training.monitors:
        monitor.on_steps(telemetry, seconds)
    return state, telemetry, seconds


def _affordable(training: Training, history: History) -> int:
    """How many steps fit into a dispatch; the first one is a single step, to find out."""
    if history.first_dispatch_s is None:
        return 1
    step_s = history.step_seconds[-1] if history.step_seconds else history.first_dispatch_s
    return max(1, int(training.recipe.train.dispatch_seconds / max(step_s, 1e-9)))


def _at_boundary(
    training: Training,
    segment: Segment,
    state: TrainState,
    early: EarlyStop,
    history: History,
    sink: _SinkClock,
) -> bool:
    """Report the sink, evaluate and save, where due; true when training should stop early."""
    metrics, stops = None, False
    if Event.SINK_END in segment.events:
        report = sink.report(segment.stop)
        for monitor in training.monitors:
            monitor.on_sink(report)
    if Event.EVALUATE in segment.events:
        evaluation = training.evaluate(state)
        metrics = evaluation.scalars()
        history.evaluated = {segment.stop: evaluation}
        stops = early.stops(evaluation)
        for monitor in training.monitors:
            monitor.on_eval(segment.stop, evaluation)
    if Event.CHECKPOINT in segment.events:
        _save(training, segment.stop, state, early, metrics)
    return stops


def _due(training: Training, saved_at: float) -> bool:
    period_s = training.recipe.checkpoint.every_seconds
    return period_s is not None and time.monotonic() - saved_at >= period_s


def _save(
    training: Training,
    step: int,
    state: TrainState,
    early: EarlyStop,
    metrics: Mapping[str, float] | None,
) -> None:
    if training.checkpoints is not None:
        # First the log: a resumed run goes on behind the checkpoint.
        for monitor in training.monitors:
            monitor.flush()
        host = {**training.host, "early_stop": early.state()}
        if training.rollbacks is not None:
            host |= training.rollbacks.kept()
        training.checkpoints.save(step, state, host, metrics)


def _behind_bad_step(
    training: Training,
    state: TrainState,
    telemetry: Telemetry,
    early: EarlyStop,
    history: History,
) -> TrainState:
    """The state to go on with. Raises RunError where the last step was bad and ends the run."""
    bad = telemetry.bad_step
    if bad is None:
        return state
    history.step = bad
    why_not = ""
    if training.rollbacks is not None:
        try:
            return _go_back(training, training.rollbacks, bad, state)
        except RunError as error:
            why_not = f"; {error}"
    history.step, history.left_out = bad - 1, left_out(state)
    _save(training, bad - 1, state, early, None)
    if training.examine is not None:
        training.examine(state, bad)
    place = training.course.place(bad)
    kept = f"; the state of step {bad - 1} is saved" if training.checkpoints else ""
    raise RunError(
        f"epoch: {place.sink} step: {place.sink_step}. Invalid loss, terminating training. "
        f"Step {bad} of {training.course.total}: loss is {telemetry.loss[-1]!s}, "
        f"gradient norm is {telemetry.grad_norm[-1]!s}{why_not}{kept}"
    )


def _go_back(training: Training, rollbacks: Rollbacks, bad: int, state: TrainState) -> TrainState:
    """The state behind a bad step, on the device, and everyone told."""
    found = rollbacks.go_back(bad, state)
    gone = rollbacks.done[-1]
    for monitor in training.monitors:
        monitor.on_rollback(gone.step, gone.to)
    return training.executable.put(found)


class _SinkClock:
    """Adds up the chunks of the sink that is under way."""

    def __init__(self) -> None:
        self._seconds, self._steps = 0.0, 0
        self._last: Telemetry | None = None

    def add(self, telemetry: Telemetry, seconds: float) -> None:
        self._seconds += seconds
        self._steps += len(telemetry)
        self._last = telemetry

    def report(self, step: int) -> SinkReport:
        """The sink that ends at boundary `step`, and a fresh start for the next."""
        assert self._last is not None
        report = SinkReport(
            step, self._last.loss[-1], self._last.learning_rate[-1], self._seconds, self._steps
        )
        self._seconds, self._steps = 0.0, 0
        return report
