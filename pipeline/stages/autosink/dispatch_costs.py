"""Cost of dispatches on this machine: single steps and long sinks, timed alternately."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
from pipeline.engine.callbacks.events import Evaluation, Monitor
from pipeline.engine.history import History
from pipeline.engine.hooks import Hooks, refuse_evaluation
from pipeline.engine.loop import Program, exhaust, train
from pipeline.engine.monitors.observers import Observers, open_observers
from pipeline.engine.schedule import Event, RunSchedule, Schedule
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry

Evaluate = Callable[[TrainState], Evaluation | None]
"""(state) -> metrics."""


@dataclass(frozen=True)
class Variant:
    """The sinks of a trial: their size and mechanism."""

    sink_steps: int | None
    """Steps of a sink; None: no sinks."""
    mechanism: Mechanism


@dataclass(frozen=True)
class Timing:
    """Times of a trial without its first sink, in which the size of dispatches is adapted."""

    step_ms: float
    """Mean over all steps, with the host's work."""
    dispatch_ms: np.ndarray
    """float64 (dispatches,): times from the end of the previous dispatch."""


class TimedRuns:
    """Trials of a compiled run; with `is_terminal` log and bar are drawn as on a terminal."""

    def __init__(
        self, recipe: Recipe, schedule: RunSchedule, executable: Executable, *, is_terminal: bool
    ) -> None:
        self._recipe = recipe
        self._run_schedule = schedule
        self._executable = executable
        self._is_terminal = is_terminal
        self.state = executable.init()
        """The state after the trials so far."""
        self._open_files = ExitStack()
        self._observers: dict[int | None, Observers] = {}

    def time(self, variant: Variant, steps: int, evaluate: Evaluate = refuse_evaluation) -> Timing:
        """Time a variant over `steps` steps, of several sinks or of a part of one.

        With `evaluate`, each sink ends with an evaluation. Raises RunError if a step isn't finite.
        """
        watch = DispatchClock()
        observers = self._open_observers(variant)
        run = replace(self._run_schedule, total=steps, sink_steps=variant.sink_steps)
        periods = () if evaluate is refuse_evaluation else (variant.sink_steps or 1,)
        every = {Event.EVALUATE: periods}
        schedule = Schedule(run, every, dispatch_seconds=self._recipe.train.dispatch_seconds)
        program = Program(self._executable, variant.mechanism)
        hooks = Hooks(monitors=[observers.monitor, watch], evaluate=evaluate)
        training = train(program, self.state, schedule, hooks, HostState(), History(0))
        self.state = exhaust(training)
        observers.monitor.flush()
        return watch.make_timing(variant.sink_steps or 1)

    def _open_observers(self, variant: Variant) -> Observers:
        """Return the observers of a variant's sink size; open them if it is new."""
        if variant.sink_steps not in self._observers:
            folder = Path(self._open_files.enter_context(tempfile.TemporaryDirectory()))
            # Writing to this console takes as long as to a visible one.
            devnull = self._open_files.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115
            console = Console(
                file=devnull,
                force_terminal=self._is_terminal,
                soft_wrap=True,
                highlight=False,
                markup=False,
            )
            reporter = self._open_files.enter_context(Reporter(folder, console))
            run_schedule = replace(self._run_schedule, sink_steps=variant.sink_steps)
            settings = make_observer_settings(self._recipe)
            observers = open_observers(settings, folder, run_schedule, 0, reporter)
            self._observers[variant.sink_steps] = self._open_files.enter_context(observers)
        return self._observers[variant.sink_steps]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()


class DispatchClock(Monitor):
    """Monitor that records the end of each dispatch, called after all other monitors."""

    def __init__(self) -> None:
        self._ends_s: list[float] = []
        self._steps: list[int] = []

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Note the time and the step at which a dispatch ended."""
        self._ends_s.append(time.perf_counter())
        self._steps.append(telemetry.start + len(telemetry))

    def make_timing(self, skipped: int) -> Timing:
        """Return the timing of the dispatches after the first `skipped` steps, or of the last."""
        steps = np.array(self._steps)
        at_ms = 1000 * np.array(self._ends_s)
        begin = min(int(np.searchsorted(steps, skipped)), len(steps) - 2)
        step_ms = (at_ms[-1] - at_ms[begin]) / (steps[-1] - steps[begin])
        return Timing(float(step_ms), np.diff(at_ms[begin:]))


LEAST_ROUNDS = 5
MOST_ROUNDS = 15
"""Bounds of the number of rounds. Each times every variant, since the machine's speed varies."""
TRIAL_MS = 50.0
"""Time of a trial, long enough to include the threads that write logs."""
LONGEST = 1000
"""Longest timed sink in steps."""
SINKS = 3
"""Least number of sinks in a trial; the first isn't timed."""
SINGLES = 4
"""Least number of steps in a trial of single steps."""

OFF = Variant(None, "none")
"""Training without sinks."""
EVALUATED_S = 1.0
"""Seconds after which the measurement of an evaluation ends, if it hasn't ended before."""


@dataclass(frozen=True)
class Measurement:
    """Costs of dispatches, with their measurements."""

    costs: Costs
    single_ms: np.ndarray
    """float64 (dispatches,): the time of each dispatch of one step without sinks."""
    long_steps: int
    """Steps of the long dispatches."""


def count_least_steps(mechanisms: Sequence[SinkMechanism]) -> int:
    """Return the number of steps of the shortest measurement, with sinks of two steps."""
    return LEAST_ROUNDS * (2 * SINGLES + 2 * SINKS * len(mechanisms))


def time_single_step(trials: TimedRuns) -> float:
    """Time a few steps that are dispatched one by one; return the ms of the fastest."""
    return float(trials.time(OFF, SINGLES).dispatch_ms.min())


def measure(
    trials: TimedRuns, single_ms: float, mechanisms: Sequence[SinkMechanism], budget_s: float
) -> Measurement:
    """Time steps without sinks, in sinks of one, and in long sinks by each mechanism.

    This takes about `budget_s` seconds, or as long as `count_least_steps` steps. `single_ms` is the
    result of `time_single_step`. Raises RunError if a step isn't finite, KeyboardInterrupt if a
    signal stops the measurement.
    """
    num_variants = 2 + len(mechanisms)
    round_ms = max(TRIAL_MS, SINGLES * single_ms) * num_variants
    num_rounds = int(np.clip(1000 * budget_s / round_ms, LEAST_ROUNDS, MOST_ROUNDS))
    # The time of a round is left for the first trial, which finds the size of long sinks.
    trial_ms = 1000 * budget_s / (num_rounds + 1) / num_variants
    first_steps = _choose_sink_steps(trial_ms, single_ms)
    step_ms = trials.time(Variant(first_steps, mechanisms[0]), SINKS * first_steps).step_ms
    long_steps = _choose_sink_steps(trial_ms, step_ms)
    sinks = max(SINKS, round(trial_ms / (long_steps * step_ms)) + 1)
    singles = max(SINGLES, int(trial_ms / single_ms))
    variants = {OFF: singles, Variant(1, mechanisms[0]): singles}
    variants |= {Variant(long_steps, mechanism): sinks * long_steps for mechanism in mechanisms}
    rounds = [
        {variant: trials.time(variant, steps) for variant, steps in variants.items()}
        for _ in range(num_rounds)
    ]
    single_dispatches = np.concatenate([timings[OFF].dispatch_ms for timings in rounds])
    return Measurement(fit_costs(rounds, mechanisms, long_steps), single_dispatches, long_steps)


def time_evaluation(executable: Executable, state: TrainState, batches: int) -> float:
    """Time a part of an evaluation; return the seconds of the whole, which has `batches` batches.

    The program must have run before, so that its start isn't timed.
    """
    started_at = time.perf_counter()
    done = 0
    while done < batches and time.perf_counter() - started_at < EVALUATED_S:
        stop = min(batches, max(1, 2 * done))
        executable.evaluate(state, done, stop)
        done = stop
    return (time.perf_counter() - started_at) * batches / done


def _choose_sink_steps(trial_ms: float, step_ms: float) -> int:
    """Return the steps of a sink such that `SINKS` sinks fit into a trial."""
    return min(max(2, int(trial_ms / (SINKS * step_ms))), LONGEST)


def fit_costs(
    rounds: Sequence[Mapping[Variant, Timing]], mechanisms: Sequence[SinkMechanism], long_steps: int
) -> Costs:
    """Fit costs to the lower quartiles of times; their error is the largest error of a gain."""

    def list_times(variant: Variant) -> list[float]:
        return [timings[variant].step_ms for timings in rounds]

    single_ms = compute_lower_quartile(list_times(Variant(1, mechanisms[0])))
    longs = {mechanism: list_times(Variant(long_steps, mechanism)) for mechanism in mechanisms}
    costs = [
        Cost.fit(mechanism, single_ms, long_steps * compute_lower_quartile(long), long_steps)
        for mechanism, long in longs.items()
    ]
    off_ms = list_times(OFF)
    error = max(estimate_gain_error(off_ms, long) for long in longs.values())
    return Costs(compute_lower_quartile(off_ms), tuple(costs), error)


def compute_lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile of times, since other work on the machine can only add to them."""
    return float(np.quantile(times, 0.25))


def estimate_gain_error(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the relative error of the median gain, slow time over fast time, over rounds."""
    return estimate_median_error([a / b for a, b in zip(slow, fast, strict=True)])


def estimate_median_error(values: Sequence[float]) -> float:
    """Return the standard error of a median as a share of it.

    For normal errors it is 1.2533 sigma / sqrt(n), with sigma = 1.4826 times the median deviation.
    """
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    return float(1.2533 * 1.4826 * deviation / np.sqrt(len(values)) / median)
