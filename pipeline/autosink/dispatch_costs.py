"""What dispatches cost on the machine at hand: single steps and long sinks, tried in turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.autosink.timed_runs import TimedRuns, Timing, Variant
from pipeline.sink.choice import Cost, Costs, SinkMechanism

ROUNDS = 5, 15
"""All ways are timed in turn so often, as there is time for: what slows the machine for a while
slows them alike."""
TRIAL_MS = 50.0
"""What a trial should have, for what is written on the side to show in it."""
LONGEST, SINKS = 1000, 3
"""A trial of long sinks has at least so many, of which the first is not timed."""
SINGLES = 4
"""A trial of single steps has at least so many."""

OFF = Variant(None, "none")


@dataclass(frozen=True)
class Measurement:
    """What dispatches cost, and how it was found out."""

    costs: Costs
    single_ms: np.ndarray
    """float64 (dispatches,): each that was timed of one step without sinks."""
    long_steps: int
    """The length of the long dispatches that they were compared with."""


def least_steps(mechanisms: Sequence[SinkMechanism]) -> int:
    """How many steps a measurement has at least."""
    return ROUNDS[0] * (2 * SINGLES + 2 * SINKS * len(mechanisms))


def first_look(trials: TimedRuns) -> float:
    """About how long a step takes that is dispatched alone, in ms."""
    return float(trials.time(OFF, SINGLES).dispatch_ms.min())


def measure(
    trials: TimedRuns, single_ms: float, mechanisms: Sequence[SinkMechanism], budget_s: float
) -> Measurement:
    """What steps cost without sinks, in sinks of one, and in long sinks by each mechanism.

    Takes about `budget_s` seconds, longer where `least_steps` do; `single_ms` is a first look.
    Raises RunError where a step is not finite, KeyboardInterrupt when a signal stops it.
    """
    round_ms = max(TRIAL_MS, SINGLES * single_ms) * (2 + len(mechanisms))
    count = int(np.clip(1000 * budget_s / round_ms, *ROUNDS))
    trial_ms = 1000 * budget_s / (count + 1) / (2 + len(mechanisms))
    guess = _long_sink(trial_ms, single_ms)
    step_ms = trials.time(Variant(guess, mechanisms[0]), SINKS * guess).step_ms
    long_steps = _long_sink(trial_ms, step_ms)
    sinks = max(SINKS, round(trial_ms / (long_steps * step_ms)) + 1)
    singles = max(SINGLES, int(trial_ms / single_ms))
    ways = {OFF: singles, Variant(1, mechanisms[0]): singles}
    ways |= {Variant(long_steps, mechanism): sinks * long_steps for mechanism in mechanisms}
    rounds = [{way: trials.time(way, steps) for way, steps in ways.items()} for _ in range(count)]
    single_dispatches = np.concatenate([timed[OFF].dispatch_ms for timed in rounds])
    return Measurement(costs_of(rounds, mechanisms, long_steps), single_dispatches, long_steps)


def _long_sink(trial_ms: float, step_ms: float) -> int:
    """The steps of a sink of which `SINKS` fit into a trial."""
    return min(max(2, int(trial_ms / (SINKS * step_ms))), LONGEST)


def costs_of(
    rounds: Sequence[Mapping[Variant, Timing]], mechanisms: Sequence[SinkMechanism], long_steps: int
) -> Costs:
    """From rounds that have each timed every way: `undisturbed` times, the error of their ratio."""

    def times(way: Variant) -> list[float]:
        return [timed[way].step_ms for timed in rounds]

    single_ms = undisturbed(times(Variant(1, mechanisms[0])))
    longs = {mechanism: times(Variant(long_steps, mechanism)) for mechanism in mechanisms}
    costs = [
        Cost.between(mechanism, single_ms, long_steps * undisturbed(long), long_steps)
        for mechanism, long in longs.items()
    ]
    error = max(error_of_gain(times(OFF), long) for long in longs.values())
    return Costs(undisturbed(times(OFF)), tuple(costs), error)


def undisturbed(times: Sequence[float]) -> float:
    """The lower quartile of times: what else runs on a machine only ever adds to them."""
    return float(np.quantile(times, 0.25))


def error_of_gain(slow: Sequence[float], fast: Sequence[float]) -> float:
    """How far the median of the ratios of two ways over rounds may be off, as a share."""
    return error_of_median([one / other for one, other in zip(slow, fast, strict=True)])


def error_of_median(values: Sequence[float]) -> float:
    """The standard error of a median as a share of it.

    1.2533 sigma / sqrt(n) for normal errors, sigma being 1.4826 times the median deviation.
    """
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return float(1.2533 * 1.4826 * deviation / np.sqrt(len(values)) / middle)
