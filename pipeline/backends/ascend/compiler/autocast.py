"""Types under O1, apex's casts at each call: a list of functions for each type.

Convolutions and products compute in float16. The functions of apex's float32 list do so in float32:
softmax, layer norm, GELU, exponentials and logarithms (apex/amp/lists, its files
functional_overrides.py and torch_overrides.py). Other ops compute in the widest type of their
operands, so the tokens of a transformer are float32 from their positions' embedding on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.compiler.matrix_formats import (
    add_float32_copy,
    is_half_map,
    make_cast,
)
from pipeline.backends.ascend.compiler.phases import Phases, find_half_type
from pipeline.backends.graph.graph import Graph, Node

FLOAT32_FUNCTIONS = frozenset(("gelu", "layer_norm", "log_softmax", "softmax", "_softmax"))
"""Names of jitted functions, and of layers without their numbers."""
FLOAT32_PRIMITIVES = frozenset(
    ("cumsum", "cumprod", "erf", "erfc", "exp", "exp2", "expm1", "log", "log1p", "log2")
)
"""The error function is GELU's. Powers and roots are left out, as parts of a normalisation."""


def choose_autocast_dtypes(
    graph: Graph, phases: Phases, kinds: Sequence[str], inputs: Collection[int]
) -> tuple[str, ...]:
    """Return the type of every value on the device under O1; `kinds` are the nodes' kinds.

    Vectors and `inputs` stay float32: ops such as batch normalisation read vectors without a cast.
    """
    float32_values = {*phases.weights, *phases.gradients, *inputs}
    dtypes = [value.dtype for value in graph.values]
    half = find_half_type(dtypes)

    def is_float32_operand(index: int) -> bool:
        is_tensor = sum(size > 1 for size in graph.values[index].shape) > 1
        return dtypes[index] == "float32" and is_tensor and index not in graph.constants

    for node, kind, phase in zip(graph.nodes, kinds, phases.of_node, strict=True):
        if phase == "optimizer" or (kind not in ("conv", "matmul") and _is_listed(node, kind)):
            continue
        if kind in ("conv", "matmul") or not any(map(is_float32_operand, node.inputs)):
            for out in node.outputs:
                is_tensor = dtypes[out] == "float32" and len(graph.values[out].shape) > 1
                if is_tensor and out not in float32_values:
                    dtypes[out] = half
    return tuple(dtypes)


def _is_listed(node: Node, kind: str) -> bool:
    """Return whether a node belongs to a function of apex's float32 list."""
    if kind == "rows" or node.primitive in FLOAT32_PRIMITIVES:
        return True
    layer = node.scope.rpartition("/")[2].rstrip("_0123456789")
    return not FLOAT32_FUNCTIONS.isdisjoint((*node.calls, layer))


def cast_operands(graph: TaskGraph) -> TaskGraph:
    """Return the graph with a Cast of each feature map of 16 bits that a float32 kernel reads.

    All kernels that read the operand share its copy.
    """
    buffers = list(graph.buffers)
    copies: dict[int, int] = {}
    tasks: list[Task] = []
    places: dict[int, int] = {}
    for place, task in enumerate(graph.tasks):
        work = task.vector
        if work is not None and work.dtype == "float32" and task.cost_class != "cast":
            for index in task.reads:
                if is_half_map(buffers[index], work) and index not in copies:
                    copies[index] = add_float32_copy(buffers, index)
                    tasks.append(make_cast(task, index, copies[index], work))
            reads = tuple(copies.get(index, index) for index in task.reads)
            task = replace(task, reads=reads)
        places[place] = len(tasks)
        tasks.append(task)
    return graph.with_tasks(tasks, places, buffers)
