"""The number of threads that read samples at once, found by trying while a run reads.

Decoders that hold Python's lock are faster with one thread than with two, others with all. Which
threads read a sample changes nothing in it, so the number may change at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHORTEST_TRIAL_S = 0.1
"""Seconds of reading after which a number of threads has been tried, if each has read once."""

AGAIN_AFTER = 50
"""Trials' lengths for which the best number stays before all are tried again."""


class ReadingThreads:
    """A gate that lets a number of threads read: all at first, then fewer, then the fastest."""

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.limit = most
        """Threads that may read now."""
        self._clock = clock
        self._free = threading.Condition()
        self._numbers = [most]
        while self._numbers[-1] > 1:
            self._numbers.append(self._numbers[-1] // 2)
        self._rates: dict[int, float] = {}
        self._trial = self._active = self._since = 0
        self._changed_at = 0.0
        self._begin()

    def _begin(self) -> None:
        """Forget what has been counted so far."""
        self._reads = self._samples = 0
        self._read_s = self._busy_s = self._thread_s = 0.0

    @contextmanager
    def reading(self, samples: int) -> Iterator[None]:
        """Wait until one more thread may read; the body reads a number of samples."""
        with self._free:
            self._free.wait_for(lambda: self._active < self.limit)
            self._count(1)
            trial = self._trial
            started_at = self._changed_at
        try:
            yield
        finally:
            with self._free:
                self._count(-1)
                # Most of an earlier trial's read was done by another number of threads.
                if trial == self._trial:
                    self._reads += 1
                    self._samples += samples
                    self._read_s += self._changed_at - started_at
                    self._conclude()
                self._free.notify_all()

    def _count(self, change: int) -> None:
        """Add the time since the last change, in which any thread was reading."""
        now = self._clock()
        if self._active:
            self._busy_s += now - self._changed_at
            self._thread_s += self._active * (now - self._changed_at)
        self._active += change
        self._changed_at = now

    def _conclude(self) -> None:
        """End the trial of a number of threads if it is long enough: try another, or the best."""
        if len(self._numbers) == 1 or self._reads < self.limit or self._busy_s < SHORTEST_TRIAL_S:
            return
        # A thread's rate times the mean number of readers: reads need not end together.
        threads = self._thread_s / self._busy_s
        self._rates[self.limit] = threads * self._samples / max(self._read_s, 1e-9)
        untried = [number for number in self._numbers if number not in self._rates]
        limit = untried[0] if untried else max(self._rates, key=self._rates.__getitem__)
        if not untried:
            self._since += 1
            if self._since == AGAIN_AFTER:
                self._since = 0
                self._rates.clear()
        self._trial += self.limit != limit
        self.limit = limit
        self._begin()
