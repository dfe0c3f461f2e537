"""Cost of dispatches on the machine at hand: single steps and long sinks, timed alternately."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from rich.console import Console

from pipeline.backends.base import Executable, Mechanism
from pipeline.backends.sink_choice import Cost, Costs, SinkMechanism
from pipeline.checkpoint.host_state import HostState
from pipeline.config.observer_settings import make_observer_settings
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
        self._recipe = recipe
        self._run_schedule = run_schedule
        self._executable = executable
        self._terminal = terminal
        self._state = executable.init()
        self._open = ExitStack()
        self._observers: dict[int | None, Observers] = {}

    def time(self, variant: Variant, steps: int) -> Timing:
        """Time `steps` steps of a variant, at least three times as many as a sink has.

        Raises RunError if one is not finite.
        """
        watch = _Stopwatch()
        observers = self._open_observers(variant)
        run = replace(self._run_schedule, total=steps, sink_steps=variant.sink_steps)
        schedule = Schedule(run, dispatch_seconds=self._recipe.train.dispatch_seconds)
        program = Program(self._executable, variant.mechanism)
        hooks = Hooks(monitors=[observers.monitor, watch])
        training = train(program, self._state, schedule, hooks, HostState(), History(0))
        self._state = exhaust(training)
        observers.monitor.flush()
        return watch.timing(variant.sink_steps or 1)

    def _open_observers(self, variant: Variant) -> Observers:
        """Return the observers of a sink size, opened when first needed."""
        if variant.sink_steps not in self._observers:
            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
            # A console that writes to nowhere, with the work of a visible one.
            nowhere = self._open.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115
            console = Console(
                file=nowhere,
                force_terminal=self._terminal,
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
            reporter = self._open.enter_context(Reporter(folder, console))
            run_schedule = replace(self._run_schedule, sink_steps=variant.sink_steps)
            settings = make_observer_settings(self._recipe)
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
        steps = np.array(self._steps)
        at_ms = 1000 * np.array(self._at)
        begin = int(np.searchsorted(steps, skipped))
        mean = (at_ms[-1] - at_ms[begin]) / (steps[-1] - steps[begin])
        return Timing(float(mean), np.diff(at_ms[begin:]))


LEAST_ROUNDS = 5
MOST_ROUNDS = 15
"""Rounds of a measurement; each times every variant once, so that what slows the machine for a
while slows all alike."""
TRIAL_MS = 50.0
"""Time of a trial, long enough to include the work of the threads that write logs."""
LONGEST = 1000
"""Longest timed sink in steps."""
SINKS = 3
"""Least sinks in a trial; the first is not timed."""
SINGLES = 4
"""Least steps in a trial of single steps."""

OFF = Variant(None, "none")


@dataclass(frozen=True)
class Measurement:
    """Costs of dispatches, and the measurements they come from."""

    costs: Costs
    single_ms: np.ndarray
    """float64 (dispatches,): the time of each dispatch of one step without sinks."""
    long_steps: int
    """Steps of the long dispatches."""


def least_steps(mechanisms: Sequence[SinkMechanism]) -> int:
    """Return the least number of steps of a measurement."""
    return LEAST_ROUNDS * (2 * SINGLES + 2 * SINKS * len(mechanisms))


def first_look(trials: TimedRuns) -> float:
    """Time a step that is dispatched alone, roughly, in ms."""
    return float(trials.time(OFF, SINGLES).dispatch_ms.min())


def measure(
    trials: TimedRuns, single_ms: float, mechanisms: Sequence[SinkMechanism], budget_s: float
) -> Measurement:
    """Time steps without sinks, in sinks of one, and in long sinks by each mechanism.

    Takes about `budget_s` seconds, more if `least_steps` need it; `single_ms` is `first_look`.
    Raises RunError if a step is not finite, KeyboardInterrupt when a signal stops it.
    """
    round_ms = max(TRIAL_MS, SINGLES * single_ms) * (2 + len(mechanisms))
    count = int(np.clip(1000 * budget_s / round_ms, LEAST_ROUNDS, MOST_ROUNDS))
    trial_ms = 1000 * budget_s / (count + 1) / (2 + len(mechanisms))
    guess = _long_sink(trial_ms, single_ms)
    step_ms = trials.time(Variant(guess, mechanisms[0]), SINKS * guess).step_ms
    long_steps = _long_sink(trial_ms, step_ms)
    sinks = max(SINKS, round(trial_ms / (long_steps * step_ms)) + 1)
    singles = max(SINGLES, int(trial_ms / single_ms))
    variants = {OFF: singles, Variant(1, mechanisms[0]): singles}
    variants |= {Variant(long_steps, mechanism): sinks * long_steps for mechanism in mechanisms}
    rounds = [
        {variant: trials.time(variant, steps) for variant, steps in variants.items()}
        for _ in range(count)
    ]
    single_dispatches = np.concatenate([timed[OFF].dispatch_ms for timed in rounds])
    return Measurement(costs_of(rounds, mechanisms, long_steps), single_dispatches, long_steps)


def _long_sink(trial_ms: float, step_ms: float) -> int:
    """Return the length of a sink of which `SINKS` fit into a trial."""
    return min(max(2, int(trial_ms / (SINKS * step_ms))), LONGEST)


def costs_of(
    rounds: Sequence[Mapping[Variant, Timing]], mechanisms: Sequence[SinkMechanism], long_steps: int
) -> Costs:
    """Fit costs to rounds of timings: the lower quartile of times, and the error of ratios."""

    def times(variant: Variant) -> list[float]:
        return [timed[variant].step_ms for timed in rounds]

    single_ms = lower_quartile(times(Variant(1, mechanisms[0])))
    longs = {mechanism: times(Variant(long_steps, mechanism)) for mechanism in mechanisms}
    costs = [
        Cost.fit(mechanism, single_ms, long_steps * lower_quartile(long), long_steps)
        for mechanism, long in longs.items()
    ]
    error = max(error_of_gain(times(OFF), long) for long in longs.values())
    return Costs(lower_quartile(times(OFF)), tuple(costs), error)


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile of times: other work on the machine only ever adds to them."""
    return float(np.quantile(times, 0.25))


def error_of_gain(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the relative error of the median ratio of two variants over rounds."""
    return error_of_median([a / b for a, b in zip(slow, fast, strict=True)])


def error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of a median as a share of it.

    1.2533 sigma / sqrt(n) for normal errors, sigma being 1.4826 times the median deviation.
    """
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return float(1.2533 * 1.4826 * deviation / np.sqrt(len(values)) / middle)
