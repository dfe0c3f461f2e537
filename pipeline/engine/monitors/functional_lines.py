"""The lines of MindSpore's functional training loop."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.engine.callbacks.events import Evaluation, Monitor
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry

BANNER = f"{14 * '='} Starting Training {14 * '='}"
EVERY = 100
"""Batches from one line to the next, counted from 0 in every pass."""


class FunctionalMonitor(Monitor):
    """Print a banner, `loss: 2.302585 [100/1875]` every 100 batches, and what a test has shown.

    With `every` 0 no losses are printed.
    """

    def __init__(
        self, say: Callable[[str], None], run_schedule: RunSchedule, every: int = EVERY
    ) -> None:
        self._say, self._run_schedule, self._every = say, run_schedule, every
        self._began = False

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Print the lines of steps; a sink's come together, after it."""
        if not self._began:
            self._began = True
            self._say(BANNER)
        if not self._every:
            return
        size = self._run_schedule.steps_per_pass
        for place, loss in enumerate(telemetry.loss.tolist(), start=telemetry.start):
            batch = place % size
            if batch % self._every == 0:
                self._say(f"loss: {loss:>7f} [{batch:>3d}/{size:>3d}]")

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Print accuracy, where there is one, and loss."""
        scalars = evaluation.scalars()
        said = [f"Accuracy: {100 * scalars['accuracy']:>0.1f}%"] if "accuracy" in scalars else []
        said += [f"Avg loss: {scalars['loss']:>8f}"] if "loss" in scalars else []
        self._say(f"Test:\n{', '.join(said)}")
