"""History: how training has gone so far."""

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
"""Dispatches of which the median is computed, so that memory stays bounded."""


@dataclass
class History:
    """How training has gone: its last step, its status, and its times."""

    step: int
    status: Literal["done", "stopped", "pruned"] = "done"
    reason: str | None = None
    left_out: int = 0
    """Steps without an update because of a non-finite step: skipped, or undone by a rollback."""
    loss: float | None = None
    train_s: float = 0.0
    """Seconds from the first dispatch to the last save, evaluations included."""
    first_dispatch_s: float | None = None
    first_step_at: float | None = None
    """When the first dispatch ended, by `time.perf_counter`."""
    step_seconds: deque[float] = field(default_factory=partial(deque, maxlen=MAX_TIMED_DISPATCHES))
    """Seconds per step of the newest dispatches, without the very first."""
    timed_steps: int = 0
    """Steps of all dispatches but the very first."""
    timed_s: float = 0.0
    """Seconds of these dispatches, waiting for data included."""
    evaluated: dict[int, Evaluation] = field(default_factory=dict)
    """The last evaluation by its step."""

    @property
    def step_ms(self) -> float | None:
        """Mean time of a step, waiting for data included, in milliseconds."""
        return 1000 * self.timed_s / self.timed_steps if self.timed_steps else None

    @property
    def median_step_ms(self) -> float | None:
        """Median time of a step over the newest dispatches; waits for data hardly change it."""
        return 1000 * statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def newest_step_s(self) -> float | None:
        """Seconds per step of the newest dispatch."""
        return self.step_seconds[-1] if self.step_seconds else self.first_dispatch_s

    def add_dispatch(self, steps: int, seconds: float, ended_at: float) -> None:
        """Record that a dispatch of `steps` steps took `seconds`; `ended_at` by `perf_counter`."""
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
    """Requests of callbacks that are in effect, or are at a later step."""
    pending: PendingBoundary | None = None
    """Set while the evaluation of this step is interrupted."""
    verdict: str | None = None
    """Why a pruner ends the run at a boundary that was interrupted in an earlier process."""
    saved_step: int | None = None
    """The step of the newest checkpoint that callbacks were notified of."""
    recent: RecentSteps = field(default_factory=RecentSteps)

    @classmethod
    def restore(cls, state: TrainState, host: HostState, history: History) -> Progress:
        """Continue from a checkpoint of the host; `history` takes its loss."""
        progress = cls(state, history, host.callbacks.granted, saved_step=history.step or None)
        if host.unfinished_boundary is not None:
            progress.pending = host.unfinished_boundary
            progress.verdict = host.unfinished_boundary.verdict
            history.loss = host.unfinished_boundary.loss
        return progress
