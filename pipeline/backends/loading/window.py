"""A window, the input of a compiled loop: consecutive steps whose batches are on the device.

Several reader threads fill its buffers on the host, which are then transferred.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.backends.loading.loader_stats import PrepareTime, SlowSample
from pipeline.core.errors import DataError, PipelineError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import make_aligned_zeros
from pipeline.data.batch import Batch
from pipeline.data.columns import DECODING_THREADS, BatchedColumn, Column, LazyColumn, Split
from pipeline.data.host_ops import HostMappedColumn
from pipeline.data.order import Batches, SampleOrder
from pipeline.data.random import seed_words
from pipeline.training.parallel.state_sharing import DevicePlacement

PARTS = 16
"""Largest number of parts of a window: enough for all threads, and few enough to cost no time."""
FIRST_WINDOW_DIVISOR = 16
"""A short first window has 1 / 16 of the steps of a full one, so that training begins early. Every
next window has twice the steps of the window before, up to a full window."""


@register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The arrays of a window, on the device."""

    columns: Mapping[str, Array]
    """The whole split, (samples, ...), if `resident`, else (window, batch, ...)."""
    indices: Array
    """Indices of samples, int32 (window, batch)."""
    epochs: Array
    """Epoch of each batch, int32 (window,)."""
    counts: Array
    """Number of valid samples of each batch, int32 (window,)."""
    seed: Array
    """Words of the seed, uint32 (2,)."""
    resident: bool = field(metadata={"static": True})
    samples: int | None = field(default=None, metadata={"static": True})
    """Number of samples if an epoch may repeat them, as in `Batches`. An index is then the sample
    plus a multiple of this number, so that repetitions of a sample draw other random numbers."""


def read_batch(inputs: Inputs, position: Array) -> Batch:
    """Return the batch at a position of a window, inside the compiled loop."""
    indices = inputs.indices[position]
    samples = indices if inputs.samples is None else indices % inputs.samples
    rows = samples if inputs.resident else position
    columns = {name: column[rows] for name, column in inputs.columns.items()}
    epochs = inputs.epochs[position]
    counts = inputs.counts[position]
    return Batch(columns, inputs.seed, epochs, indices, counts, inputs.samples)


@dataclass(frozen=True)
class Window:
    """Steps `start + 1 .. stop`, at positions 0, 1, ... of `inputs`, which can have more."""

    start: int
    stop: int
    inputs: Inputs
    is_early: bool = False
    """Whether this window or the one before is a short first window of a reader, so that training
    begins early. Waiting for it isn't starvation."""

    @property
    def max_steps(self) -> int:
        """Largest number of steps of the loader's windows."""
        return int(self.inputs.counts.shape[0])


def put_inputs(
    columns: Mapping[str, Array],
    batches: Batches,
    seed: int,
    placement: DevicePlacement,
    *,
    resident: bool,
) -> Inputs:
    """Return the inputs of a window from columns on the devices and the order of its samples."""
    batch_size = batches.indices.shape[1]
    rows = placement.list_rows(batch_size)
    indices = placement.put_batches(batches.indices[:, rows], batch_size)
    epochs, counts, words = placement.put((batches.epochs, batches.counts, seed_words(seed)))
    return Inputs(columns, indices, epochs, counts, words, resident, batches.samples)


@dataclass(frozen=True)
class LoaderSource:
    """The split that a loader reads, its order, and the devices that it is transferred to."""

    split: Split
    order: SampleOrder
    placement: DevicePlacement
    stop: int | None = None
    """Last step of the run, after which no sample is read; None: it isn't known."""
    short_first: bool = False
    """Whether a reader's first windows have fewer steps, in arrays of the same shapes."""


@dataclass(frozen=True)
class ReadPlan:
    """The division of a loader's source into windows of at most `window_steps` steps, and parts."""

    source: LoaderSource
    window_steps: int

    @property
    def rows(self) -> slice:
        """Rows of a batch that this process reads. Other processes read the other rows."""
        return self.source.placement.list_rows(self.source.order.batch_size)

    @property
    def batch_rows(self) -> int:
        """Number of rows of a batch that this process reads."""
        return self.rows.stop - self.rows.start

    @property
    def batch_bytes(self) -> int:
        """Bytes of this process's rows of a batch, in all columns."""
        return self.batch_rows * self.source.split.sample_bytes

    @property
    def threads(self) -> int:
        """Largest number of reading threads. One is fast enough for columns in memory."""
        columns = self.source.split.columns.values()
        is_lazy = any(isinstance(column, LazyColumn) for column in columns)
        return min(DECODING_THREADS if is_lazy else 1, self.parts)

    @property
    def parts(self) -> int:
        return min(PARTS, self.window_steps * self.batch_rows)

    def list_steps(self, boundary: int, number: int) -> range:
        """Return the boundaries before the steps of a window, numbered from 0 at `boundary`."""
        first = self._first_steps
        num_short = (-(-self.window_steps // first) - 1).bit_length()
        num_short_before = min(number, num_short)
        num_full_before = number - num_short_before
        start = boundary + first * (2**num_short_before - 1) + num_full_before * self.window_steps
        stop = start + min(self.window_steps, first * 2**num_short_before)
        last = self.source.stop
        if last is not None and start < last:  # A window after the end of the run isn't cut.
            stop = min(stop, last)
        return range(start, stop)

    def is_early(self, number: int) -> bool:
        """Return whether window `number` of a reader, or the window before it, is short."""
        return self._first_steps * 2 ** max(0, number - 1) < self.window_steps

    @property
    def _first_steps(self) -> int:
        divisor = FIRST_WINDOW_DIVISOR if self.source.short_first else 1
        return max(1, self.window_steps // divisor)


class WindowBuffer:
    """The host buffers of a window, filled by several threads at once."""

    def __init__(self, plan: ReadPlan, span: range, *, is_early: bool) -> None:
        started_at = time.perf_counter()
        self._plan = plan
        self._span = span
        self._early = is_early
        self._batches: Batches = plan.source.order.batches(span.start, plan.window_steps)
        self._indices = self._batches.rows[:, plan.rows].ravel()
        keys = self._batches.indices[:, plan.rows].ravel()
        self._draws = np.stack([keys, np.repeat(self._batches.epochs, plan.batch_rows)], axis=1)
        self._columns = {
            name: make_aligned_zeros((len(self._indices), *column.shape[1:]), column.dtype)
            for name, column in plan.source.split.columns.items()
        }
        self._parts_left = plan.parts
        self._lock = threading.Lock()
        self._order_s = time.perf_counter() - started_at

    def read(self, part: int) -> tuple[PrepareTime, Window | None]:
        """Read one part; return its times, and the window if this call has completed it."""
        rows = self._slice_rows(part)
        times = [self._read_column(name, rows) for name in self._columns]
        with self._lock:
            self._parts_left -= 1
            is_complete = self._parts_left == 0
        if not is_complete:
            return PrepareTime.sum_times(times), None
        started_at = time.perf_counter()
        window = self._transfer()
        seconds = {"order": self._order_s, "transfer": time.perf_counter() - started_at}
        return PrepareTime.sum_times([*times, PrepareTime(seconds)]), window

    def count_samples(self, part: int) -> int:
        rows = self._slice_rows(part)
        return int(rows.stop - rows.start)

    def _slice_rows(self, part: int) -> slice:
        """Return the rows of a part. Rows after the last step are in no part."""
        num_rows = len(self._span) * self._plan.batch_rows
        num_parts = self._plan.parts
        return slice(part * num_rows // num_parts, (part + 1) * num_rows // num_parts)

    def _read_column(self, name: str, rows: slice) -> PrepareTime:
        source = self._plan.source
        started_at = time.perf_counter()
        column = source.split.columns[name]
        out = self._columns[name][rows]
        draws = self._draws[rows] if isinstance(column, HostMappedColumn) else None
        slowest = read_into(name, column, self._indices[rows], out, draws)
        return PrepareTime({name: time.perf_counter() - started_at}, slowest)

    def _transfer(self) -> Window:
        source = self._plan.source
        shape = (self._plan.window_steps, self._plan.batch_rows)
        batch_size = source.order.batch_size
        columns = {
            name: source.placement.put_batches(values.reshape(shape + values.shape[1:]), batch_size)
            for name, values in self._columns.items()
        }
        inputs = put_inputs(
            columns, self._batches, source.order.seed, source.placement, resident=False
        )
        return Window(self._span.start, self._span.stop, inputs, self._early)


def read_into(
    name: str,
    column: Column,
    indices: np.ndarray,
    out: np.ndarray,
    draws: np.ndarray | None = None,
) -> SlowSample | None:
    """Read samples into `out`; return the slowest sample of a lazy column, None for other columns.

    `draws`, int (n, 2), are the keys and epochs by which host ops draw; None without host ops.
    Raises DataError, which names the sample of a lazy column.
    """
    if isinstance(column, np.ndarray):
        # With the default mode, numpy would fill a copy of `out` first.
        np.take(column, indices, axis=0, out=out, mode="clip")
        return None
    try:
        if isinstance(column, BatchedColumn):
            column.read_into(indices, out)
            return None
        if isinstance(column, LazyColumn):
            return _decode_into(name, column, indices, out, draws)
        out[:] = column[indices]
    except PipelineError:
        raise
    except Exception as error:
        raise DataError(f"column {name}: {type(error).__name__}: {error}") from error
    return None


def _decode_into(
    name: str,
    column: LazyColumn,
    indices: np.ndarray,
    out: np.ndarray,
    draws: np.ndarray | None,
) -> SlowSample | None:
    slowest = None
    for position, sample in enumerate(indices.tolist()):
        if position and sample == indices[position - 1] and draws is None:
            # A short batch is filled up with copies of one sample.
            out[position] = out[position - 1]
            continue
        started_at = time.perf_counter()
        try:
            if draws is not None and isinstance(column, HostMappedColumn):
                out[position] = column.sample_at(sample, *draws[position].tolist())
            else:
                out[position] = column.sample(sample)
        except PipelineError:
            raise
        except Exception as error:
            place = f"column {name}, sample {sample} ({show_name(column.sample_name(sample))})"
            raise DataError(f"{place}: {type(error).__name__}: {error}") from error
        read_s = time.perf_counter() - started_at
        if slowest is None or read_s > slowest.read_s:
            slowest = SlowSample(name, sample, show_name(column.sample_name(sample)), read_s)
    return slowest
