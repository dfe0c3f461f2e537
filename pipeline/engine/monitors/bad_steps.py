"""Warnings about bad steps that do not end a run."""

from __future__ import annotations

import numpy as np

from pipeline.core.files.value_text import join_first
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.events import Monitor, SinkReport
from pipeline.training.telemetry import Telemetry

SHOWN = 10
"""Most steps that a line names."""


class BadStepMonitor(Monitor):
    """Warn of updates that were skipped, at the end of a sink, and of every rollback.

    Overflows that the loss scale skips (`skips_overflow`) are normal and not reported.
    """

    def __init__(self, reporter: Reporter, *, skips_overflow: bool) -> None:
        self._reporter, self._skips_overflow = reporter, skips_overflow
        self._skipped: list[int] = []

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Collect the steps that were skipped."""
        skipped = telemetry.outcome(skips_overflow=self._skips_overflow).skipped_bad
        self._skipped += (telemetry.start + 1 + np.flatnonzero(skipped)).tolist()

    def on_sink(self, report: SinkReport) -> None:
        """Warn of the steps that were skipped, the first few by number."""
        steps, self._skipped = self._skipped, []
        if not steps:
            return
        named = join_first(list(map(str, steps)), SHOWN)
        number = "step" if len(steps) == 1 else "steps"
        self._reporter.warn(f"{number} {named}: not finite, no update was made")

    def on_rollback(self, step: int, to: int) -> None:
        """Warn of the rollback and say where training goes on."""
        self._reporter.warn(
            f"step {step}: not finite; back to the weights of step {to}, on with the data after "
            f"step {step}"
        )
