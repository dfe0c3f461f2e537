"""Lifetimes of a step's buffers: from the first task that touches each to the last."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.backends.ascend.chip.tasks import TaskGraph

Lifetime = tuple[int, int]
"""First task during which a buffer is live, and the first one after its last."""


def lifetimes(graph: TaskGraph) -> dict[int, Lifetime]:
    """Return buffer -> lifetime, for buffers that have memory of their own, by ascending index.

    A task's inputs live until the task ends. Parameters, state and constants live always. Inputs
    live from the start of a step, outputs to its end. A value that crosses the border of a loop
    lives through all of it, as the loop's tasks are in the graph once and run many times. A buffer
    that no task touches has no lifetime; one with another owner (see `owners`) adds to its.
    """
    end = max(len(graph.tasks), 1)
    owner = owners(graph)
    first, last = _spans(graph, owner)
    for index in (owner[given] for given in graph.inputs):
        first[index], last[index] = 0, max(last[index], 0)
    for index in (owner[wanted] for wanted in graph.outputs):
        first[index], last[index] = max(first[index], 0), end - 1
    for start, stop in _loops(graph):
        made_inside = (first >= start) & (first < stop) & (last >= stop)
        used_inside = (first >= 0) & (first < start) & (last >= start) & (last < stop)
        first[made_inside] = start
        last[used_inside] = stop - 1
    for index in (owner[kept] for kept in _permanent(graph)):
        first[index], last[index] = 0, end - 1
    spans = enumerate(zip(first.tolist(), last.tolist(), strict=True))
    return {index: (begin, final + 1) for index, (begin, final) in spans if begin >= 0}


def owners(graph: TaskGraph) -> list[int]:
    """Return, for every buffer, the one whose memory it uses.

    That is its own, or the buffer that it updates in place or is a part of. Raises ValueError where
    buffers are parts of each other in a circle.
    """
    above = [graph.aliases.get(each.index, each.within) for each in graph.buffers]
    owner_of = []
    for index in range(len(above)):
        owner, steps = index, 0
        while (whole := above[owner]) is not None and whole != owner:
            owner, steps = whole, steps + 1
            if steps > len(above):
                raise ValueError(f"buffer {index} ({graph.buffers[index].name}) is within itself")
        owner_of.append(owner)
    return owner_of


def _spans(graph: TaskGraph, owner: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last task that touch each buffer, -1 where none does.

    A buffer that is read before it is written was there from the start.
    """
    first, last = [-1] * len(owner), [-1] * len(owner)
    for position, task in enumerate(graph.tasks):
        for touched, since in ((task.reads, 0), (task.writes, position)):
            for index in (owner[part] for part in touched):
                last[index] = position
                if first[index] < 0:
                    first[index] = since
    return np.array(first, np.int64), np.array(last, np.int64)


def _permanent(graph: TaskGraph) -> Iterator[int]:
    """Return buffers that outlive the step."""
    named = {*graph.parameters, *graph.state}
    for buffer in graph.buffers:
        if buffer.role in ("parameter", "state", "constant") or buffer.index in named:
            yield buffer.index


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
