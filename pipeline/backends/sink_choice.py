"""Choice of the length and the mechanism of sinks from measured costs, with the reason.

n steps take `dispatch_ms + n * step_ms`, as one dispatch ("loop") or as n that nothing waits for
("soft"); both are called a dispatch here. A sink is one, unless an event or the time limit of a
dispatch splits it. So a longer sink divides the host's cost among more steps,
until something else ends its dispatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

SinkMechanism = Literal["loop", "soft"]

SHOWN = (1, 10, 100, 1000)
"""Sizes of sinks in the table of predictions."""

TOLERANCE = 0.005
"""A shorter sink is preferred if a longer sink saves at most this share of a step."""

HORIZON_STEPS = 200_000
"""Dispatches are counted over at most this many steps: events have repeated by then."""


@dataclass(frozen=True)
class Cost:
    """The time of a dispatch by one mechanism, including the host's work."""

    mechanism: SinkMechanism
    dispatch_ms: float
    """Time per dispatch, whatever its length; below zero if a step of a long dispatch
    takes longer than a dispatch of one step."""
    step_ms: float
    """Time per step of a dispatch."""

    @staticmethod
    def fit(mechanism: SinkMechanism, single_ms: float, long_ms: float, steps: int) -> Cost:
        """Fit the times of a dispatch of one step and of a dispatch of `steps` > 1 steps.

        If noise made the long dispatch faster, a step takes its share of the long dispatch.
        """
        step_ms = (long_ms - single_ms) / (steps - 1) if long_ms > single_ms else long_ms / steps
        return Cost(mechanism, single_ms - step_ms, step_ms)


@dataclass(frozen=True)
class Costs:
    """The time of a step without sinks, and in sinks by mechanism."""

    off_ms: float
    """Time of a step if the host reads its record before dispatching the next step."""
    sinks: tuple[Cost, ...]
    """At least one cost. The first of two equally good costs is preferred."""
    error: float
    """Relative error of a gain, from the noise of the measurement; 0 for modelled times."""

    def find(self, mechanism: str) -> Cost:
        """Return the cost of a mechanism; the first if it wasn't measured, as without sinks."""
        return next((cost for cost in self.sinks if cost.mechanism == mechanism), self.sinks[0])


@dataclass(frozen=True)
class Bounds:
    """Limits that end a dispatch besides the end of a sink."""

    total: int
    """Steps of the run."""
    periods: tuple[int, ...]
    """Periods of events, in steps."""
    window_steps: int
    """Batches that are on the device together."""
    dispatch_s: float
    """Longest time of a dispatch: a signal waits for its end."""

    @property
    def max_event_steps(self) -> int:
        """The most steps between two events: the shortest period."""
        return min(self.total, *self.periods) if self.periods else self.total

    def max_steps(self, cost: Cost) -> int:
        """Return the most steps of a dispatch that ends in time for a signal."""
        return max(1, int(1000 * self.dispatch_s / max(cost.step_ms, 1e-6)))

    def find_longest(self, cost: Cost) -> tuple[int, str]:
        """Return the longest useful sink, and its limit in words."""
        max_steps = self.max_steps(cost)
        bounds = (
            (self.total, f"the run has no more than {_format_steps(self.total)}"),
            (self.max_event_steps, f"something is due every {_format_steps(self.max_event_steps)}"),
            (self.window_steps, f"the device holds {self.window_steps:,} batches at once"),
            (
                max_steps,
                f"train.dispatch_seconds = {self.dispatch_s:g} is {_format_steps(max_steps)}",
            ),
        )
        return min(bounds, key=lambda bound: bound[0])


@dataclass(frozen=True)
class SinkChoice:
    """A sink, its predicted times per step, and the reason for it; `size` None: no sinks."""

    size: int | None
    mechanism: Literal["loop", "soft", "none"]
    reason: str
    off_ms: float
    step_ms: float

    @property
    def gain(self) -> float:
        """Speed-up over a run without sinks."""
        return self.off_ms / self.step_ms


def choose(costs: Costs, bounds: Bounds) -> SinkChoice:
    """Choose the shortest of the fastest sinks, or no sinks if none is surely faster."""
    cost, size = _find_best(costs, bounds)
    longest, bound = bounds.find_longest(cost)
    if size == 1:
        return choose_no_sink(costs.off_ms, f"a sink would hold one step: {bound}")
    ms = predict_ms(cost, size, bounds)
    gain = costs.off_ms / ms
    times = f"{ms:.4g} ms a step in sinks of {size:,}, {costs.off_ms:.4g} without: {gain:.2f}x"
    if gain <= 1 + costs.error:
        noise = f", the noise is {100 * costs.error:.2g} %" if costs.error else ""
        return choose_no_sink(costs.off_ms, f"no sink is sure to be faster; {times}{noise}")
    limit = bound if size == longest else f"longer ones save less than {100 * TOLERANCE:g} %"
    return SinkChoice(size, cost.mechanism, f"{times}; {limit}", costs.off_ms, ms)


def choose_no_sink(off_ms: float, reason: str) -> SinkChoice:
    """Return the choice of no sinks: the host reads the record of every step."""
    return SinkChoice(None, "none", reason, off_ms, off_ms)


def predict_ms(cost: Cost, size: int, bounds: Bounds) -> float:
    """Predict the milliseconds per step in sinks of `size`, which `bounds` may split."""
    horizon = min(bounds.total, HORIZON_STEPS)
    count = count_dispatches(horizon, (size, *bounds.periods), bounds.max_steps(cost))
    return cost.step_ms + cost.dispatch_ms * count / horizon


def count_dispatches(total: int, periods: tuple[int, ...], longest: int) -> int:
    """Count dispatches of at most `longest` steps in a run split at multiples of periods."""
    events = [np.arange(period, total, period) for period in periods]
    stops = np.unique(np.concatenate([*events, [total]]))
    return int(np.sum(-(-np.diff(stops, prepend=0) // longest)))


def _find_best(costs: Costs, bounds: Bounds) -> tuple[Cost, int]:
    """Return the first mechanism, or a later one that is surely faster, and its shortest sink that
    is as good."""
    best: tuple[Cost, int] | None = None
    fastest = float("inf")
    for cost in costs.sinks:
        times = {size: predict_ms(cost, size, bounds) for size in _list_candidates(cost, bounds)}
        least_ms = min(times.values())
        if least_ms < fastest * (1 - max(TOLERANCE, costs.error)):
            fastest = least_ms
            good = least_ms * (1 + TOLERANCE)
            best = cost, min(size for size, ms in times.items() if ms <= good)
    assert best is not None, "costs hold at least one mechanism"
    return best


def _list_candidates(cost: Cost, bounds: Bounds) -> Iterator[int]:
    """Yield the longest size, its whole quotients by 2 to 10, and round sizes.

    If events bound the longest size, they don't split its quotients.
    """
    longest, _ = bounds.find_longest(cost)
    yield longest
    yield from (longest // n for n in range(2, min(11, longest)) if longest % n == 0)
    decade = 1
    while decade <= longest:
        yield from (size for size in (decade, 2 * decade, 5 * decade) if 1 < size <= longest)
        decade *= 10


def _format_steps(count: int) -> str:
    return f"{count:,} step{'s' if count != 1 else ''}"
