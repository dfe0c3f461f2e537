"""History of training: its status, its times and its position, and the step that ended it.

A non-finite step that ends a run has a likely cause, and a change that a new run needs.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.checkpoint.host_state import HostState, PendingBoundary, Requests
from pipeline.core.errors import RunError
from pipeline.core.files.value_text import count_noun
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.training.telemetry import Telemetry

if TYPE_CHECKING:
    from pipeline.training.state import TrainState

RECENT_STEPS = 20
"""Number of newest steps that are searched for an explosion."""
GROWTH = 100.0
"""Least factor by which an exploded loss or gradient norm has risen; batches differ by less."""
LEAST_LOSS = 10.0
LEAST_NORM = 1e3
LEAST_WEIGHT = 1e3
"""Least magnitudes that have exploded, since smaller ones may vary by any factor."""
MAX_TIMED_DISPATCHES = 4096
"""Number of newest dispatches over which the median time of a step is computed."""


class NonFiniteStepError(RunError):
    """A step whose loss or gradient isn't finite ends the run.

    `advice` names the change that a new run needs; it is empty if resuming the run may help.
    """

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


@dataclass(frozen=True)
class Examination:
    """The result of computing a non-finite step again."""

    repeats: bool = True
    """Whether the step is non-finite again."""
    is_in_data: bool = False
    """Whether a value of the dataset isn't finite."""
    largest_weight: float = 0.0
    """Greatest magnitude in the parameters before the step."""


class RecentSteps:
    """The loss, gradient norm and learning rate of the newest finite steps of this process."""

    def __init__(self) -> None:
        self._parts: deque[np.ndarray] = deque(maxlen=RECENT_STEPS)

    def add(self, telemetry: Telemetry) -> None:
        """Add the steps of `telemetry`."""
        columns = (telemetry.loss, telemetry.grad_norm, telemetry.learning_rate)
        rows = np.stack([np.asarray(column[-RECENT_STEPS:], np.float64) for column in columns], 1)
        last = telemetry.start + len(telemetry)
        steps = np.arange(last - len(rows) + 1, last + 1, dtype=np.float64)[:, None]
        self._parts.append(np.concatenate([steps, rows], 1))

    def explain(self, examined: Examination) -> str:
        """Return a text that blames the learning rate if the newest steps exploded, else ""."""
        rows = np.concatenate([np.empty((0, 4)), *self._parts])
        finite_rows = rows[np.isfinite(rows).all(1)]
        steps, losses, norms, rates = finite_rows[-RECENT_STEPS:].T
        if examined.is_in_data or not len(steps) or rates[-1] == 0:
            return ""
        symptom = (
            _describe_rise("the loss", steps, losses, LEAST_LOSS)
            or _describe_rise("the gradient norm", steps, norms, LEAST_NORM)
            or _describe_large_weight(steps, examined.largest_weight)
        )
        if not symptom:
            return ""
        return (
            f"{symptom}; the learning rate of step {int(steps[-1])} is {rates[-1]:g}, which is the "
            "likely cause: try a smaller train.optimizer.lr"
        )


def _describe_rise(name: str, steps: np.ndarray, values: np.ndarray, least: float) -> str:
    """Return a text about a rise to at least `least` by the factor `GROWTH`; "" without one."""
    end = len(values) - 1 - int(values[::-1].argmax())  # The last of equal maxima.
    start = int(values[: end + 1].argmin())
    if values[end] < max(least, GROWTH * abs(values[start])):
        return ""
    duration = count_noun(int(steps[end] - steps[start]), "step")
    return f"{name} rose from {values[start]:.4g} to {values[end]:.4g} within {duration}"


def _describe_large_weight(steps: np.ndarray, largest: float) -> str:
    """Return a text if a weight is large after the first steps of a run, else ""."""
    if int(steps[0]) > 1 or largest < LEAST_WEIGHT:
        return ""
    return f"after {count_noun(int(steps[-1]), 'step')} a weight has reached {largest:.4g}"


def advise(examined: Examination, cause: str, step: int, policy: str) -> str:
    """Return a text about the change that a new run needs; "" if the step may not fail again."""
    if not examined.repeats:
        return ""
    if cause:
        change = "a smaller train.optimizer.lr"
    elif examined.is_in_data:
        change = "corrected data"
    else:
        change = "another train.optimizer.lr or train.precision"
    skip = ", or train.on_nan=skip" if policy == "stop" and not cause else ""
    return f"would fail at step {step} again; start a new run with {change}{skip}"


@dataclass
class History:
    """The last step of training, its status, and its times."""

    step: int
    status: Literal["done", "stopped", "pruned"] = "done"
    reason: str | None = None
    left_out: int = 0
    """Number of non-finite steps whose update was skipped, and of steps that a rollback undid."""
    loss: float | None = None
    train_s: float = 0.0
    """Seconds from the start of the loop to the last save, evaluations included."""
    first_dispatch_s: float | None = None
    first_step_at: float | None = None
    """Time of the end of the first dispatch, by `time.perf_counter`."""
    step_seconds: deque[float] = field(default_factory=partial(deque, maxlen=MAX_TIMED_DISPATCHES))
    """Seconds per step of the newest dispatches, without the first one."""
    timed_steps: int = 0
    """Number of steps of all dispatches but the first."""
    timed_s: float = 0.0
    """Seconds of all dispatches but the first, waiting for data included."""
    evaluated: dict[int, Evaluation] = field(default_factory=dict)
    """Only the last evaluation, by its step."""

    @property
    def step_ms(self) -> float | None:
        """Mean time of a step, waiting for data included, in milliseconds."""
        return 1000 * self.timed_s / self.timed_steps if self.timed_steps else None

    @property
    def median_step_ms(self) -> float | None:
        """Median time of a step over the newest dispatches, in milliseconds."""
        return 1000 * statistics.median(self.step_seconds) if self.step_seconds else None

    def add_dispatch(self, steps: int, seconds: float, ended_at: float) -> None:
        """Record that a dispatch took `seconds`, and ended at `ended_at` by `perf_counter`."""
        if self.first_dispatch_s is None:
            self.first_dispatch_s = seconds
            self.first_step_at = ended_at
        else:
            self.step_seconds.append(seconds / steps)
            self.timed_steps += steps
            self.timed_s += seconds


@dataclass
class Progress:
    """The state of training at a boundary."""

    state: TrainState
    history: History
    granted: Requests = field(default_factory=Requests)
    """Requests of callbacks that are in effect, or are accepted for a later step."""
    pending: PendingBoundary | None = None
    """The boundary at this step if its evaluation was interrupted."""
    verdict: str | None = None
    """Reason for which a pruner ended the run at `pending`, in an earlier process."""
    saved_step: int | None = None
    """Step of the newest checkpoint that callbacks were notified of."""
    saved_at: float = 0.0
    """Time of the newest checkpoint, or of the start, by `time.monotonic`."""
    evaluated_at: float = 0.0
    """Time of the newest evaluation's end, or of the start."""
    num_answered_saves: int = 0
    """Number of saves that signals requested and that are done."""
    recent: RecentSteps = field(default_factory=RecentSteps)

    @classmethod
    def restore(cls, state: TrainState, host: HostState, history: History) -> Progress:
        """Return the progress that a checkpoint saved, with the loss before its evaluation."""
        progress = cls(state, history, host.callbacks.granted, saved_step=history.step or None)
        pending = host.unfinished_boundary
        if pending is not None:
            progress.pending = pending
            progress.verdict = pending.verdict
            history.loss = pending.loss
        return progress
