"""Windows of a split that doesn't fit on the device: samples are transferred with their window.

grain reads one window ahead, in several threads if samples are decoded one by one (`ReadingThreads`
chooses the number). The threads read parts of a window into its buffer, and the thread that
completes the window transfers it. A part is a pure function of its number, so a reader can start at
any step without reading the samples before it.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

from pipeline.backends.loading.loader_stats import PrepareTime
from pipeline.backends.loading.reading_threads import ReadingThreads
from pipeline.backends.loading.window import Window
from pipeline.backends.loading.window_buffer import LoaderSource, ReadPlan, WindowBuffer
from pipeline.core.errors import PipelineError


class StreamedWindows:
    """Windows whose samples are read while the previous window is in use."""

    kind: Literal["resident", "stream"] = "stream"

    def __init__(self, source: LoaderSource, window_steps: int) -> None:
        self._plan = ReadPlan(source, window_steps)
        self._threads = ReadingThreads(self._plan.threads)
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
        # Imported late: it takes 0.1 s, and runs without a stream don't need it.
        import grain

        self.step: int | None = step
        """Start of the next window; None after the last one."""
        self._plan = plan
        self._first_step = step
        self._windows_taken = 0
        self._part_source = PartSource(plan, step, threads)
        options = grain.ReadOptions(num_threads=plan.threads, prefetch_buffer_size=plan.parts)
        self._parts = iter(grain.MapDataset.source(self._part_source).to_iter_dataset(options))

    def count_ready_steps(self) -> int:
        """Return the number of steps of the next window that have been read."""
        if self.step is None:
            return 0
        steps = len(self._plan.list_steps(self._first_step, self._windows_taken))
        return min(steps, self._part_source.num_unclaimed * steps // self._plan.parts)

    def take(self) -> tuple[Window, PrepareTime]:
        """Return the next window. Meanwhile threads read the window after it."""
        parts = []
        for _ in range(self._plan.parts):
            part = next(self._parts)
            if part.error is not None:
                raise part.error
            parts.append(part)
        self._part_source.claim(len(parts))
        self._windows_taken += 1
        (window,) = (part.window for part in parts if part.window is not None)
        self.step = window.stop if window.stop != self._plan.source.stop else None
        return window, PrepareTime.total(part.prepare_time for part in parts)

    def close(self) -> None:
        """Stop reading ahead; parts that are being read are finished and dropped."""
        self._parts.close()


@dataclass(frozen=True)
class Part:
    """Result of reading a part of a window; the last part to complete has the window.

    An error is held instead of raised, since grain adds notes to errors.
    """

    prepare_time: PrepareTime = field(default_factory=PrepareTime)
    window: Window | None = None
    error: PipelineError | None = None


class PartSource:
    """The parts of the windows from a step on, in the form of a grain data source."""

    def __init__(self, plan: ReadPlan, step: int, threads: ReadingThreads) -> None:
        self._plan = plan
        self._step = step
        self._threads = threads
        self._lock = threading.Lock()
        self._buffers: dict[int, WindowBuffer] = {}
        self._parts_read = self._parts_claimed = 0

    def __len__(self) -> int:
        """Number of parts up to the run's last step; huge if there is none, or it has passed."""
        plan = self._plan
        if plan.source.stop is None or self._step >= plan.source.stop:
            return sys.maxsize
        window_numbers = range(plan.source.stop - self._step)
        stop = plan.source.stop
        last = bisect_left(window_numbers, stop, key=lambda n: plan.list_steps(self._step, n).stop)
        return (last + 1) * plan.parts

    @property
    def num_unclaimed(self) -> int:
        """Number of parts that have been read and not taken."""
        return self._parts_read - self._parts_claimed

    def claim(self, parts: int) -> None:
        with self._lock:
            self._parts_claimed += parts

    def __getitem__(self, index: int) -> Part:
        window_number, part = divmod(index, self._plan.parts)
        with self._lock:
            if window_number not in self._buffers:
                steps = self._plan.list_steps(self._step, window_number)
                # A wait for an early window, of a reader that just started, isn't starvation.
                early = self._plan.is_early(window_number)
                self._buffers[window_number] = WindowBuffer(self._plan, steps, early=early)
            buffer = self._buffers[window_number]
        try:
            with self._threads.reading(buffer.count_samples(part)):
                prepare_time, window = buffer.read(part)
        except PipelineError as error:
            return Part(error=error)
        with self._lock:
            self._parts_read += 1
            if window is not None:
                del self._buffers[window_number]
        return Part(prepare_time, window)
