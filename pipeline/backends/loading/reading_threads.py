"""The fastest number of threads that read samples at once, found while a run reads.

Decoders that hold Python's lock are faster with one thread than with two, others with all threads.
The number may change at any time, since a sample is the same in every thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SHORTEST_TRIAL_S = 0.1
"""Least seconds of reading in a trial, which also has at least as many reads as threads."""
TRIALS_BEFORE_RETRY = 50
"""Number of trials of the fastest number of threads after which all numbers are tried again."""


class ReadingThreads:
    """Limits the threads that read at once: in trials to all, half, ..., 1, then to the fastest."""

    def __init__(self, max_threads: int) -> None:
        self.limit = max_threads
        """Number of threads that may read at once."""
        self._free = threading.Condition()
        self._limits = [max_threads]
        while self._limits[-1] > 1:
            self._limits.append(self._limits[-1] // 2)
        self._rates: dict[int, float] = {}
        self._trial = 0
        self._active = 0
        self._fastest_trials = 0
        self._changed_at = 0.0
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._reads = 0
        self._samples = 0
        self._read_s = 0.0  # Of all reads that ended in the trial.
        self._busy_s = 0.0  # With at least one reader.
        self._thread_s = 0.0  # With a reader, summed over readers.

    @contextmanager
    def limit_readers(self, samples: int) -> Iterator[None]:
        """Wait until one more thread may read. The body of `with` reads `samples` samples."""
        with self._free:
            self._free.wait_for(lambda: self._active < self.limit)
            self._change_readers(1)
            trial = self._trial
            started_at = self._changed_at
        try:
            yield
        finally:
            with self._free:
                self._change_readers(-1)
                # A read that began in an earlier trial had another number of threads beside it.
                if trial == self._trial:
                    self._reads += 1
                    self._samples += samples
                    self._read_s += self._changed_at - started_at
                    self._end_trial()
                self._free.notify_all()

    def _change_readers(self, change: int) -> None:
        """Add the time since the last change of the number of readers, and change the number."""
        time_s = time.perf_counter()
        if self._active:
            self._busy_s += time_s - self._changed_at
            self._thread_s += self._active * (time_s - self._changed_at)
        self._active += change
        self._changed_at = time_s

    def _end_trial(self) -> None:
        """End a trial that is long enough: begin the next one, or use the fastest number."""
        if len(self._limits) == 1 or self._reads < self.limit or self._busy_s < SHORTEST_TRIAL_S:
            return
        # The rate of one reader times the mean number of readers, since reads don't end together.
        mean_readers = self._thread_s / self._busy_s
        self._rates[self.limit] = mean_readers * self._samples / max(self._read_s, 1e-9)
        untried = [number for number in self._limits if number not in self._rates]
        if untried:
            limit = untried[0]
        else:
            limit = max(self._rates, key=self._rates.__getitem__)
            self._fastest_trials += 1
            if self._fastest_trials == TRIALS_BEFORE_RETRY:
                self._fastest_trials = 0
                self._rates.clear()
        if limit != self.limit:
            self._trial += 1
        self.limit = limit
        self._begin_trial()
