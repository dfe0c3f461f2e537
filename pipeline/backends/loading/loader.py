"""Loaders, which bring batches to the device, window by window.

A resident loader puts the split on the device once, and then transfers only orders of samples. A
streaming loader transfers the samples of each window while the device works on the last one.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Protocol

import numpy as np

from pipeline.backends.loading.loader_stats import (
    LoaderReport,
    LoaderStats,
    Notify,
    PrepareTime,
    WindowHandoff,
)
from pipeline.backends.loading.stream import StreamedWindows
from pipeline.backends.loading.window import Window, put_inputs
from pipeline.backends.loading.window_buffer import Clock, LoaderSource
from pipeline.data.columns import LazyColumn, Split
from pipeline.data.host_ops import HostMappedColumn

RESIDENT_LIMIT_BYTES = 2 << 30
"""Largest split on the device, as in MindSpore; a GPU may have room for more."""

RESIDENT_SHARE = 0.5
"""Share of a GPU's free memory that a split may take; the step needs the other half."""

WINDOW_LIMIT_BYTES = 256 << 20
"""A window that is transferred to the device has at most this many bytes."""

WINDOW_STEPS = 1024
"""Steps of the longest window, whatever the sink size, so that one program serves all sizes."""

Prepared = tuple[Window, PrepareTime]
"""A window and the time that it took to prepare."""


class WindowSource(Protocol):
    """Prepares windows, the next one while the previous one is in use."""

    kind: Literal["resident", "stream"]
    device_bytes: int

    def count_ready_steps(self, step: int) -> int:
        """Return how many steps of the window that starts at `step` are ready."""

    def take(self, step: int) -> Prepared:
        """Return the window that starts at `step`. Raises DataError if a sample can't be read."""

    def close(self) -> None:
        """Stop preparing ahead. The source stays usable: the next `take` starts again."""


class ResidentWindows:
    """Windows of a split that is on the device. A thread computes the order of the next window.

    For 60,000 samples that takes 7 ms, a few per cent of 1,024 steps of a small network.
    """

    kind: Literal["resident", "stream"] = "resident"

    def __init__(self, source: LoaderSource, window_steps: int) -> None:
        self._source = source
        self._steps = window_steps
        self._columns = {
            name: source.placement.put(_pad_rows(column[:], source.split.padding))
            for name, column in source.split.columns.items()
        }
        self.device_bytes = sum(column.nbytes for column in self._columns.values())
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="order")
        self._ahead: tuple[int, Future[Prepared]] | None = None

    def count_ready_steps(self, step: int) -> int:
        """Return the steps of the window if its order is computed, else 0."""
        ahead = self._ahead
        return self._steps if ahead and ahead[0] == step and ahead[1].done() else 0

    def take(self, step: int) -> Prepared:
        if self._ahead is not None and self._ahead[0] == step:
            prepared = self._ahead[1].result()
        else:
            prepared = self._prepare(step)
        next_step = step + self._steps
        if self._source.stop is None or next_step < self._source.stop:
            self._ahead = next_step, self._thread.submit(self._prepare, next_step)
        return prepared

    def close(self) -> None:
        self._ahead = None

    def _prepare(self, step: int) -> Prepared:
        started_at = time.perf_counter()
        batches = self._source.order.batches(step, self._steps)
        ordered_at = time.perf_counter()
        seed = self._source.order.seed
        inputs = put_inputs(self._columns, batches, seed, self._source.placement, resident=True)
        seconds = {"order": ordered_at - started_at, "transfer": time.perf_counter() - ordered_at}
        return Window(step, step + self._steps, inputs), PrepareTime(seconds)


class Loader:
    """Windows for a backend, and statistics of how long training waits for them."""

    def __init__(
        self, source: WindowSource, notify: Notify | None, clock: Clock = time.perf_counter
    ) -> None:
        self.kind = source.kind
        self.device_bytes = source.device_bytes
        self._source = source
        self._clock = clock
        self._stats = LoaderStats(notify)
        self._window: Window | None = None
        self._handed_over_at = 0.0

    def get_window(self, steps_done: int) -> Window:
        """Return the window with the next step after `steps_done` steps. Raises DataError."""
        last = self._window
        if last is not None and last.start <= steps_done < last.stop:
            return last
        ready = self._source.count_ready_steps(steps_done)
        requested_at = self._clock()
        window, prepare_time = self._source.take(steps_done)
        wait_s = self._clock() - requested_at
        steps = window.stop - window.start
        # Waiting for the short first windows isn't starvation.
        if last is not None and last.stop == steps_done and not window.is_early:
            busy_s = requested_at - self._handed_over_at
            trained_steps = last.stop - last.start
            handoff = WindowHandoff(
                steps_done, trained_steps, busy_s, wait_s, ready, steps, prepare_time
            )
            self._stats.add(handoff)
        else:
            self._stats.add_unprepared(wait_s, steps, prepare_time)
        self._handed_over_at = requested_at + wait_s
        self._window = window
        return window

    def close(self) -> None:
        """Stop preparing ahead, and drop the window in use. The next request starts again."""
        self._source.close()
        self._window = None

    @property
    def waited_s(self) -> float:
        """Seconds that `get_window` has waited so far."""
        return self._stats.waited_s

    def report(self) -> LoaderReport:
        """Return the time that training waited for data, by cause."""
        return self._stats.report(self.kind)


def make_loader(
    source: LoaderSource,
    kind: Literal["auto", "resident", "stream"] = "auto",
    notify: Notify | None = None,
) -> Loader:
    """Make a loader.

    `auto` is resident if the split fits on the device, and no host op draws random numbers.
    `notify` is called when training starts to wait for data, and when the waits end.
    """
    split = source.split
    if kind == "auto":
        free = source.placement.free_bytes
        # Lazy columns are decoded into the host's memory first, so RESIDENT_LIMIT_BYTES holds.
        columns = split.columns.values()
        is_lazy = any(isinstance(column, LazyColumn) for column in columns)
        limit = RESIDENT_LIMIT_BYTES if free is None or is_lazy else RESIDENT_SHARE * free
        draws = any(isinstance(column, HostMappedColumn) and column.draws for column in columns)
        kind = "stream" if draws or count_split_bytes(split) > limit else "resident"
    if kind == "resident":
        return Loader(ResidentWindows(source, WINDOW_STEPS), notify, source.clock)
    batch_bytes = max(1, split.sample_bytes * source.order.batch_size)
    steps = max(1, min(WINDOW_STEPS, WINDOW_LIMIT_BYTES // batch_bytes))
    return Loader(StreamedWindows(source, steps), notify, source.clock)


def _pad_rows(values: np.ndarray, padding: int) -> np.ndarray:
    """Return values (n, ...) with rows of zeros after them: (n + padding, ...)."""
    return np.pad(values, ((0, padding), *((0, 0),) * (values.ndim - 1))) if padding else values


def count_split_bytes(split: Split) -> int:
    """Return the bytes of a split in the dtypes that it was read in."""
    return len(split) * split.sample_bytes
