"""Monitors that a run can do without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from pipeline.core.errors import PipelineError
from pipeline.engine.callbacks.events import Evaluation, Monitor, SinkReport
from pipeline.training.telemetry import Telemetry

M = TypeVar("M", bound=Monitor)


class BestEffortMonitor(Monitor, Generic[M]):
    """Pass every event on to a monitor until it fails; then warn, and go on without it.

    `what` is the monitor's name for the user; `warn` is called once, when it fails.
    """

    def __init__(self, monitor: M, what: str, warn: Callable[[str], None]) -> None:
        self._monitor: M | None = monitor
        self._what, self._warn = what, warn

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Pass on that steps were done."""
        self.attempt(lambda monitor: monitor.on_steps(telemetry, seconds))

    def on_sink(self, report: SinkReport) -> None:
        """Pass on that a sink ended."""
        self.attempt(lambda monitor: monitor.on_sink(report))

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Pass on an evaluation."""
        self.attempt(lambda monitor: monitor.on_eval(step, evaluation))

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Pass on scalars."""
        self.attempt(lambda monitor: monitor.on_scalars(step, scalars))

    def on_rollback(self, step: int, to: int) -> None:
        """Pass on a rollback."""
        self.attempt(lambda monitor: monitor.on_rollback(step, to))

    def flush(self) -> None:
        """Have the monitor flush."""
        self.attempt(lambda monitor: monitor.flush())

    def close(self) -> None:
        """Close the monitor."""
        self.attempt(lambda monitor: monitor.close())

    def attempt(self, call: Callable[[M], None]) -> None:
        """Make a call to the monitor, unless it has failed before."""
        monitor = self._monitor
        if monitor is None:
            return
        try:
            call(monitor)
        except Exception as error:  # whatever it is, training is worth more
            self._monitor = None
            with suppress(Exception):
                monitor.close()
            known = isinstance(error, PipelineError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self._warn(f"{self._what} failed and goes no further; training goes on: {reason}")
