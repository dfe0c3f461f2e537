"""Cost of dispatches on the machine at hand: single steps and long sinks, timed alternately."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.backends.sink_choice import Cost, Costs, SinkMechanism
from pipeline.stages.autosink.timed_runs import TimedRuns, Timing, Variant

LEAST_ROUNDS = 5
MOST_ROUNDS = 15
"""Rounds of a measurement; each times every variant once. What slows the machine for a while then
slows all alike."""
TRIAL_MS = 50.0
"""Wanted time of a trial, long enough to include the work of the threads that write logs."""
LONGEST, SINKS = 1000, 3
"""Longest timed sink in steps, and the least sinks in a trial; the first is not timed."""
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

    Takes about `budget_s` seconds, more where `least_steps` need it; `single_ms` is `first_look`.
    Raises RunError where a step is not finite, KeyboardInterrupt when a signal stops it.
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
    """Fit costs to rounds of timings: `undisturbed` times, and the error of their ratio."""

    def times(variant: Variant) -> list[float]:
        return [timed[variant].step_ms for timed in rounds]

    single_ms = undisturbed(times(Variant(1, mechanisms[0])))
    longs = {mechanism: times(Variant(long_steps, mechanism)) for mechanism in mechanisms}
    costs = [
        Cost.between(mechanism, single_ms, long_steps * undisturbed(long), long_steps)
        for mechanism, long in longs.items()
    ]
    error = max(error_of_gain(times(OFF), long) for long in longs.values())
    return Costs(undisturbed(times(OFF)), tuple(costs), error)


def undisturbed(times: Sequence[float]) -> float:
    """Return the lower quartile of times: other work on the machine only ever adds to them."""
    return float(np.quantile(times, 0.25))


def error_of_gain(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the relative error of the median ratio of two variants over rounds."""
    return error_of_median([one / other for one, other in zip(slow, fast, strict=True)])


def error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of a median as a share of it.

    1.2533 sigma / sqrt(n) for normal errors, sigma being 1.4826 times the median deviation.
    """
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return float(1.2533 * 1.4826 * deviation / np.sqrt(len(values)) / middle)
