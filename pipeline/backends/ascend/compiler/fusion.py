"""Fusion of products with kernels of the vector unit.

With buffer fusion a kernel reads a product's result before the result reaches memory. FusedDbnDw is
the reverse: a weight gradient reads the gradient of a batch normalisation's input before that
gradient reaches memory, and writes the gradient for the input gradient (MindSpore's and CANN's pass
bn_reduce_grad_conv2d_backprop_filter_fusion).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.compiler.buffers import is_aligned
from pipeline.backends.ascend.compiler.primitives import FusionPattern, Patterns


def fuse_kernels(graph: TaskGraph, patterns: Patterns) -> TaskGraph:
    """Return the graph with every fusion that the patterns allow, each product fused once."""
    for pattern in patterns.fusions:
        graph = _fuse_operands(graph, pattern)
    readers: dict[int, list[int]] = defaultdict(list)
    for place, task in enumerate(graph.tasks):
        for buffer in task.reads:
            readers[buffer].append(place)
    partners: dict[int, tuple[int, FusionPattern]] = {}
    for place, task in enumerate(graph.tasks):
        if task.cube is not None:
            partner = _find_partner(graph, readers, task, patterns)
            if partner is not None and partner[0] not in partners:
                partners[partner[0]] = (place, partner[1])
    products = {product for product, _ in partners.values()}
    tasks: list[Task] = []
    places: dict[int, int] = {}
    for place, task in enumerate(graph.tasks):
        if place in products:
            continue
        places[place] = len(tasks)
        if place in partners:
            # A fused pair runs at the vector kernel's place, after all inputs of both.
            product, pattern = partners[place]
            places[product] = len(tasks)
            task = _join_tasks(graph.tasks[product], task, pattern)
        tasks.append(task)
    return graph.with_tasks(tasks, places, graph.buffers)


def _fuse_operands(graph: TaskGraph, pattern: FusionPattern) -> TaskGraph:
    """Return the graph with each kernel of the vector unit fused into the product that reads it.

    The joined task runs at the kernel's place, after the MemSet of the product's result.
    """
    absorbed, clears = _find_operand_makers(graph, pattern)
    moved = {*absorbed.values(), *clears.values()}
    tasks: list[Task] = []
    places: dict[int, int] = {}
    for place, task in enumerate(graph.tasks):
        if place in moved:
            continue
        if place in absorbed:
            number = absorbed[place]
            if number in clears:
                places[clears[number]] = len(tasks)
                tasks.append(graph.tasks[clears[number]])
            places[number] = len(tasks)
            # The joined task also writes the operand.
            product = graph.tasks[number]
            inputs = (index for index in product.reads if index not in task.writes)
            task = replace(
                product,
                type="FusedDbnDw",
                reads=tuple(dict.fromkeys([*task.reads, *inputs])),
                writes=(*product.writes, *task.writes),
                vector=task.vector,
                fused=(*task.fused, *product.fused, pattern.name),
            )
        places[place] = len(tasks)
        tasks.append(task)
    return graph.with_tasks(tasks, places, graph.buffers)


def _find_operand_makers(
    graph: TaskGraph, pattern: FusionPattern
) -> tuple[dict[int, int], dict[int, int]]:
    """Return kernel -> the product that absorbs it, and product -> the MemSet between the two."""
    writer: dict[int, int] = {}
    absorbed: dict[int, int] = {}
    clears: dict[int, int] = {}
    for place, task in enumerate(graph.tasks):
        if task.cube is not None and task.cost_class in pattern.consumer:
            maker = max((writer[index] for index in task.reads if index in writer), default=-1)
            is_new = maker >= 0 and maker not in absorbed
            if is_new and _can_absorb(graph.tasks[maker], task, pattern):
                absorbed[maker] = place
                clear = writer.get(task.writes[0], -1)
                if clear > maker:
                    clears[place] = clear
        writer.update(dict.fromkeys(task.writes, place))
    return absorbed, clears


def _can_absorb(maker: Task, product: Task, pattern: FusionPattern) -> bool:
    """Return whether a product can absorb the kernel that writes its operand."""
    return (
        maker.cost_class in pattern.producer
        and maker.cube is None
        and maker.phase == product.phase == (pattern.phase or product.phase)
        and maker.repeat == product.repeat
    )


def _find_partner(
    graph: TaskGraph, readers: Mapping[int, Sequence[int]], task: Task, patterns: Patterns
) -> tuple[int, FusionPattern] | None:
    """Return the first reader of a product and the pattern that fuses them; None if none does."""
    output = task.writes[0]
    places = readers.get(output, [])
    is_single = len(places) == 1 and output not in graph.outputs
    for pattern in patterns.fusions:
        if task.cost_class not in pattern.producer or pattern.phase not in (None, task.phase):
            continue
        if places and (pattern.keep or is_single):
            first = graph.tasks[places[0]]
            reads_another = pattern.alone and _reads_another(graph, task, first)
            is_batched = task.cube is not None and task.cube.batch > 1
            fits = _can_fuse(pattern, task, first) and pattern.batched in (None, is_batched)
            if fits and not reads_another and not _needs_reshape(graph, task, first):
                return places[0], pattern
    return None


def _needs_reshape(graph: TaskGraph, task: Task, other: Task) -> bool:
    """Return whether a product's result is reshaped to the plain layout before a kernel reads it.

    MindSpore's Dense multiplies the rows of all samples and reshapes after its bias. If the number
    of tokens isn't a multiple of 16, the reshape is a conversion, and a kernel that reads other
    values of the same size can't fuse.
    """
    output = graph.buffers[task.writes[0]]
    batch = task.cube.batch if task.cube else 1
    if task.cost_class != "matmul" or len(output.shape) < 3 or is_aligned(output.shape, batch):
        return False
    return _reads_another(graph, task, other)


def _reads_another(graph: TaskGraph, task: Task, other: Task) -> bool:
    """Return whether a kernel reads another value of the size of a product's result."""
    size = math.prod(graph.buffers[task.writes[0]].shape)
    return any(
        math.prod(graph.buffers[index].shape) == size
        for index in other.reads
        if index not in task.writes
    )


def _can_fuse(pattern: FusionPattern, task: Task, other: Task) -> bool:
    if other.cost_class not in pattern.consumer or other.phase != task.phase:
        return False
    if other.repeat != task.repeat or other.cube is not None or other.vector is None:
        return False
    operations = other.vector.simple + other.vector.heavy
    return pattern.max_operations is None or (
        operations <= pattern.max_operations and other.vector.heavy == 0
    )


def _join_tasks(product: Task, other: Task, pattern: FusionPattern) -> Task:
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
