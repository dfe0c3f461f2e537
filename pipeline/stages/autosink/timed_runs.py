"""Timed runs: training for the clock alone, on a state and with logs that are discarded.

The training stage itself runs the steps, with the monitors of the recipe, which write into a
temporary folder. So the times are those of training, without its evaluations and checkpoints.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from rich.console import Console

from pipeline.backends.base import Executable, Mechanism
from pipeline.checkpoint.host_state import HostState
from pipeline.config.observer_settings import observer_settings
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.events import Monitor
from pipeline.engine.history import History
from pipeline.engine.hooks import Hooks
from pipeline.engine.loop import Program, exhaust, train
from pipeline.engine.monitors.observers import Observers, open_observers
from pipeline.engine.schedule import RunSchedule, Schedule
from pipeline.training.telemetry import Telemetry


@dataclass(frozen=True)
class Variant:
    """A variant of a run: sinks of `sink_steps` steps, None for no sinks, by a mechanism."""

    sink_steps: int | None
    mechanism: Mechanism


@dataclass(frozen=True)
class Timing:
    """Times of a trial without its first sink, in which dispatches find their size."""

    step_ms: float
    """The mean over all steps, the host's work included."""
    dispatch_ms: np.ndarray
    """float64 (dispatches,), each from the end of the one before."""


class TimedRuns:
    """Trials of a compiled run; with `terminal` its lines and bar are drawn as on a terminal."""

    def __init__(
        self, recipe: Recipe, run_schedule: RunSchedule, executable: Executable, *, terminal: bool
    ) -> None:
        self._recipe, self._run_schedule = recipe, run_schedule
        self._executable, self._terminal = executable, terminal
        self._state = executable.init()
        self._open = ExitStack()
        self._observers: dict[int | None, Observers] = {}

    def time(self, variant: Variant, steps: int) -> Timing:
        """Time `steps` steps of a variant, at least three times as many as a sink has.

        Raises RunError where one is not finite.
        """
        watch, observers = _Stopwatch(), self._observers_of(variant)
        run = replace(self._run_schedule, total=steps, sink_steps=variant.sink_steps)
        schedule = Schedule(run, dispatch_seconds=self._recipe.train.dispatch_seconds)
        program = Program(self._executable, variant.mechanism)
        hooks = Hooks(monitors=[observers.monitor, watch])
        training = train(program, self._state, schedule, hooks, HostState(), History(0))
        self._state = exhaust(training)
        observers.monitor.flush()
        return watch.timing(variant.sink_steps or 1)

    def _observers_of(self, variant: Variant) -> Observers:
        """Return the observers of a sink size, opened when first needed."""
        if variant.sink_steps not in self._observers:
            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
            console = self._open.enter_context(_unseen(self._terminal))
            reporter = self._open.enter_context(Reporter(folder, console))
            run_schedule = replace(self._run_schedule, sink_steps=variant.sink_steps)
            settings = observer_settings(self._recipe)
            observers = open_observers(settings, folder, run_schedule, 0, reporter)
            self._observers[variant.sink_steps] = self._open.enter_context(observers)
        return self._observers[variant.sink_steps]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class _Stopwatch(Monitor):
    """Record of when each dispatch ended, after all other monitors were notified."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._steps: list[int] = []

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Note the time and the boundary."""
        self._at.append(time.perf_counter())
        self._steps.append(telemetry.start + len(telemetry))

    def timing(self, skipped: int) -> Timing:
        """Return the timing of the dispatches after boundary `skipped`."""
        steps, at_ms = np.array(self._steps), 1000 * np.array(self._at)
        begin = int(np.searchsorted(steps, skipped))
        mean = (at_ms[-1] - at_ms[begin]) / (steps[-1] - steps[begin])
        return Timing(float(mean), np.diff(at_ms[begin:]))


@contextmanager
def _unseen(terminal: bool) -> Iterator[Console]:
    """A console that writes to nowhere, with the work of a visible one."""
    with open(os.devnull, "w") as nowhere:
        yield Console(
            file=nowhere, force_terminal=terminal, soft_wrap=True, highlight=False, markup=False
        )
