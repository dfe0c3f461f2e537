"""The metrics of a custom loop between two reports."""

from __future__ import annotations

import numpy as np

from pipeline.data.columns import SampleUnit
from pipeline.engine.callbacks.events import Monitor
from pipeline.training.telemetry import Telemetry, concatenate_columns

STEPS = SampleUnit("steps", "steps")
"""The speed of a custom loop is counted in steps."""


class SinkMetrics(Monitor):
    """The metrics of the steps since the last report."""

    def __init__(self) -> None:
        self._parts: list[Telemetry] = []

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Add steps."""
        self._parts.append(telemetry)

    @property
    def last(self) -> Telemetry:
        """The newest steps. Raises IndexError before the first."""
        return self._parts[-1]

    def take(self) -> dict[str, np.ndarray]:
        """Return each metric by step, float32 (steps,), and clear them."""
        parts = self._parts
        self._parts = []
        return concatenate_columns(parts) if parts else {}
