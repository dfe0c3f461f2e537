"""Early stop: end training when a metric no longer improves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.checkpoint.host_state import EarlyStopState
from pipeline.engine.callbacks.callback import Evaluation

if TYPE_CHECKING:
    from pipeline.training.metric_names import Direction


@dataclass
class EarlyStop:
    """Ends training if `metric` is set and doesn't improve in `patience` evaluations."""

    metric: str | None = None
    better: Direction = "min"
    patience: int = 1
    """Number of successive evaluations without an improvement after which training ends."""
    min_delta: float = 0.0
    """An improvement is a change by more than this."""
    progress: EarlyStopState = field(default_factory=EarlyStopState)
    """State in checkpoints."""

    def add(self, evaluation: Evaluation) -> None:
        """Record an evaluation. NaN, from a network that has diverged, isn't an improvement."""
        if self.metric is None:
            return
        value = evaluation.scalars()[self.metric]
        best = self.progress.best
        sign = 1 if self.better == "max" else -1
        is_first = best is None and not math.isnan(value)
        if is_first or (best is not None and sign * (value - best) > self.min_delta):
            self.progress = EarlyStopState(value, 0)
        else:
            self.progress = EarlyStopState(best, self.progress.waited + 1)

    @property
    def is_over(self) -> bool:
        """Whether training should end."""
        return self.metric is not None and self.progress.waited >= self.patience

    @property
    def reason(self) -> str:
        """Reason to end training."""
        if self.progress.best is None:
            return f"{self.metric} is no number in {self.progress.waited} evaluations"
        return f"{self.metric} no better than {self.progress.best}"
