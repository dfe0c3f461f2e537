"""A traced function as one flat list of primitives over values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.core.errors import RunError

VIEWS_OF_SCAN = ("scan_slice", "scan_stack", "scan_carry")
"""Primitives of nodes that aren't equations: operands and results of a scan's iterations."""
Marked = Literal["forward", "backward", "unmarked"]


class UnboundedLoopError(RunError):
    """A while loop without a constant number of iterations."""


@dataclass(frozen=True, slots=True)
class Value:
    """An array of the traced function."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Node:
    """An application of a primitive."""

    primitive: str
    params: Mapping[str, Any]
    inputs: tuple[int, ...]
    """Indices of values in the graph."""
    outputs: tuple[int, ...]
    """Indices of values in the graph."""
    scope: str
    mark: Marked
    """Pass of differentiation, by jvp or transpose in JAX's name stack."""
    calls: tuple[str, ...]
    """Names of the jitted functions around the node, the outermost first."""
    loop: int
    """Number of the innermost loop around the node; 0 for none."""
    repeat: int
    """How often the node runs."""
    call: Hashable = None
    """Identity of the call in the user's code that makes the node; None without one."""

    @property
    def op(self) -> Hashable:
        """Key of the op of a framework without graphs: a layer, its function or the user's call."""
        return self.scope, self.calls, self.call


@dataclass
class Graph:
    """Values and the nodes that compute them, in an order that can be executed."""

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    constants: set[int] = field(default_factory=set)
    equations: int = 0
    """Number of equations of the traced function, including dead and constant equations."""
    folded: int = 0
    """Number of equations that are dead or constant."""
    carried: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of values that a loop carries: at the start and at the end of an iteration."""


def list_users(nodes: Iterable[Node]) -> dict[int, list[Node]]:
    """Return the nodes that read each value, in the order of `nodes`."""
    users: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        for index in node.inputs:
            users[index].append(node)
    return users


def prune(graph: Graph) -> Graph:
    """Remove nodes whose results are constant or that no output needs; return the same graph."""
    _find_constants(graph)
    live = find_live(graph, graph.outputs)
    nodes = [
        node
        for node in graph.nodes
        if any(out in live and out not in graph.constants for out in node.outputs)
    ]
    graph.folded = graph.equations - sum(node.primitive not in VIEWS_OF_SCAN for node in nodes)
    graph.nodes = nodes
    graph.carried = [pair for pair in graph.carried if pair[0] in live]
    return graph


def _find_constants(graph: Graph) -> None:
    """Add to `graph.constants` the values computed from constants alone, and counters of loops."""
    next_values = dict(graph.carried)
    initial = set(graph.constants)
    varying: set[int] = set()
    while True:
        # Assume that the scalars that loops carry are constant, except those in `varying`.
        constants = set(initial)
        for node in graph.nodes:
            if not constants.issuperset(node.inputs) or "random" in node.primitive:
                continue
            for out in node.outputs:
                may_vary = out in varying or graph.values[out].size > 1
                if out not in next_values or not may_vary:
                    constants.add(out)
        wrong = {
            before
            for before, after in next_values.items()
            if before in constants and after not in constants
        }
        if not wrong:
            graph.constants = constants
            return
        varying |= wrong


def find_live(graph: Graph, outputs: Iterable[int]) -> set[int]:
    """Return `outputs` and the values that they depend on, also through values that loops carry."""
    producer = {out: node for node in graph.nodes for out in node.outputs}
    next_values = dict(graph.carried)
    live: set[int] = set()
    stack = list(outputs)
    while stack:
        index = stack.pop()
        if index in live:
            continue
        live.add(index)
        if index in next_values:
            stack.append(next_values[index])
        if index in producer and index not in graph.constants:
            stack += producer[index].inputs
    return live
