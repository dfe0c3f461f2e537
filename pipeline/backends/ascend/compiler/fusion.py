"""Buffer fusion: vector kernels that take a product's result before it reaches memory."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.compiler.device_formats import is_aligned
from pipeline.backends.ascend.compiler.op_patterns import FusionPattern, Patterns


def fuse(graph: TaskGraph, patterns: Patterns) -> TaskGraph:
    """Return the graph with every fusion that the patterns allow, each product fused once."""
    uses = _uses(graph)
    into: dict[int, tuple[int, FusionPattern]] = {}
    for place, task in enumerate(graph.tasks):
        if task.cube is None:
            continue
        partner = _partner(graph, uses, place, patterns)
        if partner is not None and partner[0] not in into:
            into[partner[0]] = (place, partner[1])
    return _rewritten(graph, into)


@dataclass(frozen=True)
class _Uses:
    """Readers of each buffer in program order, and the graph's outputs."""

    readers: dict[int, list[int]]
    outputs: frozenset[int]


def _uses(graph: TaskGraph) -> _Uses:
    readers: dict[int, list[int]] = defaultdict(list)
    for place, task in enumerate(graph.tasks):
        for buffer in task.reads:
            readers[buffer].append(place)
    return _Uses(dict(readers), frozenset(graph.outputs))


def _partner(
    graph: TaskGraph, uses: _Uses, place: int, patterns: Patterns
) -> tuple[int, FusionPattern] | None:
    """Return the first reader of a product, which may fuse with it: no other may run before it."""
    task = graph.tasks[place]
    output = task.writes[0]
    readers = uses.readers.get(output, [])
    for pattern in patterns.fusions:
        if task.cost_class not in pattern.producer or pattern.phase not in (None, task.phase):
            continue
        single = len(readers) == 1 and output not in uses.outputs
        if not readers or not (pattern.keep or single):
            continue
        first = graph.tasks[readers[0]]
        if _takes(pattern, task, first) and not _reshaped_before(graph, task, first):
            return readers[0], pattern
    return None


def _reshaped_before(graph: TaskGraph, task: Task, other: Task) -> bool:
    """Return whether a product's result must leave its blocks before a kernel reads it.

    MindSpore's Dense works on the rows of all samples and reshapes after its bias. Tokens that are
    no whole sixteens make that a conversion, so that what reads other tokens, too, can't fuse.
    """
    output = graph.buffers[task.writes[0]]
    if task.cost_class != "matmul" or len(output.shape) < 3 or is_aligned(output.shape):
        return False
    size = math.prod(output.shape)
    others = (index for index in other.reads if index not in task.writes)
    return any(math.prod(graph.buffers[index].shape) == size for index in others)


def _takes(pattern: FusionPattern, task: Task, other: Task) -> bool:
    if other.cost_class not in pattern.consumer or other.phase != task.phase:
        return False
    if other.repeat != task.repeat or other.cube is not None or other.vector is None:
        return False
    operations = other.vector.simple + other.vector.heavy
    return pattern.max_operations is None or (
        operations <= pattern.max_operations and other.vector.heavy == 0
    )


def _rewritten(graph: TaskGraph, into: dict[int, tuple[int, FusionPattern]]) -> TaskGraph:
    """Return the tasks with partners at the vector kernel's place, after all inputs of both."""
    products = {producer for producer, _ in into.values()}
    tasks: list[Task] = []
    places: dict[int, int] = {}
    for place, task in enumerate(graph.tasks):
        if place in products:
            continue
        places[place] = len(tasks)
        if place in into:
            producer, pattern = into[place]
            places[producer] = len(tasks)
            task = _joined(graph.tasks[producer], task, pattern)
        tasks.append(task)
    gradients = tuple((name, size, places[maker]) for name, size, maker in graph.gradients)
    return replace(graph, tasks=tuple(tasks), gradients=gradients)


def _joined(product: Task, other: Task, pattern: FusionPattern) -> Task:
    output = product.writes[0]
    reads = [*product.reads, *(buffer for buffer in other.reads if buffer != output)]
    writes = [*product.writes, *other.writes] if pattern.keep else list(other.writes)
    return replace(
        product,
        type=f"FusionOp_{product.type}_{other.type}",
        reads=tuple(dict.fromkeys(reads)),
        writes=tuple(dict.fromkeys(writes)),
        vector=other.vector,
        fused=(*product.fused, *other.fused, pattern.name),
    )
