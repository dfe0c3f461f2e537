"""Choice of the length and the mechanism of sinks from measured costs, with the reason.

Here a dispatch is a number of steps that the host starts at once: by one call ("loop"), or by one
call for each step without waiting ("soft"). n steps of a dispatch take `dispatch_ms + n * step_ms`.
A sink is one dispatch, unless an event or the longest time of a dispatch splits it. So a longer
sink divides the host's cost among more steps, until something else splits it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.core.files.value_text import count_noun

SinkMechanism = Literal["loop", "soft"]
SHOWN = (1, 10, 100, 1000)
"""Sizes of sinks in the table of predictions."""
TOLERANCE = 0.005
"""A shorter sink is preferred if a longer sink saves at most this share of a step."""
HORIZON_STEPS = 200_000
"""Largest number of steps over which dispatches are counted: events have repeated by then."""


@dataclass(frozen=True)
class Cost:
    """The time of a dispatch by one mechanism, including the host's work."""

    mechanism: SinkMechanism
    dispatch_ms: float
    """Time of a dispatch besides its steps; below zero if a step of a long dispatch takes longer
    than a dispatch of one step."""
    step_ms: float
    """Time per step of a dispatch."""

    @staticmethod
    def fit(mechanism: SinkMechanism, single_ms: float, long_ms: float, steps: int) -> Cost:
        """Return the cost from the times of a dispatch of one step and of one of `steps` > 1 steps.

        If noise made the long dispatch faster, a step takes its share of the long dispatch.
        """
        further_ms = long_ms - single_ms
        step_ms = further_ms / (steps - 1) if further_ms > 0 else long_ms / steps
        return Cost(mechanism, single_ms - step_ms, step_ms)


@dataclass(frozen=True)
class Costs:
    """The time of a step without sinks, and in sinks by mechanism."""

    off_ms: float
    """Time of a step if the host reads its record before it dispatches the next step."""
    sinks: tuple[Cost, ...]
    """At least one cost. The first one is preferred unless a later one is surely better."""
    error: float
    """Relative error of a gain, from the noise of the measurement; 0 for modelled times."""

    def find(self, mechanism: str) -> Cost:
        """Return the cost of a mechanism; the first cost if it wasn't measured."""
        return next((cost for cost in self.sinks if cost.mechanism == mechanism), self.sinks[0])


@dataclass(frozen=True)
class Bounds:
    """Limits that end a dispatch besides the end of a sink."""

    total: int
    """Number of steps of the run."""
    periods: tuple[int, ...]
    """Periods of events, in steps."""
    window_steps: int
    """Number of batches that are on the device together."""
    dispatch_s: float
    """Longest time of a dispatch, at whose end a signal takes effect."""

    @property
    def max_event_steps(self) -> int:
        """Largest number of steps between two events: the shortest period."""
        return min((self.total, *self.periods))

    def max_steps(self, cost: Cost) -> int:
        """Return the largest number of steps of a dispatch that takes at most `dispatch_s`."""
        return max(1, int(1000 * self.dispatch_s / max(cost.step_ms, 1e-6)))

    def find_longest(self, cost: Cost) -> tuple[int, str]:
        """Return the longest useful sink, and the reason for its limit."""
        max_steps = self.max_steps(cost)
        period = count_noun(self.max_event_steps, "step")
        bounds = (
            (self.total, f"the run has no more than {count_noun(self.total, 'step')}"),
            (self.max_event_steps, f"an event is due every {period}"),
            (
                self.window_steps,
                f"the device holds {count_noun(self.window_steps, 'batch', 'batches')} at once",
            ),
            (max_steps, self._explain_longest(cost, max_steps)),
        )
        return min(bounds, key=lambda bound: bound[0])

    def _explain_longest(self, cost: Cost, max_steps: int) -> str:
        """Return why a dispatch has at most `max_steps` steps."""
        check = f"the host looks for Ctrl-C every train.dispatch_seconds = {self.dispatch_s:g}"
        if max_steps == 1:
            return f"a step takes {cost.step_ms / 1e3:.3g} s and {check}"
        return f"{check}, after {max_steps:,} steps"


@dataclass(frozen=True)
class SinkChoice:
    """A sink, its predicted times per step, and the reason for it."""

    size: int | None
    """Number of steps; None: no sinks."""
    mechanism: Literal["loop", "soft", "none"]
    reason: str
    off_ms: float
    """Time of a step without sinks."""
    step_ms: float
    """Time of a step with this choice."""

    @property
    def gain(self) -> float:
        """Speed-up over a run without sinks."""
        return self.off_ms / self.step_ms


def choose(costs: Costs, bounds: Bounds) -> SinkChoice:
    """Choose the shortest of the fastest sinks, or no sinks if none is surely faster."""
    cost, size = _find_best(costs, bounds)
    longest, bound = bounds.find_longest(cost)
    if size == 1:
        return choose_no_sink(costs.off_ms, f"a sink would have one step, since {bound}")
    step_ms = predict_ms(cost, size, bounds)
    gain = costs.off_ms / step_ms
    times = f"{step_ms:.4g} ms a step in sinks of {size:,}, {costs.off_ms:.4g} without: {gain:.2f}x"
    if gain <= 1 + costs.error:
        noise = f", the noise is {100 * costs.error:.2g} %" if costs.error else ""
        return choose_no_sink(costs.off_ms, f"no sink is sure to be faster; {times}{noise}")
    limit = bound if size == longest else f"longer ones save less than {100 * TOLERANCE:g} %"
    return SinkChoice(size, cost.mechanism, f"{times}; {limit}", costs.off_ms, step_ms)


def choose_no_sink(off_ms: float, reason: str) -> SinkChoice:
    """Return the choice of no sinks: the host reads the record of every step."""
    return SinkChoice(None, "none", reason, off_ms, off_ms)


def predict_ms(cost: Cost, size: int, bounds: Bounds) -> float:
    """Predict the milliseconds per step in sinks of `size`, which `bounds` may split."""
    horizon = min(bounds.total, HORIZON_STEPS)
    count = count_dispatches(horizon, (size, *bounds.periods), bounds.max_steps(cost))
    return cost.step_ms + cost.dispatch_ms * count / horizon


def count_dispatches(total: int, periods: tuple[int, ...], longest: int) -> int:
    """Count dispatches of at most `longest` steps in a run, split at multiples of periods."""
    events = [np.arange(period, total, period) for period in periods]
    stops = np.unique(np.concatenate([*events, [total]]))
    return int(np.sum(-(-np.diff(stops, prepend=0) // longest)))


def _find_best(costs: Costs, bounds: Bounds) -> tuple[Cost, int]:
    """Return the cost of the fastest mechanism, and the shortest sink that is about as fast.

    A later mechanism must be surely faster than those before it.
    """
    best: tuple[Cost, int] | None = None
    fastest = float("inf")
    for cost in costs.sinks:
        times = {size: predict_ms(cost, size, bounds) for size in _list_candidates(cost, bounds)}
        least_ms = min(times.values())
        if least_ms < fastest * (1 - max(TOLERANCE, costs.error)):
            fastest = least_ms
            good = least_ms * (1 + TOLERANCE)
            best = cost, min(size for size, ms in times.items() if ms <= good)
    assert best is not None, "there is at least one cost"
    return best


def _list_candidates(cost: Cost, bounds: Bounds) -> Iterator[int]:
    """Yield the longest size, its whole quotients by 2 to 10, and round sizes."""
    longest, _ = bounds.find_longest(cost)
    yield longest
    yield from (longest // n for n in range(2, min(11, longest)) if longest % n == 0)
    decade = 1
    while decade <= longest:
        yield from (size for size in (decade, 2 * decade, 5 * decade) if 1 < size <= longest)
        decade *= 10
