"""Statistics of how long training waits for its data, and reports of starvation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

STARVED_SHARE = 0.05
"""Starvation begins if training waits for a window for more than this share of its time."""
RECOVERED_SHARE = 0.01
"""Starvation ends if training waits for a window for less than this share of its time."""
NOISE_S = 1e-3
"""A wait of at most this time isn't starvation: waking a thread may take as long."""
Notify = Callable[[bool, str], None]
"""Called with True and a line for the user when starvation begins, with False when it ends."""


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
    """Time of preparing steps."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by activity, summed over reader threads."""
    slowest: SlowSample | None = None

    @classmethod
    def sum_times(cls, times: Iterable[PrepareTime]) -> PrepareTime:
        """Return the sums of times, and the slowest sample of all."""
        seconds: Counter[str] = Counter()
        slowest = None
        for prepare_time in times:
            seconds.update(prepare_time.seconds)
            sample = prepare_time.slowest
            if slowest is None or (sample is not None and sample.read_s > slowest.read_s):
                slowest = sample
        return cls(dict(seconds), slowest)


@dataclass(frozen=True)
class WindowHandoff:
    """Handoff of the window that starts at boundary `start` to the training thread."""

    start: int
    steps: int
    """Number of steps of the window before."""
    busy_s: float
    """Time from the handoff of the window before to the request of this one."""
    wait_s: float
    """Time from the request to the handoff."""
    ready_steps: int
    """Number of steps that were ready at the request."""
    window_steps: int
    prepare_time: PrepareTime

    @property
    def wait_share(self) -> float:
        """Share of time that training waits, at windows of the size of this one. A window that has
        more steps than the one before takes longer to prepare than training had work for."""
        growth = max(1.0, self.window_steps / self.steps)
        return max(0.0, 1 - growth * self.busy_s / max(self.wait_s + self.busy_s, 1e-9))


@dataclass(frozen=True)
class LoaderReport:
    """Statistics of a loader, for summary.json. Shares and means are None before a full window."""

    kind: Literal["resident", "stream"]
    starved: bool
    """Whether training has starved at any time."""
    first_wait_ms: float
    """Wait for windows that couldn't be prepared ahead: the run's first window, windows that don't
    continue at the end of the window before, and the short windows after both."""
    first_window_ms: float
    """Wait for the run's first window, which is needed to compile."""
    wait_ms_per_step: float | None
    wait_share: float | None
    queue_depth: float | None
    """Mean share of a window that was ready at its request; at 1 training never waits."""
    prepare_ms_per_step: Mapping[str, float]
    """Times by activity (reading a column, transfer, order), summed over reader threads."""
    slowest_sample: SlowSample | None


class LoaderStats:
    """Statistics of handoffs; reports when starvation begins and ends."""

    def __init__(self, notify: Notify | None, advice: str = "") -> None:
        self._notify = notify or (lambda starves, text: None)
        self._advice = advice
        """Advice that ends the line about waits; "": none."""
        self._first_window_s: float | None = None
        self._first_wait_s = 0.0
        self._busy_s = 0.0
        self._wait_s = 0.0
        self._ready_shares = 0.0
        self._steps = 0
        self._windows = 0
        self._prepared_steps = 0
        self._prepare_time = PrepareTime()
        self._starves = False
        self._has_starved = False

    def add_unprepared(self, wait_s: float, window_steps: int, prepare_time: PrepareTime) -> None:
        """Record a window that couldn't be prepared ahead."""
        if self._first_window_s is None:
            self._first_window_s = wait_s
        self._first_wait_s += wait_s
        self._add_prepared(window_steps, prepare_time)

    def add_early(self, handoff: WindowHandoff) -> None:
        """Record a window that couldn't be prepared in time since the one before was shorter."""
        self.add_unprepared(handoff.wait_s, handoff.window_steps, handoff.prepare_time)
        self._report_changes(handoff)

    def add(self, handoff: WindowHandoff) -> None:
        self._busy_s += handoff.busy_s
        self._wait_s += handoff.wait_s
        self._steps += handoff.steps
        self._windows += 1
        self._ready_shares += handoff.ready_steps / handoff.window_steps
        self._add_prepared(handoff.window_steps, handoff.prepare_time)
        self._report_changes(handoff)

    def _report_changes(self, handoff: WindowHandoff) -> None:
        """Report if starvation begins or ends with a handoff."""
        waited = handoff.wait_s > NOISE_S
        if not self._starves and waited and handoff.wait_share > STARVED_SHARE:
            self._starves = True
            self._has_starved = True
            self._notify(True, format_starvation(handoff, self._advice))
        elif self._starves and (not waited or handoff.wait_share < RECOVERED_SHARE):
            self._starves = False
            self._notify(False, f"data is fast enough again from step {handoff.start + 1}")

    def _add_prepared(self, steps: int, prepare_time: PrepareTime) -> None:
        self._prepared_steps += steps
        self._prepare_time = PrepareTime.sum_times((self._prepare_time, prepare_time))

    @property
    def waited_s(self) -> float:
        """Seconds of all waits, including those for windows that couldn't be prepared ahead."""
        return self._first_wait_s + self._wait_s

    def report(self, kind: Literal["resident", "stream"]) -> LoaderReport:
        prepared = max(1, self._prepared_steps)
        measured = self._windows > 0
        time_s = max(self._busy_s + self._wait_s, 1e-9)
        seconds = self._prepare_time.seconds
        return LoaderReport(
            kind=kind,
            starved=self._has_starved,
            first_wait_ms=1000 * self._first_wait_s,
            first_window_ms=1000 * (self._first_window_s or 0.0),
            wait_ms_per_step=1000 * self._wait_s / self._steps if measured else None,
            wait_share=self._wait_s / time_s if measured else None,
            queue_depth=self._ready_shares / self._windows if measured else None,
            prepare_ms_per_step={name: 1000 * time / prepared for name, time in seconds.items()},
            slowest_sample=self._prepare_time.slowest,
        )


def format_starvation(handoff: WindowHandoff, advice: str = "") -> str:
    """Return the line for the user when starvation begins."""
    prepare_time = handoff.prepare_time
    # Reading limits a step's time, so a step takes as long as preparing one.
    step_ms = 1000 * (handoff.wait_s + handoff.busy_s) / max(handoff.steps, handoff.window_steps)
    by_cost = Counter(prepare_time.seconds).most_common()
    costs = ", ".join(f"{name} {1000 * cost / handoff.window_steps:.2f}" for name, cost in by_cost)
    slowest = f"; slowest sample: {prepare_time.slowest}" if prepare_time.slowest else ""
    return (
        f"training waits for data from step {handoff.start + 1}: "
        f"{handoff.wait_share * step_ms:.2f} of {step_ms:.2f} ms a step "
        f"({handoff.wait_share:.0%}); "
        f"{handoff.ready_steps} of {handoff.window_steps} steps were ready; "
        f"preparing one takes, in ms: {costs}{slowest}" + (f"; {advice}" if advice else "")
    )
