"""Bytes of each task's reads that hit the L2 cache, by stack distances between tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.backends.ascend.chip.tasks import Buffer, Task, TaskGraph

LONG_RUN_BYTES = 512
"""Bytes of a transfer's burst: 16 blocks of 32 bytes."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one execution of a task: read from the L2, read from device memory, and written."""

    l2_bytes: float
    hbm_bytes: float
    write_bytes: float

    @property
    def read_bytes(self) -> float:
        """Bytes read from the L2 and from device memory."""
        return self.l2_bytes + self.hbm_bytes


def measure_traffic(
    graph: TaskGraph, l2_bytes: float, full: float, none: float
) -> tuple[Traffic, ...]:
    """Return the traffic of every task.

    The share of a buffer in the L2 depends on the traffic since the buffer was last written, or
    read in full. It is 1 up to `full * l2_bytes`, 0 from `none * l2_bytes`, and linear between the
    two.
    """
    touched_at: dict[int, float] = {}
    clock_bytes = 0.0
    traffic = []
    for task in graph.tasks:
        reads = [(index, read_bytes(task, graph.buffers, index)) for index in task.reads]
        write_bytes = float(sum(graph.buffers[index].nbytes for index in task.writes))
        read_total = sum(size for _, size in reads)
        moved_bytes = read_total + write_bytes
        hit_bytes = 0.0
        for index, size in reads:
            if index in touched_at and size:
                since = clock_bytes - touched_at[index]
                # Of the task's other traffic, half comes first on average.
                distance = (since + size + 0.5 * (moved_bytes - size)) / l2_bytes
                hit_bytes += size * min(max((none - distance) / (none - full), 0.0), 1.0)
        traffic.append(Traffic(hit_bytes, read_total - hit_bytes, write_bytes))
        clock_bytes += moved_bytes
        # A partial read, such as a gather's, leaves the rest of its buffer where it was.
        whole = [index for index, size in reads if size == graph.buffers[index].nbytes]
        touched_at.update(dict.fromkeys((*whole, *task.writes), clock_bytes))
    return tuple(traffic)


def read_bytes(task: Task, buffers: Sequence[Buffer], index: int) -> float:
    """Return the bytes of a buffer that a task reads. Gathers and slices read a part of it."""
    buffer = buffers[index]
    is_copy = task.cost_class == "copy"
    if task.cost_class == "gather" or (is_copy and _copies_long_runs(task, buffers)):
        return float(min(buffer.nbytes, sum(buffers[output].nbytes for output in task.writes)))
    return float(buffer.nbytes)


def _copies_long_runs(task: Task, buffers: Sequence[Buffer]) -> bool:
    """Return whether a copy reads only what it writes, as its runs are at least a burst long.

    In the Wide & Deep trace (2020) slices of 32 bytes a row cost as much as the whole matrix.
    """
    if len(task.reads) != 1 or len(task.writes) != 1:
        return False
    source = buffers[task.reads[0]]
    part = buffers[task.writes[0]]
    if len(source.shape) != len(part.shape) or not part.shape:
        return False
    pairs = enumerate(zip(source.shape, part.shape, strict=True))
    axis = max((axis for axis, (size, length) in pairs if size != length), default=0)
    run = math.prod(part.shape[axis:])
    return run * part.nbytes / max(1, math.prod(part.shape)) >= LONG_RUN_BYTES
