"""A compiled run that computes nothing, on a simulated clock."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.backends.base import CompileReport, Mechanism
from pipeline.engine import loop as train_stage
from pipeline.stages.autosink import dispatch_costs as trial_stage
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry
from tests.engine.test_loop import state_at
from tests.step_rows import telemetry_of


class Clockwork:
    """A dispatch of n steps takes `dispatch_s + n * step_s`, softly `(n - 1) * soft_s` more."""

    def __init__(
        self,
        dispatch_s: float = 1e-3,
        step_s: float = 1e-4,
        soft_s: float = 1e-5,
        window_steps: int = 1024,
    ) -> None:
        self.report = CompileReport(())
        self.now = 0.0
        self.ran: list[tuple[int, Mechanism]] = []
        self.nan_step: int | None = None
        self.signal_at: int | None = None
        self._dispatch_s, self._step_s, self._soft_s = dispatch_s, step_s, soft_s
        self._window = SimpleNamespace(start=0, stop=window_steps, max_steps=window_steps)
        self.loader = SimpleNamespace(get_window=lambda step: self._window)

    def init(self) -> TrainState:
        return state_at(0)

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        steps = stop - start
        self.ran.append((steps, mechanism))
        self.now += self._dispatch_s + steps * self._step_s
        self.now += (steps - 1) * self._soft_s if mechanism == "soft" else 0.0
        if self.signal_at is not None and start < self.signal_at <= stop:
            signal.raise_signal(signal.SIGINT)
        rows = np.tile(np.float32([1, 1, 1, 1, 0]), (steps, 1))
        if self.nan_step is not None and start < self.nan_step <= stop:
            rows = rows[: self.nan_step - start]
            rows[-1, 0] = np.nan
        return state_at(stop), telemetry_of(start, rows)

    @property
    def steps(self) -> int:
        """How many steps were run."""
        return sum(steps for steps, _ in self.ran)

    def rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this the clock of training and of trials."""
        clock = SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(train_stage, "time", clock)
        monkeypatch.setattr(trial_stage, "time", clock)
