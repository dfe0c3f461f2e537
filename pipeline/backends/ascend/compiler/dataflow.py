"""Kinds of nodes on the device by their shapes, producers and readers of values, moves of maps.

CANN's layout NC1HWC0 has blocks of 16 channels. By their `op_select_format`, split_d, concat_v2_d
and strided_slice_d divide the channels in it only if every part is whole blocks. Other parts,
reshapes and transposes of the channels, and the Slice of a concatenation's gradient take plain
tensors, NCHW.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.backends.ascend.chip.tasks import Permutation, simplify_permutation
from pipeline.backends.ascend.compiler.matmul_work import find_absorbed_transposes
from pipeline.backends.ascend.compiler.phases import Phases, TracedSignature
from pipeline.backends.ascend.compiler.primitives import classify_primitive
from pipeline.backends.graph.graph import Graph, Node, list_users

ROW_ELEMENTS = 32768
"""Elements of the longest row that fits the unified buffer with its result: 256 KiB hold two
float16 rows of this length, with double buffering."""

TINY_ELEMENTS = 1024
"""Largest number of elements of a move that the reading kernel computes as scalar work."""

RATE_ELEMENTS = 16
"""Random numbers stay random after an operation with an array of at most this many elements, such
as the rate of dropout."""
SLICES = ("slice", "split")
MAP_MOVES = (*SLICES, "concatenate", "pad", "transpose")
"""Primitives whose operands or results may be parts of feature maps."""
CHANNEL_CARRIERS = ("elementwise", "rows", "window", "move", "resize", "loop_view")
"""Kinds of nodes whose results keep the channels of their operands."""


@dataclass(frozen=True)
class Dataflow:
    """Producers and readers of values, with views resolved. Values and nodes are indices."""

    alias: tuple[int, ...]
    """Value -> the value whose memory it is a view of."""
    producer: dict[int, int]
    """Value -> the node that computes it."""
    consumers: dict[int, list[int]]
    """Value -> the nodes that read it."""
    kinds: tuple[str, ...]
    """Kind of each node: its primitive's (`classify_primitive`), or "rows"."""


def find_dataflow(graph: Graph, phases: Phases) -> Dataflow:
    """Find producers and readers. Views and rearrangements of weights for products are resolved."""
    alias = list(range(len(graph.values)))
    kinds: list[str] = []
    rearranged = _find_rearranged(graph, phases)
    for position, node in enumerate(graph.nodes):
        kind = _classify_node(graph, node)
        if kind == "view" or position in rearranged:
            kind = "view"
            # A scatter that fills all of its result is a view of the scattered value.
            base = node.inputs[2 if classify_primitive(node.primitive) == "scatter" else 0]
            alias[node.outputs[0]] = alias[base]
        kinds.append(kind)
    producer: dict[int, int] = {}
    consumers: dict[int, list[int]] = defaultdict(list)
    for position, node in enumerate(graph.nodes):
        if kinds[position] == "view":
            continue
        producer.update(dict.fromkeys(node.outputs, position))
        for index in dict.fromkeys(alias[index] for index in node.inputs):
            consumers[index].append(position)
    return Dataflow(tuple(alias), producer, dict(consumers), tuple(kinds))


def _classify_node(graph: Graph, node: Node) -> str:
    """Return the kind of a node, from its primitive and shapes."""
    kind = classify_primitive(node.primitive)
    if kind == "random":
        return "elementwise"
    if kind == "reduce":
        value = graph.values[node.inputs[0]]
        if value.size == graph.values[node.outputs[0]].size:
            return "elementwise" if node.primitive in ("argmax", "argmin", "reduce") else "view"
        return "rows" if _is_along_rows(value.shape, node.params.get("axes", ())) else "reduce"
    if kind in ("gather", "scatter"):
        return _classify_indexing(graph, node)
    shape = graph.values[node.inputs[0]].shape if node.inputs else ()
    if node.primitive == "broadcast_in_dim" and _keeps_size(graph, node):
        return "view"
    if node.primitive == "transpose":
        order = [axis for axis in node.params["permutation"] if shape[axis] > 1]
        if order == sorted(order):
            return "view"
    if kind in ("move", "unsupported"):
        values = (*node.inputs, *node.outputs)
        if max(graph.values[index].size for index in values) <= TINY_ELEMENTS:
            return "elementwise"
    if node.primitive == "pad" and not any(map(any, node.params["padding_config"])):
        return "view"
    return kind


def _classify_indexing(graph: Graph, node: Node) -> str:
    """Return the kind of a gather or scatter.

    Readers compute gathers of one element per row. Constant indices of all elements make a view.
    """
    size = graph.values[node.outputs[0]].size
    if node.inputs[1] in graph.constants:
        if node.primitive == "gather":
            if math.prod(node.params["slice_sizes"]) == size:
                return "view" if _keeps_size(graph, node) else "move"
        elif node.inputs[0] in graph.constants:
            return "view" if graph.values[node.inputs[2]].size == size else "move"
    return "rows" if _picks_one_per_row(graph, node) else classify_primitive(node.primitive)


def _keeps_size(graph: Graph, node: Node) -> bool:
    return graph.values[node.inputs[0]].size == graph.values[node.outputs[0]].size


def find_random_values(graph: Graph, dataflow: Dataflow) -> set[int]:
    """Return random numbers, and values computed from them and small arrays only, such as masks."""
    random: set[int] = set()
    for node in graph.nodes:
        inputs = [dataflow.alias[index] for index in node.inputs]
        computed = [index for index in inputs if index not in random]
        from_random = classify_primitive(node.primitive) == "random" or len(computed) < len(inputs)
        if from_random and all(graph.values[index].size <= RATE_ELEMENTS for index in computed):
            random.update(node.outputs)
    return random


def _picks_one_per_row(graph: Graph, node: Node) -> bool:
    """Return whether a node picks one element per row, or is the gradient of such a node.

    A cross entropy picks one class per row. The rows of its gradient are one-hot.
    """
    table = graph.values[node.inputs[0]]
    if len(table.shape) < 2 or table.shape[-1] < 2:
        return False
    rows = table.size // table.shape[-1]
    if node.primitive == "gather":
        is_element = math.prod(node.params["slice_sizes"]) == 1
        return is_element and graph.values[node.outputs[0]].size == rows
    if node.inputs[0] not in graph.constants:
        return False
    return graph.values[node.inputs[2]].size == rows


def _is_along_rows(shape: Sequence[int], axes: Iterable[int]) -> bool:
    """Return whether `axes` are the minor axes, and their rows fit a core's buffer."""
    sized = [axis for axis, size in enumerate(shape) if size > 1]
    reduced = [axis for axis in sized if axis in set(axes)]
    row = math.prod(shape[axis] for axis in reduced)
    num_outer = len(sized) - len(reduced)
    is_minor = sized[num_outer:] == reduced
    return is_minor and row <= (ROW_ELEMENTS if num_outer else TINY_ELEMENTS)


def _find_rearranged(graph: Graph, phases: Phases) -> set[int]:
    """Return the moves that are part of the op that reads them.

    These are the transposes and reversals of weights and gradients that products include, and the
    zeros that JAX puts between the gradients of sums of windows: AvgPoolGrad reads these as they
    are, and adds each to its window.
    """
    users = list_users(graph.nodes)
    rearranged = set(find_absorbed_transposes(graph))
    for position, node in enumerate(graph.nodes):
        out = node.outputs[0]
        if node.primitive == "pad" and phases.of_node[position] == "backward":
            readers = {user.primitive for user in users[out]}
            if readers == {"reduce_window_sum"}:
                rearranged.add(position)
        if node.primitive not in ("transpose", "rev"):
            continue
        into_product = all(
            classify_primitive(user.primitive) in ("conv", "matmul", "view")
            or user.primitive == "transpose"
            for user in users[out]
        )
        if (node.inputs[0] in phases.weights and into_product) or out in phases.gradients:
            rearranged.add(position)
    return rearranged


def find_gradients(
    graph: Graph, signature: TracedSignature, phases: Phases, dataflow: Dataflow
) -> dict[int, int]:
    """Return parameter -> the value of the backward pass that its update is computed from.

    The search back from the update follows values of the parameter's size, and so no norm over all
    gradients. If it doesn't reach the backward pass, a second search follows all values.
    """

    def find_last_backward_value(out: int, size: int | None) -> int | None:
        """Follow the values of `size` elements, or all, that the update `out` is computed from."""
        candidates: set[int] = set()
        stack = [dataflow.alias[out]]
        seen = set(stack)
        while stack:
            index = stack.pop()
            position = dataflow.producer.get(index)
            phase = "forward" if position is None else phases.of_node[position]
            if position is None or phase == "forward":
                continue
            if phase == "backward":
                candidates.add(index)
                continue
            for before in (dataflow.alias[value] for value in graph.nodes[position].inputs):
                fits = size is None or graph.values[before].size == size
                if fits and before not in seen:
                    seen.add(before)
                    stack.append(before)
        return max(candidates, default=None)

    gradients = {}
    for out, into in signature.updates.items():
        if into in signature.parameters:
            gradient = find_last_backward_value(out, graph.values[into].size)
            if gradient is None:
                gradient = find_last_backward_value(out, None)
            if gradient is not None:
                gradients[into] = gradient
    return gradients


def find_channel_axes(graph: Graph, dataflow: Dataflow) -> dict[int, int]:
    """Return the channel axis of each feature map.

    Feature maps are inputs and outputs of convolutions, and results of work on them that keeps the
    channels: `CHANNEL_CARRIERS`, and transposes of the other axes.
    """
    axes: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        sources = [dataflow.alias[index] for index in node.inputs]
        if node.primitive == "conv_general_dilated":
            numbers = node.params["dimension_numbers"]
            batch_axis, channel_axis, *position_axes = numbers.lhs_spec
            if batch_axis == 0 and channel_axis in (1, len(position_axes) + 1):
                axes.setdefault(sources[0], channel_axis)
                axes[node.outputs[0]] = numbers.out_spec[1]
        elif node.primitive == "transpose" and sources[0] in axes:
            source_shape = graph.values[sources[0]].shape
            axis = axes[sources[0]]
            # 0, which no part has, if the source lacks the axis: see below.
            channels = source_shape[axis] if axis < len(source_shape) else 0
            first = find_first_part(graph.values[node.inputs[0]].shape, channels)
            if first is not None and keeps_positions(node.params["permutation"], first):
                axes[node.outputs[0]] = first
        elif dataflow.kinds[position] in CHANNEL_CARRIERS and node.primitive != "transpose":
            rank = len(graph.values[node.outputs[0]].shape)
            for source, operand in zip(sources, node.inputs, strict=True):
                if source in axes and len(graph.values[operand].shape) == rank:
                    axes.update(dict.fromkeys(node.outputs, axes[source]))
                    break
    # A convolution of a reshaped value sets the axis of its source, which may have fewer axes.
    ranks = {index: len(graph.values[index].shape) for index in axes}
    return {index: axis for index, axis in axes.items() if axis < ranks[index]}


def find_kernel_axes(graph: Graph, phases: Phases) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of the input and output channels of convolutions' kernels, by shape."""
    return {
        graph.values[node.inputs[1]].shape: tuple(node.params["dimension_numbers"].rhs_spec[:2])
        for node, phase in zip(graph.nodes, phases.of_node, strict=True)
        if node.primitive == "conv_general_dilated" and phase == "forward"
    }


def list_edges(graph: Graph, node: Node, axis: int) -> Sequence[int]:
    """Return the numbers that must be multiples of 16, so that a move keeps blocks of channels."""
    if node.primitive == "pad":
        return list(node.params["padding_config"][axis])
    input_channels = [graph.values[index].shape[axis] for index in node.inputs]
    output_channels = [graph.values[index].shape[axis] for index in node.outputs]
    if node.primitive == "slice":
        edges = [node.params["start_indices"][axis], node.params["limit_indices"][axis]]
        return edges if input_channels != output_channels else []
    if node.primitive == "concatenate":
        return input_channels if node.params["dimension"] == axis else []
    return output_channels if node.params["axis"] == axis else []


def find_map_permutation(shape: Sequence[int], order: Sequence[int], channels: int) -> Permutation:
    """Return the permutation by which a network in NCHW transposes a map.

    `shape` and `order` are those in JAX, with `channels` in the minor axes. In NCHW, a reordering
    of parts of the channels, such as a shuffle of groups, moves whole planes.
    """
    first = find_first_part(shape, channels)
    if first is None or not keeps_positions(order, first):
        return simplify_permutation(shape, order)
    positions = range(1, first)
    axes_before = (0, *range(first, len(shape)), *positions)
    axes_after = (0, *order[first:], *positions)
    nchw_order = [axes_before.index(axis) for axis in axes_after]
    return simplify_permutation([shape[axis] for axis in axes_before], nchw_order)


def find_first_part(shape: Sequence[int], channels: int) -> int | None:
    """Return the first of the fewest minor axes that together are the channels, else None."""
    axes = reversed(range(1, len(shape)))
    return next((axis for axis in axes if math.prod(shape[axis:]) == channels), None)


def keeps_positions(order: Sequence[int], first: int) -> bool:
    """Return whether a transpose moves no axis before `first`."""
    return tuple(order[:first]) == tuple(range(first))
