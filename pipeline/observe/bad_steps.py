"""Lines about bad steps that a run has gone on behind."""

from __future__ import annotations

import numpy as np

from pipeline.observe.monitors import MonitorBase, SinkReport
from pipeline.observe.reporter import Reporter
from pipeline.sink.telemetry import Telemetry

SHOWN = 10
"""Steps that a line names."""


class BadStepMonitor(MonitorBase):
    """Tells of updates that were left out, at the end of a sink, and of every rollback.

    Overflows that the loss scale skips (`skips_overflow`) are its business, and no news.
    """

    def __init__(self, reporter: Reporter, *, skips_overflow: bool) -> None:
        self._reporter, self._skips_overflow = reporter, skips_overflow
        self._left_out: list[int] = []

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Take note of the steps that were left out."""
        skipped = telemetry.outcome(skips_overflow=self._skips_overflow).skipped_bad
        self._left_out += (telemetry.start + 1 + np.flatnonzero(skipped)).tolist()

    def on_sink(self, report: SinkReport) -> None:
        """Name them."""
        steps, self._left_out = self._left_out, []
        if not steps:
            return
        named = ", ".join(map(str, steps[:SHOWN]))
        more = f" and {len(steps) - SHOWN:,} more" if len(steps) > SHOWN else ""
        number = "step" if len(steps) == 1 else "steps"
        self._reporter.warn(f"{number} {named}{more}: not finite, no update was made")

    def on_rollback(self, step: int, to: int) -> None:
        """Say where training goes on."""
        self._reporter.warn(
            f"step {step}: not finite; back to the weights of step {to}, on with the data behind "
            f"step {step}"
        )
