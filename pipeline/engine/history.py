"""History of training: its status, its times and its position."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from pipeline.checkpoint.host_state import HostState, PendingBoundary, Requests
from pipeline.engine.callbacks.events import Evaluation
from pipeline.engine.non_finite_step import RecentSteps

if TYPE_CHECKING:
    from pipeline.training.state import TrainState

MAX_TIMED_DISPATCHES = 4096
"""Number of newest dispatches over which the median time of a step is computed."""


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
    """Seconds from the first dispatch to the last save, evaluations included."""
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
