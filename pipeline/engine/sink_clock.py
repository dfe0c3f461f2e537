"""The clock of a sink, which may be dispatched in several chunks."""

from __future__ import annotations

from pipeline.engine.monitors.monitors import SinkReport
from pipeline.training.telemetry import Telemetry


class SinkClock:
    """Sum of the chunks of the current sink."""

    def __init__(self) -> None:
        self._seconds, self._steps = 0.0, 0
        self._last: Telemetry | None = None

    def add(self, telemetry: Telemetry, seconds: float) -> None:
        """Record that the steps of `telemetry` took `seconds`."""
        self._seconds += seconds
        self._steps += len(telemetry)
        self._last = telemetry

    def report(self, step: int) -> SinkReport:
        """Return the report of the sink that ends at boundary `step`, and start the next."""
        assert self._last is not None
        report = SinkReport(
            step, self._last.loss[-1], self._last.learning_rate[-1], self._seconds, self._steps
        )
        self._seconds, self._steps = 0.0, 0
        return report
