"""Groups of JAX's primitives that the vendor computes as one op: resizes, and recurrent layers.

`jax.image.resize` multiplies each spatial axis by a matrix of weights (bilinear), or gathers from
it (nearest). MindSpore and torch_npu have an op and its gradient, ResizeBilinear(Grad) and
ResizeNearestNeighbor(Grad), whose maps are in blocks of 16 channels. They compute the address of
each position on the scalar unit, and move its block, as a gather computes the address of each row.

MindSpore and torch_npu have one op for a recurrent layer and direction, DynamicGRUV2 or DynamicRNN.
Its kernel keeps state and gates on the cores for all steps. The products that don't depend on the
state, of the inputs and of the gradients of weights and inputs, are one product over all steps
(CANN's DynamicGRUV2; the passes dynamic_gru_v2_grad_fission and dynamic_rnn_grad_fission_v2 of
MindSpore and CANN). In a gradient, a step is a kernel of the cell and a product.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from pipeline.backends.ascend.chip.tasks import CHANNEL_BLOCK, CubeWork, Task
from pipeline.backends.ascend.compiler.buffers import Buffers, append_copy
from pipeline.backends.ascend.compiler.dataflow import Dataflow
from pipeline.backends.ascend.compiler.primitives import classify_primitive
from pipeline.backends.graph.graph import Graph, Node, list_users

RESIZE_OPS = "resize_ops"
"""Name of this pass among the fusions that are skipped."""
RESIZE = "resize"
"""Primitive of a joined node; its parameter `rows` counts the blocks of the result's positions, or
of the gradient's."""
CALL = "_resize"
"""The jitted function of `jax.image.resize`."""
LINEAR, NEAREST = "dot_general", "gather"
STEPS = (LINEAR, NEAREST, "scatter-add", "transpose")
"""Primitives of resizes and their gradients."""


def join_resizes(graph: Graph) -> Graph:
    """Return the graph with one node for each resize of maps, and for each gradient of one.

    A resize whose steps another node reads, and one of a map of one position, stay as they are.
    """
    nodes: list[Node] = []
    chain: list[Node] = []
    users = list_users(graph.nodes)
    for node in graph.nodes:
        if chain and not _continues(chain[-1], node, graph, users):
            nodes += _join(chain, graph)
            chain = []
        if CALL in node.calls and node.primitive in STEPS:
            chain.append(node)
        else:
            nodes.append(node)
    return replace(graph, nodes=[*nodes, *_join(chain, graph)])


def _find_maps(node: Node, graph: Graph) -> list[int]:
    return [index for index in node.inputs if index not in graph.constants]


def _continues(before: Node, node: Node, graph: Graph, users: Mapping[int, Sequence[Node]]) -> bool:
    """Return whether a node is the next step of the resize with the step `before`."""
    out = before.outputs[0]
    return (
        CALL in node.calls
        and node.primitive in STEPS
        and node.op == before.op
        and _find_maps(node, graph) == [out]
        and len(users[out]) == 1
        and out not in graph.outputs
    )


def _join(chain: Sequence[Node], graph: Graph) -> list[Node]:
    """Return the node of a chain of steps, or the steps if they aren't a resize of maps."""
    if not chain or all(node.primitive == "transpose" for node in chain):
        return list(chain)
    maps = _find_maps(chain[0], graph)
    out = chain[-1].outputs[0]
    if len(maps) != 1:
        return list(chain)
    source, result = graph.values[maps[0]].shape, graph.values[out].shape
    if len(source) != len(result) or len(source) < 3 or source[0] != result[0]:
        return list(chain)
    axis = len(source) - 1 if source[-1] == result[-1] else 1
    smaller = min(source, result, key=math.prod)
    if source[axis] != result[axis] or math.prod(smaller) == smaller[0] * smaller[axis]:
        return list(chain)
    resized = source if chain[0].mark == "backward" else result
    blocks = math.ceil(resized[axis] / CHANNEL_BLOCK)
    is_linear = any(node.primitive == LINEAR for node in chain)
    params = {"rows": math.prod(resized) // resized[axis] * blocks, "is_linear": is_linear}
    last = chain[-1]
    return [replace(last, primitive=RESIZE, params=params, inputs=(maps[0],), outputs=(out,))]


CELLS = {(2, 1): "DynamicGRUV2", (3, 2): "DynamicRNN"}
"""The vendor's op by what a cell computes for each number of its state: (sigmoids, tanhs)."""
CELL_KINDS = frozenset(("view", "loop_view", "elementwise", "matmul", "move", "reduce"))
"""Kinds of nodes in a cell and in its gradient."""
MOVES = ("copy", "trans_data", "transpose", "fill", "cast")
"""Classes of tasks that rearrange or clear values. Within a kernel they are addresses."""


@dataclass(frozen=True)
class RecurrentCell:
    """A scan that is one op. Fields are values of the graph, by index, and a number of steps.

    `recurrent` are results of the products on the way from a state to the next state.
    `accumulators` are sums over the steps, such as the gradients of weights.
    """

    type: str
    steps: int
    recurrent: frozenset[int]
    accumulators: frozenset[int]


def find_cells(graph: Graph, dataflow: Dataflow, *, by_op: bool) -> dict[int, RecurrentCell]:
    """Return the scans that are GRUs or LSTMs, and the scans of their gradients, by loop.

    With `by_op`, as in frameworks without graphs, a cell must be one call: a cell whose ops custom
    code calls one by one isn't the framework's op.
    """
    loops: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.loop:
            loops[node.loop].append(node)
    cells: dict[int, RecurrentCell] = {}
    types: dict[int, str] = {}
    for loop, nodes in loops.items():
        calls = {node.call for node in nodes if classify_primitive(node.primitive) != "loop_view"}
        is_cell = CELL_KINDS.issuperset(classify_primitive(node.primitive) for node in nodes)
        if not is_cell or (by_op and len(calls) > 1):
            continue
        if all(node.mark == "backward" for node in nodes):
            type_ = _find_forward_type(nodes, types, dataflow)
        else:
            type_ = _classify_cell(graph, nodes)
        cell = _analyse_loop(graph, nodes, type_) if type_ else None
        if cell is None:
            continue
        cells[loop] = cell
        stacked = (node.outputs[0] for node in nodes if node.primitive == "scan_stack")
        types.update(dict.fromkeys(stacked, cell.type))
    return cells


def _classify_cell(graph: Graph, nodes: Sequence[Node]) -> str | None:
    """Return the vendor's op of a forward scan; None if no op has its cell."""
    states = _list_carried(graph, nodes)
    size = max((graph.values[before].size for before, _ in states), default=0)
    if not size:
        return None
    gates = tuple(
        sum(graph.values[node.outputs[0]].size for node in nodes if node.primitive == name) / size
        for name in ("logistic", "tanh")
    )
    return CELLS.get(gates)  # type: ignore[arg-type]


def _find_forward_type(
    nodes: Sequence[Node], types: Mapping[int, str], dataflow: Dataflow
) -> str | None:
    """Return the op of the forward scan whose stacked values a gradient's scan reads."""
    slices = (node.inputs[0] for node in nodes if node.primitive == "scan_slice")
    arrays = map(dataflow.alias.__getitem__, slices)
    return next((types[array] for array in arrays if array in types), None)


def _list_carried(graph: Graph, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Return the arrays that a scan carries, each before and after a step, without counters."""
    starts = {node.outputs[0] for node in nodes if node.primitive == "scan_carry"}
    return [pair for pair in graph.carried if pair[0] in starts and graph.values[pair[0]].size > 1]


def _analyse_loop(graph: Graph, nodes: Sequence[Node], type_: str) -> RecurrentCell | None:
    """Return the cell of a scan; None if no product depends on the state."""
    users = list_users(nodes)
    carried = _list_carried(graph, nodes)
    sums = {
        after
        for before, after in carried
        if len(users[before]) == 1
        and users[before][0].primitive in ("add", "add_any")
        and after in users[before][0].outputs
    }
    # Values that depend on the state before a step, and values that decide the state after it.
    dependent = {before for before, after in carried if after not in sums}
    deciding = {after for _, after in carried if after not in sums}
    for node in nodes:
        if not dependent.isdisjoint(node.inputs):
            dependent.update(node.outputs)
    for node in reversed(nodes):
        if not deciding.isdisjoint(node.outputs):
            deciding.update(node.inputs)
    products = (node.outputs[0] for node in nodes if node.primitive == "dot_general")
    recurrent = frozenset(products) & dependent & deciding
    if not recurrent:
        return None
    produced = {out for node in nodes for out in node.outputs}
    sources = {index for node in nodes for index in node.inputs} - produced
    # The scan itself runs as often as the nodes that compute its inputs.
    num_scans = max(
        (
            node.repeat
            for node in graph.nodes
            if not sources.isdisjoint(node.outputs)
            and classify_primitive(node.primitive) != "loop_view"
        ),
        default=1,
    )
    return RecurrentCell(type_, nodes[0].repeat // num_scans, recurrent, frozenset(sums))


def fuse_cells(
    tasks: list[Task], cells: Mapping[int, RecurrentCell], buffers: Buffers
) -> list[Task]:
    """Return the tasks with one op for each cell.

    Each product that doesn't depend on the state is one product over all steps.
    """
    for loop, cell in cells.items():
        tasks = _CellFusion(tasks, loop, cell, buffers).fuse()
    return tasks


class _CellFusion:
    """The fusion of one scan's tasks. Buffers are indices; `members` are the tasks of the scan."""

    def __init__(self, tasks: list[Task], loop: int, cell: RecurrentCell, buffers: Buffers) -> None:
        self.tasks = tasks
        self.loop = loop
        self.cell = cell
        self.buffers = buffers
        self.members = [task for task in tasks if task.loop == loop]
        self.written = {index for task in self.members for index in task.writes}
        index = buffers.index
        alias = buffers.alias
        self.recurrent = {index.get(alias[value]) for value in cell.recurrent}
        self.sums = {index.get(alias[value]) for value in cell.accumulators}

    def fuse(self) -> list[Task]:
        """Return all tasks. They are unchanged if none of the scan's products reads the state,
        or if others between them read the scan's results."""
        places = [place for place, task in enumerate(self.tasks) if task.loop == self.loop]
        if not places:
            return self.tasks
        first = places[0]
        stop = places[-1] + 1
        between = [task for task in self.tasks[first:stop] if task.loop != self.loop]
        if any(not self.written.isdisjoint(task.reads) for task in between):
            return self.tasks
        products = [task for task in self.members if task.cube is not None]
        independent = [task for task in products if self.recurrent.isdisjoint(task.writes)]
        if len(independent) == len(products):
            return self.tasks
        before_cell = [task for task in independent if not self._depends_on_scan(task)]
        after_cell = [task for task in independent if task not in before_cell]
        fused = [
            *chain.from_iterable(map(self._join_steps, before_cell)),
            self._make_cell(independent),
            *chain.from_iterable(map(self._join_steps, after_cell)),
        ]
        return [*self.tasks[:first], *between, *fused, *self.tasks[stop:]]

    def _depends_on_scan(self, product: Task) -> bool:
        """Return whether a product reads what the scan computes, other than copies of inputs."""
        reads = set(product.reads)
        makers = [task for task in self.members if not reads.isdisjoint(task.writes)]
        return any(
            maker.cost_class not in MOVES or self._depends_on_scan(maker) for maker in makers
        )

    def _join_steps(self, product: Task) -> list[Task]:
        """Return a product of all steps, after the MemSet of its result if it has one."""
        steps = self.cell.steps
        assert product.cube is not None
        adder = self._find_adder(product)
        work = replace(product.cube, macs=steps * product.cube.macs)
        if adder is None:
            work = replace(work, m=steps * work.m)
            writes: tuple[int, ...] = (self._stack(product.writes[0]),)
        else:
            work = replace(work, k=steps * work.k)
            writes = adder.writes[:1]
        repeat = product.repeat // steps
        reads = tuple(dict.fromkeys(map(self._stack, product.reads)))
        joined = replace(
            product, reads=reads, writes=writes, cube=work, repeat=repeat, launched=False, loop=0
        )
        clears = [
            replace(task, writes=writes, repeat=repeat, loop=0)
            for task in self.members
            if task.type == "MemSet" and task.writes == product.writes
        ]
        return [*clears, joined]

    def _find_adder(self, product: Task) -> Task | None:
        """Return the task that adds a product's result to a sum over the steps."""
        readers = (task for task in self.members if product.writes[0] in task.reads)
        return next((task for task in readers if not self.sums.isdisjoint(task.writes)), None)

    def _stack(self, index: int) -> int:
        """Return the buffer with the values of all steps; `index` if the steps share a value."""
        buffer = self.buffers.all[index]
        if buffer.within is not None:
            return buffer.within
        if index not in self.written:
            return index
        steps = self.cell.steps
        shape = (steps, *buffer.shape)
        nbytes = steps * buffer.nbytes
        place = append_copy(self.buffers.all, index, shape=shape, nbytes=nbytes)
        self.buffers.change(index, within=place)
        return place

    def _make_cell(self, independent: Sequence[Task]) -> Task:
        """Return the op of all steps. It writes what other tasks read and what the scan stacks."""
        others = [*independent, *filter(None, map(self._find_adder, independent))]
        fused = [task for task in self.members if task not in others]
        parts = tuple(task for task in fused if task.cost_class not in MOVES)
        results = dict.fromkeys(index for task in fused for index in task.writes)
        for index in (index for task in others for index in task.writes):
            results.pop(index, None)
        reads = dict.fromkeys(index for task in parts for index in task.reads)
        others += [task for task in self.tasks if task.loop != self.loop]
        read_by_others = {index for task in others for index in task.reads}
        writes = [
            index
            for index in results
            if index in read_by_others or self.buffers.all[index].within is not None
        ]
        product = next(task for task in parts if task.cube is not None)
        products = [task.cube for task in parts if task.cube is not None]
        depth = max(work.k for work in products)
        steps = self.cell.steps
        # The products of a step as one product with the largest k and the weights of all.
        work = CubeWork(
            products[0].batch,
            products[0].m,
            depth,
            -(-sum(work.k * work.n for work in products) // depth),
            steps * sum(work.macs for work in products),
        )
        return replace(
            product,
            type=f"{self.cell.type}{'Grad' if product.phase == 'backward' else ''}",
            cost_class="recurrent",
            reads=tuple(index for index in reads if index not in results),
            writes=tuple(writes) or product.writes,
            cube=work,
            repeat=product.repeat // steps,
            fused=tuple(dict.fromkeys(name for task in parts for name in task.fused)),
            loop=0,
            parts=parts,
            steps=steps,
        )
