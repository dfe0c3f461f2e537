"""Resizes of maps are one op each, forward and backward, priced by the blocks of positions."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import Array

from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.compiler.vendor_ops import RESIZE_OPS
from pipeline.backends.ascend.cost.efficiency import load_efficiency
from pipeline.backends.ascend.cost.task_time import price_tasks
from tests.backends.ascend.made_up import HW
from tests.backends.ascend.steps import gradient_step, of, only, types

BATCH, CHANNELS = 4, 20
BLOCKS = 2
"""Blocks of 16 that hold the channels."""


def resized_step(*sizes: tuple[int, int], method: str = "bilinear", **options: Any) -> TaskGraph:
    """A convolution of maps of 12 x 15 and a resize to each of the sizes."""

    def forward(kernel: Array, x: Array) -> Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        for size in sizes:
            x = jax.image.resize(x, (BATCH, *size, CHANNELS), method)
        return x

    traced = gradient_step(forward, of(3, 3, CHANNELS, CHANNELS), of(BATCH, 12, 15, CHANNELS))
    return traced.tasks("O2", **options)


def resizes(graph: TaskGraph) -> list[Task]:
    return [task for task in graph.tasks if task.type.startswith("Resize")]


@pytest.mark.parametrize("by_op", [False, True])
@pytest.mark.parametrize(
    ("method", "name"), [("bilinear", "ResizeBilinear"), ("nearest", "ResizeNearestNeighbor")]
)
def test_resize_and_its_gradient_are_one_op_each(method: str, name: str, by_op: bool) -> None:
    graph = resized_step((24, 45), method=method, by_op=by_op)
    forward, backward = resizes(graph)
    assert [task.type for task in (forward, backward)] == [name, f"{name}Grad"]
    assert {task.cost_class for task in (forward, backward)} == {"resize"}
    assert not {"MatMul", "BatchMatMul", "GatherV2"} & types(graph).keys()
    rows = [task.vector.rows for task in (forward, backward) if task.vector]
    assert rows == [BATCH * 24 * 45 * BLOCKS] * 2


def test_resizes_after_one_another_are_separate_ops() -> None:
    """The same line of code makes both, and nothing lies between them."""
    forward = [task for task in resizes(resized_step((24, 45), (8, 9))) if task.phase == "forward"]
    rows = [task.vector.rows for task in forward if task.vector]
    assert rows == [BATCH * 24 * 45 * BLOCKS, BATCH * 8 * 9 * BLOCKS]


def test_resize_takes_the_latency_of_each_block() -> None:
    graph = resized_step((24, 45))
    efficiency = load_efficiency()
    cycles = efficiency.constants.resize_row_cycles / efficiency.classes["resize"].rate
    times = dict(zip(map(id, graph.tasks), price_tasks(graph, HW), strict=True))
    assert resizes(graph)
    for task in resizes(graph):
        latency_us = BATCH * 24 * 45 * BLOCKS / HW.vector_cores_count * cycles
        assert times[id(task)].us > latency_us / HW.ai_core_clock_mhz


def test_products_remain_without_the_pass_and_for_a_map_of_one_position() -> None:
    graph = resized_step((24, 45), without=frozenset({RESIZE_OPS}))
    assert not resizes(graph)
    assert only(graph, "matmul")

    def forward(scale: Array, x: Array) -> Array:
        return jax.image.resize(x * scale, (BATCH, 6, 6, CHANNELS), "bilinear")

    graph = gradient_step(forward, of(CHANNELS), of(BATCH, 1, 1, CHANNELS)).tasks("O2")
    assert not resizes(graph)


def test_resize_of_heights_alone_is_one_op() -> None:
    def forward(kernel: Array, x: Array) -> Array:
        y = x * kernel
        return jax.image.resize(y, (BATCH, 24, 15, CHANNELS), "bilinear")

    graph = gradient_step(forward, of(CHANNELS), of(BATCH, 12, 15, CHANNELS)).tasks("O2")
    rows = [task.vector.rows for task in resizes(graph) if task.vector]
    assert rows == [BATCH * 24 * 15 * BLOCKS] * 2
