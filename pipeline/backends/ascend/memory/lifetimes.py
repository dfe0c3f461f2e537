"""Lifetimes of a step's buffers: from the first task that touches each to the last."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.backends.ascend.chip.tasks import TaskGraph

Lifetime = tuple[int, int]
"""First task during which a buffer is live, and the first one after its last."""


def lifetimes(graph: TaskGraph) -> dict[int, Lifetime]:
    """Return buffer -> lifetime, for buffers that share no other's memory, by ascending index.

    A task's inputs live until the task ends. Parameters, state and constants live always. Inputs
    live from the start of a step, outputs to its end. A value that crosses the border of a loop
    lives through all of it, as the loop's tasks are in the graph once and run many times. A buffer
    that no task touches has no lifetime; one with another owner (see `owners`) adds to its.
    """
    end = max(len(graph.tasks), 1)
    owner = owners(graph)
    first, last = _task_spans(graph, owner)
    for index in graph.inputs:
        first[owner[index]] = 0
        last[owner[index]] = max(last[owner[index]], 0)
    for index in graph.outputs:
        first[owner[index]] = max(first[owner[index]], 0)
        last[owner[index]] = end - 1
    for start, stop in _loops(graph):
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


def owners(graph: TaskGraph) -> list[int]:
    """Return the buffer whose memory each buffer uses.

    That is the buffer itself, or the one that it updates in place or is a part of. Raises
    ValueError for buffers that are parts of each other in a circle.
    """
    above = [graph.aliases.get(buffer.index, buffer.within) for buffer in graph.buffers]
    owner_of = []
    for index in range(len(above)):
        owner = index
        for _ in range(len(above) + 1):
            parent = above[owner]
            if parent is None or parent == owner:
                break
            owner = parent
        else:
            raise ValueError(f"buffer {index} ({graph.buffers[index].name}) is within itself")
        owner_of.append(owner)
    return owner_of


def _task_spans(graph: TaskGraph, owner: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last task that touch each buffer, -1 for none.

    A buffer that is read before it is written was there from the start.
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


def _loops(graph: TaskGraph) -> Iterator[Lifetime]:
    """Return runs of tasks that are repeated: a scan, with the scans in it."""
    start = None
    for position, task in enumerate(graph.tasks):
        if task.repeat > 1 and start is None:
            start = position
        elif task.repeat == 1 and start is not None:
            yield start, position
            start = None
    if start is not None:
        yield start, len(graph.tasks)
