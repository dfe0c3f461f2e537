"""Does training wait for its data? Starvation is a state that is told of, never an error (S-12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

STARVED_SHARE = 0.05
"""Training starves when a window made it wait for a larger share of the time it took."""

FED_SHARE = 0.01
"""It is fed again when one made it wait for a smaller share."""

NOISE_S = 1e-3
"""Shorter waits are the operating system's: waking a thread up may take as long."""

Tell = Callable[[bool, str], None]
"""Called as starvation begins (true) and ends (false), with a line for the user."""


@dataclass(frozen=True)
class SlowSample:
    """The sample that took longest to read: its index, and its name where it has one."""

    column: str
    sample: int
    name: str
    read_s: float

    def __str__(self) -> str:
        return f"{self.column} of sample {self.sample} ({self.name}), {1000 * self.read_s:.1f} ms"


@dataclass(frozen=True)
class PrepareTime:
    """What preparing steps took, all reader threads together: seconds by what was done."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    slowest: SlowSample | None = None

    @classmethod
    def total(cls, efforts: Iterable[PrepareTime]) -> PrepareTime:
        """The sum of several."""
        seconds: Counter[str] = Counter()
        slowest = None
        for effort in efforts:
            seconds.update(effort.seconds)
            slowest = slower(slowest, effort.slowest)
        return cls(dict(seconds), slowest)


def slower(one: SlowSample | None, other: SlowSample | None) -> SlowSample | None:
    """That which took longer of two, the first in a tie."""
    if one is None or other is None:
        return one or other
    return other if other.read_s > one.read_s else one


@dataclass(frozen=True)
class WindowHandoff:
    """A window was handed to the training thread, which asked for it after `busy_s`.

    `steps` were trained meanwhile; of the `window_steps` asked for, `ready_steps` were there.
    """

    start: int
    steps: int
    busy_s: float
    wait_s: float
    ready_steps: int
    window_steps: int
    effort: PrepareTime

    @property
    def wait_share(self) -> float:
        """The share of the time that was spent waiting."""
        return self.wait_s / max(self.wait_s + self.busy_s, 1e-9)


@dataclass(frozen=True)
class FeedReport:
    """How training was fed, for summary.json. Shares and means are None before a second window."""

    kind: Literal["resident", "stream"]
    starved: bool
    """Was it ever?"""
    first_wait_ms: float
    """For windows that nobody could have prepared: the first one, and one after a jump."""
    wait_ms_per_step: float | None
    wait_share: float | None
    queue_depth: float | None
    """The mean share of a window that was ready when it was asked for: 1 never waits."""
    prepare_ms_per_step: Mapping[str, float]
    """By what is done: reading a column, transfer, order; all reader threads together."""
    slowest_sample: SlowSample | None


class FeedStats:
    """Keeps account of hand-overs and tells when starvation begins and ends."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self._first_wait_s = self._busy_s = self._wait_s = self._depths = 0.0
        self._steps = self._windows = self._prepared_steps = 0
        self._effort = PrepareTime()
        self._starves = self._starved = False

    def jump(self, wait_s: float, window_steps: int, effort: PrepareTime) -> None:
        """A window was handed over that nobody could have prepared."""
        self._first_wait_s += wait_s
        self._prepared(window_steps, effort)

    def add(self, given: WindowHandoff) -> None:
        """The next window was handed over."""
        self._busy_s += given.busy_s
        self._wait_s += given.wait_s
        self._steps += given.steps
        self._windows += 1
        self._depths += given.ready_steps / given.window_steps
        self._prepared(given.window_steps, given.effort)
        self._judge(given)

    def _prepared(self, steps: int, effort: PrepareTime) -> None:
        self._prepared_steps += steps
        self._effort = PrepareTime.total((self._effort, effort))

    def _judge(self, given: WindowHandoff) -> None:
        waited = given.wait_s > NOISE_S
        if not self._starves and waited and given.wait_share > STARVED_SHARE:
            self._starves = self._starved = True
            self._say(True, starved_text(given))
        elif self._starves and (not waited or given.wait_share < FED_SHARE):
            self._starves = False
            self._say(False, f"data is fast enough again from step {given.start + 1}")

    def _say(self, starves: bool, text: str) -> None:
        if self._tell is not None:
            self._tell(starves, text)

    def report(self, kind: Literal["resident", "stream"]) -> FeedReport:
        """The account so far."""
        prepared = max(1, self._prepared_steps)
        measured, time_s = self._windows > 0, self._busy_s + self._wait_s
        return FeedReport(
            kind=kind,
            starved=self._starved,
            first_wait_ms=1000 * self._first_wait_s,
            wait_ms_per_step=1000 * self._wait_s / self._steps if measured else None,
            wait_share=self._wait_s / max(time_s, 1e-9) if measured else None,
            queue_depth=self._depths / self._windows if measured else None,
            prepare_ms_per_step={k: 1000 * s / prepared for k, s in self._effort.seconds.items()},
            slowest_sample=self._effort.slowest,
        )


def starved_text(given: WindowHandoff) -> str:
    """The line that a user reads when training has to wait."""
    step_ms = 1000 * (given.wait_s + given.busy_s) / given.steps
    by_cost = sorted(given.effort.seconds.items(), key=lambda item: -item[1])
    costs = ", ".join(f"{what} {1000 * s / given.window_steps:.2f}" for what, s in by_cost)
    slowest = f"; slowest sample: {given.effort.slowest}" if given.effort.slowest else ""
    return (
        f"training waits for data from step {given.start + 1}: "
        f"{given.wait_share * step_ms:.2f} of {step_ms:.2f} ms a step "
        f"({given.wait_share:.0%}); {given.ready_steps} of {given.window_steps} steps were ready; "
        f"preparing one takes, in ms: {costs}{slowest}"
    )
