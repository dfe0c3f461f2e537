"""Group primitives into kernels.

A kernel of the vector unit computes its results from values in memory, and all values between them.
If several kernels need such a value, each computes it. Values that a product, a pooling, a move or
the caller reads must be in memory. A reduction over rows of a feature map ends a kernel, a
reduction along the minor axis doesn't. So batch normalisation has two kernels forward and two
backward, and layer norm, softmax, GELU and an optimizer have one each, however JAX writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.backends.ascend.chip.tasks import VectorWork
from pipeline.backends.ascend.compiler.dataflow import Dataflow, find_random_values
from pipeline.backends.ascend.compiler.horizontal_fusion import (
    FUSABLE,
    SMALL_ELEMENTS,
    Form,
    Kernel,
    join_kernels,
)
from pipeline.backends.ascend.compiler.phases import Phases
from pipeline.backends.ascend.compiler.primitives import (
    HEAVY,
    SIMPLE,
    VIRTUAL,
    classify_primitive,
)
from pipeline.backends.graph.graph import Graph, Node
from pipeline.core.host.array_values import get_stored_bytes
from pipeline.models.modules.name_stack import find_layer

RECOMPUTE_RATIO = 1.3
"""A value that several kernels use is in memory if computing it again would read more than this
factor times its bytes."""

LONGEST_CHAIN = 100
"""A chain within one kernel has at most this many operations. The vendor's fusion passes stop far
earlier; chains of thousands of operations don't fit a kernel."""

MAX_SEARCHED_NODES = 300
"""A value with more nodes than this between it and the ends of its kernels is always in memory."""


class Kernels:
    """Groups of nodes that become a graph's kernels. Nodes are positions, values are indices.

    `dtypes` are the types of values on the device. `by_op` makes a kernel of each op of the
    framework, and `fuses_adam=False` of each op of an update with a root, as Adam's. `stored` are
    the fusable values that kernels write to memory.
    """

    def __init__(
        self,
        graph: Graph,
        phases: Phases,
        dataflow: Dataflow,
        dtypes: Sequence[str],
        *,
        by_op: bool,
        fuses_adam: bool,
    ) -> None:
        self.graph = graph
        self.phases = phases
        self.dataflow = dataflow
        self.dtypes = dtypes
        self.by_op = by_op
        self.composes_updates = not fuses_adam and any(
            node.primitive in ("sqrt", "rsqrt") and graph.values[node.outputs[0]].size > 1
            for position, node in enumerate(graph.nodes)
            if phases.of_node[position] == "optimizer"
        )
        """Whether each op of an update is a kernel."""
        self.kinds = dataflow.kinds
        self.outputs = {dataflow.alias[index] for index in graph.outputs}
        self.random = find_random_values(graph, dataflow)
        self.stored = self._find_values_in_memory()

    def form_kernels(self) -> list[Kernel]:
        """Return all kernels, in an order in which they can run."""
        self._break_long_chains()
        self._store_masked_gradients()
        self._store_expensive_values()
        kernels = [
            self._form_kernel(position)
            for position, node in enumerate(self.graph.nodes)
            if self.kinds[position] not in ("view", "loop_view")
            and any(self._is_written(out) for out in node.outputs)
        ]
        return join_kernels(kernels, self._is_large)

    def _is_large(self, index: int) -> bool:
        return self.graph.values[index].size > SMALL_ELEMENTS

    def _find_values_in_memory(self) -> set[int]:
        """Return fusable values that are read outside the kernels that compute them."""
        in_memory = set()
        for index, position in self.dataflow.producer.items():
            if self.kinds[position] in FUSABLE:
                users = self.dataflow.consumers.get(index, [])
                outside = any(self._needs_memory(position, user) for user in users)
                if index in self.outputs or outside:
                    in_memory.add(index)
        return in_memory

    def _needs_memory(self, producer: int, user: int) -> bool:
        """Return whether a node reads the result of a fusable node from memory."""
        source = self.graph.nodes[producer]
        reader = self.graph.nodes[user]
        out = source.outputs[0]
        phases = (self.phases.of_node[producer], self.phases.of_node[user])
        if self.kinds[user] not in (*FUSABLE, "reduce"):
            return source.primitive not in VIRTUAL or self.kinds[user] != "loop_view"
        if phases == ("backward", "optimizer") and out in self.phases.gradients:
            return True  # The all-reduce needs a final gradient before any update.
        if source.primitive in VIRTUAL and source.loop == reader.loop:
            return False
        if self.composes_updates and phases[0] == "optimizer" and self.graph.values[out].size > 1:
            return True
        is_large = self._is_large(out)
        is_mask = is_large and self.graph.values[out].dtype == "bool"
        if source.loop != reader.loop or (is_mask and phases[0] != phases[1]):
            return True  # Masks for the backward pass are stored, as they take a bit per element.
        if out in self.random and reader.outputs[0] not in self.random:
            return True  # The vector unit draws no numbers, however few.
        if not self.by_op or phases[0] != phases[1] or source.op == reader.op:
            return False
        # Ops of a framework write large results, calls of custom code all results.
        return is_large or (source.call != reader.call and phases[0] != "optimizer")

    def _is_interior(self, index: int) -> bool:
        """Return whether every kernel that needs a value computes it itself."""
        position = self.dataflow.producer.get(index)
        return position is not None and self.kinds[position] in FUSABLE and index not in self.stored

    def _is_written(self, index: int) -> bool:
        """Return whether a kernel writes a value to memory, for the optimizer or other kernels."""
        return not self._is_interior(index) or index in self.phases.shared_gradients

    def _break_long_chains(self) -> None:
        """Store the values at which chains reach `LONGEST_CHAIN` operations."""
        lengths: dict[int, int] = {}
        for position, node in enumerate(self.graph.nodes):
            if self.kinds[position] not in FUSABLE:
                continue
            inputs = (self.dataflow.alias[index] for index in node.inputs)
            length = 1 + max((lengths.get(index, 0) for index in inputs), default=0)
            for out in node.outputs:
                if length >= LONGEST_CHAIN:
                    self.stored.add(out)
                lengths[out] = 0 if out in self.stored else length

    def _store_masked_gradients(self) -> None:
        """Store results of ReluGrad that several kernels read."""
        users = self._find_kernel_keys()
        for position, node in enumerate(self.graph.nodes):
            backward = self.phases.of_node[position] == "backward"
            if node.primitive == "select_n" and backward and self.kinds[position] in FUSABLE:
                out = node.outputs[0]
                if self._is_large(out) and len(users.get(out, ())) > 1:
                    self.stored.add(out)

    def _store_expensive_values(self) -> None:
        """Store large values that several kernels need, if they end an op or are expensive."""
        users = self._find_kernel_keys()
        sources: dict[int, frozenset[int]] = {}
        for position, node in enumerate(self.graph.nodes):
            if self.kinds[position] not in FUSABLE:
                continue
            node_sources: set[int] = set()
            for index in (self.dataflow.alias[index] for index in node.inputs):
                if self._is_interior(index):
                    node_sources |= sources[index]
                elif self._is_large(index) and index not in self.graph.constants:
                    node_sources.add(index)
            for out in node.outputs:
                sources[out] = frozenset(node_sources)
                is_shared = self._is_large(out) and len(users.get(out, ())) > 1
                if not is_shared or out in self.stored:
                    continue
                if self._ends_op(position) or self._is_expensive(out, node_sources):
                    self.stored.add(out)

    def _ends_op(self, position: int) -> bool:
        """Return whether another layer or function reads the result of a node.

        The vendor's fusion passes join ops whose result has one reader (eltwise_fusion_pass). So no
        kernel computes the result of another op again: batch normalisation's result before a
        squeeze-and-excitation is written once, and the mean and the product read it. Kernels of the
        same op, which is several primitives in JAX, may compute a value again.
        """
        if self.phases.of_node[position] == "optimizer":
            return False
        node = self.graph.nodes[position]
        users = self.dataflow.consumers.get(node.outputs[0], ())
        return any(_identify_op(self.graph.nodes[user]) != _identify_op(node) for user in users)

    def _is_expensive(self, out: int, sources: set[int]) -> bool:
        """Return whether a kernel that computes a value again reads many more bytes for it."""
        limit = RECOMPUTE_RATIO * self._sum_bytes({out})
        if self._sum_bytes(sources) <= limit:
            return False
        ends = self._find_ends(out)
        if ends is None:
            return True
        for end in ends:
            other_sources = self._find_other_sources(out, end)
            if other_sources is None or self._sum_bytes(sources - other_sources) > limit:
                return True
        return False

    def _sum_bytes(self, values: set[int]) -> float:
        return sum(
            self.graph.values[index].size * get_stored_bytes(self.dtypes[index]) for index in values
        )

    def _find_ends(self, value: int) -> list[int] | None:
        """Return the last nodes of the kernels that would compute a value; None if too many."""
        ends: dict[int, None] = {}
        stack = [value]
        seen = {value}
        while stack:
            for user in self.dataflow.consumers.get(stack.pop(), ()):
                outputs = self.graph.nodes[user].outputs
                if self.kinds[user] == "reduce" or any(out in self.stored for out in outputs):
                    ends[user] = None
                fresh = [out for out in outputs if self._is_interior(out) and out not in seen]
                seen.update(fresh)
                stack += fresh
            if len(seen) + len(ends) > MAX_SEARCHED_NODES:
                return None
        return list(ends)

    def _find_other_sources(self, value: int, end: int) -> set[int] | None:
        """Return what the kernel that ends in a node reads besides a value; None if too many."""
        inputs: set[int] = set()
        stack = [end]
        seen = {end}
        while stack and len(seen) <= MAX_SEARCHED_NODES:
            node = self.graph.nodes[stack.pop()]
            for index in {self.dataflow.alias[index] for index in node.inputs} - {value}:
                if not self._is_interior(index):
                    inputs.add(index)
                elif self.dataflow.producer[index] not in seen:
                    seen.add(self.dataflow.producer[index])
                    stack.append(self.dataflow.producer[index])
        return inputs if not stack else None

    def _compute_levels(self) -> dict[int, int]:
        """Return the number of kernels in sequence that compute each value."""
        levels: dict[int, int] = {}
        for position, node in enumerate(self.graph.nodes):
            if self.kinds[position] == "view":
                continue
            input_levels = (levels.get(index, 0) for index in self._resolve_inputs(position))
            level = max(input_levels, default=0)
            for out in node.outputs:
                levels[out] = level + (0 if self._is_interior(out) else 1)
        return levels

    def _find_kernel_keys(self) -> dict[int, frozenset[tuple[object, ...]]]:
        """Return keys of the kernels that would compute each value: phase, form, level, loop."""
        levels = self._compute_levels()
        keys: dict[int, frozenset[tuple[object, ...]]] = {}
        for position in range(len(self.graph.nodes) - 1, -1, -1):
            node = self.graph.nodes[position]
            kind = self.kinds[position]
            if kind not in (*FUSABLE, "reduce"):
                continue
            for out in node.outputs:
                if kind == "reduce" or out in self.stored:
                    phase = self.phases.of_node[position]
                    keys[out] = frozenset({(phase, kind == "reduce", levels[out], node.loop)})
                else:
                    users = self.dataflow.consumers.get(out, ())
                    results = (
                        result for user in users for result in self.graph.nodes[user].outputs
                    )
                    keys[out] = frozenset().union(*(keys.get(result, ()) for result in results))
        return keys

    def _form_kernel(self, position: int) -> Kernel:
        """Return the kernel that ends in a node, with all nodes back to values in memory."""
        node = self.graph.nodes[position]
        kind = self.kinds[position]
        fused = kind in (*FUSABLE, "reduce")
        nodes, sources = (
            self._gather_nodes(position) if fused else ([position], self._resolve_inputs(position))
        )
        outputs = (index for member in nodes for index in self.graph.nodes[member].outputs)
        elements = max(self.graph.values[index].size for index in (*node.inputs, *outputs))
        form: Form = "reduce" if kind == "reduce" else "single"
        if fused and node.outputs[0] in self.random:
            form = "random"
        elif kind in FUSABLE:
            # A kernel along rows has a reduction of at least half its elements.
            along_rows = any(
                self.kinds[member] == "rows"
                and 2 * self.graph.values[self.graph.nodes[member].inputs[0]].size >= elements
                for member in nodes
            )
            form = "rows" if along_rows else "elementwise"
            if self.composes_updates and self.phases.of_node[position] == "optimizer":
                form = "update"
        return Kernel(
            form,
            self.phases.of_node[position],
            [out for out in node.outputs if self._is_written(out)],
            nodes,
            [index for index in sources if index not in self.graph.constants],
            elements,
            node.loop,
            node.repeat,
            scope=node.scope,
            call=node.call if self.by_op and fused else None,
        )

    def _resolve_inputs(self, position: int) -> list[int]:
        """Return a node's inputs with views resolved, each once."""
        inputs = self.graph.nodes[position].inputs
        return list(dict.fromkeys(self.dataflow.alias[index] for index in inputs))

    def _gather_nodes(self, end: int) -> tuple[list[int], list[int]]:
        """Return the nodes of the kernel that ends in the node `end`, and its inputs in memory."""
        nodes = {end: None}
        sources: dict[int, None] = {}
        updates = self.phases.of_node[end] == "optimizer"
        stack = [end]
        while stack:
            for index in self._resolve_inputs(stack.pop()):
                producer = self.dataflow.producer.get(index)
                is_gradient = updates and index in self.phases.shared_gradients
                if producer is None or is_gradient or not self._is_interior(index):
                    sources[index] = None
                elif producer not in nodes:
                    nodes[producer] = None
                    stack.append(producer)
        return list(nodes), list(sources)


def _identify_op(node: Node) -> tuple[str, tuple[str, ...]]:
    """Return the layer and the functions of a node, the same in the forward and backward pass."""
    return find_layer(node.scope), node.calls


def measure_kernel(
    kernel: Kernel, graph: Graph, kinds: Sequence[str], dtypes: Sequence[str]
) -> VectorWork:
    """Return the work of a kernel of the vector unit.

    `kinds` are by node, `dtypes` by value. Reductions along rows, and broadcasts of their results,
    run once for every row. Rows are the reduction's, as its operand may be a view of a
    buffer with shorter rows, such as four tokens that are normalised together.
    """
    simple = 0.0
    heavy = 0.0
    row_counts: list[int] = []
    for position in kernel.nodes:
        node = graph.nodes[position]
        size = max(graph.values[index].size for index in (*node.inputs, *node.outputs))
        share = min(1.0, size / max(1, kernel.elements))
        simple_ops, heavy_ops = _count_node_operations(graph, node)
        simple += simple_ops * share
        heavy += heavy_ops * share
        is_large = bool(node.inputs) and 2 * graph.values[node.inputs[0]].size >= kernel.elements
        if kinds[position] == "rows" and is_large:
            # A scatter has an update for each row.
            results = (*node.inputs[2:], *node.outputs)
            row_counts.append(min(graph.values[index].size for index in results))
    along_rows = 1
    if kernel.form == "rows":
        # A reduction and a broadcast each, but the last isn't broadcast if no row is written.
        writes_rows = any(2 * graph.values[root].size >= kernel.elements for root in kernel.roots)
        along_rows = max(2 * len(row_counts) - (not writes_rows), 1)
    is_float32 = any(
        dtypes[index] == "float32" and graph.values[index].size * 2 > kernel.elements
        for index in (*kernel.sources, *kernel.roots)
    )
    dtype = "float32" if is_float32 else "float16"
    rows = max(row_counts, default=None)
    return VectorWork(kernel.elements, dtype, simple, heavy, along_rows, rows)


def _count_node_operations(graph: Graph, node: Node) -> tuple[float, float]:
    """Return simple and heavy operations per element of a node.

    A division by a constant is compiled to a product.
    """
    if classify_primitive(node.primitive) in ("reduce", "scatter", "gather"):
        return 1.0, 0.0
    if node.primitive == "div" and node.inputs[1] in graph.constants:
        return 1.0, 0.0
    if node.primitive == "integer_pow" and node.params["y"] in (2, 3):
        return float(node.params["y"] - 1), 0.0
    return float(node.primitive in SIMPLE), float(node.primitive in HEAVY)
