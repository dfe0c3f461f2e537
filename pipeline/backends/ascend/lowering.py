"""From kernels to the tasks of a device: types, layouts, and what the compiler adds.

It adds what the vendor's graph compiler does: a Cast of every float32 weight that a product reads,
every step; TransData where a value changes its layout; MemSet before what accumulates; GetNext.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.backends.ascend.fusion import fuse
from pipeline.backends.ascend.graph import Graph, Node
from pipeline.backends.ascend.kernels import Kernel, Kernels
from pipeline.backends.ascend.layouts import channel_axes, item_bytes, padded_elements
from pipeline.backends.ascend.phases import Precision, device_dtypes, find_phases
from pipeline.backends.ascend.primitives import OPS, kind_of, passes_of
from pipeline.backends.ascend.products import TYPES, convolution_work, matrix_work
from pipeline.backends.ascend.recognise import Features, Patterns, recognise
from pipeline.backends.ascend.tasks import (
    Buffer,
    CostClass,
    Layout,
    Phase,
    Role,
    Task,
    TaskGraph,
    VectorWork,
)
from pipeline.errors import RunError


@dataclass(frozen=True)
class Signature:
    """What the inputs of a step are, by the index of their values; `updates` says which output
    takes the place of which input.
    """

    parameters: Mapping[int, str]
    state: Mapping[int, str]
    inputs: Mapping[int, str]
    updates: Mapping[int, int]


class UnsupportedError(RunError):
    """A primitive that the emulated device doesn't know."""


def lower(
    graph: Graph,
    signature: Signature,
    precision: Precision | None,
    patterns: Patterns,
    *,
    by_op: bool = False,
    strict: bool = False,
) -> TaskGraph:
    """The tasks of one step. `by_op` runs every op of the framework on its own, unfused.

    Raises UnsupportedError on unknown primitives when `strict`.
    """
    lowering = _Lowering(graph, signature, precision, patterns, by_op)
    if strict and lowering.unsupported:
        names = ", ".join(sorted(lowering.unsupported))
        raise UnsupportedError(
            f"no rule for {names}; price with strict = false to count them by their bytes"
        )
    lowered = lowering.run()
    return lowered if by_op else fuse(lowered, patterns)


class _Lowering:
    def __init__(
        self,
        graph: Graph,
        signature: Signature,
        precision: Precision | None,
        patterns: Patterns,
        by_op: bool,
    ) -> None:
        self.graph, self.signature, self.patterns = graph, signature, patterns
        self.precision = precision
        parameters = set(signature.parameters)
        self.phases = find_phases(graph, parameters)
        every_input = {*parameters, *signature.state, *signature.inputs}
        self.dtypes = device_dtypes(graph, self.phases, every_input, precision)
        self.kernels = Kernels(graph, self.phases, self._plain_bytes, by_op=by_op)
        self.alias = self.kernels.wiring.alias
        self.axes = channel_axes(graph, self.kernels.wiring)
        self.outputs = {self.alias[index] for index in graph.outputs}
        self.unsupported = Counter(
            node.primitive
            for node, kind in zip(graph.nodes, self.kernels.wiring.kinds, strict=True)
            if kind == "unsupported"
        )
        self.buffers: list[Buffer] = []
        self.tasks: list[Task] = []
        self.index: dict[int, int] = {}
        self.prepared: dict[tuple[int, Layout], int] = {}
        self.classes: dict[int, CostClass] = {}
        self.laid_out: dict[int, int] = {}
        self.deferred: list[Task] = []
        self.replaced = {self.alias[out]: into for out, into in signature.updates.items()}
        self.counts: Counter[str] = Counter()
        self._name_loops()

    def _plain_bytes(self, index: int) -> float:
        return self.graph.values[index].size * item_bytes(self.dtypes[index])

    def run(self) -> TaskGraph:
        """All tasks."""
        for index in (
            *self.signature.parameters,
            *self.signature.state,
            *self.signature.inputs,
        ):
            self.buffer(self.alias[index])
        if self.signature.inputs:
            filled = tuple(self.buffer(index) for index in self.signature.inputs)
            self.add("GetNext", "", "ai_cpu", "data", "ai_cpu", (), filled)
        for kernel in self.kernels.form():
            if kernel.phase == "optimizer":
                self.flush()
            self.lower_kernel(kernel)
        self.flush()
        return TaskGraph(
            buffers=tuple(self.buffers),
            tasks=tuple(self.tasks),
            inputs=tuple(self.index[index] for index in self.signature.inputs),
            parameters=tuple(self.index[index] for index in self.signature.parameters),
            state=tuple(self.index[index] for index in self.signature.state),
            outputs=tuple(self.buffer(index) for index in sorted(self.outputs)),
            gradients=self.gradients(),
            primitives=self.coverage(),
            unsupported=dict(self.unsupported),
            aliases=self.aliases(),
        )

    def flush(self) -> None:
        """Gradients are laid out anew once they are all there."""
        self.tasks += self.deferred
        self.deferred = []

    def coverage(self) -> dict[str, int]:
        """What became of every equation."""
        views = sum(kind == "view" for kind in self.kernels.wiring.kinds)
        unsupported = sum(self.unsupported.values())
        loops = sum(kind == "loop_view" for kind in self.kernels.wiring.kinds)
        tasks = self.counts["task"] - unsupported
        every = len(self.graph.nodes) - loops
        return {
            "task": tasks,
            "fused": every - views - tasks - unsupported,
            "free": views + self.graph.folded,
            "unsupported": unsupported,
        }

    def aliases(self) -> dict[int, int]:
        """Which output buffers take the place of which inputs."""
        pairs = (
            (self.index.get(self.alias[out]), self.index.get(into))
            for out, into in self.signature.updates.items()
        )
        return {
            out: into for out, into in pairs if out is not None and into is not None and out != into
        }

    def gradients(self) -> tuple[tuple[str, int, int], ...]:
        """Each parameter's gradient: the buffer that its update reads out of the backward pass."""
        maker = {
            buffer: place
            for place, task in enumerate(self.tasks)
            for buffer in task.writes
            if task.phase == "backward"
        }
        parameters = {self.index[index]: name for index, name in self.signature.parameters.items()}
        updates = {buffer: into for buffer, into in self.aliases().items() if into in parameters}
        found: dict[str, tuple[int, int]] = {}
        for task in self.tasks:
            names = [parameters[updates[buffer]] for buffer in task.writes if buffer in updates]
            read = (self.laid_out.get(buffer, buffer) for buffer in task.reads)
            made = [buffer for buffer in read if buffer in maker]
            if names and made:
                largest = max(made, key=lambda buffer: self.buffers[buffer].nbytes)
                found[names[0]] = (self.buffers[largest].nbytes, maker[largest])
        ordered = sorted(found.items(), key=lambda item: (item[1][1], item[0]))
        return tuple((name, nbytes, place) for name, (nbytes, place) in ordered)

    def _name_loops(self) -> None:
        """What a scan slices and stacks lies within the whole that it slices or stacks."""
        self.within: dict[int, int] = {}
        for node, kind in zip(self.graph.nodes, self.kernels.wiring.kinds, strict=True):
            if kind != "loop_view":
                continue
            source, out = self.alias[node.inputs[0]], node.outputs[0]
            if node.primitive == "scan_slice":
                self.within[out] = source
            elif node.primitive == "scan_stack":
                self.within[source] = out
            else:
                self.within[out] = source

    def buffer(self, value: int) -> int:
        """The buffer of a value, made when it is first asked for."""
        if value in self.index:
            return self.index[value]
        whole = self.within.get(value)
        within = self.buffer(whole) if whole is not None and whole != value else None
        layout = self._layout(value)
        self.index[value] = self._add_buffer(value, self.dtypes[value], layout, within)
        return self.index[value]

    def _add_buffer(
        self, value: int, dtype: str, layout: Layout, within: int | None = None
    ) -> int:
        stored = padded_elements(self.graph.values[value], layout, self.axes.get(value))
        self.buffers.append(
            Buffer(
                len(self.buffers),
                self._stored_shape(value, layout),
                dtype,
                layout,
                math.ceil(stored * item_bytes(dtype)),
                self._role(value),
                self._name(value),
                within,
            )
        )
        return len(self.buffers) - 1

    def _stored_shape(self, value: int, layout: Layout) -> tuple[int, ...]:
        """Plain feature maps are stored as NCHW, as the vendor's frameworks do."""
        shape, axis = self.graph.values[value].shape, self.axes.get(value)
        if layout != "ND" or axis is None or len(shape) != 4:
            return shape
        rest = [size for place, size in enumerate(shape) if place not in (0, axis)]
        return (shape[0], shape[axis], *rest)

    def _layout(self, value: int) -> Layout:
        if value in self.signature.inputs:
            return "ND"
        producer = self.kernels.wiring.producer.get(value)
        node = self.graph.nodes[producer] if producer is not None else None
        if value in self.axes:
            return "NC1HWC0"
        if value in self.replaced and self.replaced[value] != value:
            return self._layout(self.replaced[value])
        if node is not None and kind_of(node.primitive) in ("conv", "matmul"):
            return "FRACTAL_Z" if kind_of(node.primitive) == "conv" else "FRACTAL_NZ"
        return "FRACTAL_Z" if self._is_kernel(value) else "ND"

    def _is_kernel(self, value: int) -> bool:
        """Weights of convolutions, and their moments, are kept in the cube's layout."""
        return (
            len(self.graph.values[value].shape) >= 4
            and value in (self.signature.parameters | self.signature.state)
        )

    def _role(self, value: int) -> Role:
        signature = self.signature
        for role, values in (
            ("parameter", signature.parameters),
            ("state", signature.state),
            ("input", signature.inputs),
            ("gradient", self.phases.gradients),
            ("output", self.outputs),
        ):
            if value in values:
                return role  # type: ignore[return-value]
        return "activation"

    def _name(self, value: int) -> str:
        for names in (self.signature.parameters, self.signature.state, self.signature.inputs):
            if value in names:
                return names[value]
        producer = self.kernels.wiring.producer.get(value)
        node = self.graph.nodes[producer] if producer is not None else None
        return f"{node.scope}/{node.primitive}" if node else "constant"

    def add(
        self,
        type_: str,
        scope: str,
        engine: str,
        phase: Phase,
        cost_class: CostClass,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        repeat: int = 1,
        **rest: object,
    ) -> None:
        """Add a task."""
        self.tasks.append(
            Task(
                type_, scope, engine, phase, cost_class, reads, writes, repeat=repeat, **rest  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def lower_kernel(self, kernel: Kernel) -> None:
        """One kernel's task, and those that prepare it."""
        self.counts["task"] += sum(
            any(out in kernel.roots for out in self.graph.nodes[position].outputs)
            for position in kernel.nodes
        )
        node = self.graph.nodes[kernel.nodes[0]]
        kind = self.kernels.wiring.kinds[kernel.nodes[0]]
        if kernel.form != "single":
            self.vector_kernel(kernel)
        elif kind in ("conv", "matmul"):
            self.product(kernel, node, kind)
        elif kind == "window":
            self.window(kernel, node)
        else:
            self.other(kernel, node, kind)

    def vector_kernel(self, kernel: Kernel) -> None:
        """Element-wise work, a reduction, or both along rows."""
        nodes = [self.graph.nodes[position] for position in kernel.nodes]
        reads = tuple(self.buffer(index) for index in kernel.sources)
        writes = tuple(self.buffer(index) for index in kernel.roots)
        features = self._features(kernel, nodes)
        if any(root in self.kernels.random for root in kernel.roots):
            self.random(kernel, reads, writes)
            return
        type_, cost_class = recognise(features, self.patterns)
        if cost_class == "elementwise" and kernel.phase == "forward":
            reads = self._with_cast_bias(kernel, reads)
        if cost_class == "bias_grad":
            reads = self._as_plain(kernel, reads)
        if cost_class in ("bias_grad", "reduce"):
            self.clear(kernel, writes)
        self.classes.update(dict.fromkeys(kernel.roots, cost_class))
        work = self._vector_work(kernel, nodes)
        names = tuple(dict.fromkeys(node.primitive for node in nodes))
        self.add(
            type_, kernel.scope, "vector", kernel.phase, cost_class, reads, writes, kernel.repeat,
            vector=work, fused=names,
        )  # fmt: skip

    def random(self, kernel: Kernel, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """Random numbers are the AI CPU's; a few of them, such as keys, are scalar work."""
        drawn = self.graph.values[kernel.roots[0]]
        if drawn.size <= 1024:
            work = VectorWork(drawn.size, "float32")
            self.add(
                "Random", kernel.scope, "vector", kernel.phase, "elementwise", reads, writes,
                kernel.repeat, vector=work,
            )  # fmt: skip
            return
        name = "DropoutGenMask" if drawn.dtype == "bool" else "StatelessRandomUniform"
        self.add(name, kernel.scope, "ai_cpu", kernel.phase, "ai_cpu", reads, writes, kernel.repeat)

    def _features(self, kernel: Kernel, nodes: list[Node]) -> Features:
        names = tuple(node.primitive for node in nodes)
        root = self.graph.values[kernel.roots[0]]
        updated = {self.alias[out] for out in self.signature.updates}
        return Features(
            form=kernel.form,
            phase=kernel.phase,
            primitives=names,
            calls=frozenset(call for node in nodes for call in node.calls),
            after=frozenset(
                self.classes[index] for index in kernel.sources if index in self.classes
            ),
            channels=sum(size > 1 for size in root.shape) <= 1 and root.size > 1,
            updates=any(index in updated for index in kernel.roots),
            results=len(kernel.roots),
            random_mask=any(index in self.kernels.random for index in kernel.sources),
        )

    def _vector_work(self, kernel: Kernel, nodes: list[Node]) -> VectorWork:
        simple = heavy = 0.0
        for node in nodes:
            size = max(self.graph.values[index].size for index in (*node.inputs, *node.outputs))
            share = min(1.0, size / max(1, kernel.elements))
            few, many = passes_of(node.primitive)
            if kind_of(node.primitive) in ("reduce", "scatter", "gather"):
                few = 1.0
            simple, heavy = simple + few * share, heavy + many * share
        widest = any(
            self.dtypes[index] == "float32" and self.graph.values[index].size * 2 > kernel.elements
            for index in (*kernel.sources, *kernel.roots)
        )
        return VectorWork(kernel.elements, "float32" if widest else "float16", simple, heavy)

    def _with_cast_bias(self, kernel: Kernel, reads: tuple[int, ...]) -> tuple[int, ...]:
        """A float32 bias is cast before it is added to a float16 feature map."""
        if self.precision not in ("O2", "O3"):
            return reads
        cast = []
        for index, buffer in zip(kernel.sources, reads, strict=True):
            vector = index in self.signature.parameters and self.graph.values[index].size > 1
            if vector and self.dtypes[index] == "float32" and kernel.elements > 1:
                buffer = self.prepare(index, "ND", kernel)
            cast.append(buffer)
        return tuple(cast)

    def _as_plain(self, kernel: Kernel, reads: tuple[int, ...]) -> tuple[int, ...]:
        """BiasAddGrad reads plain layouts: a blocked gradient is laid out anew first."""
        plain = []
        for index, buffer in zip(kernel.sources, reads, strict=True):
            if index in self.axes and self.buffers[buffer].layout == "NC1HWC0":
                buffer = self._converted(index, buffer, "ND", kernel, self.dtypes[index])
            plain.append(buffer)
        return tuple(plain)

    def _converted(
        self, value: int, source: int, layout: Layout, kernel: Kernel, dtype: str
    ) -> int:
        """A copy in another layout: a TransData task."""
        made = self._add_buffer(value, dtype, layout)
        self.buffers[made] = replace(self.buffers[made], role="activation")
        self.add(
            "TransData", kernel.scope, "vector", kernel.phase, "trans_data", (source,), (made,),
            kernel.repeat, vector=VectorWork(self.graph.values[value].size, dtype),
        )  # fmt: skip
        return made

    def clear(self, kernel: Kernel, writes: tuple[int, ...]) -> None:
        """MemSet of what a kernel accumulates into."""
        self.add(
            "MemSet", kernel.scope, "vector", kernel.phase, "fill", (), writes[:1], kernel.repeat
        )

    def prepare(self, value: int, layout: Layout, kernel: Kernel) -> int:
        """A value as a product reads it: float16, in the cube's layout; once a step."""
        value = self.alias[value]
        key = (value, layout)
        if key in self.prepared:
            return self.prepared[key]
        ready = self.buffer(value)
        dtype = self.dtypes[value]
        if dtype == "float32" and self.precision is not None:
            ready = self._cast(value, ready, kernel)
            dtype = "float16"
        before = self.buffers[self.buffer(value)].layout
        if layout != "ND" and before == "ND" and self._changes_layout(value, layout):
            ready = self._converted(value, ready, layout, kernel, dtype)
        self.prepared[key] = ready
        return ready

    def _changes_layout(self, value: int, layout: Layout) -> bool:
        """Weights of matrix products and a batch's images lie plainly; feature maps do not."""
        return value in self.signature.parameters or value in self.signature.inputs

    def _cast(self, value: int, source: int, kernel: Kernel) -> int:
        made = self._add_buffer(value, "float16", self.buffers[source].layout)
        self.buffers[made] = replace(self.buffers[made], role="activation", name="float16 copy")
        self.add(
            "Cast", kernel.scope, "vector", kernel.phase, "cast", (source,), (made,),
            kernel.repeat, vector=VectorWork(self.graph.values[value].size, "float32"),
        )  # fmt: skip
        return made

    def product(self, kernel: Kernel, node: Node, kind: str) -> None:
        """A convolution or a matrix product on the cube."""
        backward = kernel.phase == "backward"
        gives_gradient = node.outputs[0] in self.phases.gradients and backward
        if kind == "conv":
            cost_class, work = convolution_work(self.graph, node, self.phases, backward)
            layouts: tuple[Layout, Layout] = ("NC1HWC0", "FRACTAL_Z")
        else:
            cost_class, layouts = "matmul", ("FRACTAL_NZ", "FRACTAL_NZ")
            work = matrix_work(self.graph, node, self._matrix_dtype(node))
        cast = kind == "conv" or work.dtype != "float32"
        reads = tuple(
            self.prepare(index, layout, kernel) if cast else self.buffer(self.alias[index])
            for index, layout in zip(node.inputs, layouts, strict=False)
        )
        writes = (self.buffer(node.outputs[0]),)
        if gives_gradient:
            self.clear(kernel, writes)
        self.add(
            TYPES[cost_class], kernel.scope, "cube", kernel.phase, cost_class,
            tuple(dict.fromkeys(reads)), writes, kernel.repeat, cube=work, fused=(node.primitive,),
        )  # fmt: skip
        if gives_gradient and kind == "matmul" and self._is_large_matrix(node.outputs[0]):
            self._lay_gradient_out(node.outputs[0], kernel)

    def _is_large_matrix(self, value: int) -> bool:
        return len([size for size in self.graph.values[value].shape if size > 1]) > 1

    def _lay_gradient_out(self, value: int, kernel: Kernel) -> None:
        """A weight's gradient is laid out plainly, after the all-reduce, for its update."""
        source = self.index[value]
        made = self._converted(value, source, "ND", kernel, "float32")
        self.deferred.append(replace(self.tasks.pop(), phase="optimizer"))
        self.buffers[made] = replace(self.buffers[made], role="gradient")
        self.index[value] = made
        self.laid_out[made] = source

    def _matrix_dtype(self, node: Node) -> str:
        if self.precision in ("O2", "O3"):
            return "float16"
        dtypes = {self.dtypes[index] for index in node.inputs}
        return "float32" if "float32" in dtypes else "float16"

    def window(self, kernel: Kernel, node: Node) -> None:
        """Pooling; the maximum's comes with a mask of where each was found."""
        reads = tuple(
            self.buffer(index)
            for index in dict.fromkeys(self.alias[i] for i in node.inputs)
            if self.graph.values[index].size > 1 and index not in self.graph.constants
        )
        largest = max(node.outputs, key=lambda index: self.graph.values[index].size)
        maximum = "max" in node.primitive or node.primitive.startswith("select_and")
        backward = kernel.phase == "backward"
        if maximum:
            name = "MaxPoolGradWithArgmax" if backward else "MaxPoolWithArgmax"
            cost_class: CostClass = "max_pool_grad" if backward else "max_pool"
            writes = self._pooled(node, backward, largest)
            reads = self._gradient_and_mask(node, reads) if backward else reads
            self.clear(kernel, writes)
        else:
            name, cost_class, writes = "AvgPool", "avg_pool", (self.buffer(node.outputs[0]),)
        area = math.prod(node.params.get("window_dimensions", (1,)))
        work = VectorWork(kernel.elements, self.dtypes[largest], float(area))
        self.add(
            name, kernel.scope, "vector", kernel.phase, cost_class, reads, writes, kernel.repeat,
            vector=work, fused=(node.primitive,),
        )  # fmt: skip

    def _pooled(self, node: Node, backward: bool, largest: int) -> tuple[int, ...]:
        if backward or len(node.outputs) == 1:
            return (self.buffer(largest),)
        pooled = node.outputs[0]
        mask = next((out for out in node.outputs[1:] if self.graph.values[out].size > 1), None)
        if mask is None:
            return (self.buffer(pooled),)
        self.index[mask] = self._add_buffer(pooled, "bool", "NC1HWC0")
        buffer = self.buffers[self.index[mask]]
        self.buffers[self.index[mask]] = replace(
            buffer, nbytes=9 * buffer.nbytes, role="activation", name="argmax"
        )
        for out in node.outputs[1:]:
            self.index[out] = self.index[mask]
        return (self.buffer(pooled), self.index[mask])

    def _gradient_and_mask(self, node: Node, reads: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(reads))

    def other(self, kernel: Kernel, node: Node, kind: str) -> None:
        """Moves, gathers, scatters, sorts, collectives, and what has no rule."""
        reads = tuple(self.buffer(index) for index in kernel.sources)
        writes = tuple(self.buffer(index) for index in kernel.roots)
        classes: dict[str, CostClass] = {
            "gather": "gather", "scatter": "scatter", "sort": "sort", "collective": "all_reduce",
        }  # fmt: skip
        cost_class = classes.get(kind, "transpose" if node.primitive == "transpose" else "copy")
        if kind == "scatter":
            self.clear(kernel, writes)
        engine = "hccl" if kind == "collective" else "vector"
        self.add(
            OPS.get(node.primitive, node.primitive), kernel.scope, engine, kernel.phase,
            cost_class, reads, writes, kernel.repeat,
            vector=VectorWork(self._moved(node, kind), self.dtypes[node.outputs[0]]),
            fused=(node.primitive,),
        )  # fmt: skip

    def _moved(self, node: Node, kind: str) -> int:
        """Elements that move: what is gathered or scattered, not the table."""
        if kind == "scatter":
            return self.graph.values[node.inputs[2]].size
        return max(self.graph.values[index].size for index in node.outputs)
