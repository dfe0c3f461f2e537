"""When each buffer of a step is live: from the first task that touches it to the last."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.backends.ascend.tasks import TaskGraph

Lifetime = tuple[int, int]
"""The first task during which a buffer is live, and the first one after that during which not."""


def lifetimes(graph: TaskGraph) -> dict[int, Lifetime]:
    """Buffer -> lifetime, for buffers that need memory of their own, by ascending index.

    What a task reads lives until the task ends. Parameters, state and constants live always.
    Inputs live from the start of a step, outputs to its end. A buffer that is an update in place
    is the one that it updates. A value that crosses the border of a loop lives through all of it,
    for the loop's tasks are in the graph once and run many times. What no task touches has none.
    """
    end = max(len(graph.tasks), 1)
    first, last = _spans(graph)
    for index in _roots(graph, graph.inputs):
        first[index], last[index] = 0, max(last[index], 0)
    for index in _roots(graph, graph.outputs):
        first[index], last[index] = max(first[index], 0), end - 1
    for start, stop in _loops(graph):
        made_inside = (first >= start) & (first < stop) & (last >= stop)
        used_inside = (first >= 0) & (first < start) & (last >= start) & (last < stop)
        first[made_inside] = start
        last[used_inside] = stop - 1
    for index in _permanent(graph):
        first[index], last[index] = 0, end - 1
    spans = enumerate(zip(first.tolist(), last.tolist(), strict=True))
    return {index: (begin, final + 1) for index, (begin, final) in spans if begin >= 0}


def _spans(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray]:
    """First and last task that touches a buffer, -1 where none does.

    What is read before it is written was there from the start.
    """
    first, last = [-1] * len(graph.buffers), [-1] * len(graph.buffers)
    for position, task in enumerate(graph.tasks):
        for touched, since in ((task.reads, 0), (task.writes, position)):
            for index in _roots(graph, touched):
                last[index] = position
                if first[index] < 0:
                    first[index] = since
    return np.array(first, np.int64), np.array(last, np.int64)


def root(graph: TaskGraph, index: int) -> int:
    """The buffer whose memory a buffer uses: its own, or that which it updates in place."""
    while index in graph.aliases:
        index = graph.aliases[index]
    return index


def _roots(graph: TaskGraph, indices: tuple[int, ...]) -> Iterator[int]:
    return (root(graph, index) for index in indices)


def _permanent(graph: TaskGraph) -> Iterator[int]:
    """Buffers that outlive the step."""
    named = {*graph.parameters, *graph.state}
    for buffer in graph.buffers:
        kept = buffer.role in ("parameter", "state", "constant") or buffer.index in named
        if kept and buffer.index not in graph.aliases:
            yield buffer.index


def _loops(graph: TaskGraph) -> Iterator[Lifetime]:
    """Runs of tasks that are repeated: a scan, with the scans in it."""
    begin = None
    for position, task in enumerate(graph.tasks):
        if task.repeat > 1 and begin is None:
            begin = position
        elif task.repeat == 1 and begin is not None:
            yield begin, position
            begin = None
    if begin is not None:
        yield begin, len(graph.tasks)
