"""Graphs of one or two tasks, to price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.backends.ascend.chip.tasks import (
    Buffer,
    CostClass,
    CubeWork,
    Engine,
    Task,
    TaskGraph,
    VectorWork,
)
from tests.backends.ascend.made_up import HW

BYTES = {"float16": 2, "float32": 4, "int32": 4}
ENDLESS = 1e12
FAST_MEMORY = replace(
    HW,
    hbm_sustained_gb_per_s=ENDLESS,
    hbm_nominal_gb_per_s=ENDLESS,
    l2_read_bytes_per_cycle=ENDLESS,
    l2_write_bytes_per_cycle=ENDLESS,
    ub_to_l2_bytes_per_cycle=ENDLESS,
    l0c_to_ub_bytes_per_cycle=ENDLESS,
)
"""A chip on which moving data costs nothing."""
FLAT = replace(HW, task_floor_all_cores_us=HW.task_floor_one_core_us)
"""A chip on which starting all cores takes no longer than starting one."""


def buffer(index: int, shape: tuple[int, ...], dtype: str = "float16") -> Buffer:
    return Buffer(
        index, shape, dtype, "ND", math.prod(shape) * BYTES[dtype], "activation", f"b{index}"
    )


def graph_of(
    cost_class: CostClass,
    reads: Sequence[tuple[tuple[int, ...], str]],
    write: tuple[tuple[int, ...], str],
    cube: CubeWork | None = None,
    vector: VectorWork | None = None,
    engine: Engine = "vector",
) -> TaskGraph:
    """One task over buffers of these shapes and types."""
    buffers = tuple(buffer(index, *made) for index, made in enumerate([*reads, write]))
    indices = tuple(range(len(reads)))
    fields: Any = (indices, (len(reads),), cube, vector)
    task = Task(cost_class, "net", engine, "forward", cost_class, *fields)
    return TaskGraph(buffers, (task,))


def matmul(m: int, k: int, n: int, dtype: str = "float16", batch: int = 1) -> TaskGraph:
    """(m, k) x (k, n), `batch` times."""
    cube = CubeWork(batch, m, k, n, batch * m * k * n, dtype=dtype)
    reads = [((batch, m, k), dtype), ((batch, k, n), dtype)]
    return graph_of("matmul", reads, ((batch, m, n), dtype), cube, engine="cube")


def convolution(
    cost_class: CostClass, images: int, edge: int, inner: int, outer: int, taps: int = 9
) -> TaskGraph:
    """A convolution of stride 1, or one of its gradients, with fields of `taps`."""
    rows = images * edge * edge
    macs = rows * taps * inner * outer
    x, y = ((images, edge, edge, inner), "float16"), ((images, edge, edge, outer), "float16")
    kernel = (taps, inner, outer)
    if cost_class == "conv_kernel_grad":
        cube = CubeWork(1, taps * inner, rows, outer, macs, taps)
        return graph_of(cost_class, [x, y], (kernel, "float32"), cube, engine="cube")
    if cost_class == "conv_input_grad":
        cube = CubeWork(1, rows, taps * outer, inner, macs, taps)
        return graph_of(cost_class, [y, (kernel, "float16")], x, cube, engine="cube")
    cube = CubeWork(1, rows, taps * inner, outer, macs, taps)
    return graph_of(cost_class, [x, (kernel, "float16")], y, cube, engine="cube")


def stream(cost_class: CostClass, elements: int, simple: float = 1.0) -> TaskGraph:
    """A kernel that reads and writes as many float16."""
    vector = VectorWork(elements, "float16", simple)
    shape = ((elements,), "float16")
    return graph_of(cost_class, [shape], shape, vector=vector)


def feature_map_task(cost_class: CostClass, images: int, edge: int, channels: int) -> TaskGraph:
    """A kernel between feature maps, or from one to its channels."""
    full = ((images, edge, edge, channels), "float16")
    small = ((images, max(edge // 2, 1), max(edge // 2, 1), channels), "float16")
    if cost_class == "bias_grad":
        return graph_of(cost_class, [full], ((channels,), "float16"))
    if cost_class == "max_pool_grad":
        return graph_of(cost_class, [small], full)
    return graph_of(cost_class, [full], small)


def row_task(cost_class: CostClass, rows: int, width: int) -> TaskGraph:
    """A gather from, or a scatter into, a table of 1000 rows."""
    table, picked = ((1000, width), "float32"), ((rows, width), "float32")
    index = ((rows, 1), "int32")
    if cost_class == "gather":
        return graph_of(cost_class, [table, index], picked)
    return graph_of(cost_class, [picked, index], table)
