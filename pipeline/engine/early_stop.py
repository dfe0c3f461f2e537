"""Early stop: end training when a metric no longer improves."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.host_state import EarlyStopState
from pipeline.engine.callbacks.events import Evaluation

if TYPE_CHECKING:
    from pipeline.training.metric_names import Direction


@dataclass
class EarlyStop:
    """Patience with a metric: the only monitor that decides something. Without a metric it never
    stops."""

    metric: str | None = None
    better: Direction = "min"
    patience: int = 1
    """Evaluations without an improvement that end training."""
    min_delta: float = 0.0
    """An improvement is larger than this."""
    progress: EarlyStopState = field(default_factory=EarlyStopState)

    def restore(self, progress: EarlyStopState) -> None:
        """Continue from a checkpoint."""
        self.progress = progress

    def add(self, evaluation: Evaluation) -> None:
        """Record an evaluation, after which `is_over` may become true.

        NaN, of a network that has diverged, isn't an improvement.
        """
        if self.metric is None:
            return
        value = evaluation.scalars()[self.metric]
        best = self.progress.best
        sign = 1 if self.better == "max" else -1
        is_first = best is None and value == value
        if is_first or (best is not None and sign * (value - best) > self.min_delta):
            self.progress = EarlyStopState(value, 0)
        else:
            self.progress = EarlyStopState(best, self.progress.waited + 1)

    @property
    def is_over(self) -> bool:
        """Whether patience has run out, in this process or before a checkpoint was saved."""
        return self.metric is not None and self.progress.waited >= self.patience

    @property
    def reason(self) -> str:
        """The reason of the stop."""
        if self.progress.best is None:
            return f"{self.metric} is no number in {self.progress.waited} evaluations"
        return f"{self.metric} no better than {self.progress.best}"

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint, as JSON."""
        return asdict(self.progress)
