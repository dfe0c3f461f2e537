"""Which sink pays: from measured costs to a sink's length and mechanism, with the reason.

A dispatch of n steps takes `dispatch_ms + n * step_ms`. A sink is one dispatch, or several where an
event or the time that a signal may wait cuts it, so a longer sink shares the host's cost among more
steps until something else ends its dispatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

SinkMechanism = Literal["loop", "soft"]

SHOWN = (1, 10, 100, 1000)
"""The sizes that a prediction is shown for."""

TOLERANCE = 0.005
"""A shorter sink is preferred where a longer one saves no more than this share of a step."""

HORIZON_STEPS = 200_000
"""Dispatches are counted over no more steps: by then events have come round often enough."""


@dataclass(frozen=True)
class Cost:
    """What a dispatch takes under one mechanism, all that the host does for it included."""

    mechanism: SinkMechanism
    dispatch_ms: float
    """For the dispatch, whatever its length; below zero where long dispatches run slower."""
    step_ms: float
    """For each step of it."""

    @staticmethod
    def between(mechanism: SinkMechanism, single_ms: float, long_ms: float, steps: int) -> Cost:
        """From what a dispatch of one step takes, and one of `steps` > 1 steps as a whole."""
        step_ms = (long_ms - single_ms) / (steps - 1)
        return Cost(mechanism, single_ms - step_ms, step_ms)


@dataclass(frozen=True)
class Costs:
    """What steps take without sinks, and in sinks by mechanism."""

    off_ms: float
    """A step whose record the host reads before it hands over the next one."""
    sinks: tuple[Cost, ...]
    """At least one; the mechanism to prefer where two are as good comes first."""
    error: float
    """By what share a gain may be off, for the noise of the measurement; 0 where it is modelled."""


@dataclass(frozen=True)
class Bounds:
    """What ends a dispatch besides the end of a sink."""

    total: int
    """Steps of the run."""
    periods: tuple[int, ...]
    """How often events are due, each in steps."""
    window_steps: int
    """Batches that are on the device together."""
    dispatch_s: float
    """How long a signal may wait for its answer."""

    @property
    def between_events(self) -> int:
        """The longest run of steps without an event in it."""
        return min(self.total, *self.periods) if self.periods else self.total

    def affordable(self, cost: Cost) -> int:
        """The steps of a dispatch that ends in time for a signal."""
        return max(1, int(1000 * self.dispatch_s / max(cost.step_ms, 1e-6)))

    def longest(self, cost: Cost) -> tuple[int, str]:
        """The longest sink that is of any use, and what bounds it."""
        affordable = self.affordable(cost)
        bounds = (
            (self.total, f"the run has no more than {_steps(self.total)}"),
            (self.between_events, f"something is due every {_steps(self.between_events)}"),
            (self.window_steps, f"the device holds {self.window_steps:,} batches at once"),
            (affordable, f"train.dispatch_seconds = {self.dispatch_s:g} is {_steps(affordable)}"),
        )
        return min(bounds, key=lambda bound: bound[0])


@dataclass(frozen=True)
class Choice:
    """A sink, what is expected of it, and why it was taken; a `size` of None is no sink."""

    size: int | None
    mechanism: Literal["loop", "soft", "none"]
    why: str
    off_ms: float
    step_ms: float

    @property
    def gain(self) -> float:
        """How many times as fast as without sinks."""
        return self.off_ms / self.step_ms


def choose(costs: Costs, bounds: Bounds) -> Choice:
    """The shortest sink that is as good as any, or none where none is sure to be faster."""
    cost, size = _best(costs, bounds)
    if size == 1:
        return no_sink(costs.off_ms, f"a sink would hold one step: {bounds.longest(cost)[1]}")
    ms = predict(cost, size, bounds)
    gain = costs.off_ms / ms
    told = f"{ms:.4g} ms a step in sinks of {size:,}, {costs.off_ms:.4g} without: {gain:.2f}x"
    if gain <= 1 + costs.error:
        return no_sink(costs.off_ms, f"no sink is sure to be faster; {told}{_noise(costs)}")
    longest, bound = bounds.longest(cost)
    limit = bound if size == longest else f"longer ones save less than {100 * TOLERANCE:g} %"
    return Choice(size, cost.mechanism, f"{told}; {limit}", costs.off_ms, ms)


def no_sink(off_ms: float, why: str) -> Choice:
    """The host sees every step: never slower than itself."""
    return Choice(None, "none", why, off_ms, off_ms)


def predict(cost: Cost, size: int, bounds: Bounds) -> float:
    """Milliseconds a step in sinks of `size`, cut by everything else that ends a dispatch."""
    horizon = min(bounds.total, HORIZON_STEPS)
    longest = bounds.affordable(cost)
    count = dispatches(horizon, (size, *bounds.periods), longest)
    return cost.step_ms + cost.dispatch_ms * count / horizon


def dispatches(total: int, periods: tuple[int, ...], longest: int) -> int:
    """Into how many dispatches of at most `longest` steps a run is cut at multiples of periods."""
    cuts = [np.arange(period, total, period) for period in periods]
    stops = np.unique(np.concatenate([*cuts, [total]]))
    return int(np.sum(-(-np.diff(stops, prepend=0) // longest)))


def _best(costs: Costs, bounds: Bounds) -> tuple[Cost, int]:
    """The mechanism that is fastest at its best, and the shortest sink that is as good."""
    best: tuple[Cost, int] | None = None
    fastest = float("inf")
    for cost in costs.sinks:
        times = {size: predict(cost, size, bounds) for size in _candidates(cost, bounds)}
        least = min(times.values())
        if least < fastest * (1 - max(TOLERANCE, costs.error)):
            fastest = least
            good = least * (1 + TOLERANCE)
            best = cost, min(size for size, ms in times.items() if ms <= good)
    assert best is not None, "costs hold at least one mechanism"
    return best


def _candidates(cost: Cost, bounds: Bounds) -> Iterator[int]:
    """Round numbers, and whole parts of the longest: a sink that an event would cut pays twice."""
    longest, _ = bounds.longest(cost)
    yield longest
    parts = (parts for parts in range(2, min(11, longest)) if longest % parts == 0)
    yield from (longest // count for count in parts)
    decade = 1
    while decade <= longest:
        yield from (size for size in (decade, 2 * decade, 5 * decade) if 1 < size <= longest)
        decade *= 10


def _noise(costs: Costs) -> str:
    return f", the noise is {100 * costs.error:.2g} %" if costs.error else ""


def _steps(count: int) -> str:
    return f"{count:,} step{'s' if count != 1 else ''}"
