"""Loaders, which bring batches to the device, window by window.

A resident loader puts the split on the device once. Then it transfers only the order of samples. A
streaming loader transfers the samples of each window while the device uses the previous one.

Windows of a split that doesn't fit on the device: samples are transferred with their window.

Threads read one window ahead: several threads if samples are decoded one by one (`ReadingThreads`
chooses the number). They read parts of a window into its buffer, and the thread that completes the
window transfers it. A reader can start at any step without reading the samples before it.

The fastest number of threads that read samples at once, found while a run reads.

Decoders that hold Python's lock are faster with one thread than with two, others with all threads.
The number may change at any time, since a sample is the same in every thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal, Protocol

import jax.numpy as jnp
import numpy as np

from pipeline.backends.loading.loader_stats import (
    LoaderReport,
    LoaderStats,
    Notify,
    PrepareTime,
    WindowHandoff,
)
from pipeline.backends.loading.window import (
    LoaderSource,
    ReadPlan,
    Window,
    WindowBuffer,
    put_inputs,
    read_batch,
)
from pipeline.data.batch import Batch
from pipeline.data.columns import BatchedColumn, LazyColumn, Split, count_split_bytes
from pipeline.data.host_ops import HostMappedColumn
from pipeline.training.parallel.state_sharing import gather_arrays

RESIDENT_LIMIT_BYTES = 2 << 30
"""Largest split on the device, as in MindSpore; a GPU may have room for more."""
RESIDENT_SHARE = 0.5
"""Largest share of a GPU's free memory that a split may take. The step needs the other half."""
WINDOW_LIMIT_BYTES = 256 << 20
"""Largest size of the samples of a window."""
WINDOW_STEPS = 1024
"""Largest number of steps of a window, for all sink sizes, so that they use the same program."""
Prepared = tuple[Window, PrepareTime]
"""A window and the time that it took to prepare."""
Part = tuple[PrepareTime, Window | None]
"""The time of reading a part of a window, and the window if this part has completed it."""
SHORTEST_TRIAL_S = 0.1
"""Least seconds of reading in a trial, which also has at least as many reads as threads."""
TRIALS_BEFORE_RETRY = 50
"""Number of trials of the fastest number of threads after which all numbers are tried again."""


class WindowSource(Protocol):
    """Prepares windows: the next one while the previous one is used."""

    kind: Literal["resident", "stream"]
    device_bytes: int

    def count_ready_steps(self, step: int) -> int:
        """Return how many steps of the window that starts at boundary `step` are ready."""

    def take(self, step: int) -> Prepared:
        """Return the window that starts at boundary `step`. Raises DataError for a bad sample."""

    def close(self) -> None:
        """Stop preparing ahead, until the next `take`."""


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
        self._ahead: dict[int, Future[Prepared]] = {}
        """The window that is prepared ahead, by its start."""

    def count_ready_steps(self, step: int) -> int:
        future = self._ahead.get(step)
        return self._steps if future is not None and future.done() else 0

    def take(self, step: int) -> Prepared:
        future = self._ahead.get(step)
        prepared = self._prepare(step) if future is None else future.result()
        next_step = step + self._steps
        if self._source.stop is None or next_step < self._source.stop:
            self._ahead = {next_step: self._thread.submit(self._prepare, next_step)}
        return prepared

    def close(self) -> None:
        self._ahead = {}

    def _prepare(self, step: int) -> Prepared:
        started_at = time.perf_counter()
        batches = self._source.order.batches(step, self._steps)
        ordered_at = time.perf_counter()
        seed = self._source.order.seed
        inputs = put_inputs(self._columns, batches, seed, self._source.placement, resident=True)
        seconds = {"order": ordered_at - started_at, "transfer": time.perf_counter() - ordered_at}
        return Window(step, step + self._steps, inputs), PrepareTime(seconds)


class Loader:
    """Windows for a backend, and statistics of the time that training waits for them."""

    def __init__(self, source: WindowSource, notify: Notify | None, advice: str = "") -> None:
        self.kind = source.kind
        self.device_bytes = source.device_bytes
        self._source = source
        self._stats = LoaderStats(notify, advice)
        self._window: Window | None = None
        self._handed_over_at = 0.0

    def get_window(self, steps_done: int) -> Window:
        """Return the window with the step after `steps_done`, as `WindowSource.take` does."""
        last = self._window
        if last is not None and last.start <= steps_done < last.stop:
            return last
        ready = self._source.count_ready_steps(steps_done)
        requested_at = time.perf_counter()
        window, prepare_time = self._source.take(steps_done)
        wait_s = time.perf_counter() - requested_at
        steps = window.stop - window.start
        if last is not None and last.stop == steps_done:
            handoff = WindowHandoff(
                start=steps_done,
                steps=last.stop - last.start,
                busy_s=requested_at - self._handed_over_at,
                wait_s=wait_s,
                ready_steps=ready,
                window_steps=steps,
                prepare_time=prepare_time,
            )
            # The growing first windows couldn't be prepared in time, so their waits aren't summed.
            (self._stats.add_early if window.is_early else self._stats.add)(handoff)
        else:
            self._stats.add_unprepared(wait_s, steps, prepare_time)
        self._handed_over_at = requested_at + wait_s
        self._window = window
        return window

    def read_batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 1, before the map ops. All processes of a run
        must call it."""
        window = self.get_window(step - 1)
        return read_batch(gather_arrays(window.inputs), jnp.int32(step - 1 - window.start))

    def close(self) -> None:
        """Stop preparing ahead until the next request, and drop the window in use."""
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
    fits = _fits_on_device(source)
    if kind == "resident" or (kind == "auto" and fits):
        return Loader(ResidentWindows(source, WINDOW_STEPS), notify)
    batch_bytes = max(1, split.sample_bytes * source.order.batch_size)
    steps = max(1, min(WINDOW_STEPS, WINDOW_LIMIT_BYTES // batch_bytes))
    advice = "train.feed=resident would read each sample once" if fits else _advise(split)
    return Loader(StreamedWindows(source, steps), notify, advice)


def _fits_on_device(source: LoaderSource) -> bool:
    """Return whether a split may be on the device: there is room, and no op draws on the host."""
    free = source.placement.free_bytes
    # A lazy column is decoded into the host's memory first, which has the smaller limit.
    columns = source.split.columns.values()
    is_lazy = any(isinstance(column, LazyColumn) for column in columns)
    limit = RESIDENT_LIMIT_BYTES if free is None or is_lazy else RESIDENT_SHARE * free
    draws = any(isinstance(column, HostMappedColumn) and column.draws for column in columns)
    return not draws and count_split_bytes(source.split) <= limit


def _advise(split: Split) -> str:
    """Return what shortens the waits for samples that are read again in each epoch."""
    columns = split.columns.values()
    if any(isinstance(column, HostMappedColumn) for column in columns):
        return "do less in dataset.train.host_ops: map ops of dataset.train.ops run in the step"
    if any(isinstance(c, LazyColumn) and not isinstance(c, BatchedColumn) for c in columns):
        return "convert the data once: python -m pipeline convert records"
    return "python -m pipeline profile measures what takes the time"


def _pad_rows(values: np.ndarray, padding: int) -> np.ndarray:
    """Return values (n, ...) with rows of zeros after them: (n + padding, ...)."""
    if not padding:
        return values
    return np.concatenate([values, np.zeros((padding, *values.shape[1:]), values.dtype)])


class StreamedWindows:
    """Windows whose samples are read while the previous window is in use."""

    kind: Literal["resident", "stream"] = "stream"

    def __init__(self, source: LoaderSource, window_steps: int) -> None:
        self._plan = ReadPlan(source, window_steps)
        self._threads = ReadingThreads(self._plan.threads)
        # One window is used while the next one is transferred.
        self.device_bytes = 2 * window_steps * self._plan.batch_bytes
        self._reader: Reader | None = None

    def count_ready_steps(self, step: int) -> int:
        reader = self._reader
        return reader.count_ready_steps() if reader is not None and reader.step == step else 0

    def take(self, step: int) -> tuple[Window, PrepareTime]:
        if self._reader is None or self._reader.step != step:
            self.close()
            self._reader = Reader(self._plan, step, self._threads)
        try:
            return self._reader.take()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class Reader:
    """Reads window after window from boundary `step` on."""

    def __init__(self, plan: ReadPlan, step: int, threads: ReadingThreads) -> None:
        self.step: int | None = step
        """Start of the next window; None after the last one."""
        self._plan = plan
        self._threads = threads
        self._first_step = step
        self._pool = ThreadPoolExecutor(plan.threads, thread_name_prefix="reader")
        self._read_window(0)

    def _read_window(self, number: int) -> None:
        """Begin to read window `number`, which `take` then returns."""
        self._number = number
        self._steps = self._plan.list_steps(self._first_step, number)
        is_early = self._plan.is_early(number)
        buffer = self._pool.submit(WindowBuffer, self._plan, self._steps, is_early=is_early)
        self._parts = [
            self._pool.submit(self._read_part, buffer, part) for part in range(self._plan.parts)
        ]

    def _read_part(self, buffer: Future[WindowBuffer], part: int) -> Part:
        window = buffer.result()
        with self._threads.limit_readers(window.count_samples(part)):
            return window.read(part)

    def count_ready_steps(self) -> int:
        """Return the number of steps of the next window that have been read."""
        if self.step is None:
            return 0
        return sum(part.done() for part in self._parts) * len(self._steps) // self._plan.parts

    def take(self) -> tuple[Window, PrepareTime]:
        """Return the next window, after threads have begun to read the window after it."""
        parts = self._parts
        stop = self._steps.stop
        self.step = stop if stop != self._plan.source.stop else None
        if self.step is not None:
            self._read_window(self._number + 1)
        results = [part.result() for part in parts]
        (window,) = (window for _, window in results if window is not None)
        return window, PrepareTime.sum_times(time for time, _ in results)

    def close(self) -> None:
        """Stop reading ahead; parts that are being read are finished and dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


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
