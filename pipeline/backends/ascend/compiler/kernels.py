"""Group primitives into kernels.

A kernel of the vector unit computes its results from values in memory: everything between is
computed on the way, again if several kernels need it. Values that a product, a window, a move or
the caller reads must be in memory; a reduction over rows of a feature map ends a kernel, one along
the minor axis does not. This gives batch normalisation its two kernels forward and two backward,
and layer norm, softmax, GELU and an optimizer one each, however they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.backends.ascend.chip.tasks import VectorWork
from pipeline.backends.ascend.compiler.dataflow import find_dataflow, find_random_values
from pipeline.backends.ascend.compiler.horizontal_fusion import (
    FUSABLE,
    SMALL_ELEMENTS,
    Form,
    Kernel,
    join_kernels,
)
from pipeline.backends.ascend.compiler.phases import Phases
from pipeline.backends.ascend.compiler.primitives import VIRTUAL, kind_of, passes_of
from pipeline.backends.graph.graph import Graph, Node
from pipeline.models.modules.name_stack import find_layer

RECOMPUTE_RATIO = 1.3
"""A value used by several kernels is kept in memory if computing it again would read more than this
factor times its bytes."""

LONGEST_CHAIN = 100
"""Operations on the way to a value within one kernel. The vendor's fusion passes stop far earlier;
this bound is for chains of thousands, which no kernel holds."""

WELL_CONNECTED = 300
"""A value with more nodes than this between it and the ends of its kernels is always kept."""


class Kernels:
    """Groups of nodes that become a graph's kernels."""

    def __init__(
        self,
        graph: Graph,
        phases: Phases,
        nbytes: Callable[[int], float],
        *,
        by_op: bool = False,
    ) -> None:
        self.graph = graph
        self.phases = phases
        self.nbytes = nbytes
        self.by_op = by_op
        self.dataflow = find_dataflow(graph, phases)
        self.outputs = {self.dataflow.alias[index] for index in graph.outputs}
        self.random = find_random_values(graph, self.dataflow)
        self.kept = self._must_keep()

    def form(self) -> list[Kernel]:
        """Return all kernels, in an order in which they can run."""
        self._break_long_chains()
        self._keep_masked_gradients()
        self._keep_expensive_values()
        kernels = [
            self._kernel(position)
            for position, node in enumerate(self.graph.nodes)
            if self._kind(position) not in ("view", "loop_view")
            and any(self._is_written(out) for out in node.outputs)
        ]
        return join_kernels(kernels, self._is_large)

    def _kind(self, position: int) -> str:
        return self.dataflow.kinds[position]

    def _is_large(self, index: int) -> bool:
        return self.graph.values[index].size > SMALL_ELEMENTS

    def _must_keep(self) -> set[int]:
        """Keep fusable values that something outside their kernels reads."""
        in_memory = set()
        for index, position in self.dataflow.producer.items():
            if self._kind(position) in FUSABLE:
                users = self.dataflow.consumers.get(index, [])
                outside = any(self._needs_memory(position, user) for user in users)
                if index in self.outputs or outside:
                    in_memory.add(index)
        return in_memory

    def _needs_memory(self, producer: int, user: int) -> bool:
        source = self.graph.nodes[producer]
        reader = self.graph.nodes[user]
        out = source.outputs[0]
        phases = (self.phases.of_node[producer], self.phases.of_node[user])
        if self._kind(user) not in (*FUSABLE, "reduce"):
            return source.primitive not in VIRTUAL or self._kind(user) != "loop_view"
        if phases == ("backward", "optimizer") and out in self.phases.gradients:
            return True  # a final gradient is ready at its all-reduce, before any update
        if source.primitive in VIRTUAL and source.loop == reader.loop:
            return False
        large = self._is_large(out)
        is_mask = large and self.graph.values[out].dtype == "bool"
        if source.loop != reader.loop or (is_mask and phases[0] != phases[1]):
            return True  # masks for the backward pass take a bit an element
        if out in self.random and reader.outputs[0] not in self.random:
            return large
        # Another module or another function is another op of the framework.
        another = (source.scope, source.calls) != (reader.scope, reader.calls)
        return self.by_op and phases[0] == phases[1] and another and large

    def _is_interior(self, index: int) -> bool:
        """Return whether every kernel that needs a value computes it itself."""
        position = self.dataflow.producer.get(index)
        return position is not None and self._kind(position) in FUSABLE and index not in self.kept

    def _is_written(self, index: int) -> bool:
        """Return whether a kernel writes a value to memory, be it for the optimizer alone."""
        return not self._is_interior(index) or index in self.phases.shared_gradients

    def _break_long_chains(self) -> None:
        lengths: dict[int, int] = {}
        for position, node in enumerate(self.graph.nodes):
            if self._kind(position) not in FUSABLE:
                continue
            inputs = (self.dataflow.alias[index] for index in node.inputs)
            length = 1 + max((lengths.get(index, 0) for index in inputs), default=0)
            for out in node.outputs:
                if length >= LONGEST_CHAIN:
                    self.kept.add(out)
                lengths[out] = 0 if out in self.kept else length

    def _keep_masked_gradients(self) -> None:
        """Keep the result of a ReluGrad: several kernels read it, and it closes a chain."""
        users = self._kernel_keys()
        for position, node in enumerate(self.graph.nodes):
            backward = self.phases.of_node[position] == "backward"
            if node.primitive == "select_n" and backward and self._kind(position) in FUSABLE:
                out = node.outputs[0]
                if self._is_large(out) and len(users.get(out, ())) > 1:
                    self.kept.add(out)

    def _keep_expensive_values(self) -> None:
        """Keep large values that several kernels need: results of ops, and what is cheaper to read.

        Sources that the kernels read anyhow count nothing.
        """
        users = self._kernel_keys()
        sources: dict[int, frozenset[int]] = {}
        for position, node in enumerate(self.graph.nodes):
            if self._kind(position) not in FUSABLE:
                continue
            sources_of: set[int] = set()
            for index in (self.dataflow.alias[index] for index in node.inputs):
                if self._is_interior(index):
                    sources_of |= sources[index]
                elif self._is_large(index) and index not in self.graph.constants:
                    sources_of.add(index)
            for out in node.outputs:
                sources[out] = frozenset(sources_of)
                shared = self._is_large(out) and len(users.get(out, ())) > 1
                if not shared or out in self.kept:
                    continue
                if self._ends_an_op(position) or self._is_expensive(out, sources_of):
                    self.kept.add(out)

    def _ends_an_op(self, position: int) -> bool:
        """Return whether another layer or function reads the result of a node.

        The vendor's fusion passes join ops whose result has one reader (eltwise_fusion_pass), so
        that no kernel computes the result of another op again: batch normalisation's result before
        a squeeze-and-excitation is written once, and read by the mean and by the product. Within an
        op, which JAX takes to pieces, kernels compute what they need.
        """
        if self.phases.of_node[position] == "optimizer":
            return False
        node = self.graph.nodes[position]
        users = self.dataflow.consumers.get(node.outputs[0], ())
        return any(_op_of(self.graph.nodes[user]) != _op_of(node) for user in users)

    def _is_expensive(self, out: int, sources: set[int]) -> bool:
        """Return whether a kernel reads much more to compute a value than to read it."""
        limit = RECOMPUTE_RATIO * self.nbytes(out)
        if sum(map(self.nbytes, sources)) <= limit:
            return False
        ends = self._ends(out)
        if ends is None:
            return True
        for end in ends:
            besides = self._read_besides(out, end)
            if besides is None or sum(map(self.nbytes, sources - besides)) > limit:
                return True
        return False

    def _ends(self, value: int) -> list[int] | None:
        """Return the nodes that end the kernels which would compute a value; None if many."""
        ends: dict[int, None] = {}
        stack = [value]
        seen = {value}
        while stack:
            for user in self.dataflow.consumers.get(stack.pop(), ()):
                outputs = self.graph.nodes[user].outputs
                if self._kind(user) == "reduce" or any(out in self.kept for out in outputs):
                    ends[user] = None
                fresh = [out for out in outputs if self._is_interior(out) and out not in seen]
                seen.update(fresh)
                stack += fresh
            if len(seen) + len(ends) > WELL_CONNECTED:
                return None
        return list(ends)

    def _read_besides(self, value: int, end: int) -> set[int] | None:
        """Return what the kernel that ends in a node would read beside a value; None if many."""
        inputs: set[int] = set()
        stack = [end]
        seen = {end}
        while stack and len(seen) <= WELL_CONNECTED:
            node = self.graph.nodes[stack.pop()]
            for index in {self.dataflow.alias[index] for index in node.inputs} - {value}:
                if not self._is_interior(index):
                    inputs.add(index)
                elif self.dataflow.producer[index] not in seen:
                    seen.add(self.dataflow.producer[index])
                    stack.append(self.dataflow.producer[index])
        return inputs if not stack else None

    def _levels(self) -> dict[int, int]:
        """Return how many kernels in sequence it takes until each value is in memory."""
        levels: dict[int, int] = {}
        for position, node in enumerate(self.graph.nodes):
            if self._kind(position) == "view":
                continue
            reached = max((levels.get(index, 0) for index in self._inputs(position)), default=0)
            for out in node.outputs:
                levels[out] = reached + (0 if self._is_interior(out) else 1)
        return levels

    def _kernel_keys(self) -> dict[int, frozenset[tuple[object, ...]]]:
        """Return the kernels that would compute each value, as far as they can be distinguished."""
        levels = self._levels()
        keys: dict[int, frozenset[tuple[object, ...]]] = {}
        for position in range(len(self.graph.nodes) - 1, -1, -1):
            node = self.graph.nodes[position]
            kind = self._kind(position)
            if kind not in (*FUSABLE, "reduce"):
                continue
            for out in node.outputs:
                if kind == "reduce" or out in self.kept:
                    phase = self.phases.of_node[position]
                    keys[out] = frozenset({(phase, kind == "reduce", levels[out], node.loop)})
                else:
                    users = self.dataflow.consumers.get(out, ())
                    results = (
                        result for user in users for result in self.graph.nodes[user].outputs
                    )
                    keys[out] = frozenset().union(*(keys.get(result, ()) for result in results))
        return keys

    def _kernel(self, position: int) -> Kernel:
        """Return the kernel that ends in a node: everything back to values in memory."""
        node = self.graph.nodes[position]
        kind = self._kind(position)
        fused = kind in (*FUSABLE, "reduce")
        nodes, sources = self._gather(position) if fused else ([position], self._inputs(position))
        outputs = (index for member in nodes for index in self.graph.nodes[member].outputs)
        elements = max(self.graph.values[index].size for index in (*node.inputs, *outputs))
        form: Form = "reduce" if kind == "reduce" else "single"
        if kind in FUSABLE:
            # A reduction along rows is a large part of the kernel.
            along_rows = any(
                self._kind(member) == "rows"
                and 2 * self.graph.values[self.graph.nodes[member].inputs[0]].size >= elements
                for member in nodes
            )
            form = "rows" if along_rows else "elementwise"
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
        )

    def _inputs(self, position: int) -> list[int]:
        """Return a node's inputs with views resolved, each once."""
        inputs = self.graph.nodes[position].inputs
        return list(dict.fromkeys(self.dataflow.alias[index] for index in inputs))

    def _gather(self, end: int) -> tuple[list[int], list[int]]:
        """Return the nodes of the kernel that ends in one, and its inputs in memory."""
        nodes = {end: None}
        sources: dict[int, None] = {}
        updates = self.phases.of_node[end] == "optimizer"
        stack = [end]
        while stack:
            for index in self._inputs(stack.pop()):
                producer = self.dataflow.producer.get(index)
                is_gradient = updates and index in self.phases.shared_gradients
                if producer is None or is_gradient or not self._is_interior(index):
                    sources[index] = None
                elif producer not in nodes:
                    nodes[producer] = None
                    stack.append(producer)
        return list(nodes), list(sources)


def _op_of(node: Node) -> tuple[str, tuple[str, ...]]:
    """Return the layer and the functions of a node, the same in the forward and backward pass."""
    return find_layer(node.scope), node.calls


def kernel_work(
    kernel: Kernel, graph: Graph, kinds: Sequence[str], dtypes: Sequence[str]
) -> VectorWork:
    """Return the work of a kernel of the vector unit, from the kinds of nodes and types of values.

    Reductions, and their results that are spread over the row again, run once for every row.
    """
    simple = 0.0
    heavy = 0.0
    reductions = 0
    for position in kernel.nodes:
        node = graph.nodes[position]
        size = max(graph.values[index].size for index in (*node.inputs, *node.outputs))
        share = min(1.0, size / max(1, kernel.elements))
        simple_ops, heavy_ops = _operations(graph, node)
        simple += simple_ops * share
        heavy += heavy_ops * share
        large = 2 * graph.values[node.inputs[0]].size >= kernel.elements if node.inputs else False
        reductions += kinds[position] == "rows" and large
    along_rows = 1
    if kernel.form == "rows":
        spread = any(2 * graph.values[root].size >= kernel.elements for root in kernel.roots)
        along_rows = max(2 * reductions - (not spread), 1)
    wide = any(
        dtypes[index] == "float32" and graph.values[index].size * 2 > kernel.elements
        for index in (*kernel.sources, *kernel.roots)
    )
    dtype = "float32" if wide else "float16"
    return VectorWork(kernel.elements, dtype, simple, heavy, along_rows)


def _operations(graph: Graph, node: Node) -> tuple[float, float]:
    """Return simple and heavy operations per element of a node.

    A division by a known number is a product with another.
    """
    if kind_of(node.primitive) in ("reduce", "scatter", "gather"):
        return 1.0, 0.0
    if node.primitive == "div" and node.inputs[1] in graph.constants:
        return 1.0, 0.0
    if node.primitive == "integer_pow" and node.params["y"] in (2, 3):
        return float(node.params["y"] - 1), 0.0
    return passes_of(node.primitive)
