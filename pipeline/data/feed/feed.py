"""How batches reach the device, window by window.

A resident feed puts the whole split on the device once, as it was read; a streamed one moves a
window's samples, preparing the next window while the device works on this one (S-03).
"""

from __future__ import annotations

import time
from typing import Literal, Protocol

import jax

from pipeline.data.columns import Split
from pipeline.data.feed.feed_stats import FeedReport, FeedStats, PrepareTime, Tell, WindowHandoff
from pipeline.data.feed.resident import ResidentSupply
from pipeline.data.feed.stream import StreamSupply
from pipeline.data.feed.window import Window
from pipeline.data.feed.window_buffer import Clock
from pipeline.data.order import SampleOrder

RESIDENT_LIMIT_BYTES = 2 << 30
"""The largest split kept on the device; MindSpore's device cache has the same bound (S-15)."""

WINDOW_LIMIT_BYTES = 256 << 20
"""The most that is moved to the device at once (S-15)."""

WINDOW_STEPS = 1024
"""The longest window. One value for every sink size, so that one program serves them all."""


class WindowSource(Protocol):
    """Prepares windows, the next one while the last is in use."""

    kind: Literal["resident", "stream"]
    device_bytes: int

    def ready_steps(self, step: int) -> int:
        """How many steps of the window from `step` could be had at once."""

    def take(self, step: int) -> tuple[Window, PrepareTime]:
        """The window from `step` and what preparing it took; waits for it where it must.

        Raises DataError when a sample can't be read.
        """

    def close(self) -> None:
        """Stop preparing ahead; `take` begins anew."""


class Feed:
    """Where a backend gets windows from."""

    def __init__(
        self, supply: WindowSource, tell: Tell | None, clock: Clock = time.perf_counter
    ) -> None:
        self._supply, self._clock, self._ledger = supply, clock, FeedStats(tell)
        self.kind, self.device_bytes = supply.kind, supply.device_bytes
        self._window: Window | None = None
        self._given_at = 0.0

    def window(self, step: int) -> Window:
        """The window that holds the step after boundary `step`; seeking costs nothing extra.

        Raises DataError when one of its samples can't be read.
        """
        last = self._window
        if last is None or not last.start <= step < last.stop:
            last = self._window = self._next(last, step)
        return last

    def _next(self, last: Window | None, step: int) -> Window:
        ready, asked_at = self._supply.ready_steps(step), self._clock()
        window, effort = self._supply.take(step)
        given_at = self._clock()
        wait_s, steps = given_at - asked_at, window.stop - window.start
        if last is not None and last.stop == step:
            used, busy_s = last.stop - last.start, asked_at - self._given_at
            self._ledger.add(WindowHandoff(step, used, busy_s, wait_s, ready, steps, effort))
        else:
            self._ledger.jump(wait_s, steps, effort)
        self._given_at = given_at
        return window

    def close(self) -> None:
        """Stop preparing ahead, so that what nobody will train on is not read."""
        self._supply.close()

    def report(self) -> FeedReport:
        """Whether training had to wait, and what for."""
        return self._ledger.report(self.kind)


def make_feed(
    split: Split,
    order: SampleOrder,
    device: jax.Device,
    kind: Literal["auto", "resident", "stream"],
    *,
    stop: int | None = None,
    tell: Tell | None = None,
    clock: Clock = time.perf_counter,
) -> Feed:
    """A feed of the asked kind; `auto` is resident where the split fits.

    No step from boundary `stop` on is prepared ahead; `tell` is told when training has to wait.
    """
    fits = split_bytes(split) <= RESIDENT_LIMIT_BYTES
    if kind == "resident" or (kind == "auto" and fits):
        return Feed(ResidentSupply(split, order, device, WINDOW_STEPS, stop), tell, clock)
    batch_bytes = max(1, split.sample_bytes * order.batch_size)
    steps = max(1, min(WINDOW_STEPS, WINDOW_LIMIT_BYTES // batch_bytes))
    return Feed(StreamSupply(split, order, device, steps, stop, clock), tell, clock)


def split_bytes(split: Split) -> int:
    """The size of a split as it was read."""
    return len(split) * split.sample_bytes
