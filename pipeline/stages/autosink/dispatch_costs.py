"""Cost of dispatches on this machine: single steps and long sinks, timed alternately."""

from __future__ import annotations

import os
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
from pipeline.engine.callbacks.callback import Evaluation, Monitor
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
    """The sinks of a trial."""

    sink_steps: int | None
    """Steps of a sink; None without sinks."""
    mechanism: Mechanism


@dataclass(frozen=True)
class Timing:
    """Times of a trial without its first sink, in which the size of dispatches is adapted."""

    step_ms: float
    """Mean over all steps, with the host's work."""
    dispatch_ms: np.ndarray
    """float64 (dispatches,): the time from the end of the previous dispatch to the end of each."""


class TimedRuns:
    """Timed short trainings of a run; with `is_terminal`, its log is formatted for a terminal."""

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
        """Train for `steps` steps in the sinks of a variant, and return the times.

        `steps` may be fewer than a sink has. With `evaluate`, each sink ends with an
        evaluation. Raises RunError if a step isn't finite.
        """
        clock = DispatchClock()
        observers = self._open_observers(variant.sink_steps)
        run_schedule = replace(self._run_schedule, total=steps, sink_steps=variant.sink_steps)
        periods = () if evaluate is refuse_evaluation else (variant.sink_steps or 1,)
        dispatch_s = self._recipe.train.dispatch_seconds
        every = {Event.EVALUATE: periods}
        schedule = Schedule(run_schedule, every, dispatch_seconds=dispatch_s)
        program = Program(self._executable, variant.mechanism)
        hooks = Hooks(monitors=[observers.monitor, clock], evaluate=evaluate)
        training = train(program, self.state, schedule, hooks, HostState(), History(0))
        self.state = exhaust(training)
        observers.monitor.flush()
        return clock.make_timing(variant.sink_steps or 1)

    def _open_observers(self, sink_steps: int | None) -> Observers:
        """Return the observers of sinks of a size, opened by the first call."""
        if sink_steps not in self._observers:
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
            run_schedule = replace(self._run_schedule, sink_steps=sink_steps)
            settings = make_observer_settings(self._recipe)
            observers = open_observers(settings, folder, run_schedule, 0, reporter)
            self._observers[sink_steps] = self._open_files.enter_context(observers)
        return self._observers[sink_steps]

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
        """Record the time and the step at which a dispatch ended."""
        self._ends_s.append(time.perf_counter())
        self._steps.append(telemetry.start + len(telemetry))

    def make_timing(self, skipped_steps: int) -> Timing:
        """Return the timing of dispatches after `skipped_steps` steps, at least of the last one."""
        steps = np.array(self._steps)
        ends_ms = 1000 * np.array(self._ends_s)
        begin = min(int(np.searchsorted(steps, skipped_steps)), len(steps) - 2)
        step_ms = (ends_ms[-1] - ends_ms[begin]) / (steps[-1] - steps[begin])
        return Timing(float(step_ms), np.diff(ends_ms[begin:]))


LEAST_ROUNDS = 5
MOST_ROUNDS = 15
"""Bounds of the number of rounds. A round times all variants, since the machine's speed varies."""
TRIAL_MS = 50.0
"""Time of a trial, long enough to include the work of threads that write logs."""
LONGEST = 1000
"""Steps of the longest sink that is timed or modelled."""
SINKS = 3
"""Least number of sinks in a trial; the first isn't timed."""
SINGLES = 4
"""Least number of steps in a trial of single steps."""

OFF = Variant(None, "none")
"""Training without sinks."""
MOST_EVALUATION_S = 1.0
"""Seconds after which a timed evaluation begins no more batches."""


def count_least_steps(mechanisms: Sequence[SinkMechanism]) -> int:
    """Return the number of steps of the shortest measurement, with sinks of two steps."""
    return LEAST_ROUNDS * (2 * SINGLES + 2 * SINKS * len(mechanisms))


def time_single_step(trials: TimedRuns) -> float:
    """Time a few steps that are dispatched one by one; return the ms of the fastest."""
    return float(trials.time(OFF, SINGLES).dispatch_ms.min())


def measure(
    trials: TimedRuns, single_ms: float, mechanisms: Sequence[SinkMechanism], budget_s: float
) -> tuple[Costs, np.ndarray]:
    """Time steps without sinks, in sinks of one step, and in long sinks by each mechanism.

    Returns the costs, and the ms of each step without sinks, float64 (dispatches,). This takes
    about `budget_s` seconds, or longer if `count_least_steps` steps do. `single_ms` is the result
    of `time_single_step`. Raises RunError if a step isn't finite, KeyboardInterrupt if a signal
    stops the measurement.
    """
    num_variants = 2 + len(mechanisms)
    round_ms = max(TRIAL_MS, SINGLES * single_ms) * num_variants
    num_rounds = int(np.clip(1000 * budget_s / round_ms, LEAST_ROUNDS, MOST_ROUNDS))
    # The first trial, which finds the size of long sinks, has the time of one more round.
    trial_ms = 1000 * budget_s / (num_rounds + 1) / num_variants
    first_steps = _choose_sink_steps(trial_ms, single_ms)
    step_ms = trials.time(Variant(first_steps, mechanisms[0]), SINKS * first_steps).step_ms
    long_steps = _choose_sink_steps(trial_ms, step_ms)
    num_sinks = max(SINKS, round(trial_ms / (long_steps * step_ms)) + 1)
    num_singles = max(SINGLES, int(trial_ms / single_ms))
    num_steps = {OFF: num_singles, Variant(1, mechanisms[0]): num_singles}
    for mechanism in mechanisms:
        num_steps[Variant(long_steps, mechanism)] = num_sinks * long_steps
    rounds = [
        {variant: trials.time(variant, steps) for variant, steps in num_steps.items()}
        for _ in range(num_rounds)
    ]
    single_dispatches = np.concatenate([timings[OFF].dispatch_ms for timings in rounds])
    return fit_costs(rounds, mechanisms, long_steps), single_dispatches


def time_evaluation(executable: Executable, state: TrainState, batches: int) -> float:
    """Return the seconds of an evaluation of `batches` batches, estimated by the first of them.

    The program must have run before, so that its start isn't timed.
    """
    started_at = time.perf_counter()
    num_done = 0
    while num_done < batches and time.perf_counter() - started_at < MOST_EVALUATION_S:
        stop = min(batches, max(1, 2 * num_done))
        executable.evaluate(state, num_done, stop)
        num_done = stop
    return (time.perf_counter() - started_at) * batches / num_done


def _choose_sink_steps(trial_ms: float, step_ms: float) -> int:
    """Return the most steps of a sink, 2 to `LONGEST`, so that `SINKS` sinks fit into a trial."""
    return min(max(2, int(trial_ms / (SINKS * step_ms))), LONGEST)


def fit_costs(
    rounds: Sequence[Mapping[Variant, Timing]], mechanisms: Sequence[SinkMechanism], long_steps: int
) -> Costs:
    """Fit costs to lower quartiles of step times. Their error is the largest error of a gain."""

    def list_times(variant: Variant) -> list[float]:
        return [timings[variant].step_ms for timings in rounds]

    single_ms = compute_lower_quartile(list_times(Variant(1, mechanisms[0])))
    off_ms = list_times(OFF)
    costs = []
    errors = []
    for mechanism in mechanisms:
        step_ms = list_times(Variant(long_steps, mechanism))
        long_ms = long_steps * compute_lower_quartile(step_ms)
        costs.append(Cost.fit(mechanism, single_ms, long_ms, long_steps))
        errors.append(estimate_gain_error(off_ms, step_ms))
    return Costs(compute_lower_quartile(off_ms), tuple(costs), max(errors))


def compute_lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile of times. Other work on the machine can only lengthen times."""
    return float(np.quantile(times, 0.25))


def estimate_gain_error(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the relative standard error of the median over rounds of the gain, slow / fast.

    For normal errors it is 1.2533 sigma / sqrt(n), with sigma = 1.4826 times the median deviation.
    """
    gains = np.divide(slow, fast)
    median = np.median(gains)
    deviation = np.median(np.abs(gains - median))
    return float(1.2533 * 1.4826 * deviation / np.sqrt(len(gains)) / median)
