"""Which primitives run as one kernel.

A kernel of the vector unit computes its results from values in memory: everything between is
computed on the way, again if several kernels need it. What must be in memory is what a product, a
window, a move or the caller reads; a reduction over rows of a feature map ends a kernel, one along
the minor axis does not. This gives batch normalisation its two kernels forward and two backward,
and layer norm, softmax, GELU and an optimizer one each, however they were written.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.backends.ascend.graph import Graph, Node
from pipeline.backends.ascend.phases import Phases
from pipeline.backends.ascend.primitives import VIRTUAL, kind_of
from pipeline.backends.ascend.tasks import Phase

ROW_ELEMENTS = 32768
"""The longest row that stays in the unified buffer with what is computed from it: 256 KiB hold
float16 rows of this length twice, with room for double buffering."""

SMALL_ELEMENTS = 16384
"""Values of up to so many elements, 64 KiB in float32, are computed again rather than kept."""

RECOMPUTE_RATIO = 1.3
"""A value used by several kernels is kept in memory where computing it again would read this many
times its own bytes."""

Form = Literal["elementwise", "rows", "reduce", "single"]


@dataclass
class Kernel:
    """Nodes that run together; `roots` are the values that it leaves in memory.

    `form` is "single" for a node that is a kernel of its own. `elements` is the size of the
    iteration. `sources` are what it reads, in the order in which it meets them.
    """

    form: Form
    phase: Phase
    roots: list[int]
    nodes: list[int]
    sources: list[int]
    elements: int
    loop: int
    repeat: int
    scope: str = ""
    level: int = 0
    fused: list[str] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The node after which it can't run any more, for the order."""
        return max(self.nodes)


@dataclass(frozen=True)
class Wiring:
    """Where values come from and go to, views looked through."""

    alias: tuple[int, ...]
    """Value -> the value whose memory it is a view of."""
    producer: dict[int, int]
    consumers: dict[int, list[int]]
    kinds: tuple[str, ...]


def wire(graph: Graph, phases: Phases) -> Wiring:
    """Look through views, and through what only turns a weight around for a product."""
    alias = list(range(len(graph.values)))
    kinds: list[str] = []
    turned = _turned_for_products(graph, phases)
    for position, node in enumerate(graph.nodes):
        kind = _kind_here(graph, node)
        if kind == "view" or position in turned:
            kind = "view"
            for out in node.outputs:
                alias[out] = alias[node.inputs[0]]
        kinds.append(kind)
    producer: dict[int, int] = {}
    consumers: dict[int, list[int]] = defaultdict(list)
    for position, node in enumerate(graph.nodes):
        if kinds[position] == "view":
            continue
        producer.update(dict.fromkeys(node.outputs, position))
        for index in dict.fromkeys(alias[index] for index in node.inputs):
            consumers[index].append(position)
    return Wiring(tuple(alias), producer, dict(consumers), tuple(kinds))


def _kind_here(graph: Graph, node: Node) -> str:
    """The kind of a node, given its shapes."""
    kind = kind_of(node.primitive)
    if kind == "random":
        return "elementwise"
    if kind == "reduce":
        return _kind_of_reduction(graph, node)
    if kind in ("gather", "scatter") and _is_one_per_row(graph, node):
        return "rows"
    if node.primitive == "transpose" and _keeps_order(graph, node):
        return "view"
    if kind in ("move", "unsupported") and _is_tiny(graph, node):
        return "elementwise"
    if node.primitive == "pad" and not any(map(any, node.params["padding_config"])):
        return "view"
    return kind


def _kind_of_reduction(graph: Graph, node: Node) -> str:
    value = graph.values[node.inputs[0]]
    if value.size == graph.values[node.outputs[0]].size:
        return "elementwise"
    return "rows" if _along_rows(value.shape, node.params.get("axes", ())) else "reduce"


def _random_values(graph: Graph, wiring: Wiring) -> set[int]:
    """Random numbers, and what is computed from them alone, such as the mask of a dropout."""
    found: set[int] = set()
    for node in graph.nodes:
        inputs = [wiring.alias[index] for index in node.inputs]
        others = [index for index in inputs if index not in found]
        drawn = kind_of(node.primitive) == "random" or len(others) < len(inputs)
        if drawn and all(graph.values[index].size <= 16 for index in others):
            found.update(node.outputs)
    return found


def _is_one_per_row(graph: Graph, node: Node) -> bool:
    """Picking one class of every row, as a cross entropy does, and its gradient: one-hot rows."""
    table = graph.values[node.inputs[0]]
    if len(table.shape) < 2 or table.shape[-1] < 2:
        return False
    rows = table.size // table.shape[-1]
    if node.primitive == "gather":
        one = math.prod(node.params["slice_sizes"]) == 1
        return one and graph.values[node.outputs[0]].size == rows
    if node.inputs[0] not in graph.constants:
        return False
    return graph.values[node.inputs[2]].size == rows


def _is_tiny(graph: Graph, node: Node) -> bool:
    return max(graph.values[index].size for index in (*node.inputs, *node.outputs)) <= 1024


def _along_rows(shape: Sequence[int], axes: Iterable[int]) -> bool:
    """Whether the axes are the minor ones, of rows that fit into a core's buffer."""
    real = [axis for axis, size in enumerate(shape) if size > 1]
    reduced = [axis for axis in real if axis in set(axes)]
    row = math.prod(shape[axis] for axis in reduced)
    kept = len(real) - len(reduced)
    return real[kept:] == reduced and row <= ROW_ELEMENTS and (kept > 0 or row <= 1024)


def _keeps_order(graph: Graph, node: Node) -> bool:
    shape = graph.values[node.inputs[0]].shape
    order = [axis for axis in node.params["permutation"] if shape[axis] > 1]
    return order == sorted(order)


def _turned_for_products(graph: Graph, phases: Phases) -> set[int]:
    """Transposes and reversals of weights and of their gradients: the cube reads either way."""
    users: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for index in node.inputs:
            users[index].append(node)
    turned = set()
    for position, node in enumerate(graph.nodes):
        if node.primitive not in ("transpose", "rev"):
            continue
        out = node.outputs[0]
        into_product = all(
            kind_of(user.primitive) in ("conv", "matmul", "view") or user.primitive == "transpose"
            for user in users[out]
        )
        if (node.inputs[0] in phases.weights and into_product) or out in phases.gradients:
            turned.add(position)
    return turned


FUSABLE = ("elementwise", "rows")


class Kernels:
    """Forms the kernels of a graph."""

    def __init__(
        self,
        graph: Graph,
        phases: Phases,
        nbytes: Callable[[int], float],
        *,
        by_op: bool = False,
    ) -> None:
        self.graph, self.phases, self.nbytes, self.by_op = graph, phases, nbytes, by_op
        self.wiring = wire(graph, phases)
        self.outputs = {self.wiring.alias[index] for index in graph.outputs}
        self.random = _random_values(graph, self.wiring)
        self.kept = self._must_keep()

    def form(self) -> list[Kernel]:
        """All kernels, in an order in which they can run."""
        self._keep_masked_gradients()
        self._keep_what_is_dear_to_recompute()
        kernels = [self._kernel(position) for position in self._roots()]
        return _ordered(_merged(kernels, self._is_large))

    def _kind(self, position: int) -> str:
        return self.wiring.kinds[position]

    def _is_large(self, index: int) -> bool:
        return self.graph.values[index].size > SMALL_ELEMENTS

    def _must_keep(self) -> set[int]:
        """Fusable values that something outside their kernels reads."""
        kept = set()
        for index, position in self.wiring.producer.items():
            if self._kind(position) not in FUSABLE:
                continue
            users = self.wiring.consumers.get(index, [])
            if index in self.outputs or any(self._needs_memory(position, user) for user in users):
                kept.add(index)
        return kept

    def _needs_memory(self, producer: int, user: int) -> bool:
        made, used = self.graph.nodes[producer], self.graph.nodes[user]
        if self._kind(user) not in (*FUSABLE, "reduce"):
            return made.primitive not in VIRTUAL or self._kind(user) != "loop_view"
        if made.loop != used.loop or self._is_saved_mask(producer, user):
            return True
        if made.outputs[0] in self.random and used.outputs[0] not in self.random:
            return self._is_large(made.outputs[0])
        same_phase = self.phases.of_node[producer] == self.phases.of_node[user]
        alone = self.by_op and same_phase and _another_op(made, used)
        return alone and self._is_large(made.outputs[0])

    def _is_saved_mask(self, producer: int, user: int) -> bool:
        """Masks are kept for the backward pass, an element a bit."""
        out = self.graph.nodes[producer].outputs[0]
        of_node = self.phases.of_node
        return (
            self.graph.values[out].dtype == "bool"
            and self._is_large(out)
            and of_node[producer] != of_node[user]
        )

    def _is_interior(self, index: int) -> bool:
        """Whether a value is computed on the way, by whoever needs it."""
        position = self.wiring.producer.get(index)
        return (
            position is not None and self._kind(position) in FUSABLE and index not in self.kept
        )

    def _keep_masked_gradients(self) -> None:
        """What a ReluGrad gives is kept: several kernels read it, and it closes a chain."""
        users = self._kernel_keys()
        for position, node in enumerate(self.graph.nodes):
            backward = self.phases.of_node[position] == "backward"
            if node.primitive == "select_n" and backward and self._kind(position) in FUSABLE:
                out = node.outputs[0]
                if self._is_large(out) and len(users.get(out, ())) > 1:
                    self.kept.add(out)

    def _keep_what_is_dear_to_recompute(self) -> None:
        """Keep large values of several kernels where reading them is cheaper than their sources."""
        users = self._kernel_keys()
        sources: dict[int, frozenset[int]] = {}
        for position, node in enumerate(self.graph.nodes):
            if self._kind(position) not in FUSABLE:
                continue
            found: set[int] = set()
            for index in (self.wiring.alias[index] for index in node.inputs):
                if self._is_interior(index):
                    found |= sources[index]
                elif self._is_large(index) and index not in self.graph.constants:
                    found.add(index)
            for out in node.outputs:
                sources[out] = frozenset(found)
                if out in self.kept or not self._is_large(out) or len(users.get(out, ())) < 2:
                    continue
                again = sum(self.nbytes(index) for index in found)
                if again > RECOMPUTE_RATIO * self.nbytes(out):
                    self.kept.add(out)

    def _levels(self) -> dict[int, int]:
        """How many kernels, one after the other, it takes to have each value in memory."""
        levels: dict[int, int] = {}
        for position, node in enumerate(self.graph.nodes):
            if self._kind(position) == "view":
                continue
            reached = 0
            for index in (self.wiring.alias[index] for index in node.inputs):
                level = levels.get(index, 0)
                reached = max(reached, level)
            for out in node.outputs:
                levels[out] = reached + (0 if self._is_interior(out) else 1)
        return levels

    def _kernel_keys(self) -> dict[int, frozenset[tuple[object, ...]]]:
        """For each value, the kernels that would compute it."""
        levels = self._levels()
        keys: dict[int, frozenset[tuple[object, ...]]] = {}
        for position in range(len(self.graph.nodes) - 1, -1, -1):
            node, kind = self.graph.nodes[position], self._kind(position)
            if kind not in (*FUSABLE, "reduce"):
                continue
            for out in node.outputs:
                own = (self.phases.of_node[position], kind == "reduce", levels[out], node.loop)
                found: set[tuple[object, ...]] = set()
                if kind == "reduce" or out in self.kept:
                    found.add(own)
                if kind != "reduce":
                    for user in self.wiring.consumers.get(out, ()):
                        for made in self.graph.nodes[user].outputs:
                            if not (made in self.kept and out not in self.kept):
                                found |= keys.get(made, frozenset())
                            else:
                                found |= {
                                    (self.phases.of_node[user], False, levels[made], node.loop)
                                }
                keys[out] = frozenset(found)
        return keys

    def _roots(self) -> list[int]:
        """Nodes that end a kernel."""
        return [
            position
            for position, node in enumerate(self.graph.nodes)
            if self._kind(position) not in ("view", "loop_view")
            and not all(self._is_interior(out) for out in node.outputs)
        ]

    def _kernel(self, position: int) -> Kernel:
        """The kernel that ends in a node: everything back to what is in memory."""
        node, kind = self.graph.nodes[position], self._kind(position)
        nodes, sources = [position], dict[int, None]()
        elements = max(
            (self.graph.values[index].size for index in (*node.inputs, *node.outputs)), default=0
        )
        stack = [position] if kind in (*FUSABLE, "reduce") else []
        if not stack:
            sources = dict.fromkeys(self.wiring.alias[index] for index in node.inputs)
        seen = {position}
        while stack:
            for index in (self.wiring.alias[i] for i in self.graph.nodes[stack.pop()].inputs):
                if not self._is_interior(index):
                    sources[index] = None
                    continue
                producer = self.wiring.producer[index]
                if producer in seen:
                    continue
                seen.add(producer)
                nodes.append(producer)
                stack.append(producer)
                elements = max(elements, self.graph.values[index].size)
        form: Form = "single"
        if kind in FUSABLE:
            form = "rows" if self._works_along_rows(nodes, elements) else "elementwise"
        elif kind == "reduce":
            form = "reduce"
        return Kernel(
            form,
            self.phases.of_node[position],
            [out for out in node.outputs if not self._is_interior(out)],
            nodes,
            [index for index in sources if index not in self.graph.constants],
            elements,
            node.loop,
            node.repeat,
            scope=node.scope,
        )

    def _works_along_rows(self, nodes: Iterable[int], elements: int) -> bool:
        """Whether a reduction along rows is a fair part of a kernel, not of a vector beside it."""
        return any(
            self._kind(position) == "rows"
            and 2 * self.graph.values[self.graph.nodes[position].inputs[0]].size >= elements
            for position in nodes
        )


def _another_op(made: Node, used: Node) -> bool:
    """Whether a framework would run two nodes as separate ops: another module, another function."""
    return (made.scope, made.calls) != (used.scope, used.calls)


def _merged(kernels: list[Kernel], is_large: Callable[[int], bool]) -> list[Kernel]:
    """Kernels of the same size become one where all that one reads, the other reads too."""
    _set_levels(kernels)
    leader: dict[tuple[object, ...], Kernel] = {}
    merged: list[Kernel] = []
    for kernel in kernels:
        if kernel.form == "single":
            merged.append(kernel)
            continue
        form = "reduce" if kernel.form == "reduce" else "elementwise"
        keys = [
            (form, kernel.phase, kernel.level, kernel.loop, kernel.elements, index)
            for index in kernel.sources
            if is_large(index) or kernel.elements <= SMALL_ELEMENTS
        ]
        hosts = (leader[key] for key in keys if key in leader)
        host = next((found for found in hosts if _reads_as_much(found, kernel, is_large)), None)
        if host is None:
            merged.append(kernel)
            host = kernel
        else:
            _join(host, kernel)
        leader.update(dict.fromkeys(keys, host))
    return _with_updates_joined(_with_statistics_joined(merged))


def _with_statistics_joined(kernels: list[Kernel]) -> list[Kernel]:
    """Running statistics are updated by the kernel that normalises with the same statistics."""
    reduced = {root for kernel in kernels if kernel.form == "reduce" for root in kernel.roots}
    hosts: dict[int, Kernel] = {}
    for kernel in reversed(kernels):
        if kernel.form in FUSABLE and kernel.phase == "forward" and kernel.elements > SMALL_ELEMENTS:
            hosts.update({index: kernel for index in kernel.sources if index in reduced})
    joined = []
    for kernel in kernels:
        small = kernel.form in FUSABLE and kernel.elements <= SMALL_ELEMENTS
        shared = [hosts[index] for index in kernel.sources if index in hosts]
        if small and kernel.phase == "forward" and shared:
            elements, scope = shared[0].elements, shared[0].scope
            _join(shared[0], kernel)
            shared[0].elements, shared[0].scope = elements, scope
        else:
            joined.append(kernel)
    return joined


def _with_updates_joined(kernels: list[Kernel]) -> list[Kernel]:
    """An optimizer's kernels of one parameter, moments first, are one: ApplyAdam writes them all."""
    maker: dict[int, Kernel] = {}
    joined: list[Kernel] = []
    for kernel in kernels:
        host = kernel
        if kernel.phase == "optimizer" and kernel.form == "elementwise":
            chain = [maker[index] for index in kernel.sources if index in maker]
            host = next((made for made in chain if made.elements == kernel.elements), kernel)
        if host is kernel:
            joined.append(kernel)
        else:
            _join(host, kernel)
            host.sources = [index for index in host.sources if index not in host.roots]
        if host.phase == "optimizer" and host.form == "elementwise":
            maker.update(dict.fromkeys(kernel.roots, host))
    return joined


def _reads_as_much(one: Kernel, other: Kernel, is_large: Callable[[int], bool]) -> bool:
    """Whether either's large sources are all among the other's.

    Two normalisations that share a gradient stay apart: each reads its own feature map too.
    """
    first, second = ({index for index in kernel.sources if is_large(index)} for kernel in (one, other))
    return first <= second or second <= first


def _join(host: Kernel, guest: Kernel) -> None:
    host.roots += guest.roots
    host.nodes = list(dict.fromkeys([*host.nodes, *guest.nodes]))
    host.sources = list(dict.fromkeys([*host.sources, *guest.sources]))
    host.form = "rows" if "rows" in (host.form, guest.form) else host.form


def _set_levels(kernels: list[Kernel]) -> None:
    levels: dict[int, int] = {}
    for kernel in kernels:
        kernel.level = 1 + max((levels.get(index, 0) for index in kernel.sources), default=0)
        levels.update(dict.fromkeys(kernel.roots, kernel.level))


def _ordered(kernels: list[Kernel]) -> list[Kernel]:
    """In program order, but never before what a kernel reads."""
    import heapq

    maker = {root: place for place, kernel in enumerate(kernels) for root in kernel.roots}
    waits = [0] * len(kernels)
    followers: dict[int, list[int]] = defaultdict(list)
    for place, kernel in enumerate(kernels):
        for before in {maker[index] for index in kernel.sources if index in maker} - {place}:
            followers[before].append(place)
            waits[place] += 1
    ready = [(kernels[place].first, place) for place, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        place = heapq.heappop(ready)[1]
        ordered.append(kernels[place])
        for follower in followers[place]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, (kernels[follower].first, follower))
    assert len(ordered) == len(kernels), "kernels wait for one another"
    return ordered
