"""Feeds, which bring batches to the device, window by window.

A resident feed puts the whole split on the device once, as it was read; a streamed one transfers a
window's samples, preparing the next window while the device works on this one (S-03).
"""

from __future__ import annotations

import time
from typing import Literal, Protocol

from pipeline.backends.feed.feed_stats import (
    FeedReport,
    FeedStats,
    Notify,
    PrepareTime,
    WindowHandoff,
)
from pipeline.backends.feed.resident import ResidentWindows
from pipeline.backends.feed.stream import StreamedWindows
from pipeline.backends.feed.window import Window
from pipeline.backends.feed.window_buffer import Clock
from pipeline.data.columns import LazyColumn, Split
from pipeline.data.order import SampleOrder
from pipeline.training.parallel.placement import DevicePlacement

RESIDENT_LIMIT_BYTES = 2 << 30
"""The largest split kept on the device; MindSpore's device cache has the same bound (S-15). A GPU
may keep more."""

RESIDENT_SHARE = 0.5
"""Share of a GPU's free memory that a split may take; the rest is left to the step."""

WINDOW_LIMIT_BYTES = 256 << 20
"""The most bytes that are transferred to the device at once (S-15)."""

WINDOW_STEPS = 1024
"""The longest window. One value for every sink size, so that one program serves them all."""


class WindowSource(Protocol):
    """Prepares windows, the next one while the last is in use."""

    kind: Literal["resident", "stream"]
    device_bytes: int

    def ready_steps(self, step: int) -> int:
        """The number of steps of the window from `step` that are ready."""

    def take(self, step: int) -> tuple[Window, PrepareTime]:
        """The window from `step` and the time to prepare it; waits for it where it must.

        Raises DataError when a sample can't be read.
        """

    def close(self) -> None:
        """Stop preparing ahead; `take` starts again."""


class Feed:
    """Windows for a backend."""

    def __init__(
        self, source: WindowSource, notify: Notify | None, clock: Clock = time.perf_counter
    ) -> None:
        self._source, self._clock, self._stats = source, clock, FeedStats(notify)
        self.kind, self.device_bytes = source.kind, source.device_bytes
        self._window: Window | None = None
        self._handed_at = 0.0

    def window(self, step: int) -> Window:
        """The window that holds the step after boundary `step`; seeking costs nothing extra.

        Raises DataError when one of its samples can't be read.
        """
        last = self._window
        if last is None or not last.start <= step < last.stop:
            last = self._window = self._next(last, step)
        return last

    def _next(self, last: Window | None, step: int) -> Window:
        ready, requested_at = self._source.ready_steps(step), self._clock()
        window, prepare_time = self._source.take(step)
        handed_at = self._clock()
        wait_s, steps = handed_at - requested_at, window.stop - window.start
        if last is not None and last.stop == step and not window.early:
            used, busy_s = last.stop - last.start, requested_at - self._handed_at
            handoff = WindowHandoff(step, used, busy_s, wait_s, ready, steps, prepare_time)
            self._stats.add(handoff)
        else:
            self._stats.jump(wait_s, steps, prepare_time)
        self._handed_at = handed_at
        return window

    def close(self) -> None:
        """Stop preparing ahead, so that no samples are read which are not trained on.

        The last window is let go, too: it is read again where it is asked for.
        """
        self._source.close()
        self._window = None

    @property
    def waited_s(self) -> float:
        """Seconds that were waited for windows so far, the first one included."""
        return self._stats.waited_s

    def report(self) -> FeedReport:
        """How long training had to wait, and for what."""
        return self._stats.report(self.kind)


def make_feed(
    split: Split,
    order: SampleOrder,
    placement: DevicePlacement,
    kind: Literal["auto", "resident", "stream"],
    *,
    stop: int | None = None,
    notify: Notify | None = None,
    clock: Clock = time.perf_counter,
    short_first: bool = False,
) -> Feed:
    """Make a feed of the kind; `auto` is resident where the split fits.

    No step from boundary `stop` on is prepared ahead; `notify` is called when training has to wait.
    `short_first` begins with short windows, each of which costs the transfer of a full one.
    """
    fits = split_bytes(split) <= resident_limit_bytes(split, placement)
    if kind == "resident" or (kind == "auto" and fits):
        return Feed(ResidentWindows(split, order, placement, WINDOW_STEPS, stop), notify, clock)
    batch_bytes = max(1, split.sample_bytes * order.batch_size)
    steps = max(1, min(WINDOW_STEPS, WINDOW_LIMIT_BYTES // batch_bytes))
    windows = StreamedWindows(split, order, placement, steps, stop, clock, short_first=short_first)
    return Feed(windows, notify, clock)


def resident_limit_bytes(split: Split, placement: DevicePlacement) -> float:
    """The size of the largest split that is kept on the devices: a share of what a GPU has free.

    Samples still to be decoded would all be so before the first step, in the host's memory.
    """
    free = placement.free_bytes
    decoded = not any(isinstance(column, LazyColumn) for column in split.columns.values())
    return RESIDENT_SHARE * free if free is not None and decoded else RESIDENT_LIMIT_BYTES


def split_bytes(split: Split) -> int:
    """The size of a split as it was read."""
    return len(split) * split.sample_bytes
