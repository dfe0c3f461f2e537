"""What the vendor's graph compiler puts around kernels: Cast, TransData, MemSet."""

from __future__ import annotations

from dataclasses import replace

from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import CostClass, Layout, Task, VectorWork
from pipeline.backends.ascend.compiler.buffers import Buffers
from pipeline.backends.ascend.compiler.horizontal_fusion import Kernel
from pipeline.backends.ascend.frontend.graph import Graph


class Operands:
    """The tasks of a step so far, and values in the type and layout that a kernel wants.

    What a loop's turns share is prepared before the loop.
    """

    def __init__(self, graph: Graph, buffers: Buffers, precision: Precision | None) -> None:
        self.graph, self.buffers, self.precision = graph, buffers, precision
        self.alias = buffers.alias
        self.tasks: list[Task] = []
        self.laid_out: dict[int, int] = {}
        self._prepared: dict[tuple[int, Layout], int] = {}
        self._deferred: list[Task] = []

    def add(
        self,
        kernel: Kernel,
        type_: str,
        cost_class: CostClass,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        **rest: object,
    ) -> Task:
        """Add a task of the vector unit, or of another engine, for a kernel."""
        fields = {"engine": "vector", "repeat": kernel.repeat, **rest}
        task = Task(
            type=type_, scope=kernel.scope, phase=kernel.phase, cost_class=cost_class,
            reads=reads, writes=writes, **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.tasks.append(task)
        return task

    def flush(self) -> None:
        """Gradients are laid out anew once they are all there."""
        self.tasks += self._deferred
        self._deferred = []

    def clear(self, kernel: Kernel, writes: tuple[int, ...]) -> None:
        """MemSet of what a kernel accumulates into."""
        self.add(kernel, "MemSet", "fill", (), writes[:1])

    def prepare(self, value: int, layout: Layout, kernel: Kernel) -> int:
        """A value as a product reads it: float16, in the cube's layout; once a step."""
        value = self.alias[value]
        key = (value, layout)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(value, layout, kernel)
        return self._prepared[key]

    def _prepare(self, value: int, layout: Layout, kernel: Kernel) -> int:
        before = len(self.tasks)
        ready, dtype = self.buffers.of(value), self.buffers.dtypes[value]
        plain = self.buffers.all[ready].layout == "ND"
        if dtype == "float32" and self.precision is not None:
            ready, dtype = self._cast(value, ready, kernel), "float16"
        if layout != "ND" and plain and self._changes_layout(value):
            ready = self.convert(value, ready, layout, kernel, dtype)
        self._move_out_of_loops(before, self._repeat_of(value))
        return ready

    def _changes_layout(self, value: int) -> bool:
        """Weights of matrix products and a batch's images lie plainly; feature maps do not."""
        return value in self.buffers.phases.weights or value in self.buffers.signature.inputs

    def _cast(self, value: int, source: int, kernel: Kernel) -> int:
        made = self.buffers.add(value, "float16", self.buffers.all[source].layout)
        self.buffers.change(made, role="activation", name="float16 copy")
        work = VectorWork(self.graph.values[value].size, "float32")
        self.add(kernel, "Cast", "cast", (source,), (made,), vector=work)
        return made

    def convert(self, value: int, source: int, layout: Layout, kernel: Kernel, dtype: str) -> int:
        """A copy in another layout: a TransData task."""
        made = self.buffers.add(value, dtype, layout)
        self.buffers.change(made, role="activation")
        work = VectorWork(self.graph.values[value].size, dtype)
        self.add(kernel, "TransData", "trans_data", (source,), (made,), vector=work)
        return made

    def prepare_plain(self, value: int, kernel: Kernel) -> int:
        """A feature map in the plain layout, laid out once for all that read it so."""
        key: tuple[int, Layout] = (value, "ND")
        if key not in self._prepared:
            source, dtype = self.buffers.of(value), self.buffers.dtypes[value]
            blocked = self.buffers.all[source].layout == "NC1HWC0"
            made = self.convert(value, source, "ND", kernel, dtype) if blocked else source
            self._prepared[key] = made
        return self._prepared[key]

    def _repeat_of(self, value: int) -> int:
        producer = self.buffers.wiring.producer.get(value)
        return self.graph.nodes[producer].repeat if producer is not None else 1

    def _move_out_of_loops(self, first: int, repeat: int) -> None:
        """Tasks from `first` on, before the loop whose turns share what they make."""
        added = [replace(task, repeat=min(task.repeat, repeat)) for task in self.tasks[first:]]
        place = first
        if any(task.repeat > repeat for task in self.tasks[first:]):
            while place and self.tasks[place - 1].repeat > repeat:
                place -= 1
        self.tasks[first:] = []
        self.tasks[place:place] = added

    def lay_gradient_out(self, value: int, kernel: Kernel) -> None:
        """A weight's gradient is laid out plainly for its update: after the all-reduce, but in a
        loop at once, where it is stacked, and not at all where turns add to a sum.
        """
        stacked = value in self.buffers.within
        if self.graph.values[value].size <= max(self.graph.values[value].shape, default=1):
            return
        if kernel.loop and not stacked:
            return
        source = self.buffers.index[value]
        made = self.convert(value, source, "ND", kernel, "float32")
        whole = self.buffers.all[source].within
        self.buffers.change(made, role="gradient", within=whole)
        self.buffers.change(source, within=None)
        self.buffers.index[value] = made
        if not kernel.loop:
            self._deferred.append(replace(self.tasks.pop(), phase="optimizer"))
            self.laid_out[made] = source

    def cast_biases(self, kernel: Kernel, reads: tuple[int, ...]) -> tuple[int, ...]:
        """A float32 bias is cast before it is added to a float16 feature map."""
        if self.precision not in ("O2", "O3") or kernel.elements <= 1:
            return reads
        return tuple(
            self.prepare(index, "ND", kernel) if self._is_float32_weight(index) else buffer
            for index, buffer in zip(kernel.sources, reads, strict=True)
        )

    def _is_float32_weight(self, value: int) -> bool:
        many = self.graph.values[value].size > 1
        return many and self.buffers.dtypes[value] == "float32" and self._is_weight(value)

    def _is_weight(self, value: int) -> bool:
        return value in self.buffers.phases.weights

    def plain(self, kernel: Kernel, reads: tuple[int, ...]) -> tuple[int, ...]:
        """BiasAddGrad reads plain layouts: a blocked gradient is laid out anew first."""
        dtypes, axes = self.buffers.dtypes, self.buffers.axes
        return tuple(
            self.convert(index, buffer, "ND", kernel, dtypes[index])
            if index in axes and self.buffers.all[buffer].layout == "NC1HWC0"
            else buffer
            for index, buffer in zip(kernel.sources, reads, strict=True)
        )
