"""Batch normalisation in float32 within a float16 network, as MindSpore's amp_level O2 keeps it.

`mindspore.amp` wraps each BatchNorm of O2 in a Cast on the way in and out, unless a training script
says `keep_batchnorm_fp32=False`, as the model zoo's do; MindCV's don't (mindcv 0.3.0, utils/amp.py
and trainer_factory.py). A convolution writes float32 itself, as under O0 (hardware notes, 1.6), and
the Cast after the forward pass joins BNTrainingUpdate; others are kernels, so that
the weight's gradient no longer computes the gradient of the map.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pipeline.backends.ascend.chip.tasks import Buffer, Task, TaskGraph, VectorWork

NORMS = ("bn_reduce", "bn_update")
PRODUCTS = ("conv", "depthwise")
FLOAT32_BYTES_PER_FLOAT16 = 2


def keep_norms_in_float32(graph: TaskGraph) -> TaskGraph:
    """Return the graph with batch normalisation's kernels on float32 copies of their maps."""
    buffers = list(graph.buffers)
    for index in _maps_of_norms_alone(graph):
        buffers[index] = _widen(buffers[index])
    tasks: list[Task] = []
    places: dict[int, int] = {}
    copies: dict[int, int] = {}
    for place, task in enumerate(graph.tasks):
        if task.cost_class not in NORMS or task.vector is None:
            places[place] = len(tasks)
            tasks.append(task)
            continue
        update = task.cost_class == "bn_update"
        for index in task.reads:
            half = _is_half_map(buffers[index], task.vector)
            if half and index not in copies and not (update and task.phase == "forward"):
                copies[index] = _add_copy(buffers, index)
                tasks.append(_cast(task, index, copies[index], task.vector))
        result = task.writes[0]
        widened = update and task.phase == "backward" and _is_half_map(buffers[result], task.vector)
        output = _add_copy(buffers, result) if widened else result
        places[place] = len(tasks)
        tasks.append(
            replace(
                task,
                reads=tuple(copies.get(index, index) for index in task.reads),
                writes=(output, *task.writes[1:]),
                vector=replace(task.vector, dtype="float32"),
            )
        )
        if widened:
            tasks.append(_cast(task, output, result, task.vector))
    return graph.with_tasks(tasks, places, buffers)


def _maps_of_norms_alone(graph: TaskGraph) -> list[int]:
    """Return the results of convolutions that nothing but normalisation reads."""
    read_by_norms = {i for task in graph.tasks if task.cost_class in NORMS for i in task.reads}
    read_by_others = {i for task in graph.tasks if task.cost_class not in NORMS for i in task.reads}
    alone = read_by_norms - read_by_others - set(graph.outputs)
    return [
        task.writes[0]
        for task in graph.tasks
        if task.cost_class in PRODUCTS
        and task.phase == "forward"
        and task.writes[0] in alone
        and graph.buffers[task.writes[0]].dtype == "float16"
    ]


def _widen(buffer: Buffer) -> Buffer:
    return replace(buffer, dtype="float32", nbytes=FLOAT32_BYTES_PER_FLOAT16 * buffer.nbytes)


def _is_half_map(buffer: Buffer, work: VectorWork) -> bool:
    return buffer.dtype == "float16" and math.prod(buffer.shape) == work.elements


def _add_copy(buffers: list[Buffer], index: int) -> int:
    """Add a float32 copy of a buffer."""
    copy = _widen(buffers[index])
    place = len(buffers)
    buffers.append(replace(copy, index=place, role="activation", name="float32 copy", within=None))
    return place


def _cast(task: Task, source: int, copy: int, work: VectorWork) -> Task:
    return Task(
        "Cast", task.scope, "vector", task.phase, "cast", (source,), (copy,),
        vector=VectorWork(work.elements, "float32"), repeat=task.repeat,
    )  # fmt: skip
