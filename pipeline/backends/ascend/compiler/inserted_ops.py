"""Ops that the vendor's graph compiler inserts around kernels: Cast, TransData, MemSet."""

from __future__ import annotations

import math
from dataclasses import replace

from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import (
    CostClass,
    Layout,
    Permutation,
    Task,
    VectorWork,
    permutation_of,
)
from pipeline.backends.ascend.compiler.buffers import Buffers
from pipeline.backends.ascend.compiler.horizontal_fusion import Kernel
from pipeline.backends.graph.graph import Graph


class InsertedOps:
    """Tasks of a step so far, and values in the type and layout that a kernel needs.

    Values that a loop's iterations share are prepared before the loop.
    """

    def __init__(self, graph: Graph, buffers: Buffers, precision: Precision | None) -> None:
        self.graph = graph
        self.buffers = buffers
        self.precision = precision
        self.alias = buffers.alias
        self.tasks: list[Task] = []
        self.laid_out: dict[int, int] = {}
        self._prepared: dict[tuple[int, Layout], int] = {}
        self._permuted: dict[tuple[int, int, Permutation], int] = {}
        self._channels_last: set[int] = set()
        self._channels_first: dict[int, int] = {}
        self._deferred: list[Task] = []

    def add(
        self,
        kernel: Kernel,
        type_: str,
        cost_class: CostClass,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        **details: object,
    ) -> None:
        """Add a task of the vector unit, or of another engine, for a kernel."""
        fields = {"engine": "vector", "repeat": kernel.repeat, **details}
        task = Task(
            type=type_, scope=kernel.scope, phase=kernel.phase, cost_class=cost_class,
            reads=reads, writes=writes, **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.tasks.append(task)

    def flush(self) -> None:
        """Convert gradients to another layout once all of them are there."""
        self.tasks += self._deferred
        self._deferred = []

    def clear(self, kernel: Kernel, writes: tuple[int, ...]) -> None:
        """Add the MemSet of a value that a kernel accumulates into, a part of its op's launch."""
        self.add(kernel, "MemSet", "fill", (), writes[:1], launched=False)

    def prepare(self, value: int, layout: Layout, kernel: Kernel) -> int:
        """Return a value as a product reads it: float16, in the cube's layout; once a step."""
        value = self.alias[value]
        key = (value, layout)
        if key not in self._prepared:
            before = len(self.tasks)
            ready = self.buffers.of(value)
            dtype = self.buffers.dtypes[value]
            plain = self.buffers.all[ready].layout == "ND"
            if dtype == "float32" and self.precision is not None:
                ready = self._cast(value, ready, kernel)
                dtype = "float16"
            # Feature maps have the cube's layout, but weights of products and images are plain.
            is_weight = value in self.buffers.phases.weights
            converts = is_weight or value in self.buffers.signature.inputs
            if layout != "ND" and plain and converts:
                ready = self.convert(value, ready, layout, kernel, dtype)
            producer = self.buffers.dataflow.producer.get(value)
            repeat = 1 if producer is None else self.graph.nodes[producer].repeat
            self._hoist_out_of_loops(before, repeat)
            self._prepared[key] = ready
        return self._prepared[key]

    def _cast(self, value: int, source: int, kernel: Kernel) -> int:
        copy = self.buffers.add_copy(value, "float16", self.buffers.all[source].layout)
        self.buffers.change(copy, name="float16 copy")
        work = VectorWork(self.graph.values[value].size, "float32")
        self.add(kernel, "Cast", "cast", (source,), (copy,), vector=work)
        return copy

    def convert(self, value: int, source: int, layout: Layout, kernel: Kernel, dtype: str) -> int:
        """Add a TransData task: a copy in another layout, a part of the launch of who reads it."""
        copy = self.buffers.add_copy(value, dtype, layout)
        work = VectorWork(self.graph.values[value].size, dtype)
        self.add(kernel, "TransData", "trans_data", (source,), (copy,), vector=work, launched=False)
        return copy

    def permute(self, value: int, source: int, moved: Permutation, kernel: Kernel) -> int:
        """Return an operand's copy in another order, made once for all products that read it."""
        key = (value, source, moved)
        if key not in self._permuted:
            dtype = self.buffers.all[source].dtype
            copy = self.buffers.add_copy(value, dtype, "ND")
            work = VectorWork(self.graph.values[value].size, dtype)
            self.add(
                kernel, "TransposeD", "transpose", (source,), (copy,), vector=work,
                fused=("transpose",), permutation=moved,
            )  # fmt: skip
            self._permuted[key] = copy
        return self._permuted[key]

    def prepare_plain(self, value: int, kernel: Kernel) -> int:
        """Return a feature map in the plain layout, converted once for all its readers."""
        key: tuple[int, Layout] = (value, "ND")
        if key not in self._prepared:
            source = self.buffers.of(value)
            if self.buffers.all[source].layout == "NC1HWC0":
                source = self.convert(value, source, "ND", kernel, self.buffers.dtypes[value])
            self._prepared[key] = source
        return self._prepared[key]

    def channels_last(self, value: int, kernel: Kernel) -> int:
        """Return a feature map in the plain layout with its channels last."""
        plain = self.prepare_plain(value, kernel)
        images, positions, channels = self._sides(value)
        return self.permute(
            value, plain, permutation_of((images, channels, positions), (0, 2, 1)), kernel
        )

    def channels_first(self, value: int, kernel: Kernel) -> int:
        """Return a map whose channels are last in blocks, as convolutions and their like read it.

        That is a Transpose and a TransData, made once for all readers.
        """
        if value not in self._channels_first:
            source = self.buffers.of(value)
            images, positions, channels = self._sides(value)
            moved = permutation_of((images, positions, channels), (0, 2, 1))
            plain = self.permute(value, source, moved, kernel)
            dtype = self.buffers.all[source].dtype
            copy = self.convert(value, plain, "NC1HWC0", kernel, dtype)
            self._channels_first[value] = copy
        return self._channels_first[value]

    def plain_result(self, value: int) -> int:
        """Return the buffer of a map that is written with its channels last."""
        buffer = self.buffers.of(value)
        blocked = self.buffers.all[buffer].layout == "NC1HWC0"
        if blocked and value in self.buffers.axes and value not in self._channels_last:
            self.buffers.change(buffer, layout="ND")
            self._channels_last.add(value)
        return buffer

    def is_channels_last(self, value: int) -> bool:
        """Return whether a map was written with its channels last."""
        return value in self._channels_last

    def _sides(self, value: int) -> tuple[int, int, int]:
        """Return a map's images, positions and channels."""
        shape = self.graph.values[value].shape
        channels = shape[self.buffers.axes.get(value, len(shape) - 1)]
        return shape[0], math.prod(shape) // (shape[0] * channels), channels

    def _hoist_out_of_loops(self, first: int, repeat: int) -> None:
        """Put tasks from `first` on before the loop whose iterations share their results."""
        added = [replace(task, repeat=min(task.repeat, repeat)) for task in self.tasks[first:]]
        place = first
        if any(task.repeat > repeat for task in self.tasks[first:]):
            while place and self.tasks[place - 1].repeat > repeat:
                place -= 1
        self.tasks[first:] = []
        self.tasks[place:place] = added

    def convert_gradient(self, value: int, kernel: Kernel) -> None:
        """Convert a weight's gradient to the plain layout for its update.

        That is after the all-reduce; in a loop at once if gradients are stacked, and not at all
        if iterations add to a sum.
        """
        stacked = value in self.buffers.within
        if self.graph.values[value].size <= max(self.graph.values[value].shape, default=1):
            return
        if kernel.loop and not stacked:
            return
        source = self.buffers.index[value]
        copy = self.convert(value, source, "ND", kernel, "float32")
        self.buffers.change(copy, role="gradient", within=self.buffers.all[source].within)
        self.buffers.change(source, within=None)
        self.buffers.index[value] = copy
        if not kernel.loop:
            self._deferred.append(replace(self.tasks.pop(), phase="optimizer"))
            self.laid_out[copy] = source

    def cast_biases(self, kernel: Kernel, reads: tuple[int, ...]) -> tuple[int, ...]:
        """Cast a float32 bias before it is added to a float16 feature map."""
        if self.precision not in ("O2", "O3") or kernel.elements <= 1:
            return reads
        weights = self.buffers.phases.weights
        dtypes = self.buffers.dtypes
        return tuple(
            self.prepare(index, "ND", kernel)
            if index in weights and dtypes[index] == "float32" and self.graph.values[index].size > 1
            else buffer
            for index, buffer in zip(kernel.sources, reads, strict=True)
        )

    def plain(self, kernel: Kernel, reads: tuple[int, ...]) -> tuple[int, ...]:
        """Convert a blocked gradient for BiasAddGrad, which reads plain layouts."""
        return tuple(
            self.convert(index, buffer, "ND", kernel, self.buffers.dtypes[index])
            if index in self.buffers.axes and self.buffers.all[buffer].layout == "NC1HWC0"
            else buffer
            for index, buffer in zip(kernel.sources, reads, strict=True)
        )
