"""Monitors that a run can do without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pipeline.errors import PipelineError
from pipeline.observe.monitors import Evaluation, Monitor, SinkReport
from pipeline.sink.telemetry import Telemetry


class BestEffortMonitor:
    """Tells a monitor what it is told, until the monitor fails; then says so, and goes on without.

    `what` is the monitor's name for the user, `warn` is told once of its failure.
    """

    def __init__(self, monitor: Monitor, what: str, warn: Callable[[str], None]) -> None:
        self._monitor: Monitor | None = monitor
        self._what, self._warn = what, warn

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Pass on that steps were done."""
        self.tell("on_steps", telemetry, seconds)

    def on_sink(self, report: SinkReport) -> None:
        """Pass on that a sink ended."""
        self.tell("on_sink", report)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Pass on an evaluation."""
        self.tell("on_eval", step, evaluation)

    def on_rollback(self, step: int, to: int) -> None:
        """Pass on a rollback."""
        self.tell("on_rollback", step, to)

    def flush(self) -> None:
        """Have the monitor flush."""
        self.tell("flush")

    def close(self) -> None:
        """Close the monitor."""
        self.tell("close")

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the monitor, unless it has failed before."""
        monitor = self._monitor
        if monitor is None:
            return
        try:
            getattr(monitor, method)(*args)
        except Exception as error:  # whatever it is, training is worth more
            self._monitor = None
            with suppress(Exception):
                monitor.close()
            known = isinstance(error, PipelineError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self._warn(f"{self._what} failed and goes no further; training goes on: {reason}")
