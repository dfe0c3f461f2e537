"""Lower kernels to a device's tasks: types, layouts, and ops that the compiler inserts.

The vendor's graph compiler inserts a Cast of every float32 weight that a product reads, every step;
TransData where a value changes its layout; MemSet before accumulation; GetNext.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import (
    CostClass,
    Layout,
    Permutation,
    Task,
    TaskGraph,
    VectorWork,
    permutation_of,
)
from pipeline.backends.ascend.compiler.buffers import Buffers
from pipeline.backends.ascend.compiler.dataflow import TINY_ELEMENTS, find_gradients
from pipeline.backends.ascend.compiler.float32_norms import keep_norms_in_float32
from pipeline.backends.ascend.compiler.fusion import fuse
from pipeline.backends.ascend.compiler.horizontal_fusion import Kernel
from pipeline.backends.ascend.compiler.inserted_ops import InsertedOps
from pipeline.backends.ascend.compiler.kernels import Kernels
from pipeline.backends.ascend.compiler.matmul_work import (
    TYPES,
    absorbed_transposes,
    convolution_work,
    is_free,
    matrix_work,
    operand_permutation,
    result_permutation,
    window_area,
)
from pipeline.backends.ascend.compiler.matrix_formats import convert_formats
from pipeline.backends.ascend.compiler.op_patterns import Features, Patterns, match_pattern
from pipeline.backends.ascend.compiler.phases import Signature, device_dtypes, find_phases
from pipeline.backends.ascend.compiler.primitives import OPS, kind_of, passes_of
from pipeline.backends.graph.graph import Graph, Node
from pipeline.core.errors import RunError
from pipeline.core.host.item_sizes import stored_bytes

MOVERS: dict[str, CostClass] = {
    "gather": "gather",
    "scatter": "scatter",
    "sort": "sort",
    "collective": "all_reduce",
    "cumulative": "rows",
}
"""Cost classes of moves other than `transpose` and `copy`."""


class UnsupportedError(RunError):
    """A primitive that the emulated device doesn't know."""


@dataclass(frozen=True)
class LoweringOptions:
    """Options of the compiler; `precision` and `keep_batchnorm_fp32` are MindSpore's amp levels."""

    precision: Precision | None
    patterns: Patterns
    by_op: bool = False
    """Whether every op of the framework runs on its own, unfused."""
    strict: bool = False
    """Whether an unknown primitive is an error."""
    keep_batchnorm_fp32: bool = False


def lower(graph: Graph, signature: Signature, options: LoweringOptions) -> TaskGraph:
    """Return the tasks of one step. Raises UnsupportedError on unknown primitives if `strict`."""
    unsupported = Counter(
        node.primitive for node in graph.nodes if kind_of(node.primitive) == "unsupported"
    )
    if options.strict and unsupported:
        names = ", ".join(sorted(unsupported))
        raise UnsupportedError(
            f"no rule for {names}; price with strict = false to count them by their bytes"
        )
    lowered = _Lowering(graph, signature, options).run(unsupported)
    if options.keep_batchnorm_fp32:
        lowered = keep_norms_in_float32(lowered)
    fused = lowered if options.by_op else fuse(lowered, options.patterns)
    return convert_formats(fused, op_by_op=options.by_op)


class _Lowering:
    """One lowering of a graph to tasks."""

    def __init__(self, graph: Graph, signature: Signature, options: LoweringOptions) -> None:
        self.graph, self.signature, self.patterns = graph, signature, options.patterns
        precision, by_op = options.precision, options.by_op
        self.precision, self.by_op = precision, by_op
        self.phases = find_phases(graph, set(signature.parameters))
        every_input = {*signature.parameters, *signature.state, *signature.inputs}
        self.dtypes = device_dtypes(graph, self.phases, every_input, precision)
        self.kernels = Kernels(graph, self.phases, self._plain_bytes, by_op=by_op)
        self.dataflow = self.kernels.dataflow
        self.alias = self.dataflow.alias
        self.buffers = Buffers(graph, signature, self.phases, self.dtypes, self.dataflow)
        self.inserted = InsertedOps(graph, self.buffers, precision)
        self.updated = {self.alias[out] for out in signature.updates}
        self.classes: dict[int, CostClass] = {}
        self.absorbed = {
            graph.nodes[position].outputs[0]: graph.nodes[position]
            for position in absorbed_transposes(graph)
        }
        self.makers = {out: node for node in graph.nodes for out in node.outputs}

    def _plain_bytes(self, index: int) -> float:
        return self.graph.values[index].size * stored_bytes(self.dtypes[index])

    def run(self, unsupported: Counter[str]) -> TaskGraph:
        """Return all tasks."""
        signature, of = self.signature, self.buffers.of
        for index in (*signature.parameters, *signature.state, *signature.inputs):
            of(index)
        self._fetch()
        kernels = self.kernels.form()
        for kernel in kernels:
            if kernel.phase == "optimizer":
                self.inserted.flush()
            self._lower(kernel)
        self.inserted.flush()
        outputs = tuple(of(index) for index in sorted(self.buffers.outputs))
        return TaskGraph(
            buffers=tuple(self.buffers.all),
            tasks=tuple(self.inserted.tasks),
            inputs=tuple(map(of, signature.inputs)),
            parameters=tuple(map(of, signature.parameters)),
            state=tuple(map(of, signature.state)),
            outputs=outputs,
            gradients=self._gradients(),
            primitives=self._coverage(kernels),
            unsupported=dict(unsupported),
            aliases=self.buffers.aliases(),
        )

    def _fetch(self) -> None:
        if self.signature.inputs:
            filled = tuple(map(self.buffers.of, self.signature.inputs))
            self.inserted.tasks.append(Task("GetNext", "", "ai_cpu", "data", "ai_cpu", (), filled))

    def _coverage(self, kernels: list[Kernel]) -> dict[str, int]:
        """Count every equation by its outcome."""
        roots = {root for kernel in kernels for root in kernel.roots}
        counts = Counter({"task": 0, "fused": 0, "free": self.graph.folded, "unsupported": 0})
        for node, kind in zip(self.graph.nodes, self.dataflow.kinds, strict=True):
            if kind_of(node.primitive) == "unsupported":
                counts["unsupported"] += 1
            elif kind != "loop_view":
                outcome = "task" if roots.intersection(node.outputs) else "fused"
                counts["free" if kind == "view" else outcome] += 1
        return dict(counts)

    def _gradients(self) -> tuple[tuple[str, int, int], ...]:
        """Return each parameter's gradient: its bytes before the update, and the last task to write
        it.
        """
        whole = [each.index if each.within is None else each.within for each in self.buffers.all]
        maker: dict[int, int] = {}
        for place, task in enumerate(self.inserted.tasks):
            if task.phase == "backward":
                maker.update(
                    dict.fromkeys((_root(whole, written) for written in task.writes), place)
                )
        values = find_gradients(self.graph, self.signature, self.phases, self.dataflow)
        gradients = []
        for parameter, value in values.items():
            if value not in self.buffers.index:
                continue
            buffer = self.buffers.of(value)
            buffer = self.inserted.laid_out.get(buffer, buffer)
            root = _root(whole, buffer)
            if root in maker:
                name = self.signature.parameters[parameter]
                gradients.append((name, self.buffers.all[buffer].nbytes, maker[root]))
        return tuple(sorted(gradients, key=lambda gradient: (gradient[2], gradient[0])))

    def _lower(self, kernel: Kernel) -> None:
        """Add one kernel's task, after those that prepare it."""
        node = self.graph.nodes[kernel.nodes[0]]
        kind = self.dataflow.kinds[kernel.nodes[0]]
        if kernel.form != "single":
            self._vector_kernel(kernel)
        elif kind in ("conv", "matmul"):
            self._product(kernel, node, kind)
        elif kind == "window":
            lower_window(kernel, node, self.inserted)
        else:
            self._move(kernel, node, kind)

    def _vector_kernel(self, kernel: Kernel) -> None:
        """Add element-wise work, a reduction, or both along rows."""
        nodes = [self.graph.nodes[position] for position in kernel.nodes]
        reads, writes = self._laid_out(kernel)
        if any(root in self.kernels.random for root in kernel.roots):
            self._random(kernel, reads, writes)
            return
        type_, cost_class = match_pattern(self._features(kernel, nodes), self.patterns)
        if cost_class == "elementwise" and kernel.phase == "forward":
            reads = self.inserted.cast_biases(kernel, reads)
        if cost_class == "bias_grad" or (cost_class == "reduce" and self._is_plain_mean(kernel)):
            reads = self.inserted.plain(kernel, reads)
        if cost_class in ("bias_grad", "reduce"):
            self.inserted.clear(kernel, writes)
        self.classes.update(dict.fromkeys(kernel.roots, cost_class))
        names = tuple(dict.fromkeys(node.primitive for node in nodes))
        self.inserted.add(
            kernel, type_, cost_class, reads, writes,
            vector=self._vector_work(kernel, nodes), fused=names,
        )  # fmt: skip

    def _is_plain_mean(self, kernel: Kernel) -> bool:
        """Return whether a sum over the positions of each image reads a plain tensor.

        Eager frameworks' means do; ReduceMean in a graph takes blocks of channels.
        """
        sums = self.graph.values[kernel.roots[0]]
        return self.by_op and sum(size > 1 for size in sums.shape) > 1

    def _laid_out(self, kernel: Kernel) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what a vector kernel reads and writes, in layouts that it can work on.

        Work along the channels of a position, as layer norm's on images, needs them side by side:
        frameworks put a Transpose from NCHW to NHWC before it and one back after it, since
        feature maps are NCHW for everything else (ConvNeXt, Liu et al. 2022, does so in PyTorch).
        """
        if kernel.form == "rows" and any(map(self._is_map, kernel.sources)):
            reads = tuple(
                self.inserted.channels_last(index, kernel)
                if self._is_map(index)
                else self.buffers.of(index)
                for index in kernel.sources
            )
            return reads, tuple(map(self.inserted.plain_result, kernel.roots))
        writes = tuple(map(self.buffers.of, kernel.roots))
        blocked = any(self.buffers.all[index].layout == "NC1HWC0" for index in writes)
        reads = tuple(
            self.inserted.channels_first(index, kernel)
            if blocked and self._is_channels_last(index, kernel)
            else self.buffers.of(index)
            for index in kernel.sources
        )
        return reads, writes

    def _is_map(self, index: int) -> bool:
        """Return whether a value is a feature map in blocks, of more than one position."""
        value, axis = self.graph.values[index], self.buffers.axes.get(index)
        if axis is None or len(value.shape) != 4:
            return False
        positions = value.size // (value.shape[0] * value.shape[axis])
        return positions > 1 and self.buffers.all[self.buffers.of(index)].layout == "NC1HWC0"

    def _is_channels_last(self, index: int, kernel: Kernel) -> bool:
        """Return whether a whole map comes from work along channels: a product, or layer norm."""
        value = self.graph.values[index]
        if len(value.shape) != 4 or value.size != kernel.elements:
            return False
        producer = self.dataflow.producer.get(index)
        made = self.dataflow.kinds[producer] if producer is not None else ""
        return made == "matmul" or self.inserted.is_channels_last(index)

    def _random(self, kernel: Kernel, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """Add random numbers as AI CPU work; a few of them, such as keys, are scalar work."""
        drawn = self.graph.values[kernel.roots[0]]
        if drawn.size <= TINY_ELEMENTS:
            work = VectorWork(drawn.size, "float32")
            self.inserted.add(kernel, "Random", "elementwise", reads, writes, vector=work)
            return
        name = "DropoutGenMask" if drawn.dtype == "bool" else "StatelessRandomUniform"
        self.inserted.add(kernel, name, "ai_cpu", reads, writes, engine="ai_cpu")

    def _features(self, kernel: Kernel, nodes: list[Node]) -> Features:
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

    def _vector_work(self, kernel: Kernel, nodes: list[Node]) -> VectorWork:
        simple = heavy = 0.0
        for node in nodes:
            size = max(self.graph.values[index].size for index in (*node.inputs, *node.outputs))
            share = min(1.0, size / max(1, kernel.elements))
            few, many = self._passes(node)
            simple, heavy = simple + few * share, heavy + many * share
        widest = any(
            self.dtypes[index] == "float32" and self.graph.values[index].size * 2 > kernel.elements
            for index in (*kernel.sources, *kernel.roots)
        )
        dtype = "float32" if widest else "float16"
        return VectorWork(kernel.elements, dtype, simple, heavy, self._along_rows(kernel))

    def _along_rows(self, kernel: Kernel) -> int:
        """Return the operations of a kernel that every row needs its own of: its reductions, and
        their results that are spread over the row again.
        """
        if kernel.form != "rows":
            return 1
        reductions = sum(
            self.dataflow.kinds[position] == "rows"
            and 2 * self.graph.values[self.graph.nodes[position].inputs[0]].size >= kernel.elements
            for position in kernel.nodes
        )
        spread = any(2 * self.graph.values[root].size >= kernel.elements for root in kernel.roots)
        return max(2 * reductions - (not spread), 1)

    def _passes(self, node: Node) -> tuple[float, float]:
        """Return operations per element: a division by a known number is a product with another."""
        if kind_of(node.primitive) in ("reduce", "scatter", "gather"):
            return 1.0, 0.0
        if node.primitive == "div" and node.inputs[1] in self.graph.constants:
            return 1.0, 0.0
        if node.primitive == "integer_pow" and node.params["y"] in (2, 3):
            return float(node.params["y"] - 1), 0.0
        return passes_of(node.primitive)

    def _product(self, kernel: Kernel, node: Node, kind: str) -> None:
        """Add a convolution or a matrix product on the cube."""
        backward = kernel.phase == "backward"
        gives_gradient = backward and node.outputs[0] in self.phases.gradients
        if kind == "conv":
            cost_class, work = convolution_work(self.graph, node, self.phases, backward)
            layouts: tuple[Layout, Layout] = ("NC1HWC0", "FRACTAL_Z")
        else:
            cost_class, layouts = "matmul", ("FRACTAL_NZ", "FRACTAL_NZ")
            work = matrix_work(self.graph, node, self._matrix_dtype(node))
        cast = kind == "conv" or work.dtype != "float32"
        reads = tuple(
            self.inserted.prepare(index, layout, kernel)
            if cast
            else self.buffers.of(self.alias[index])
            for index, layout in zip(node.inputs, layouts, strict=False)
        )
        if kind == "conv":
            values = [self.alias[index] for index in node.inputs]
            reads = tuple(
                self.inserted.channels_first(value, kernel)
                if self.inserted.is_channels_last(value)
                else buffer
                for value, buffer in zip(values, reads, strict=True)
            )
        if kind == "matmul":
            reads = tuple(
                self.inserted.channels_last(index, kernel) if self._is_map(index) else buffer
                for index, buffer in zip(node.inputs, reads, strict=True)
            )
            reads = tuple(self._in_order(kernel, node, side, reads[side]) for side in range(2))
        writes = (self.buffers.of(node.outputs[0]),)
        if gives_gradient:
            self.inserted.clear(kernel, writes)
        self.inserted.add(
            kernel, TYPES[cost_class], cost_class, tuple(dict.fromkeys(reads)), writes,
            engine="cube", cube=work, fused=(node.primitive,),
        )  # fmt: skip
        if gives_gradient and kind == "matmul":
            self.inserted.convert_gradient(node.outputs[0], kernel)

    def _in_order(self, kernel: Kernel, node: Node, side: int, buffer: int) -> int:
        """Return an operand in the order in which the cube reads it. Weights are stored in it."""
        value = self.alias[node.inputs[side]]
        if value in self.phases.weights or self.alias[node.inputs[side]] in self.graph.constants:
            return buffer
        moved = operand_permutation(self.graph, node, side, self.absorbed)
        if is_free(moved):
            return buffer
        return self.inserted.permute(value, buffer, moved, kernel)

    def _matrix_dtype(self, node: Node) -> str:
        """Return the type of a product's operands.

        The cube has no float32: under every amp_level, O0 too, MindSpore's kernel selection reduces
        the operands of MatMul and BatchMatMul to float16 by a Cast and keeps a float32 result, as
        it does for convolutions (hardware notes 1.6; a ViT-B/16 without amp_level takes 157 ms).
        Traced types alone (None) are those of the releases before, whose vector unit multiplies.
        """
        if self.precision is not None:
            return "float16"
        dtypes = {self.dtypes[index] for index in node.inputs}
        return "float32" if "float32" in dtypes else "float16"

    def _move(self, kernel: Kernel, node: Node, kind: str) -> None:
        """Add moves, gathers, scatters, sorts, collectives, and primitives without a rule."""
        cut = node.primitive in ("slice", "split") and kernel.phase == "backward"
        if cut and kernel.roots[0] in self.buffers.axes:
            self._slice_plainly(kernel, node)
            return
        reads = tuple(map(self.buffers.of, kernel.sources))
        writes = tuple(map(self.buffers.of, kernel.roots))
        turned = node.primitive == "transpose"
        other: CostClass = "transpose" if turned else "copy"
        if kind == "scatter":
            self.inserted.clear(kernel, writes)
        self.inserted.add(
            kernel,
            OPS.get(node.primitive, node.primitive),
            MOVERS.get(kind, other),
            reads,
            writes,
            engine="hccl" if kind == "collective" else "vector",
            vector=VectorWork(self._moved(node, kind), self.dtypes[node.outputs[0]]),
            fused=(node.primitive,),
            permutation=self._permutation(node) if turned else None,
        )

    def _permutation(self, node: Node) -> Permutation:
        """Return the permutation of a transpose's bytes: neither reshapes nor layouts change it."""
        maker = self.makers.get(node.inputs[0])
        if maker is not None and maker.primitive == "dot_general":
            return result_permutation(self.graph, maker, node)
        shape = self.graph.values[node.inputs[0]].shape
        return permutation_of(shape, node.params["permutation"])

    def _slice_plainly(self, kernel: Kernel, node: Node) -> None:
        """Slice a concatenation's gradient.

        The vendor's Slice has plain layouts only, and runs once for each part.
        """
        whole = self.inserted.prepare_plain(kernel.sources[0], kernel)
        for root in kernel.roots:
            part = self.buffers.add(root, self.dtypes[root], "ND")
            self.buffers.change(part, role="activation")
            work = VectorWork(self.graph.values[root].size, self.dtypes[root])
            self.inserted.add(
                kernel, "Slice", "copy", (whole,), (part,), vector=work, fused=(node.primitive,)
            )
            blocked = (self.buffers.of(root),)
            self.inserted.add(kernel, "TransData", "trans_data", (part,), blocked, vector=work)

    def _moved(self, node: Node, kind: str) -> int:
        """Return the elements that a node copies: the gathered or scattered ones, not the table."""
        if kind == "scatter":
            return self.graph.values[node.inputs[2]].size
        return max(self.graph.values[index].size for index in node.outputs)


def _root(whole: list[int], buffer: int) -> int:
    while whole[buffer] != buffer:
        buffer = whole[buffer]
    return buffer


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
