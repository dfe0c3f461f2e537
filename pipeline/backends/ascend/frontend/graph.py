"""A traced function as one flat list of primitives over values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.core.errors import RunError

VIEWS_OF_SCAN = ("scan_slice", "scan_stack", "scan_carry")

Marked = Literal["forward", "backward", "unmarked"]


class UnboundedLoopError(RunError):
    """A while loop whose trip count can't be derived."""


@dataclass(frozen=True, slots=True)
class Value:
    """An array of the traced function."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Node:
    """One application of a primitive; inputs and outputs are indices of values.

    `mark` is the differentiation mark of JAX's name stack (jvp, transpose). `calls` are the jitted
    functions around it. Nodes of one `loop` run `repeat` times.
    """

    primitive: str
    params: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: str
    mark: Marked
    calls: tuple[str, ...]
    loop: int
    repeat: int


@dataclass
class Graph:
    """Values and the nodes that compute them, in an order that can be executed."""

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    constants: set[int] = field(default_factory=set)
    equations: int = 0
    """Numbers of equations of the function as traced, dead and constant ones too."""
    folded: int = 0
    """Equations that were dead, or computed at compile time."""
    carried: list[tuple[int, int]] = field(default_factory=list)
    """Values that a loop carries: at the start of an iteration, and at its end."""


def pruned(graph: Graph) -> Graph:
    """Return the graph without values that no output needs or that are known at compile time."""
    _find_constants(graph)
    needed = _needed(graph)
    kept = [
        node
        for node in graph.nodes
        if any(out in needed and out not in graph.constants for out in node.outputs)
    ]
    graph.folded = graph.equations - sum(node.primitive not in VIEWS_OF_SCAN for node in kept)
    graph.nodes = kept
    graph.carried = [pair for pair in graph.carried if pair[0] in needed]
    return graph


def _find_constants(graph: Graph) -> None:
    """Return everything computed from constants alone; a loop's counters count as known too."""
    made_of = dict(graph.carried)
    varying: set[int] = set()
    given = set(graph.constants)
    while True:
        constants = _constants_unless(graph, given, varying)
        wrong = {
            before
            for before, after in made_of.items()
            if before in constants and after not in constants
        }
        if not wrong:
            graph.constants = constants
            return
        varying |= wrong


def _constants_unless(graph: Graph, given: set[int], varying: set[int]) -> set[int]:
    """Return the constants if all values that loops carry are constant but the `varying` ones."""
    carried = {before for before, _ in graph.carried}
    constants = set(given)
    for node in graph.nodes:
        known = all(index in constants for index in node.inputs) and "random" not in node.primitive
        for out in node.outputs:
            changes = out in carried and (out in varying or graph.values[out].size > 1)
            if known and not changes:
                constants.add(out)
    return constants


def _needed(graph: Graph) -> set[int]:
    """Return the values that the outputs depend on, also through a loop's next iteration."""
    maker = {out: node for node in graph.nodes for out in node.outputs}
    made_of = dict(graph.carried)
    needed: set[int] = set()
    stack = list(graph.outputs)
    while stack:
        index = stack.pop()
        if index in needed:
            continue
        needed.add(index)
        if index in made_of:
            stack.append(made_of[index])
        if index in maker and index not in graph.constants:
            stack += maker[index].inputs
    return needed
