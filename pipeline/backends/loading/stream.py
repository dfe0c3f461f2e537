"""Windows of a split that doesn't fit on the device: samples are transferred with their window.

Threads read one window ahead: several threads if samples are decoded one by one (`ReadingThreads`
chooses the number). They read parts of a window into its buffer, and the thread that completes the
window transfers it. A reader can start at any step without reading the samples before it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from pipeline.backends.loading.loader_stats import PrepareTime
from pipeline.backends.loading.reading_threads import ReadingThreads
from pipeline.backends.loading.window import Window
from pipeline.backends.loading.window_buffer import LoaderSource, ReadPlan, WindowBuffer

Part = tuple[PrepareTime, Window | None]
"""The time of reading a part of a window, and the window if this part has completed it."""


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
