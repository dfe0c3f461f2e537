"""Progress: where a call of `train` is, and what the next checkpoint keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.checkpoint.host_state import HostState, PendingBoundary, Requests
from pipeline.engine.bad_step import RecentSteps
from pipeline.engine.history import History

if TYPE_CHECKING:
    from pipeline.training.state import TrainState


@dataclass
class Progress:
    """The state of training between two dispatches."""

    state: TrainState
    history: History
    granted: Requests = field(default_factory=Requests)
    """Requests of callbacks that are in effect, or are at a step that lies ahead."""
    pending: PendingBoundary | None = None
    """Set while the evaluation of this step is interrupted."""
    verdict: str | None = None
    """Why a pruner ends the run at a boundary that was interrupted in an earlier process."""
    saved_step: int | None = None
    """The step of the newest checkpoint that callbacks were notified of."""
    recent: RecentSteps = field(default_factory=RecentSteps)

    @classmethod
    def restore(cls, state: TrainState, host: HostState, history: History) -> Progress:
        """Continue with what a checkpoint kept of the host; `history` takes its loss."""
        progress = cls(state, history, host.callbacks.granted, saved_step=history.step or None)
        if host.unfinished_boundary is not None:
            progress.pending = host.unfinished_boundary
            progress.verdict = host.unfinished_boundary.verdict
            history.loss = host.unfinished_boundary.loss
        return progress
