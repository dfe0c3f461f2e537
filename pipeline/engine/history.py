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
"""Times of at most this many dispatches are kept for the median."""


@dataclass
class History:
    """The last step of training, its status, and its times."""

    step: int
    status: Literal["done", "stopped", "pruned"] = "done"
    reason: str | None = None
    left_out: int = 0
    """Non-finite steps whose update was skipped, and steps that a rollback has undone."""
    loss: float | None = None
    train_s: float = 0.0
    """Seconds from the first dispatch to the last save, evaluations included."""
    first_dispatch_s: float | None = None
    first_step_at: float | None = None
    """Time of the end of the first dispatch, by `time.perf_counter`."""
    step_seconds: deque[float] = field(default_factory=partial(deque, maxlen=MAX_TIMED_DISPATCHES))
    """Seconds per step of the newest dispatches, without the first one."""
    timed_steps: int = 0
    """Steps of all dispatches but the first one."""
    timed_s: float = 0.0
    """Seconds of all dispatches but the first one, waiting for data included."""
    evaluated: dict[int, Evaluation] = field(default_factory=dict)
    """Last evaluation, by its step."""

    @property
    def step_ms(self) -> float | None:
        """Mean time of a step, waiting for data included, in milliseconds."""
        return 1000 * self.timed_s / self.timed_steps if self.timed_steps else None

    @property
    def median_step_ms(self) -> float | None:
        """Median time of a step over the newest dispatches, in milliseconds."""
        return 1000 * statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def newest_step_s(self) -> float | None:
        """Seconds per step of the newest dispatch."""
        return self.step_seconds[-1] if self.step_seconds else self.first_dispatch_s

    def add_dispatch(self, steps: int, seconds: float, ended_at: float) -> None:
        """Record a dispatch of `steps` steps in `seconds`; `ended_at` is by `perf_counter`."""
        if self.first_dispatch_s is None:
            self.first_dispatch_s = seconds
            self.first_step_at = ended_at
        else:
            self.step_seconds.append(seconds / steps)
            self.timed_steps += steps
            self.timed_s += seconds


@dataclass
class Progress:
    """The state of training between two dispatches."""

    state: TrainState
    history: History
    granted: Requests = field(default_factory=Requests)
    """Requests of callbacks that are in effect, or will be at a later step."""
    pending: PendingBoundary | None = None
    """Boundary of this step if its evaluation was interrupted."""
    verdict: str | None = None
    """Reason of a pruner to end the run, from an earlier process that was interrupted."""
    saved_step: int | None = None
    """Step of the newest checkpoint that callbacks were notified of."""
    saved_at: float = 0.0
    """Time of the newest checkpoint, or of the start, by `time.monotonic`."""
    num_answered_saves: int = 0
    """Saves requested by signals that have been made."""
    recent: RecentSteps = field(default_factory=RecentSteps)

    @classmethod
    def restore(cls, state: TrainState, host: HostState, history: History) -> Progress:
        """Return the progress of a checkpoint, and set the loss of `history`."""
        progress = cls(state, history, host.callbacks.granted, saved_step=history.step or None)
        if host.unfinished_boundary is not None:
            progress.pending = host.unfinished_boundary
            progress.verdict = host.unfinished_boundary.verdict
            history.loss = host.unfinished_boundary.loss
        return progress
