"""Buffers of a step's values: layout, stored elements, role and name of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK, Buffer, Layout, Role
from pipeline.backends.ascend.compiler.dataflow import Dataflow
from pipeline.backends.ascend.compiler.phases import Phases, Signature
from pipeline.backends.ascend.compiler.primitives import kind_of
from pipeline.backends.graph.graph import Graph, Value
from pipeline.core.host.item_sizes import stored_bytes

CARRIERS = ("elementwise", "rows", "window", "move", "loop_view")
"""Kinds of nodes whose results keep the channels of their operands."""


class Buffers:
    """Buffers by value, created at their first use."""

    def __init__(
        self,
        graph: Graph,
        signature: Signature,
        phases: Phases,
        dtypes: Sequence[str],
        dataflow: Dataflow,
    ) -> None:
        self.graph = graph
        self.signature = signature
        self.phases = phases
        self.dtypes = dtypes
        self.dataflow = dataflow
        self.alias = dataflow.alias
        self.axes = channel_axes(graph, dataflow)
        self.outputs = {self.alias[index] for index in graph.outputs}
        self.all: list[Buffer] = []
        self.index: dict[int, int] = {}
        self.replaced = {self.alias[out]: into for out, into in signature.updates.items()}
        self.within = _wholes(graph, dataflow)
        self._roles = _roles(signature, phases, self.outputs)
        self._names = {**signature.inputs, **signature.state, **signature.parameters}

    def of(self, value: int) -> int:
        """Return the buffer of a value."""
        if value in self.index:
            return self.index[value]
        owner = self.within.get(value)
        within = self.of(owner) if owner is not None and owner != value else None
        added = self.add(value, self.dtypes[value], self._layout(value), within)
        self.index[value] = added
        return added

    def add(self, value: int, dtype: str, layout: Layout, within: int | None = None) -> int:
        """Add another buffer for a value, in a type and a layout."""
        stored = padded_elements(self.graph.values[value], layout, self.axes.get(value))
        self.all.append(
            Buffer(
                index=len(self.all),
                shape=self._stored_shape(value, layout),
                dtype=dtype,
                layout=layout,
                nbytes=math.ceil(stored * stored_bytes(dtype)),
                role=self._roles.get(value, "activation"),
                name=self._name(value),
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
        """Change the role, name, size or layout of a buffer."""
        self.all[buffer] = replace(self.all[buffer], **fields)  # type: ignore[arg-type]

    def aliases(self) -> dict[int, int]:
        """Return which output buffers replace which inputs."""
        pairs = (
            (self.index.get(self.alias[out]), self.index.get(into))
            for out, into in self.signature.updates.items()
        )
        return {
            out: into for out, into in pairs if out is not None and into is not None and out != into
        }

    def _stored_shape(self, value: int, layout: Layout) -> tuple[int, ...]:
        """Return the stored shape: plain feature maps are NCHW, as in the vendor's frameworks."""
        shape = self.graph.values[value].shape
        axis = self.axes.get(value)
        if layout != "ND" or axis is None or len(shape) != 4:
            return shape
        positions = (size for place, size in enumerate(shape) if place not in (0, axis))
        return (shape[0], shape[axis], *positions)

    def _layout(self, value: int) -> Layout:
        if value in self.signature.inputs:
            return "ND"
        if value in self.axes:
            return "NC1HWC0"
        if value in self.replaced and self.replaced[value] != value:
            return self._layout(self.replaced[value])
        producer = self.dataflow.producer.get(value)
        kind = kind_of(self.graph.nodes[producer].primitive) if producer is not None else None
        if kind in ("conv", "matmul"):
            return "FRACTAL_Z" if kind == "conv" else "FRACTAL_NZ"
        # A convolution's weight or its moment has the cube's layout.
        lasts = value in self.signature.parameters or value in self.signature.state
        return "FRACTAL_Z" if lasts and len(self.graph.values[value].shape) >= 4 else "ND"

    def _name(self, value: int) -> str:
        if value in self._names:
            return self._names[value]
        producer = self.dataflow.producer.get(value)
        if producer is None:
            return "constant"
        node = self.graph.nodes[producer]
        return f"{node.scope}/{node.primitive}"


def _roles(signature: Signature, phases: Phases, outputs: set[int]) -> dict[int, Role]:
    roles: dict[int, Role] = dict.fromkeys(outputs, "output")
    roles |= dict.fromkeys(phases.gradients | phases.shared_gradients, "gradient")
    roles |= dict.fromkeys(signature.inputs, "input")
    roles |= dict.fromkeys(signature.state, "state")
    return roles | dict.fromkeys(signature.parameters, "parameter")


def _wholes(graph: Graph, dataflow: Dataflow) -> dict[int, int]:
    """Return the whole buffers that slices of a scan, read or stacked, lie within."""
    within: dict[int, int] = {}
    for node in graph.nodes:
        if node.primitive == "scan_stack":
            within[dataflow.alias[node.inputs[0]]] = node.outputs[0]
        elif node.primitive in ("scan_slice", "scan_carry"):
            within[node.outputs[0]] = dataflow.alias[node.inputs[0]]
    return within


def channel_axes(graph: Graph, dataflow: Dataflow) -> dict[int, int]:
    """Return which axis of each feature map holds its channels.

    Feature maps are the inputs and outputs of convolutions and the results of element-wise work on
    them.
    """
    axes: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        inputs = [dataflow.alias[index] for index in node.inputs]
        if node.primitive == "conv_general_dilated":
            numbers = node.params["dimension_numbers"]
            if numbers.lhs_spec[:2] in ((0, 1), (0, len(numbers.lhs_spec) - 1)):
                axes.setdefault(inputs[0], numbers.lhs_spec[1])
                axes[node.outputs[0]] = numbers.out_spec[1]
        elif dataflow.kinds[position] in CARRIERS and node.primitive != "transpose":
            rank = len(graph.values[node.outputs[0]].shape)
            for index in inputs:
                if index in axes and len(graph.values[index].shape) == rank:
                    axes.update(dict.fromkeys(node.outputs, axes[index]))
                    break
    return axes


def is_aligned(shape: Sequence[int]) -> bool:
    """Return whether both edges of a matrix are whole sixteens, so that it fills its fractals."""
    edges = shape[-2:]
    return len(edges) == 2 and all(edge % CHANNEL_BLOCK == 0 for edge in edges)


def padded_elements(value: Value, layout: Layout, channel_axis: int | None = None) -> int:
    """Return the elements that a layout stores.

    Channels are padded to blocks of 16, in FRACTAL_NZ both minor axes of a matrix.
    """
    shape = list(value.shape)
    if layout == "NC1HWC0" and channel_axis is not None:
        shape[channel_axis] = pad_to_blocks(shape[channel_axis])
    elif layout == "FRACTAL_NZ" and len(shape) > 1:
        shape[-2:] = [pad_to_blocks(shape[-2]), pad_to_blocks(shape[-1])]
    elif layout == "FRACTAL_Z" and len(shape) > 1:
        # The two largest axes of a weight are its channels, the others are taps.
        order = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))
        for axis in order[-2:]:
            shape[axis] = pad_to_blocks(shape[axis])
    return math.prod(shape)


def pad_to_blocks(size: int) -> int:
    """Return a size padded to whole blocks of 16."""
    return math.ceil(size / CHANNEL_BLOCK) * CHANNEL_BLOCK
