"""Conversions of formats around matrix products, and of types around normalisation and under O1.

A MatMul reads and writes FRACTAL_NZ, blocks of 16 x 16. The trace of AlexNet (2023) has a TransData
after the product of its 10 classes and before its gradient, and none between products of 4,096
features, whose element-wise work stays in blocks. CANN's element-wise ops, softmax, layer norm and
sums of rows support FRACTAL_NZ if both edges of a matrix are multiples of 16 (`op_select_format` of
softmax_v2, layer_norm). Moves, and matrices with other edges, are plain: a TransData stands before
each product that reads a plain matrix, and before each move of a product's result. All readers
share its copy. Eager frameworks run each op on plain tensors, so every product converts, except
results of other products.

Under O1, apex's casts at each call, each type has a list of functions (apex/amp/lists, its files
functional_overrides.py and torch_overrides.py). Convolutions and products compute in float16, the
functions of the float32 list in float32: softmax, layer norm, GELU, exponentials and logarithms.
Other ops compute in the widest type of their operands, so the tokens of a transformer are float32
from their positions' embedding on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK, Buffer, Task, TaskGraph, VectorWork
from pipeline.backends.ascend.compiler.buffers import append_copy, is_aligned, pad_to_blocks
from pipeline.backends.ascend.compiler.phases import Phases, find_half_type
from pipeline.backends.graph.graph import Graph, Node
from pipeline.core.host.array_values import get_stored_bytes

Matrices = tuple[int, int, int]
"""Batch, rows and columns."""
NORMS = ("bn_reduce", "bn_update")
SUMS = ("reduce", "bias_grad", "bn_reduce")
IN_BLOCKS = (*SUMS, "elementwise", "rows", "cast", "bn_update")
"""Classes of the vector unit's kernels that support FRACTAL_NZ."""
CONVOLUTIONS = ("conv", "depthwise")
FLOAT32_FUNCTIONS = frozenset(("gelu", "layer_norm", "log_softmax", "softmax", "_softmax"))
"""Names of jitted functions, and of layers without their numbers."""
FLOAT32_PRIMITIVES = frozenset(
    ("cumsum", "cumprod", "erf", "erfc", "exp", "exp2", "expm1", "log", "log1p", "log2")
)
"""The error function is GELU's. Powers and roots are left out, as parts of a normalisation."""


def convert_formats(graph: TaskGraph, *, op_by_op: bool) -> TaskGraph:
    """Return the graph with a TransData between products and matrices in the plain format."""
    conversion = _Conversion(graph, op_by_op)
    places = {place: conversion.add(task) for place, task in enumerate(graph.tasks)}
    return graph.with_tasks(conversion.tasks, places, conversion.buffers)


class _Conversion:
    """One pass over the tasks of a graph. Buffers are indices."""

    def __init__(self, graph: TaskGraph, op_by_op: bool) -> None:
        self.op_by_op = op_by_op
        self.buffers = list(graph.buffers)
        self.tasks: list[Task] = []
        self.blocked: dict[int, int] = {}
        """Buffer -> its copy in FRACTAL_NZ, or itself if it is written in FRACTAL_NZ."""
        self.plain: dict[int, int] = {}
        """Buffer that is written in FRACTAL_NZ -> its plain copy."""
        self.writers: dict[int, Task] = {}
        self.readers: dict[int, list[Task]] = defaultdict(list)
        for task in graph.tasks:
            for index in task.reads:
                self.readers[index].append(task)

    def add(self, task: Task) -> int:
        """Add a task with its conversions. Return the task's place."""
        if not is_matrix_product(task):
            reads_blocks = any(self.blocked.get(index) == index for index in task.reads)
            if task.engine == "vector" and reads_blocks:
                task = self._choose_format(task)
            self.tasks.append(task)
            self.writers.update(dict.fromkeys(task.writes, task))
            return len(self.tasks) - 1
        assert task.cube is not None
        matrices = self._find_operand_matrices(task)
        reads = tuple(self._to_blocks(index, task, matrices.get(index)) for index in task.reads)
        result = (task.cube.batch, task.cube.m, task.cube.n)
        copies = {}
        for index in task.writes:
            if self._must_leave_blocks(index, task.cube.batch):
                copies[index] = self._add_copy(index, result)
                # The plain result still has the bytes of padded blocks: without them ViT's errors
                # grow (benchmarks/results/ascend910.md).
                self.buffers[index] = replace(self.buffers[index], layout="ND")
            elif self.buffers[index].role != "gradient":
                shape = self.buffers[index].shape
                if task.cube.batch == 1 and len(shape) > 3:
                    shape = (shape[0], math.prod(shape[1:-1]), shape[-1])
                self._keep_in_blocks(index, shape)
        writes = tuple(copies.get(index, index) for index in task.writes)
        self.tasks.append(replace(task, reads=tuple(dict.fromkeys(reads)), writes=writes))
        place = len(self.tasks) - 1
        self.writers.update(dict.fromkeys(task.writes, task))
        for index, copy in copies.items():
            self._convert(task, copy, index)
            self.blocked[index] = copy
        return place

    def _choose_format(self, task: Task) -> Task:
        """Return a kernel that reads a matrix in blocks, with its other matrices in blocks too.

        A kernel that only supports plain tensors reads plain copies.
        """
        if task.cost_class not in IN_BLOCKS:
            reads = (self._to_plain(index, task) for index in task.reads)
            return replace(task, reads=tuple(reads))
        if task.cost_class in SUMS:
            return task
        in_blocks = (index for index in task.reads if self.blocked.get(index) == index)
        shape = self.buffers[next(in_blocks)].shape
        size = math.prod(shape)
        rows = shape[-2] if len(shape) > 1 else 1
        matrices = (math.prod(shape[:-2]), rows, shape[-1])
        for index in task.writes:
            buffer = self.buffers[index]
            if math.prod(buffer.shape) == size and buffer.layout == "ND":
                self._keep_in_blocks(index, shape)
        reads = (
            self._to_blocks(index, task, matrices)
            if math.prod(self.buffers[index].shape) == size and self.buffers[index].dtype != "bool"
            else index
            for index in task.reads
        )
        return replace(task, reads=tuple(reads))

    def _keep_in_blocks(self, index: int, shape: tuple[int, ...]) -> None:
        """Write a buffer of matrices in FRACTAL_NZ for all readers."""
        buffer = self.buffers[index]
        edges = map(pad_to_blocks, shape[-2:] if len(shape) > 1 else ())
        nbytes = math.ceil(math.prod((*shape[:-2], *edges)) * get_stored_bytes(buffer.dtype))
        self.buffers[index] = replace(buffer, layout="FRACTAL_NZ", nbytes=nbytes, shape=shape)
        self.blocked[index] = index

    def _to_plain(self, index: int, task: Task) -> int:
        """Return a plain buffer, or the plain copy of a buffer in blocks that all readers share."""
        if self.blocked.get(index) != index:
            return index
        if index not in self.plain:
            self.plain[index] = append_copy(self.buffers, index, layout="ND")
            self._convert(task, index, self.plain[index])
        return self.plain[index]

    def _find_operand_matrices(self, task: Task) -> dict[int, Matrices]:
        """Return a product's operands as matrices, but not the other inputs of a fused kernel."""
        work = task.cube
        assert work is not None
        shapes = {
            work.batch * work.k * work.n: (work.batch, work.n, work.k),
            work.batch * work.m * work.k: (work.batch, work.m, work.k),
        }
        sizes = {index: math.prod(self.buffers[index].shape) for index in task.reads}
        return {index: shapes[size] for index, size in sizes.items() if size in shapes}

    def _to_blocks(self, index: int, task: Task, matrices: Matrices | None) -> int:
        """Return an operand in FRACTAL_NZ. All products of a graph share the conversion."""
        if index in self.blocked:
            return self.blocked[index]
        if matrices is None or not self._is_plain(index):
            return index
        copy = self._add_copy(index, matrices)
        self._convert(task, index, copy)
        if not self.op_by_op:
            self.blocked[index] = copy
        return copy

    def _is_plain(self, index: int) -> bool:
        """Return whether a product's operand is in the plain layout.

        Parameters and a batch's images were converted before.
        """
        maker = self.writers.get(index)
        buffer = self.buffers[index]
        if maker is None or maker.type == "TransData" or buffer.role == "parameter":
            return False
        return buffer.layout == "ND" or self.op_by_op

    def _must_leave_blocks(self, index: int, batch: int) -> bool:
        """Return whether a product's result is converted to the plain layout for other ops."""
        buffer = self.buffers[index]
        stays = is_aligned(buffer.shape, batch) and not self.op_by_op
        if buffer.role == "gradient" or stays:
            return False
        readers = self.readers[index]
        return not readers or any(not is_matrix_product(reader) for reader in readers)

    def _add_copy(self, index: int, matrices: Matrices) -> int:
        """Add the copy of a buffer in FRACTAL_NZ with the shape (batch, rows, columns).

        The cube reads either order. If only one edge is a multiple of 16, such as the features of
        attention's heads, this edge becomes the columns.
        """
        batch, rows, columns = matrices
        if columns % CHANNEL_BLOCK and not rows % CHANNEL_BLOCK:
            rows, columns = columns, rows
        elements = batch * pad_to_blocks(rows) * pad_to_blocks(columns)
        return append_copy(
            self.buffers,
            index,
            shape=(batch, rows, columns),
            layout="FRACTAL_NZ",
            nbytes=math.ceil(elements * get_stored_bytes(self.buffers[index].dtype)),
        )

    def _convert(self, task: Task, source: int, copy: int) -> None:
        # The original has the lower index, as its copy was added later.
        buffer = self.buffers[min(source, copy)]
        work = VectorWork(math.prod(buffer.shape), buffer.dtype)
        conversion = Task(
            "TransData", task.scope, "vector", task.phase, "trans_data", (source,), (copy,),
            vector=work, repeat=task.repeat, launched=False,
        )  # fmt: skip
        self.tasks.append(conversion)


def is_matrix_product(task: Task) -> bool:
    """Return whether a task is a product of matrices on the cube."""
    return task.cube is not None and task.cost_class == "matmul" and task.cube.dtype == "float16"


def keep_norms_in_float32(graph: TaskGraph) -> TaskGraph:
    """Return the graph with the kernels of batch and layer norm on float32 copies of their maps.

    Under O2 `mindspore.amp` puts a Cast before and after each BatchNorm, unless a training script
    sets `keep_batchnorm_fp32=False`. The model zoo's scripts set it, MindCV's don't (mindcv 0.3.0,
    utils/amp.py and trainer_factory.py). LayerNorm is in the same list, in MindSpore from 1.9 on
    (train/amp.py). A convolution writes float32 itself, as under O0 (hardware notes, 1.6), and the
    Cast after the forward pass joins BNTrainingUpdate. Other casts are kernels, so FusedDbnDw isn't
    possible.
    """
    buffers = list(graph.buffers)
    for index in _find_maps_of_norms(graph):
        buffers[index] = replace(buffers[index], dtype="float32", nbytes=2 * buffers[index].nbytes)
    tasks: list[Task] = []
    places: dict[int, int] = {}
    copies: dict[int, int] = {}
    for place, task in enumerate(graph.tasks):
        is_layer_norm = task.type.startswith("LayerNorm")
        if not (is_layer_norm or task.cost_class in NORMS) or task.vector is None:
            places[place] = len(tasks)
            tasks.append(task)
            continue
        is_update = task.cost_class == "bn_update"
        for index in task.reads:
            is_half = is_half_map(buffers[index], task.vector)
            if is_half and index not in copies and not (is_update and task.phase == "forward"):
                copies[index] = add_float32_copy(buffers, index)
                tasks.append(make_cast(task, index, copies[index], task.vector))
        result = task.writes[0]
        casts_result = is_layer_norm or (is_update and task.phase == "backward")
        is_widened = casts_result and is_half_map(buffers[result], task.vector)
        output = add_float32_copy(buffers, result) if is_widened else result
        places[place] = len(tasks)
        tasks.append(
            replace(
                task,
                reads=tuple(copies.get(index, index) for index in task.reads),
                writes=(output, *task.writes[1:]),
                vector=replace(task.vector, dtype="float32"),
            )
        )
        if is_widened:
            tasks.append(make_cast(task, output, result, task.vector))
    return graph.with_tasks(tasks, places, buffers)


def _find_maps_of_norms(graph: TaskGraph) -> list[int]:
    """Return the results of convolutions that only normalisation reads."""
    read_by_norms: set[int] = set()
    read_by_others = set(graph.outputs)
    for task in graph.tasks:
        (read_by_norms if task.cost_class in NORMS else read_by_others).update(task.reads)
    read_by_norms -= read_by_others
    return [
        task.writes[0]
        for task in graph.tasks
        if task.cost_class in CONVOLUTIONS
        and task.phase == "forward"
        and task.writes[0] in read_by_norms
        and graph.buffers[task.writes[0]].dtype == "float16"
    ]


def is_half_map(buffer: Buffer, work: VectorWork) -> bool:
    """Return whether a buffer has all elements of a kernel's work, in a type of 16 bits."""
    return buffer.dtype in ("float16", "bfloat16") and math.prod(buffer.shape) == work.elements


def add_float32_copy(buffers: list[Buffer], index: int) -> int:
    """Add a float32 copy of a buffer of 16-bit elements, and return its index."""
    nbytes = 2 * buffers[index].nbytes
    return append_copy(buffers, index, dtype="float32", nbytes=nbytes, name="float32 copy")


def make_cast(task: Task, source: int, copy: int, work: VectorWork) -> Task:
    """Return the Cast of a buffer to its copy, for the kernel `task` with `work`."""
    return Task(
        "Cast", task.scope, "vector", task.phase, "cast", (source,), (copy,),
        vector=VectorWork(work.elements, "float32"), repeat=task.repeat,
    )  # fmt: skip


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
