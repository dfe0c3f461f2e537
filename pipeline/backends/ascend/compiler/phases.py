"""Find weights, gradients and updates, and the type of each value on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import Phase
from pipeline.backends.ascend.compiler.primitives import classify_primitive
from pipeline.backends.graph.graph import VIEWS_OF_SCAN, Graph, Node

GRADIENT_CARRIERS = frozenset({"view", "elementwise", "move", "loop_view", "reduce", "collective"})
"""Kinds of nodes between the computation of a gradient and the optimizer."""

REFORMS = ("convert_element_type", "transpose", "rev")
"""Primitives that convert or rearrange a weight."""


@dataclass(frozen=True)
class TracedSignature:
    """Names of a step's inputs, by the index of their values and by role.

    `updates` maps outputs to the inputs that they replace.
    """

    parameters: Mapping[int, str]
    state: Mapping[int, str]
    inputs: Mapping[int, str]
    updates: Mapping[int, int]


@dataclass(frozen=True)
class Phases:
    """Phases of a step's nodes and roles of its values, by their indices in the graph.

    `weights` are the parameters and values converted from them. `gradients` are values of the
    backward pass that only updates read. `shared_gradients` are read by updates and by the backward
    pass, such as the gradient of batch norm's scale.
    """

    of_node: tuple[Phase, ...]
    weights: frozenset[int]
    gradients: frozenset[int]
    shared_gradients: frozenset[int]


def find_phases(graph: Graph, parameters: Collection[int]) -> Phases:
    """Find phases from JAX's marks, and from dependencies for nodes without a mark."""
    of_node = _assign_phases(graph)
    gradients = _find_gradients(graph, of_node)
    computed = _collect_outputs(graph, of_node, "backward")
    read_by_optimizer = {
        index
        for node, phase in zip(graph.nodes, of_node, strict=True)
        if phase == "optimizer"
        for index in node.inputs
    }
    shared = frozenset(computed & read_by_optimizer) - gradients
    weights = set(parameters)
    for node, phase in zip(graph.nodes, of_node, strict=True):
        is_view = classify_primitive(node.primitive) in ("view", "loop_view")
        keeps_weight = is_view or node.primitive in REFORMS
        if phase != "optimizer" and keeps_weight and node.inputs[0] in weights:
            weights.update(node.outputs)
    return Phases(of_node, frozenset(weights), gradients, shared)


def _collect_outputs(graph: Graph, of_node: Sequence[Phase], phase: Phase) -> set[int]:
    pairs = zip(graph.nodes, of_node, strict=True)
    return {index for node, node_phase in pairs if node_phase == phase for index in node.outputs}


def _assign_phases(graph: Graph) -> tuple[Phase, ...]:
    """Return the phase of each node.

    Nodes without a mark from JAX are forward if the loss depends on them, or if they depend only on
    the forward pass. Other nodes without a mark are the optimizer's, except sums of gradients over
    the iterations of a loop.
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
    is_forward = "forward" in before or any(index in read_by_marked for index in node.outputs)
    return "forward" if is_forward else "optimizer"


def _find_accumulating_loops(graph: Graph) -> frozenset[int]:
    """Return loops with a backward pass whose results no forward pass of the loop reads."""
    after_backward: set[int] = set()
    for node in graph.nodes:
        if node.mark == "backward" or not after_backward.isdisjoint(node.inputs):
            after_backward.update(node.outputs)
    updated = {before for before, after in graph.carried if after in after_backward}
    backward_loops = {node.loop for node in graph.nodes if node.mark == "backward" and node.loop}
    training_loops = {
        node.loop
        for node in graph.nodes
        if node.mark == "forward" and not updated.isdisjoint(node.inputs)
    }
    return frozenset(backward_loops - training_loops)


def _find_gradients(graph: Graph, of_node: Sequence[Phase]) -> frozenset[int]:
    """Return values of the backward pass that lead only to the optimizer or an output."""
    elsewhere: set[int] = set()
    for node, phase in zip(reversed(graph.nodes), reversed(of_node), strict=True):
        if phase != "optimizer":
            kind = classify_primitive(node.primitive)
            carries = phase == "backward" and kind in GRADIENT_CARRIERS
            if not carries or not elsewhere.isdisjoint(node.outputs):
                elsewhere.update(node.inputs)
    return frozenset(_collect_outputs(graph, of_node, "backward") - elsewhere)


def choose_dtypes(
    graph: Graph, phases: Phases, inputs: Collection[int], precision: Precision | None
) -> tuple[str, ...]:
    """Return the type of every value on the device.

    A `precision` of None keeps the traced types. O2 and O3 make float32 feature maps float16, like
    MindSpore's amp_level, or bfloat16 in a step that has bfloat16. Weights, their gradients and
    updates, vectors and the loss stay float32. O0 also keeps the traced types, and the lowering
    inserts casts for convolutions.
    """
    traced = [value.dtype for value in graph.values]
    if precision in (None, "O0"):
        return tuple(traced)
    float32_values = {*phases.weights, *phases.gradients, *inputs}
    float32_values |= _find_loss_values(graph, phases)
    float32_values |= _collect_outputs(graph, phases.of_node, "optimizer")
    half = find_half_type(traced)
    return tuple(
        half
        if dtype == "float32" and len(graph.values[index].shape) > 1 and index not in float32_values
        else dtype
        for index, dtype in enumerate(traced)
    )


def find_half_type(dtypes: Collection[str]) -> str:
    """Return the short type of a step: bfloat16 if it has bfloat16, else float16."""
    return "bfloat16" if "bfloat16" in dtypes else "float16"


def _find_loss_values(graph: Graph, phases: Phases) -> set[int]:
    """Return the values after the last forward product and before the first backward product."""
    products = ("conv", "matmul")
    before: set[int] = set()  # a forward product depends on these
    loss: set[int] = set()
    for node, phase in zip(reversed(graph.nodes), reversed(phases.of_node), strict=True):
        if phase == "forward":
            is_product = classify_primitive(node.primitive) in products
            if is_product or not before.isdisjoint(node.outputs):
                before.update(node.inputs)
            else:
                loss.update(node.outputs)
    after: set[int] = set()  # these depend on a backward product
    for node, phase in zip(graph.nodes, phases.of_node, strict=True):
        if phase == "backward":
            is_product = classify_primitive(node.primitive) in products
            if is_product or not after.isdisjoint(node.inputs):
                after.update(node.outputs)
            elif all(index in loss or index in graph.constants for index in node.inputs):
                loss.update(node.outputs)
    return loss
