"""Statistics of how long training waits for its data, and reports of starvation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

STARVED_SHARE = 0.05
"""Training starves if it waits for a window for more than this share of its time."""

RECOVERED_SHARE = 0.01
"""Starvation ends if training waits for a window for less than this share of its time."""

NOISE_S = 1e-3
"""Shortest wait that counts: the operating system may take as long to wake a thread."""

Notify = Callable[[bool, str], None]
"""(starves, line for the user): called when starvation begins and when it ends."""


@dataclass(frozen=True)
class SlowSample:
    """The sample with the longest reading time, with its index and name."""

    column: str
    sample: int
    name: str
    read_s: float

    def __str__(self) -> str:
        return f"{self.column} of sample {self.sample} ({self.name}), {1000 * self.read_s:.1f} ms"


@dataclass(frozen=True)
class PrepareTime:
    """Seconds of preparing steps by activity, summed over reader threads."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    slowest: SlowSample | None = None

    @classmethod
    def sum_times(cls, times: Iterable[PrepareTime]) -> PrepareTime:
        """Return the sums of times, and the slowest sample of all."""
        seconds: Counter[str] = Counter()
        slowest = None
        for time in times:
            seconds.update(time.seconds)
            sample = time.slowest
            if slowest is None or (sample is not None and sample.read_s > slowest.read_s):
                slowest = sample
        return cls(dict(seconds), slowest)


@dataclass(frozen=True)
class WindowHandoff:
    """Handoff of the window that starts at boundary `start` to the training thread.

    The thread trained the `steps` steps of the window before it in `busy_s`. `ready_steps` of the
    new window's `window_steps` were ready when it was requested, `wait_s` before the handoff.
    """

    start: int
    steps: int
    busy_s: float
    wait_s: float
    ready_steps: int
    window_steps: int
    prepare_time: PrepareTime

    @property
    def wait_share(self) -> float:
        return self.wait_s / max(self.wait_s + self.busy_s, 1e-9)


@dataclass(frozen=True)
class LoaderReport:
    """Statistics of a loader, for summary.json. Shares and means are None before a full window."""

    kind: Literal["resident", "stream"]
    starved: bool
    """Whether training has starved at any time."""
    first_wait_ms: float
    """Wait for windows that couldn't be prepared ahead: the run's first window, windows that don't
    follow the window before them, and the short windows after these."""
    first_window_ms: float
    """Wait for the run's first window, before which nothing can be compiled."""
    wait_ms_per_step: float | None
    wait_share: float | None
    queue_depth: float | None
    """Mean share of a window that was ready when requested; at 1 training never waits."""
    prepare_ms_per_step: Mapping[str, float]
    """Times by activity (reading a column, transfer, order), summed over reader threads."""
    slowest_sample: SlowSample | None


class LoaderStats:
    """Statistics of handoffs; reports when starvation begins and ends."""

    def __init__(self, notify: Notify | None) -> None:
        self._notify = notify or (lambda starves, text: None)
        self._first_window_s: float | None = None
        self._first_wait_s = self._busy_s = self._wait_s = self._depths = 0.0
        self._steps = self._windows = self._prepared_steps = 0
        self._prepare_time = PrepareTime()
        self._starves = self._starved = False

    def add_unprepared(self, wait_s: float, window_steps: int, prepare_time: PrepareTime) -> None:
        """Record a window that couldn't be prepared ahead."""
        if self._first_window_s is None:
            self._first_window_s = wait_s
        self._first_wait_s += wait_s
        self._add_prepared(window_steps, prepare_time)

    def add(self, handoff: WindowHandoff) -> None:
        self._busy_s += handoff.busy_s
        self._wait_s += handoff.wait_s
        self._steps += handoff.steps
        self._windows += 1
        self._depths += handoff.ready_steps / handoff.window_steps
        self._add_prepared(handoff.window_steps, handoff.prepare_time)
        waited = handoff.wait_s > NOISE_S
        if not self._starves and waited and handoff.wait_share > STARVED_SHARE:
            self._starves = self._starved = True
            self._notify(True, format_starvation(handoff))
        elif self._starves and (not waited or handoff.wait_share < RECOVERED_SHARE):
            self._starves = False
            self._notify(False, f"data is fast enough again from step {handoff.start + 1}")

    def _add_prepared(self, steps: int, prepare_time: PrepareTime) -> None:
        self._prepared_steps += steps
        self._prepare_time = PrepareTime.sum_times((self._prepare_time, prepare_time))

    @property
    def waited_s(self) -> float:
        """Seconds of all waits, also for windows that couldn't be prepared ahead."""
        return self._first_wait_s + self._wait_s

    def report(self, kind: Literal["resident", "stream"]) -> LoaderReport:
        prepared = max(1, self._prepared_steps)
        measured = self._windows > 0
        time_s = max(self._busy_s + self._wait_s, 1e-9)
        seconds = self._prepare_time.seconds
        return LoaderReport(
            kind=kind,
            starved=self._starved,
            first_wait_ms=1000 * self._first_wait_s,
            first_window_ms=1000 * (self._first_window_s or 0.0),
            wait_ms_per_step=1000 * self._wait_s / self._steps if measured else None,
            wait_share=self._wait_s / time_s if measured else None,
            queue_depth=self._depths / self._windows if measured else None,
            prepare_ms_per_step={name: 1000 * time / prepared for name, time in seconds.items()},
            slowest_sample=self._prepare_time.slowest,
        )


def format_starvation(handoff: WindowHandoff) -> str:
    """Return the line for the user when training has to wait."""
    time = handoff.prepare_time
    step_ms = 1000 * (handoff.wait_s + handoff.busy_s) / handoff.steps
    by_cost = sorted(time.seconds.items(), key=lambda item: -item[1])
    costs = ", ".join(f"{name} {1000 * cost / handoff.window_steps:.2f}" for name, cost in by_cost)
    slowest = f"; slowest sample: {time.slowest}" if time.slowest else ""
    return (
        f"training waits for data from step {handoff.start + 1}: "
        f"{handoff.wait_share * step_ms:.2f} of {step_ms:.2f} ms a step "
        f"({handoff.wait_share:.0%}); "
        f"{handoff.ready_steps} of {handoff.window_steps} steps were ready; "
        f"preparing one takes, in ms: {costs}{slowest}"
    )
