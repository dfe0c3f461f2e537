"""A split that is larger than the device: samples travel with their window.

grain reads, in several threads where samples are decoded one by one, and always one window ahead.
What it reads is parts of windows, which go straight to their place in the window's buffer; the
thread that completes a window moves it to the device. A part is a pure function of its number, so a
jump to any step opens a reader there and walks over nothing.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import Literal

import jax

from pipeline.data.columns import Split
from pipeline.data.feed.feed_stats import PrepareTime
from pipeline.data.feed.window import Window
from pipeline.data.feed.window_buffer import Clock, Filling, Plan
from pipeline.data.order import SampleOrder
from pipeline.errors import PipelineError


class StreamSupply:
    """Windows whose samples are read while the window before is in use."""

    kind: Literal["resident", "stream"] = "stream"

    def __init__(
        self,
        split: Split,
        order: SampleOrder,
        device: jax.Device,
        window_steps: int,
        stop: int | None,
        clock: Clock,
    ) -> None:
        self._plan = Plan(split, order, device, window_steps, stop, clock)
        self.device_bytes = 2 * window_steps * self._plan.batch_bytes
        self._reader: Reader | None = None

    def ready_steps(self, step: int) -> int:
        """How many steps of the window from `step` have been read."""
        reader = self._reader
        return reader.ready_steps() if reader is not None and reader.step == step else 0

    def take(self, step: int) -> tuple[Window, PrepareTime]:
        """The window from `step`. Raises DataError where a sample can't be read."""
        if self._reader is None or self._reader.step != step:
            self.close()
            self._reader = Reader(self._plan, step)
        try:
            return self._reader.take()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class Reader:
    """Reads window after window from boundary `step` on."""

    def __init__(self, plan: Plan, step: int) -> None:
        # Importing it takes 0.1 s, which runs without a stream are spared.
        import grain

        self.step: int | None = step
        """Where the next window starts; None behind the last one."""
        self._plan = plan
        self._source = PartSource(plan, step)
        options = grain.ReadOptions(num_threads=plan.threads, prefetch_buffer_size=plan.parts)
        self._parts = iter(grain.MapDataset.source(self._source).to_iter_dataset(options))

    def ready_steps(self) -> int:
        """How many steps of the next window have been read."""
        if self.step is None:
            return 0
        steps = self._plan.window_stop(self.step) - self.step
        return self._source.unclaimed * steps // self._plan.parts

    def take(self) -> tuple[Window, PrepareTime]:
        """The next window. As its parts are taken, reading goes on with the one behind it."""
        parts = [self._part() for _ in range(self._plan.parts)]
        self._source.claim(len(parts))
        (window,) = (part.window for part in parts if part.window is not None)
        self.step = window.stop if window.stop != self._plan.stop else None
        return window, PrepareTime.total(part.effort for part in parts)

    def _part(self) -> Part:
        part = next(self._parts)
        if part.error is not None:
            raise part.error
        return part

    def close(self) -> None:
        """Stop reading ahead; what is being read at the moment is finished and dropped."""
        self._parts.close()


@dataclass(frozen=True)
class Part:
    """A part of a window was read; the one that was completed last brings the window.

    An error is carried, since one that is raised comes out of grain with notes about grain.
    """

    effort: PrepareTime = field(default_factory=PrepareTime)
    window: Window | None = None
    error: PipelineError | None = None


class PartSource:
    """The parts of the windows from a step on, in the form of a grain data source."""

    def __init__(self, plan: Plan, step: int) -> None:
        self._plan, self._step = plan, step
        self._lock = threading.Lock()
        self._filling: dict[int, Filling] = {}
        self._read = self._claimed = 0

    def __len__(self) -> int:
        """Up to the window that reaches the last step; where that is passed, without end."""
        plan = self._plan
        if plan.stop is None or self._step >= plan.stop:
            return sys.maxsize
        return -(-(plan.stop - self._step) // plan.window_steps) * plan.parts

    @property
    def unclaimed(self) -> int:
        """How many parts have been read that nobody has taken."""
        return self._read - self._claimed

    def claim(self, parts: int) -> None:
        """So many have been taken."""
        with self._lock:
            self._claimed += parts

    def __getitem__(self, index: int) -> Part:
        number, part = divmod(index, self._plan.parts)
        with self._lock:
            if number not in self._filling:
                start = self._step + number * self._plan.window_steps
                self._filling[number] = Filling(self._plan, start)
            filling = self._filling[number]
        try:
            effort, window = filling.read(part)
        except PipelineError as error:
            return Part(error=error)
        with self._lock:
            self._read += 1
            if window is not None:
                del self._filling[number]
        return Part(effort, window)
