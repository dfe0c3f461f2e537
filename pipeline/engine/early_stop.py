"""Early stop: end training when a metric no longer improves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.recipe import EarlyStopSpec
from pipeline.engine.monitors.monitors import Evaluation
from pipeline.training.part_specs import metric_directions


@dataclass
class EarlyStop:
    """Patience with a metric. The only monitor that decides something."""

    spec: EarlyStopSpec
    best: float | None = None
    waited: int = 0

    def take_note(self, evaluation: Evaluation) -> None:
        """Record an evaluation; `is_over` says whether patience has run out with it.

        NaN, of a network that has diverged, is no improvement and nothing to compare with.
        """
        if self.spec.metric is None:
            return
        value = evaluation.scalars()[self.spec.metric]
        metric = self.spec.metric
        sign = 1 if metric_directions([metric])[metric] == "max" else -1
        is_first = self.best is None and value == value
        if is_first or (self.best is not None and sign * (value - self.best) > self.spec.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    @property
    def is_over(self) -> bool:
        """Whether patience has run out, in this process or before a checkpoint was saved."""
        return self.spec.metric is not None and self.waited >= self.spec.patience

    @property
    def reason(self) -> str:
        """Why it is over."""
        if self.best is None:
            return f"{self.spec.metric} is no number in {self.waited} evaluations"
        return f"{self.spec.metric} no better than {self.best}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return {"best": self.best, "waited": self.waited}
