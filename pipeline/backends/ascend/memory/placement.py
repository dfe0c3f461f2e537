"""Lifetimes of a step's buffers, and offsets for blocks of memory with known lifetimes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from pipeline.backends.ascend.chip.tasks import TaskGraph

Fit = Literal["best", "lowest"]
FITS: tuple[Fit, ...] = ("best", "lowest")
"""The gap that a block takes: the tightest or the lowest that it fits in."""
ORDERS = ("size", "area")
"""Blocks are placed by descending bytes, or by descending bytes x lifetime."""
CLOSE = 0.005
"""Other heuristics are tried only to save more than this share of memory."""
Lifetime = tuple[int, int]
"""First task during which a buffer is live, and the first task after its death."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are in use from the start of task `birth` to the end of task `death - 1`."""

    nbytes: int
    birth: int
    death: int


@dataclass(frozen=True)
class Packing:
    """An offset in bytes for every block, and the end of the highest block."""

    offsets: tuple[int, ...]
    extent_bytes: int


def sum_live_bytes(blocks: Iterable[Block], num_tasks: int) -> np.ndarray:
    """Return the bytes live during each task: int64, shape (num_tasks,)."""
    change = np.zeros(num_tasks + 1, np.int64)
    for block in blocks:
        change[block.birth] += block.nbytes
        change[block.death] -= block.nbytes
    return np.cumsum(change[:num_tasks])


def pack_blocks(blocks: tuple[Block, ...], bound_bytes: int) -> Packing:
    """Return offsets at which no two blocks that live at the same time overlap.

    Blocks are placed from the largest down, each in the tightest gap between placed blocks that
    live at the same time, as in MindSpore's SOMAS. If the extent isn't `CLOSE` to `bound_bytes`,
    the most bytes that are live at once, other orders and the lowest gap are tried too. The best
    packing is returned.
    """
    rows = [(block.nbytes, block.birth, block.death) for block in blocks]
    table = np.array(rows, np.int64).reshape(-1, 3)
    best: Packing | None = None
    nbytes, birth, death = table.T
    for order, fit in product(ORDERS, FITS):
        limit = None if best is None else best.extent_bytes
        weight = nbytes if order == "size" else nbytes * (death - birth)
        offsets = _place_blocks(table, np.argsort(-weight, kind="stable"), fit, limit)
        if offsets is not None:
            extent = int((offsets + nbytes).max(initial=0))
            best = Packing(tuple(offsets.tolist()), extent)
        if best is not None and best.extent_bytes <= bound_bytes * (1 + CLOSE):
            break
    assert best is not None, "the first heuristic has no limit to fail at"
    return best


def _place_blocks(
    table: np.ndarray, order: np.ndarray, fit: Fit, limit: int | None
) -> np.ndarray | None:
    """Return offsets of the rows of `table` (nbytes, birth, death), placed in an order.

    Returns None if a block reaches the `limit` in bytes.
    """
    # A column (start, end, birth, death) for every placed block, by ascending start. The first
    # column is address 0, an empty block that conflicts with all blocks.
    offsets = np.zeros(len(table), np.int64)
    placed = np.zeros((4, len(table) + 1), np.int64)
    placed[3, 0] = np.iinfo(np.int64).max
    placed[2, 0] = -1
    rows = table.tolist()
    for count, index in enumerate(order.tolist(), start=1):
        nbytes, birth, death = rows[index]
        starts, ends, births, deaths = placed[:, :count]
        rivals = ((births < death) & (deaths > birth)).nonzero()[0]
        offset = _find_offset(starts.take(rivals), ends.take(rivals), nbytes, fit)
        if limit is not None and offset + nbytes >= limit:
            return None
        offsets[index] = offset
        place = int(starts.searchsorted(offset, side="right"))
        placed[:, place + 1 : count + 1] = placed[:, place:count]
        placed[:, place] = (offset, offset + nbytes, birth, death)
    return offsets


def _find_offset(starts: np.ndarray, ends: np.ndarray, nbytes: int, fit: Fit) -> int:
    """Return a free offset beside blocks `starts` .. `ends`, sorted by start."""
    tops = np.maximum.accumulate(ends)
    gaps = starts[1:] - tops[:-1]
    fitting = (gaps >= nbytes).nonzero()[0]
    if not fitting.size:
        return int(tops[-1])
    return int(tops[fitting[gaps[fitting].argmin()] if fit == "best" else fitting[0]])


def find_lifetimes(graph: TaskGraph) -> dict[int, Lifetime]:
    """Return buffer -> lifetime, by ascending index, for buffers with their own memory.

    A task's inputs live until the task ends. Parameters, state and constants always live. Inputs
    live from the start of a step, outputs to its end. A value that crosses the border of a loop
    lives through all of the loop, whose tasks are in the graph once and run many times. A buffer
    that no task touches has no lifetime. A buffer in the memory of another (see `find_owners`)
    extends the other's lifetime.
    """
    end = max(len(graph.tasks), 1)
    owner = find_owners(graph)
    first, last = _find_task_spans(graph, owner)
    for index in graph.inputs:
        first[owner[index]] = 0
        last[owner[index]] = max(last[owner[index]], 0)
    for index in graph.outputs:
        first[owner[index]] = max(first[owner[index]], 0)
        last[owner[index]] = end - 1
    for start, stop in _find_loops(graph):
        made_inside = (first >= start) & (first < stop) & (last >= stop)
        used_inside = (first >= 0) & (first < start) & (last >= start) & (last < stop)
        first[made_inside] = start
        last[used_inside] = stop - 1
    named = {*graph.parameters, *graph.state}
    for buffer in graph.buffers:
        if buffer.role in ("parameter", "state", "constant") or buffer.index in named:
            first[owner[buffer.index]] = 0
            last[owner[buffer.index]] = end - 1
    spans = enumerate(zip(first.tolist(), last.tolist(), strict=True))
    return {index: (begin, final + 1) for index, (begin, final) in spans if begin >= 0}


def find_owners(graph: TaskGraph) -> list[int]:
    """Return each buffer's owner: itself, or the buffer that it updates in place or is within."""
    parents = [graph.aliases.get(buffer.index, buffer.within) for buffer in graph.buffers]
    owners = []
    for index, parent in enumerate(parents):
        owner = index
        while parent is not None and parent != owner:
            owner = parent
            parent = parents[owner]
        owners.append(owner)
    return owners


def _find_task_spans(graph: TaskGraph, owner: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last task that touch each buffer: int64, -1 if none does.

    A buffer that is read before it is written lives from task 0.
    """
    first = np.full(len(owner), -1, np.int64)
    last = np.full(len(owner), -1, np.int64)
    for position, task in enumerate(graph.tasks):
        for touched, since in ((task.reads, 0), (task.writes, position)):
            for index in (owner[part] for part in touched):
                last[index] = position
                if first[index] < 0:
                    first[index] = since
    return first, last


def _find_loops(graph: TaskGraph) -> Iterator[Lifetime]:
    """Yield the runs of repeated tasks: each scan, with the scans inside it."""
    start = None
    for position, task in enumerate(graph.tasks):
        # A scan of no iterations inside another scan repeats its tasks 0 times.
        if task.repeat > 1 and start is None:
            start = position
        elif task.repeat == 1 and start is not None:
            yield start, position
            start = None
    if start is not None:
        yield start, len(graph.tasks)
