"""Pooling as tasks."""

from __future__ import annotations

from pipeline.backends.ascend.chip.tasks import CostClass, VectorWork
from pipeline.backends.ascend.compiler.horizontal_fusion import Kernel
from pipeline.backends.ascend.compiler.inserted_ops import InsertedOps
from pipeline.backends.ascend.compiler.matmul_work import window_area
from pipeline.backends.graph.graph import Node


def lower_window(kernel: Kernel, node: Node, inserted: InsertedOps) -> None:
    """Add the task of a pooling; a maximum may have a mask of its position."""
    backward = kernel.phase == "backward"
    values, buffers = inserted.graph.values, inserted.buffers
    sizes = [values[index].size for index in (*node.inputs, *node.outputs)]
    largest = max(node.outputs, key=lambda index: values[index].size)
    pooled = min((size for size in sizes if size > 1), default=1)
    read = (buffers.of(index) for index in kernel.sources if values[index].size > 1)
    reads = tuple(dict.fromkeys(read))
    if _is_maximum(node):
        name = "MaxPoolGradWithArgmax" if backward else "MaxPoolWithArgmax"
        cost_class: CostClass = "max_pool_grad" if backward else "max_pool"
        writes = (buffers.of(largest),) if backward else _with_mask(node, inserted)
        inserted.clear(kernel, writes)
    else:
        name, cost_class = "AvgPoolGrad" if backward else "AvgPool", "avg_pool"
        writes = (buffers.of(node.outputs[0]),)
    work = VectorWork(pooled, buffers.dtypes[largest], float(window_area(node)))
    inserted.add(kernel, name, cost_class, reads, writes, vector=work, fused=(node.primitive,))


def _is_maximum(node: Node) -> bool:
    return "max" in node.primitive or node.primitive.startswith("select_and")


def _with_mask(node: Node, inserted: InsertedOps) -> tuple[int, ...]:
    """Add the maxima, and a bit for each position under each window where the node has masks."""
    values, buffers = inserted.graph.values, inserted.buffers
    pooled = node.outputs[0]
    masks = [out for out in node.outputs[1:] if values[out].size > 1]
    if not masks:
        return (buffers.of(pooled),)
    mask = buffers.add(pooled, "bool", "NC1HWC0")
    nbytes = window_area(node) * buffers.all[mask].nbytes
    buffers.change(mask, nbytes=nbytes, role="activation", name="argmax")
    buffers.index.update(dict.fromkeys(node.outputs[1:], mask))
    return (buffers.of(pooled), mask)
