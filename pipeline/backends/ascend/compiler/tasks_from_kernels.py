"""Lower kernels to a device's tasks: types, layouts, and ops that the compiler inserts.

In every step the vendor's graph compiler inserts a Cast of each float32 weight that a product
reads, a TransData for each change of layout, a MemSet before each accumulation, and a GetNext.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from pipeline.backends.ascend.chip.hardware import Core
from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import (
    CostClass,
    Layout,
    Permutation,
    Task,
    TaskGraph,
    VectorWork,
    simplify_permutation,
)
from pipeline.backends.ascend.compiler.buffers import Buffers, InsertedOps
from pipeline.backends.ascend.compiler.conversions import (
    cast_operands,
    choose_autocast_dtypes,
    convert_formats,
    keep_norms_in_float32,
)
from pipeline.backends.ascend.compiler.dataflow import TINY_ELEMENTS, find_dataflow, find_gradients
from pipeline.backends.ascend.compiler.fusion import fuse_kernels
from pipeline.backends.ascend.compiler.horizontal_fusion import Kernel
from pipeline.backends.ascend.compiler.kernels import Kernels, measure_kernel
from pipeline.backends.ascend.compiler.map_layouts import MapLayouts
from pipeline.backends.ascend.compiler.matmul_work import (
    TYPES,
    count_window_positions,
    find_absorbed_transposes,
    find_operand_permutation,
    find_result_permutation,
    is_free,
    measure_convolution,
    measure_matmul,
)
from pipeline.backends.ascend.compiler.phases import TracedSignature, choose_dtypes, find_phases
from pipeline.backends.ascend.compiler.primitives import (
    OPS,
    Features,
    classify_primitive,
    load_patterns,
    match_pattern,
)
from pipeline.backends.ascend.compiler.vendor_ops import (
    RESIZE_OPS,
    find_cells,
    fuse_cells,
    join_resizes,
)
from pipeline.backends.graph.graph import Graph, Node
from pipeline.core.errors import RunError

MOVERS: dict[str, CostClass] = {
    "gather": "gather",
    "scatter": "scatter",
    "sort": "sort",
    "collective": "all_reduce",
    "cumulative": "rows",
}
"""Cost classes of moves other than `transpose` and `copy`."""

ADAM_FUSION = "adam_apply_one_with_decay"
"""MindSpore's passes that make one kernel of Adam's update."""


class UnsupportedError(RunError):
    """A primitive that the emulated device doesn't support."""


@dataclass(frozen=True)
class LoweringOptions:
    """Options of the compiler, with types as in `ExecutionConfig`."""

    precision: Precision | None
    by_op: bool = False
    """Whether every op of the framework runs as its own kernel, without fusion."""
    strict: bool = False
    """Whether an unknown primitive is an error."""
    keep_batchnorm_fp32: bool = False
    without: frozenset[str] = frozenset()
    """Names of fusions to skip."""
    core: Core = "joined"
    cube_float32: bool = False
    """Whether the cube multiplies float32, so that nothing casts such operands."""


def lower(graph: Graph, signature: TracedSignature, options: LoweringOptions) -> TaskGraph:
    """Return the tasks of one step. Raises UnsupportedError on unknown primitives if `strict`."""
    unsupported = Counter(
        node.primitive
        for node in graph.nodes
        if classify_primitive(node.primitive) == "unsupported"
    )
    if options.strict and unsupported:
        names = ", ".join(sorted(unsupported))
        raise UnsupportedError(
            f"{names}: not supported; strict = false estimates such operations by their bytes"
        )
    if RESIZE_OPS not in options.without:
        graph = join_resizes(graph)
    lowered = _Lowering(graph, signature, options).run(unsupported)
    if options.keep_batchnorm_fp32:
        lowered = keep_norms_in_float32(lowered)
    if options.precision == "O1":
        lowered = cast_operands(lowered)
    patterns = load_patterns().select(options.core, options.without)
    fused = lowered if options.by_op else fuse_kernels(lowered, patterns)
    if options.core == "split":
        return fused
    return convert_formats(fused, op_by_op=options.by_op)


class _Lowering:
    """One lowering of a graph to tasks."""

    def __init__(self, graph: Graph, signature: TracedSignature, options: LoweringOptions) -> None:
        self.graph = graph
        self.signature = signature
        self.options = options
        self.phases = find_phases(graph, set(signature.parameters))
        self.dataflow = find_dataflow(graph, self.phases)
        self.dtypes = self._choose_dtypes()
        self.kernels = Kernels(
            graph,
            self.phases,
            self.dataflow,
            self.dtypes,
            by_op=options.by_op,
            fuses_adam=ADAM_FUSION not in options.without,
        )
        self.alias = self.dataflow.alias
        self.matrix_layout: Layout = "ND" if options.core == "split" else "FRACTAL_NZ"
        self.buffers = Buffers(
            graph, signature, self.phases, self.dtypes, self.dataflow, self.matrix_layout
        )
        self.keeps_float32 = options.cube_float32 and options.precision in (None, "O0")
        # Without casts, operands are as they were traced.
        self.inserted = InsertedOps(self.buffers, None if self.keeps_float32 else options.precision)
        self.maps = MapLayouts(self.inserted)
        self.updated = {self.alias[out] for out in signature.updates}
        self.classes: dict[int, CostClass] = {}
        writes_heads = "matmul_confusiontranspose" not in options.without
        self.absorbed = {
            graph.nodes[position].outputs[0]: graph.nodes[position]
            for position in find_absorbed_transposes(graph, writes_heads=writes_heads)
        }

    def run(self, unsupported: Counter[str]) -> TaskGraph:
        """Return all tasks."""
        signature = self.signature
        parameters, state, inputs = (
            tuple(map(self.buffers.get, values))
            for values in (signature.parameters, signature.state, signature.inputs)
        )
        if inputs:
            self.inserted.tasks.append(Task("GetNext", "", "ai_cpu", "data", "ai_cpu", (), inputs))
        kernels = self.kernels.form_kernels()
        for kernel in kernels:
            if kernel.phase == "optimizer":
                self.inserted.flush()
            self._lower_kernel(kernel)
        self.inserted.flush()
        cells = find_cells(self.graph, self.dataflow, by_op=self.options.by_op)
        self.inserted.tasks = fuse_cells(self.inserted.tasks, cells, self.buffers)
        outputs = tuple(map(self.buffers.get, sorted(self.buffers.outputs)))
        return TaskGraph(
            buffers=tuple(self.buffers.all),
            tasks=tuple(self.inserted.tasks),
            inputs=inputs,
            parameters=parameters,
            state=state,
            outputs=outputs,
            gradients=self._list_gradients(),
            primitives=self._count_outcomes(kernels),
            unsupported=dict(unsupported),
            aliases=self.buffers.find_aliases(),
        )

    def _choose_dtypes(self) -> tuple[str, ...]:
        signature = self.signature
        inputs = {*signature.parameters, *signature.state, *signature.inputs}
        if self.options.precision == "O1":
            return choose_autocast_dtypes(self.graph, self.phases, self.dataflow.kinds, inputs)
        return choose_dtypes(self.graph, self.phases, inputs, self.options.precision)

    def _count_outcomes(self, kernels: list[Kernel]) -> dict[str, int]:
        """Count all equations by outcome, as in `TaskGraph.primitives`."""
        roots = {root for kernel in kernels for root in kernel.roots}
        counts = Counter({"task": 0, "fused": 0, "free": self.graph.folded, "unsupported": 0})
        for node, kind in zip(self.graph.nodes, self.dataflow.kinds, strict=True):
            if classify_primitive(node.primitive) == "unsupported":
                counts["unsupported"] += 1
            elif kind != "loop_view":
                outcome = "task" if roots.intersection(node.outputs) else "fused"
                counts["free" if kind == "view" else outcome] += 1
        return dict(counts)

    def _list_gradients(self) -> tuple[tuple[str, int, int], ...]:
        """Return (parameter name, bytes, last writer) of each gradient, sorted by writer."""
        buffers = self.buffers.all
        arrays = [buffer.index if buffer.within is None else buffer.within for buffer in buffers]

        def find_array(buffer: int) -> int:
            while arrays[buffer] != buffer:
                buffer = arrays[buffer]
            return buffer

        writers: dict[int, int] = {}
        for place, task in enumerate(self.inserted.tasks):
            if task.phase == "backward":
                writers.update(dict.fromkeys(map(find_array, task.writes), place))
        values = find_gradients(self.graph, self.signature, self.phases, self.dataflow)
        gradients = []
        for parameter, value in values.items():
            if value not in self.buffers.index:
                continue
            buffer = self.buffers.get(value)
            buffer = self.inserted.unconverted.get(buffer, buffer)
            writer = writers.get(find_array(buffer))
            if writer is not None:
                name = self.signature.parameters[parameter]
                gradients.append((name, self.buffers.all[buffer].nbytes, writer))
        return tuple(sorted(gradients, key=lambda gradient: (gradient[2], gradient[0])))

    def _lower_kernel(self, kernel: Kernel) -> None:
        """Add a kernel's task, after the tasks that convert its inputs."""
        node = self.graph.nodes[kernel.nodes[0]]
        kind = self.dataflow.kinds[kernel.nodes[0]]
        if kernel.form != "single":
            self._add_vector_kernel(kernel)
        elif kind in ("conv", "matmul"):
            self._add_product(kernel, node, kind)
        elif kind == "window":
            self._add_pool(kernel, node)
        elif kind == "resize":
            self._add_resize(kernel, node)
        else:
            self._add_move(kernel, node, kind)

    def _add_vector_kernel(self, kernel: Kernel) -> None:
        """Add a kernel of the vector unit, with the conversions and the MemSet that it needs."""
        nodes = [self.graph.nodes[position] for position in kernel.nodes]
        reads, writes = self.maps.lay_out(kernel)
        if kernel.form == "random":
            self._add_random(kernel, reads, writes)
            return
        features = self._describe_kernel(kernel, nodes)
        type_, cost_class = match_pattern(features, load_patterns())
        if cost_class == "elementwise" and kernel.phase == "forward":
            reads = self.inserted.cast_biases(kernel, reads)
        # Means over the positions of each image read plain tensors in eager frameworks; ReduceMean
        # in a graph takes blocks of channels.
        result_shape = self.graph.values[kernel.roots[0]].shape
        is_plain_mean = self.options.by_op and sum(size > 1 for size in result_shape) > 1
        if cost_class == "bias_grad" or (cost_class == "reduce" and is_plain_mean):
            reads = self.inserted.convert_to_plain(kernel, reads)
        if cost_class in ("bias_grad", "reduce"):
            self.inserted.add_memset(kernel, writes)
        self.classes.update(dict.fromkeys(kernel.roots, cost_class))
        self.inserted.add(
            kernel, type_, cost_class, reads, writes,
            vector=measure_kernel(kernel, self.graph, self.dataflow.kinds, self.dtypes),
            fused=tuple(dict.fromkeys(features.primitives)),
        )  # fmt: skip

    def _add_random(self, kernel: Kernel, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """Add random numbers as AI CPU work, however few. Keys are scalar work."""
        value = self.graph.values[kernel.roots[0]]
        if value.size <= TINY_ELEMENTS and value.dtype.startswith(("key", "uint")):
            work = VectorWork(value.size, "float32")
            self.inserted.add(kernel, "Random", "elementwise", reads, writes, vector=work)
            return
        name = "DropoutGenMask" if value.dtype == "bool" else "StatelessRandomUniform"
        self.inserted.add(kernel, name, "ai_cpu", reads, writes, engine="ai_cpu")

    def _describe_kernel(self, kernel: Kernel, nodes: list[Node]) -> Features:
        """Return the properties by which a pattern names a kernel."""
        root = self.graph.values[kernel.roots[0]]
        after = (self.classes[index] for index in kernel.sources if index in self.classes)
        kinds = {self.dataflow.kinds[position] for position in kernel.nodes}
        return Features(
            form=kernel.form,
            phase=kernel.phase,
            primitives=tuple(node.primitive for node in nodes),
            calls=frozenset(call for node in nodes for call in node.calls),
            after=frozenset(after) | ({"rows"} & kinds),
            channels=sum(size > 1 for size in root.shape) <= 1 and root.size > 1,
            maps=all(self._is_map_or_matrix(kernel, index) for index in kernel.sources),
            updates=bool(self.updated.intersection(kernel.roots)),
            results=len(kernel.roots),
            random_mask=not self.kernels.random.isdisjoint(kernel.sources),
        )

    def _is_map_or_matrix(self, kernel: Kernel, index: int) -> bool:
        """Return whether a value is a feature map with more than one position, or a matrix."""
        value = self.graph.values[index]
        if len(value.shape) <= 2 or value.size < kernel.elements:
            return True
        return index in self.buffers.axes and sum(size > 1 for size in value.shape) > 2

    def _add_product(self, kernel: Kernel, node: Node, kind: str) -> None:
        """Add a convolution or a matrix product on the cube.

        The cube has no float32. Under every amp_level, also O0, MindSpore casts the operands of
        products and convolutions to float16 and keeps a float32 result (hardware notes, 1.6; a
        ViT-B/16 without amp_level takes 157 ms). With precision None the vector unit multiplies
        float32. A cube that has float32 multiplies it under O0 and None.
        """
        backward = kernel.phase == "backward"
        writes_gradient = backward and node.outputs[0] in self.phases.gradients
        if kind == "conv":
            cost_class, work = measure_convolution(self.graph, node, self.phases, backward)
            layouts: tuple[Layout, Layout] = ("NC1HWC0", "FRACTAL_Z")
            if self.keeps_float32 and {self.dtypes[index] for index in node.inputs} == {"float32"}:
                work = replace(work, dtype="float32")
        else:
            cost_class = "matmul"
            traced = {self.dtypes[index] for index in node.inputs}
            keeps_types = self.options.precision is None or self.keeps_float32
            is_float32 = keeps_types and "float32" in traced
            work = measure_matmul(self.graph, node, "float32" if is_float32 else "float16")
            layouts = (self.matrix_layout, self.matrix_layout)
        values = [self.alias[index] for index in node.inputs]
        if work.dtype == "float32" and kind == "matmul":
            reads = list(map(self.buffers.get, values))
        else:
            reads = [
                self.inserted.prepare(value, layout, kernel)
                for value, layout in zip(values, layouts, strict=True)
            ]
        inserted = self.inserted
        if kind == "conv":
            reads = [
                inserted.put_channels_first(value, kernel, read)
                if value in inserted.channels_last
                else read
                for value, read in zip(values, reads, strict=True)
            ]
        else:
            reads = [
                inserted.put_channels_last(value, kernel, read) if self.maps.is_map(value) else read
                for value, read in zip(node.inputs, reads, strict=True)
            ]
            reads = [self._reorder_operand(kernel, node, side, reads[side]) for side in range(2)]
        writes = (self.buffers.get(node.outputs[0]),)
        if writes_gradient:
            self.inserted.add_memset(kernel, writes)
        self.inserted.add(
            kernel, TYPES[cost_class], cost_class, tuple(dict.fromkeys(reads)), writes,
            engine="cube", cube=work, fused=(node.primitive,),
        )  # fmt: skip
        if writes_gradient and kind == "matmul" and self.matrix_layout != "ND":
            self.inserted.convert_gradient(node.outputs[0], kernel)

    def _reorder_operand(self, kernel: Kernel, node: Node, side: int, buffer: int) -> int:
        """Return an operand in the cube's order. Weights are stored in this order."""
        value = self.alias[node.inputs[side]]
        if value in self.phases.weights or value in self.graph.constants:
            return buffer
        moved = find_operand_permutation(self.graph, node, side, self.absorbed)
        return buffer if is_free(moved) else self.inserted.permute(value, buffer, moved, kernel)

    def _add_pool(self, kernel: Kernel, node: Node) -> None:
        """Add a pooling. A max pooling may write a mask of the maxima's positions too."""
        backward = kernel.phase == "backward"
        values = self.graph.values
        inputs = (self.alias[index] for index in node.inputs)
        sizes = [values[index].size for index in (*inputs, *node.outputs)]
        largest = max(node.outputs, key=lambda index: values[index].size)
        pooled = min((size for size in sizes if size > 1), default=1)
        sources = (self.buffers.get(index) for index in kernel.sources if values[index].size > 1)
        reads = tuple(dict.fromkeys(sources))
        cost_class: CostClass = "avg_pool"
        name = "AvgPoolGrad" if backward else "AvgPool"
        if "max" in node.primitive or node.primitive.startswith("select_and"):
            name = "MaxPoolGradWithArgmax" if backward else "MaxPoolWithArgmax"
            cost_class = "max_pool_grad" if backward else "max_pool"
            writes = (self.buffers.get(largest),) if backward else self._add_maxima_and_mask(node)
            self.inserted.add_memset(kernel, writes)
        else:
            writes = (self.buffers.get(node.outputs[0]),)
        work = VectorWork(pooled, self.dtypes[largest], float(count_window_positions(node)))
        fused = (node.primitive,)
        self.inserted.add(kernel, name, cost_class, reads, writes, vector=work, fused=fused)

    def _add_resize(self, kernel: Kernel, node: Node) -> None:
        """Add a resize of maps, or its gradient, which adds to a cleared map."""
        backward = kernel.phase == "backward"
        reads, writes = self.maps.lay_out(kernel)
        if backward:
            self.inserted.add_memset(kernel, writes)
        name = "ResizeBilinear" if node.params["is_linear"] else "ResizeNearestNeighbor"
        out = node.outputs[0]
        size = self.graph.values[out].size
        work = VectorWork(size, self.dtypes[out], rows=int(node.params["rows"]))
        self.inserted.add(
            kernel, name + "Grad" * backward, "resize", reads, writes,
            vector=work, fused=(node.primitive,),
        )  # fmt: skip

    def _add_maxima_and_mask(self, node: Node) -> tuple[int, ...]:
        """Return the buffers of maxima and, if the node has one, a mask: a bit per position."""
        pooled = node.outputs[0]
        if all(self.graph.values[out].size <= 1 for out in node.outputs[1:]):
            return (self.buffers.get(pooled),)
        mask = self.buffers.add(pooled, "bool", "NC1HWC0")
        nbytes = count_window_positions(node) * self.buffers.all[mask].nbytes
        self.buffers.change(mask, nbytes=nbytes, role="activation", name="argmax")
        self.buffers.index.update(dict.fromkeys(node.outputs[1:], mask))
        return (self.buffers.get(pooled), mask)

    def _add_move(self, kernel: Kernel, node: Node, kind: str) -> None:
        """Add moves, gathers, scatters, sorts, collectives, and primitives without a rule."""
        if self.maps.needs_plain(node):
            self.maps.add_plain_move(kernel, node)
            return
        reads, writes = self.maps.lay_out(kernel)
        is_transpose = node.primitive == "transpose"
        elements = max(self.graph.values[index].size for index in node.outputs)
        if kind == "scatter":
            elements = self.graph.values[node.inputs[2]].size
            self.inserted.add_memset(kernel, writes)
        self.inserted.add(
            kernel,
            OPS.get(node.primitive, node.primitive),
            MOVERS.get(kind, "transpose" if is_transpose else "copy"),
            reads,
            writes,
            engine="hccl" if kind == "collective" else "vector",
            vector=VectorWork(elements, self.dtypes[node.outputs[0]]),
            fused=(node.primitive,),
            permutation=self._find_permutation(node) if is_transpose else None,
        )

    def _find_permutation(self, node: Node) -> Permutation:
        """Return the permutation of a transpose; after a product, the easiest one."""
        producer = self.dataflow.producer.get(node.inputs[0])
        if producer is not None and self.graph.nodes[producer].primitive == "dot_general":
            return find_result_permutation(self.graph, self.graph.nodes[producer], node)
        shape = self.graph.values[node.inputs[0]].shape
        return simplify_permutation(shape, node.params["permutation"])
