"""How batches reach the device, window by window.

A *window* is a run of consecutive steps whose sample indices (and, when streaming, whose samples)
are on the device together; the compiled loop picks batch after batch out of it. A resident feed
puts the whole split on the device once, as it was read; a streamed one moves a window's samples,
preparing the next window while the device works on this one (S-03).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

import jax
import numpy as np
from jax.tree_util import register_dataclass

from pipeline.data.columns import Split
from pipeline.data.order import Batches, Order
from pipeline.data.random import seed_words
from pipeline.training.state import Array, Batch

RESIDENT_LIMIT_BYTES = 2 << 30
"""The largest split kept on the device; MindSpore's device cache has the same bound (S-15)."""

WINDOW_LIMIT_BYTES = 256 << 20
"""The most that is moved to the device at once (S-15)."""

WINDOW_STEPS = 1024
"""The longest window. One value for every sink size, so that one program serves them all."""


@register_dataclass
@dataclass(frozen=True)
class Inputs:
    """A window on the device.

    `columns` are (samples, ...) when resident, else (window, batch, ...). `indices` are int32
    (window, batch), `passes` and `counts` int32 (window,), `seed` uint32 (2,).
    """

    columns: Mapping[str, Array]
    indices: Array
    passes: Array
    counts: Array
    seed: Array
    resident: bool = field(metadata={"static": True})


def batch_at(inputs: Inputs, position: Array) -> Batch:
    """The batch at a position of a window; runs inside the compiled loop."""
    sample = inputs.indices[position]
    rows = sample if inputs.resident else position
    columns = {name: column[rows] for name, column in inputs.columns.items()}
    return Batch(columns, inputs.seed, inputs.passes[position], sample, inputs.counts[position])


@dataclass(frozen=True)
class Window:
    """Steps `start + 1 .. stop`, at positions 0 .. of `inputs`."""

    start: int
    stop: int
    inputs: Inputs


class Feed(Protocol):
    """Where a backend gets windows from."""

    kind: Literal["resident", "stream"]
    device_bytes: int

    def window(self, step: int) -> Window:
        """The window that holds the step after boundary `step`; seeking costs nothing extra."""


def make_feed(
    split: Split,
    order: Order,
    device: jax.Device,
    kind: Literal["auto", "resident", "stream"],
) -> Feed:
    """A feed of the asked kind; `auto` is resident where the split fits."""
    fits = split_bytes(split) <= RESIDENT_LIMIT_BYTES
    resident = kind == "resident" or (kind == "auto" and fits)
    return ResidentFeed(split, order, device) if resident else StreamedFeed(split, order, device)


def split_bytes(split: Split) -> int:
    """The size of a split as it was read."""
    return sum(
        int(np.prod(column.shape, dtype=np.int64)) * np.dtype(column.dtype).itemsize
        for column in split.columns.values()
    )


class ResidentFeed:
    """The split lies on the device; a window moves only indices."""

    kind: Literal["resident", "stream"] = "resident"

    def __init__(self, split: Split, order: Order, device: jax.Device) -> None:
        self._order, self._device = order, device
        self._columns = {
            name: jax.device_put(column[:], device) for name, column in split.columns.items()
        }
        self.device_bytes = split_bytes(split)
        self._window: Window | None = None

    def window(self, step: int) -> Window:
        """The window from `step`, or the last one while it still holds the step."""
        last = self._window
        if last is None or not last.start <= step < last.stop:
            batches = self._order.batches(step, WINDOW_STEPS)
            inputs = _inputs(self._columns, batches, self._order.seed, self._device, resident=True)
            self._window = last = Window(step, step + WINDOW_STEPS, inputs)
        return last


class StreamedFeed:
    """Samples travel with their window; one window is prepared ahead, on a thread of its own."""

    kind: Literal["resident", "stream"] = "stream"

    def __init__(self, split: Split, order: Order, device: jax.Device) -> None:
        self._split, self._order, self._device = split, order, device
        batch_bytes = max(1, split_bytes(split) * order.batch_size // max(1, len(split)))
        self._steps = max(1, min(WINDOW_STEPS, WINDOW_LIMIT_BYTES // batch_bytes))
        self.device_bytes = 2 * self._steps * batch_bytes
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._window: Window | None = None
        self._ahead: tuple[int, Future[Window]] | None = None

    def window(self, step: int) -> Window:
        """The window from `step`, waiting for its samples where they are not there yet."""
        last = self._window
        if last is None or not last.start <= step < last.stop:
            if self._ahead is not None and self._ahead[0] == step:
                last = self._ahead[1].result()
            else:
                last = self._read(step)
            self._window = last
            self._ahead = (last.stop, self._reader.submit(self._read, last.stop))
        return last

    def _read(self, step: int) -> Window:
        batches = self._order.batches(step, self._steps)
        columns = {
            name: jax.device_put(
                column[batches.indices.ravel()].reshape(*batches.indices.shape, *column.shape[1:]),
                self._device,
            )
            for name, column in self._split.columns.items()
        }
        inputs = _inputs(columns, batches, self._order.seed, self._device, resident=False)
        return Window(step, step + self._steps, inputs)


def _inputs(
    columns: Mapping[str, Array],
    batches: Batches,
    seed: int,
    device: jax.Device,
    *,
    resident: bool,
) -> Inputs:
    plan = (batches.indices, batches.passes, batches.counts, seed_words(seed))
    indices, passes, counts, seed_on_device = jax.device_put(plan, device)
    return Inputs(columns, indices, passes, counts, seed_on_device, resident)
