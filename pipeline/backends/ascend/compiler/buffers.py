"""Buffers of a step's values, and ops that the vendor's graph compiler inserts between kernels.

The inserted ops are Cast, TransData, TransposeD and MemSet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import (
    CHANNEL_BLOCK,
    Buffer,
    CostClass,
    Layout,
    Permutation,
    Role,
    Task,
    VectorWork,
    simplify_permutation,
)
from pipeline.backends.ascend.compiler.dataflow import (
    Dataflow,
    find_channel_axes,
    find_kernel_axes,
)
from pipeline.backends.ascend.compiler.horizontal_fusion import Kernel
from pipeline.backends.ascend.compiler.phases import Phases, TracedSignature, find_half_type
from pipeline.backends.ascend.compiler.primitives import classify_primitive
from pipeline.backends.graph.graph import Graph, Value
from pipeline.core.host.array_values import get_stored_bytes


class Buffers:
    """Buffers of values, created at their first use. Values and buffers are indices.

    `all` has the buffers, `index` the buffer of each value. `axes` has the channel axis of each
    feature map, `kernel_axes` the channel axes of kernels by shape, `within` the array that each
    slice of a scan is a part of. `matrix_layout` is the layout that the cube writes matrices in.
    """

    def __init__(
        self,
        graph: Graph,
        signature: TracedSignature,
        phases: Phases,
        dtypes: Sequence[str],
        dataflow: Dataflow,
        matrix_layout: Layout = "FRACTAL_NZ",
    ) -> None:
        self.graph = graph
        self.matrix_layout = matrix_layout
        self.signature = signature
        self.phases = phases
        self.dtypes = dtypes
        self.dataflow = dataflow
        self.alias = dataflow.alias
        self.axes = find_channel_axes(graph, dataflow)
        self.kernel_axes = find_kernel_axes(graph, phases)
        self.outputs = {self.alias[index] for index in graph.outputs}
        self.all: list[Buffer] = []
        self.index: dict[int, int] = {}
        self.replaced_inputs = {self.alias[out]: into for out, into in signature.updates.items()}
        self.within = _find_sliced_arrays(graph, dataflow)
        self._roles = _assign_roles(signature, phases, self.outputs)
        self._names = {**signature.inputs, **signature.state, **signature.parameters}

    def get(self, value: int) -> int:
        """Return the buffer of a value."""
        if value in self.index:
            return self.index[value]
        owner = self.within.get(value)
        within = self.get(owner) if owner is not None and owner != value else None
        added = self.add(value, self.dtypes[value], self._choose_layout(value), within)
        self.index[value] = added
        return added

    def add(self, value: int, dtype: str, layout: Layout, within: int | None = None) -> int:
        """Add another buffer for a value, in a type and a layout."""
        shape = self.graph.values[value].shape
        channel_axes = self.kernel_axes.get(shape, (len(shape) - 2, len(shape) - 1))
        if layout == "NC1HWC0":
            channel_axes = (self.axes[value],) if value in self.axes else ()
        stored = count_padded_elements(self.graph.values[value], layout, channel_axes)
        self.all.append(
            Buffer(
                index=len(self.all),
                shape=self._compute_stored_shape(value, layout),
                dtype=dtype,
                layout=layout,
                nbytes=math.ceil(stored * get_stored_bytes(dtype)),
                role=self._roles.get(value, "activation"),
                name=self._name_value(value),
                within=within,
            )
        )
        return len(self.all) - 1

    def add_copy(self, value: int, dtype: str, layout: Layout) -> int:
        """Add a copy of a value, an activation."""
        copy = self.add(value, dtype, layout)
        self.change(copy, role="activation")
        return copy

    def change(self, buffer: int, **fields: object) -> None:
        """Change fields of a buffer."""
        self.all[buffer] = replace(self.all[buffer], **fields)  # type: ignore[arg-type]

    def find_aliases(self) -> dict[int, int]:
        """Return output buffer -> the input buffer that it replaces."""
        pairs = (
            (self.index.get(self.alias[out]), self.index.get(into))
            for out, into in self.signature.updates.items()
        )
        return {
            out: into for out, into in pairs if out is not None and into is not None and out != into
        }

    def _compute_stored_shape(self, value: int, layout: Layout) -> tuple[int, ...]:
        """Return a value's shape in a layout. Plain feature maps are NCHW, as in MindSpore."""
        shape = self.graph.values[value].shape
        axis = self.axes.get(value)
        if layout != "ND" or axis is None or len(shape) != 4:
            return shape
        positions = (size for place, size in enumerate(shape) if place not in (0, axis))
        return (shape[0], shape[axis], *positions)

    def _choose_layout(self, value: int) -> Layout:
        if value in self.signature.inputs:
            return "ND"
        if value in self.axes:
            return "NC1HWC0"
        if self.replaced_inputs.get(value, value) != value:
            return self._choose_layout(self.replaced_inputs[value])
        producer = self.dataflow.producer.get(value)
        if producer is not None:
            kind = classify_primitive(self.graph.nodes[producer].primitive)
            if kind in ("conv", "matmul"):
                return "FRACTAL_Z" if kind == "conv" else self.matrix_layout
        # Weights of convolutions, and their moments, have the cube's layout.
        is_stored = value in self.signature.parameters or value in self.signature.state
        return "FRACTAL_Z" if is_stored and len(self.graph.values[value].shape) >= 4 else "ND"

    def _name_value(self, value: int) -> str:
        if value in self._names:
            return self._names[value]
        producer = self.dataflow.producer.get(value)
        if producer is None:
            return "constant"
        node = self.graph.nodes[producer]
        return f"{node.scope}/{node.primitive}"


def _assign_roles(signature: TracedSignature, phases: Phases, outputs: set[int]) -> dict[int, Role]:
    roles: dict[int, Role] = dict.fromkeys(outputs, "output")
    roles |= dict.fromkeys(phases.gradients | phases.shared_gradients, "gradient")
    roles |= dict.fromkeys(signature.inputs, "input")
    roles |= dict.fromkeys(signature.state, "state")
    return roles | dict.fromkeys(signature.parameters, "parameter")


def _find_sliced_arrays(graph: Graph, dataflow: Dataflow) -> dict[int, int]:
    """Return slice -> the array that a scan reads the slice from or stacks it in."""
    within: dict[int, int] = {}
    for node in graph.nodes:
        if node.primitive == "scan_stack":
            within[dataflow.alias[node.inputs[0]]] = node.outputs[0]
        elif node.primitive in ("scan_slice", "scan_carry"):
            within[node.outputs[0]] = dataflow.alias[node.inputs[0]]
    return within


def is_aligned(shape: Sequence[int], batch: int) -> bool:
    """Return whether both edges of a matrix are multiples of 16, so that it fills its fractals.

    The tokens of an image in rows and columns, which a product without a `batch` reads, are the
    rows of one matrix, as vendors' networks flatten them.
    """
    if batch == 1 and len(shape) > 3:
        shape = (math.prod(shape[1:-1]), shape[-1])
    edges = shape[-2:]
    return len(edges) == 2 and all(edge % CHANNEL_BLOCK == 0 for edge in edges)


def count_padded_elements(value: Value, layout: Layout, channel_axes: Sequence[int]) -> int:
    """Return the number of elements that a layout stores for a value.

    Channels are padded to blocks of 16: a map's in NC1HWC0, and both those that a kernel reads and
    those that it computes in FRACTAL_Z. FRACTAL_NZ pads both minor axes of a matrix.
    """
    shape = list(value.shape)
    if layout == "NC1HWC0" or (layout == "FRACTAL_Z" and len(shape) > 1):
        for axis in channel_axes:
            shape[axis] = pad_to_blocks(shape[axis])
    elif layout == "FRACTAL_NZ" and len(shape) > 1:
        shape[-2:] = [pad_to_blocks(shape[-2]), pad_to_blocks(shape[-1])]
    return math.prod(shape)


def append_copy(buffers: list[Buffer], index: int, **changes: Any) -> int:
    """Append a copy of a buffer, an activation with some changes, and return its index."""
    place = len(buffers)
    changes = {"index": place, "role": "activation", "within": None, **changes}
    buffers.append(replace(buffers[index], **changes))
    return place


def pad_to_blocks(size: int) -> int:
    """Return a size padded to whole blocks of 16."""
    return math.ceil(size / CHANNEL_BLOCK) * CHANNEL_BLOCK


class InsertedOps:
    """Tasks of a step so far, and conversions of values to the type and layout that kernels need.

    Values that a loop's iterations share are converted before the loop.
    """

    def __init__(self, buffers: Buffers, precision: Precision | None) -> None:
        self.graph = buffers.graph
        self.buffers = buffers
        self.precision = precision
        self.alias = buffers.alias
        self.half = find_half_type(buffers.dtypes)
        self.tasks: list[Task] = []
        self.unconverted: dict[int, int] = {}
        """Plain copy of a gradient -> the buffer that it was converted from."""
        self._prepared: dict[tuple[int, Layout], int] = {}
        self._plain: dict[int, int] = {}
        """Buffer of a feature map -> its plain copy."""
        self._permuted: dict[tuple[int, int, Permutation], int] = {}
        self.channels_last: set[int] = set()
        """Maps that were written with their channels last."""
        self._channels_first: dict[int, int] = {}
        """Buffer of a map with its channels last -> its copy in blocks."""
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
        fields = {"engine": "vector", "repeat": kernel.repeat, "loop": kernel.loop, **details}
        task = Task(
            type=type_, scope=kernel.scope, phase=kernel.phase, cost_class=cost_class,
            reads=reads, writes=writes, **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.tasks.append(task)

    def flush(self) -> None:
        """Add the conversions of gradients, after the tasks of the backward pass."""
        self.tasks += self._deferred
        self._deferred = []

    def add_memset(self, kernel: Kernel, writes: tuple[int, ...]) -> None:
        """Add the MemSet of the result that a kernel accumulates, within the launch of its op."""
        self.add(kernel, "MemSet", "fill", (), writes[:1], launched=False)

    def prepare(self, value: int, layout: Layout, kernel: Kernel) -> int:
        """Return the buffer of a value as a product reads it: in the precision's half type, and a
        weight or an input in `layout`.

        The value is converted once in a step.
        """
        value = self.alias[value]
        key = (value, layout)
        if key not in self._prepared:
            first = len(self.tasks)
            ready = self.buffers.get(value)
            dtype = self.buffers.dtypes[value]
            is_plain = self.buffers.all[ready].layout == "ND"
            if dtype == "float32" and self.precision is not None:
                copy = self.buffers.add_copy(value, self.half, self.buffers.all[ready].layout)
                self.buffers.change(copy, name=f"{self.half} copy")
                work = VectorWork(self.graph.values[value].size, "float32")
                self.add(kernel, "Cast", "cast", (ready,), (copy,), vector=work)
                ready = copy
                dtype = self.half
            # Feature maps have the cube's layout, but weights of products and images are plain.
            is_weight = value in self.buffers.phases.weights
            needs_layout = is_weight or value in self.buffers.signature.inputs
            if layout != "ND" and is_plain and needs_layout:
                ready = self.convert(value, ready, layout, kernel, dtype)
            producer = self.buffers.dataflow.producer.get(value)
            repeat = 1 if producer is None else self.graph.nodes[producer].repeat
            self._hoist_out_of_loops(first, repeat)
            self._prepared[key] = ready
        return self._prepared[key]

    def convert(self, value: int, source: int, layout: Layout, kernel: Kernel, dtype: str) -> int:
        """Add a TransData and return the copy. The reading kernel's launch includes the task."""
        copy = self.buffers.add_copy(value, dtype, layout)
        work = VectorWork(self.graph.values[value].size, dtype)
        self.add(kernel, "TransData", "trans_data", (source,), (copy,), vector=work, launched=False)
        return copy

    def permute(self, value: int, source: int, moved: Permutation, kernel: Kernel) -> int:
        """Return an operand's copy in another order. All products that read it share the copy."""
        key = (value, source, moved)
        if key not in self._permuted:
            dtype = self.buffers.all[source].dtype
            copy = self.buffers.add_copy(value, dtype, "ND")
            work = VectorWork(self.graph.values[value].size, dtype)
            self.add(
                kernel, "TransposeD", "transpose", (source,), (copy,), vector=work,
                permutation=moved,
            )  # fmt: skip
            self._permuted[key] = copy
        return self._permuted[key]

    def prepare_plain(self, value: int, kernel: Kernel, source: int | None = None) -> int:
        """Return a feature map, or its copy `source`, in the plain layout.

        All readers share the conversion.
        """
        source = self.buffers.get(value) if source is None else source
        if source not in self._plain:
            plain = source
            if self.buffers.all[source].layout == "NC1HWC0":
                dtype = self.buffers.all[source].dtype
                plain = self.convert(value, source, "ND", kernel, dtype)
            self._plain[source] = plain
        return self._plain[source]

    def write_plain(self, value: int) -> int:
        """Return the plain buffer that a move writes a map to. The map's readers share it."""
        part = self.buffers.get(value)
        if self.buffers.all[part].layout == "NC1HWC0":
            part = self.buffers.add_copy(value, self.buffers.dtypes[value], "ND")
        self._plain[self.buffers.get(value)] = part
        return part

    def put_in_blocks(self, value: int, part: int, kernel: Kernel) -> None:
        """Convert a map that a move has written plain to blocks of channels."""
        blocked = (self.buffers.get(value),)
        work = VectorWork(self.graph.values[value].size, self.buffers.all[part].dtype)
        self.add(kernel, "TransData", "trans_data", (part,), blocked, vector=work, launched=False)

    def put_channels_last(self, value: int, kernel: Kernel, source: int | None = None) -> int:
        """Return a feature map, or its copy `source`, plain and with its channels last."""
        plain = self.prepare_plain(value, kernel, source)
        images, positions, channels = self._measure_map(value)
        moved = simplify_permutation((images, channels, positions), (0, 2, 1))
        copy = self.permute(value, plain, moved, kernel)
        self.buffers.change(copy, shape=(images, positions, channels))
        return copy

    def put_channels_first(self, value: int, kernel: Kernel, source: int | None = None) -> int:
        """Return a channels-last map, or its copy `source`, in blocks of channels for convolutions.

        This adds a Transpose and a TransData, which all readers share.
        """
        source = self.buffers.get(value) if source is None else source
        if source not in self._channels_first:
            images, positions, channels = self._measure_map(value)
            moved = simplify_permutation((images, positions, channels), (0, 2, 1))
            plain = self.permute(value, source, moved, kernel)
            dtype = self.buffers.all[source].dtype
            copy = self.convert(value, plain, "NC1HWC0", kernel, dtype)
            self._channels_first[source] = copy
        return self._channels_first[source]

    def write_channels_last(self, value: int) -> int:
        """Change the buffer of a map to plain with its channels last, and return it."""
        buffer = self.buffers.get(value)
        blocked = self.buffers.all[buffer].layout == "NC1HWC0"
        if blocked and value in self.buffers.axes and value not in self.channels_last:
            stored = get_stored_bytes(self.buffers.all[buffer].dtype)
            nbytes = math.ceil(self.graph.values[value].size * stored)
            self.buffers.change(buffer, layout="ND", nbytes=nbytes)
            self.channels_last.add(value)
        return buffer

    def _measure_map(self, value: int) -> tuple[int, int, int]:
        """Return a map's numbers of images, positions and channels."""
        shape = self.graph.values[value].shape
        channels = shape[self.buffers.axes.get(value, len(shape) - 1)]
        return shape[0], math.prod(shape) // (shape[0] * channels), channels

    def _hoist_out_of_loops(self, first: int, repeat: int) -> None:
        """Move the tasks from `first` before the loop whose iterations share their results.

        `repeat` is how often a step computes their input.
        """
        added = [
            replace(task, repeat=repeat, loop=0) if task.repeat > repeat else task
            for task in self.tasks[first:]
        ]
        place = first
        if any(task.repeat > repeat for task in self.tasks[first:]):
            while place and self.tasks[place - 1].repeat > repeat:
                place -= 1
        self.tasks[first:] = []
        self.tasks[place:place] = added

    def convert_gradient(self, value: int, kernel: Kernel) -> None:
        """Convert a weight's gradient to the plain layout for its update, after the all-reduce.

        In a loop, stacked gradients are converted at once, and gradients that iterations add up
        aren't converted.
        """
        # A vector has no other layout than the plain one.
        is_vector = self.graph.values[value].size <= max(self.graph.values[value].shape, default=1)
        is_stacked = value in self.buffers.within
        if is_vector or (kernel.loop and not is_stacked):
            return
        source = self.buffers.index[value]
        copy = self.convert(value, source, "ND", kernel, "float32")
        self.buffers.change(copy, role="gradient", within=self.buffers.all[source].within)
        self.buffers.change(source, within=None)
        self.buffers.index[value] = copy
        if not kernel.loop:
            self._deferred.append(replace(self.tasks.pop(), phase="optimizer"))
            self.unconverted[copy] = source

    def cast_biases(self, kernel: Kernel, reads: tuple[int, ...]) -> tuple[int, ...]:
        """Return the read buffers, with float16 copies of biases for a float16 feature map."""
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

    def convert_to_plain(self, kernel: Kernel, reads: tuple[int, ...]) -> tuple[int, ...]:
        """Return the read buffers in plain layouts, for kernels such as BiasAddGrad."""
        return tuple(
            self.convert(index, buffer, "ND", kernel, self.buffers.dtypes[index])
            if index in self.buffers.axes and self.buffers.all[buffer].layout == "NC1HWC0"
            else buffer
            for index, buffer in zip(kernel.sources, reads, strict=True)
        )
