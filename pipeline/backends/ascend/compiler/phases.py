"""Find weights, gradients and updates, and the type of each value on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import Phase
from pipeline.backends.ascend.compiler.primitives import classify_primitive
from pipeline.backends.graph.graph import VIEWS_OF_SCAN, Graph, Node

CARRIERS = frozenset({"view", "elementwise", "move", "loop_view", "reduce", "collective"})
"""Kinds of nodes that a gradient passes through on its way to the optimizer."""

REFORMS = ("convert_element_type", "transpose", "rev")
"""Primitives that make another form of a weight."""


@dataclass(frozen=True)
class Signature:
    """Roles of a step's inputs, by the index of their values.

    `updates` maps outputs to the inputs that they replace.
    """

    parameters: Mapping[int, str]
    state: Mapping[int, str]
    inputs: Mapping[int, str]
    updates: Mapping[int, int]


@dataclass(frozen=True)
class Phases:
    """Phases of a step's nodes and roles of its values, by their indices in the graph.

    `weights` are the parameters and other forms of them; `gradients` are values that lead only to
    updates; `shared_gradients` lead to updates and are read by the backward pass, too, as the
    gradient of batch norm's scale is.
    """

    of_node: tuple[Phase, ...]
    weights: frozenset[int]
    gradients: frozenset[int]
    shared_gradients: frozenset[int]


def find_phases(graph: Graph, parameters: Collection[int]) -> Phases:
    """Find phases from JAX's marks, and from dependencies if JAX leaves none."""
    of_node = _assign_phases(graph)
    gradients = _find_gradients(graph, of_node)
    made = _collect_outputs(graph, of_node, "backward")
    read = {
        index
        for node, phase in zip(graph.nodes, of_node, strict=True)
        if phase == "optimizer"
        for index in node.inputs
    }
    shared = frozenset(made & read) - gradients
    weights = set(parameters)
    for node, phase in zip(graph.nodes, of_node, strict=True):
        same = (
            classify_primitive(node.primitive) in ("view", "loop_view") or node.primitive in REFORMS
        )
        if phase != "optimizer" and same and node.inputs[0] in weights:
            weights.update(node.outputs)
    return Phases(of_node, frozenset(weights), gradients, shared)


def _collect_outputs(graph: Graph, of_node: Sequence[Phase], phase: Phase) -> set[int]:
    pairs = zip(graph.nodes, of_node, strict=True)
    return {index for node, of in pairs if of == phase for index in node.outputs}


def _assign_phases(graph: Graph) -> tuple[Phase, ...]:
    """Return the phase of each node.

    Without a mark from JAX, nodes that the loss depends on, or that depend on the forward pass
    alone, are forward; the rest is the optimizer's, but for sums of gradients over a loop's
    iterations.
    """
    if all(node.mark != "backward" for node in graph.nodes):
        return tuple("forward" for _ in graph.nodes)
    read_by_marked: set[int] = set()
    for node in reversed(graph.nodes):
        if node.mark != "unmarked" or not read_by_marked.isdisjoint(node.outputs):
            read_by_marked.update(node.inputs)
    summing = _find_accumulating_loops(graph)
    of_value: dict[int, Phase] = {}
    phases: list[Phase] = []
    for node in graph.nodes:
        phase = _choose_phase(node, {of_value.get(index) for index in node.inputs}, read_by_marked)
        if phase == "optimizer" and node.loop in summing:
            phase = "backward"
        phases.append(phase)
        of_value.update(dict.fromkeys(node.outputs, phase))
    return tuple(phases)


def _choose_phase(node: Node, before: set[Phase | None], read_by_marked: set[int]) -> Phase:
    """Return the phase of a node, from the phases of its inputs' producers."""
    if node.mark != "unmarked":
        return node.mark
    if before == {"backward"} and node.primitive in VIEWS_OF_SCAN:
        return "backward"
    if before & {"backward", "optimizer"}:
        return "optimizer"
    early = "forward" in before or any(index in read_by_marked for index in node.outputs)
    return "forward" if early else "optimizer"


def _find_accumulating_loops(graph: Graph) -> frozenset[int]:
    """Return loops with a backward pass whose iterations don't train what the next one reads."""
    late: set[int] = set()
    for node in graph.nodes:
        if node.mark == "backward" or not late.isdisjoint(node.inputs):
            late.update(node.outputs)
    trained = {before for before, after in graph.carried if after in late}
    backward = {node.loop for node in graph.nodes if node.mark == "backward" and node.loop}
    training = {
        node.loop
        for node in graph.nodes
        if node.mark == "forward" and not trained.isdisjoint(node.inputs)
    }
    return frozenset(backward - training)


def _find_gradients(graph: Graph, of_node: Sequence[Phase]) -> frozenset[int]:
    """Return values of the backward pass that only the optimizer, or an output, uses in the end."""
    elsewhere: set[int] = set()
    for node, phase in zip(reversed(graph.nodes), reversed(of_node), strict=True):
        if phase != "optimizer":
            carries = phase == "backward" and classify_primitive(node.primitive) in CARRIERS
            if not carries or not elsewhere.isdisjoint(node.outputs):
                elsewhere.update(node.inputs)
    return frozenset(_collect_outputs(graph, of_node, "backward") - elsewhere)


def choose_dtypes(
    graph: Graph, phases: Phases, inputs: Collection[int], precision: Precision | None
) -> tuple[str, ...]:
    """Return the type of every value on the device.

    None keeps the traced types. O2 and O3 make float32 feature maps float16, as MindSpore's
    amp_level does; weights, their gradients and updates, vectors and the loss stay float32. O0
    leaves everything float32; the casts of convolutions are inserted by the lowering.
    """
    traced = [value.dtype for value in graph.values]
    if precision in (None, "O0"):
        return tuple(traced)
    wide = {*phases.weights, *phases.gradients, *inputs, *_find_loss_values(graph, phases)}
    wide |= _collect_outputs(graph, phases.of_node, "optimizer")
    return tuple(
        "float16"
        if dtype == "float32" and len(graph.values[index].shape) > 1 and index not in wide
        else dtype
        for index, dtype in enumerate(traced)
    )


def _find_loss_values(graph: Graph, phases: Phases) -> set[int]:
    """Return the values after the last forward product and before the first backward one."""
    products = ("conv", "matmul")
    before: set[int] = set()
    loss: set[int] = set()
    for node, phase in zip(reversed(graph.nodes), reversed(phases.of_node), strict=True):
        if phase == "forward":
            is_product = classify_primitive(node.primitive) in products
            if is_product or any(index in before for index in node.outputs):
                before.update(node.inputs)
            if not is_product and not any(index in before for index in node.outputs):
                loss.update(node.outputs)
    after: set[int] = set()
    for node, phase in zip(graph.nodes, phases.of_node, strict=True):
        if phase == "backward":
            is_product = classify_primitive(node.primitive) in products
            if is_product or any(index in after for index in node.inputs):
                after.update(node.outputs)
            elif all(index in loss or index in graph.constants for index in node.inputs):
                loss.update(node.outputs)
    return loss
