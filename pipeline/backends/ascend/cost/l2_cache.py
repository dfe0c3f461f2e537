"""Share of a task's reads that hit the L2, by stack distances over the order of the tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.backends.ascend.chip.tasks import Buffer, Task, TaskGraph

LONG_RUN_BYTES = 512
"""Sixteen blocks of 32 bytes, the width of a transfer's burst."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one execution of a task: read from the L2, from device memory, written."""

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
    """Return the traffic of every task, in one pass over them.

    A byte last touched `d` bytes of traffic ago is in the L2 for certain while d is under `full *
    l2_bytes`, never when over `none * l2_bytes`, in between by a straight line.
    """
    touched_at: dict[int, float] = {}
    clock_bytes = 0.0
    traffic = []
    for task in graph.tasks:
        reads = [(index, read_bytes(task, graph.buffers, index)) for index in task.reads]
        write_bytes = float(sum(graph.buffers[index].nbytes for index in task.writes))
        total = sum(size for _, size in reads)
        moved_bytes = total + write_bytes
        hit_bytes = 0.0
        for index, size in reads:
            if index in touched_at and size:
                since = clock_bytes - touched_at[index]
                distance = (since + size + 0.5 * (moved_bytes - size)) / l2_bytes
                hit_bytes += size * min(max((none - distance) / (none - full), 0.0), 1.0)
        traffic.append(Traffic(hit_bytes, total - hit_bytes, write_bytes))
        clock_bytes += moved_bytes
        touched_at.update(dict.fromkeys((*task.reads, *task.writes), clock_bytes))
    return tuple(traffic)


def read_bytes(task: Task, buffers: Sequence[Buffer], index: int) -> float:
    """Return the bytes of a buffer that a task reads: rows of a table, the part of a slice."""
    buffer = buffers[index]
    if task.cost_class == "gather" or (task.cost_class == "copy" and _is_long_runs(task, buffers)):
        return float(min(buffer.nbytes, sum(buffers[output].nbytes for output in task.writes)))
    return float(buffer.nbytes)


def _is_long_runs(task: Task, buffers: Sequence[Buffer]) -> bool:
    """Return whether a copy takes long runs of its input, so that it reads no more than it takes.

    In the Wide & Deep trace (2020) slices of 32 bytes a row cost as much as the whole.
    """
    if len(task.reads) != 1 or len(task.writes) != 1:
        return False
    source = buffers[task.reads[0]]
    part = buffers[task.writes[0]]
    if len(source.shape) != len(part.shape) or not part.shape:
        return False
    pairs = enumerate(zip(source.shape, part.shape, strict=True))
    axis = max((axis for axis, (size, taken) in pairs if size != taken), default=0)
    run = math.prod(part.shape[axis:])
    return run * part.nbytes / max(1, math.prod(part.shape)) >= LONG_RUN_BYTES
