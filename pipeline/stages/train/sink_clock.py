"""The clock of a sink, which may be dispatched in several chunks."""

from __future__ import annotations

from pipeline.observe.monitors import SinkReport
from pipeline.sink.telemetry import Telemetry


class SinkClock:
    """Adds up the chunks of the sink that is under way."""

    def __init__(self) -> None:
        self._seconds, self._steps = 0.0, 0
        self._last: Telemetry | None = None

    def add(self, telemetry: Telemetry, seconds: float) -> None:
        """A chunk took so long."""
        self._seconds += seconds
        self._steps += len(telemetry)
        self._last = telemetry

    def report(self, step: int) -> SinkReport:
        """The sink that ends at boundary `step`, and a fresh start for the next."""
        assert self._last is not None
        report = SinkReport(
            step, self._last.loss[-1], self._last.learning_rate[-1], self._seconds, self._steps
        )
        self._seconds, self._steps = 0.0, 0
        return report
