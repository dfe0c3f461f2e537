"""Layouts of feature maps that kernels of the vector unit read and write."""

from __future__ import annotations

import math

from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK, Permutation, VectorWork
from pipeline.backends.ascend.compiler.buffers import InsertedOps
from pipeline.backends.ascend.compiler.dataflow import (
    MAP_MOVES,
    SLICES,
    find_map_permutation,
    list_edges,
)
from pipeline.backends.ascend.compiler.horizontal_fusion import Kernel
from pipeline.backends.ascend.compiler.primitives import OPS
from pipeline.backends.graph.graph import Node


class MapLayouts:
    """Chooses the layouts of maps, and inserts the conversions between them. Values are indices."""

    def __init__(self, inserted: InsertedOps) -> None:
        self.inserted = inserted
        self.buffers = inserted.buffers
        self.graph = inserted.graph
        self.alias = inserted.alias
        self.dataflow = inserted.buffers.dataflow
        self.phases = inserted.buffers.phases

    def lay_out(self, kernel: Kernel) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the buffers that a vector kernel reads and writes, in layouts that it supports.

        Work along the channels of a position, such as layer norm on images, needs channels last.
        Frameworks put a Transpose before and after such work, since all other ops use NCHW
        (ConvNeXt, Liu et al. 2022, in PyTorch).
        """
        if kernel.form == "rows" and any(map(self.is_map, kernel.sources)):
            reads = tuple(
                self.inserted.put_channels_last(index, kernel)
                if self.is_map(index)
                else self.buffers.get(index)
                for index in kernel.sources
            )
            return reads, tuple(map(self.inserted.write_channels_last, kernel.roots))
        if self._stays_channels_last(kernel):
            reads = tuple(map(self.buffers.get, kernel.sources))
            return reads, tuple(map(self.inserted.write_channels_last, kernel.roots))
        writes = tuple(map(self.buffers.get, kernel.roots))
        blocked = any(self.buffers.all[index].layout == "NC1HWC0" for index in writes)
        reads = tuple(
            self.inserted.put_channels_first(index, kernel)
            if blocked and self._is_channels_last(index, kernel)
            else self.buffers.get(index)
            for index in kernel.sources
        )
        return reads, writes

    def _stays_channels_last(self, kernel: Kernel) -> bool:
        """Return whether all maps of a kernel have their channels last.

        Tokens of a hierarchical transformer leave blocks of channels once, after the convolution
        that embeds patches. Maps that a convolution or a pooling reads return to blocks.
        """
        maps = [index for index in kernel.sources if index in self.buffers.axes]
        users = (user for root in kernel.roots for user in self.dataflow.consumers.get(root, ()))
        return (
            any(self._is_channels_last(index, kernel) for index in kernel.sources)
            and not any(map(self.is_map, maps))
            and all(self.dataflow.kinds[user] not in ("conv", "window") for user in users)
        )

    def is_map(self, index: int) -> bool:
        """Return whether a value is a feature map in blocks, with more than one position."""
        value = self.graph.values[index]
        axis = self.buffers.axes.get(index)
        if axis is None or len(value.shape) != 4:
            return False
        positions = value.size // (value.shape[0] * value.shape[axis])
        return positions > 1 and self.buffers.all[self.buffers.get(index)].layout == "NC1HWC0"

    def _is_channels_last(self, index: int, kernel: Kernel) -> bool:
        """Return whether a map was computed with channels last, by a product or layer norm."""
        value = self.graph.values[index]
        if len(value.shape) != 4 or (kernel.form != "single" and value.size != kernel.elements):
            return False
        producer = self.dataflow.producer.get(index)
        kind = self.dataflow.kinds[producer] if producer is not None else ""
        return kind == "matmul" or index in self.inserted.channels_last

    def needs_plain(self, node: Node) -> bool:
        """Return whether a move reads maps in blocks, or writes them, but runs on plain tensors."""
        axes = self.buffers.axes
        sources = [self.alias[index] for index in node.inputs]
        if node.primitive not in MAP_MOVES or not self.inserted.channels_last.isdisjoint(sources):
            return False
        operand = next((index for index in node.inputs if self.alias[index] in axes), None)
        if operand is None:
            # The operands have no blocks yet.
            return any(out in axes for out in node.outputs)
        position = self.dataflow.producer[node.outputs[0]]
        backward = self.phases.of_node[position] == "backward"
        if node.primitive == "transpose" or (backward and node.primitive in SLICES):
            return True
        source = self.alias[operand]
        values = self.graph.values
        is_reshaped = len(values[operand].shape) != len(values[source].shape)
        return is_reshaped or any(
            edge % CHANNEL_BLOCK for edge in list_edges(self.graph, node, axes[source])
        )

    def add_plain_move(self, kernel: Kernel, node: Node) -> None:
        """Add a move on plain tensors, and a TransData of each result that is read in blocks.

        In the backward pass the vendor's Slice runs once for each part.
        """
        sources = tuple(self.inserted.prepare_plain(index, kernel) for index in kernel.sources)
        parts = [self.inserted.write_plain(root) for root in kernel.roots]
        is_transpose = node.primitive == "transpose"
        if is_transpose:
            self.buffers.change(parts[0], shape=self.buffers.all[sources[0]].shape)
        by_part = kernel.phase == "backward" and node.primitive in SLICES
        writes_by_task = [(part,) for part in parts] if by_part else [tuple(parts)]
        for written in writes_by_task:
            elements = max(math.prod(self.buffers.all[part].shape) for part in written)
            self.inserted.add(
                kernel,
                "Slice" if by_part else OPS[node.primitive],
                "transpose" if is_transpose else "copy",
                sources,
                written,
                vector=VectorWork(elements, self.buffers.all[written[0]].dtype),
                fused=(node.primitive,),
                permutation=self._find_permutation(node),
            )
        for root, part in zip(kernel.roots, parts, strict=True):
            users = [self.graph.nodes[user] for user in self.dataflow.consumers.get(root, ())]
            if users and all(map(self.needs_plain, users)) and root not in self.buffers.within:
                self.buffers.index[root] = part
            elif part != self.buffers.get(root):
                self.inserted.put_in_blocks(root, part, kernel)

    def _find_permutation(self, node: Node) -> Permutation | None:
        if node.primitive != "transpose":
            return None
        source = self.alias[node.inputs[0]]
        axis = self.buffers.axes.get(source)
        channels = 0 if axis is None else self.graph.values[source].shape[axis]
        shape = self.graph.values[node.inputs[0]].shape
        return find_map_permutation(shape, node.params["permutation"], channels)
