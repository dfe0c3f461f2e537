"""Find each parameter's gradient."""

from __future__ import annotations

from pipeline.backends.ascend.compiler.buffers import Signature
from pipeline.backends.ascend.compiler.dataflow import Dataflow
from pipeline.backends.ascend.compiler.phases import Phases
from pipeline.backends.graph.graph import Graph


def find_gradients(
    graph: Graph, signature: Signature, phases: Phases, dataflow: Dataflow
) -> dict[int, int]:
    """Return parameter -> the value of the backward pass that its update starts from.

    The search from the update goes through values of the parameter's own size, so that a norm over
    all gradients leads to none; only where that has no result, through all.
    """
    source = _Sources(graph, phases, dataflow)
    gradients = {}
    for out, into in signature.updates.items():
        if into not in signature.parameters:
            continue
        gradient = source.of(out, graph.values[into].size)
        if gradient is None:
            gradient = source.of(out, None)
        if gradient is not None:
            gradients[into] = gradient
    return gradients


class _Sources:
    """Finds the values that updates are computed from."""

    def __init__(self, graph: Graph, phases: Phases, dataflow: Dataflow) -> None:
        self.graph, self.phases, self.dataflow = graph, phases, dataflow

    def of(self, out: int, size: int | None) -> int | None:
        """Return the last value of the backward pass from which an update is computed.

        The search goes through values of one size, or of any.
        """
        candidates: set[int] = set()
        stack = [self.dataflow.alias[out]]
        seen = set(stack)
        while stack:
            index = stack.pop()
            position = self.dataflow.producer.get(index)
            if position is None or self.phases.of_node[position] == "forward":
                continue
            if self.phases.of_node[position] == "backward":
                candidates.add(index)
                continue
            for before in (self.dataflow.alias[i] for i in self.graph.nodes[position].inputs):
                fits = size is None or self.graph.values[before].size == size
                if fits and before not in seen:
                    seen.add(before)
                    stack.append(before)
        return max(candidates, default=None)
