"""All operators: importing this module fills the table."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.models.torch_graph.graph import GraphNode, TorchGraph, find_backward_passes
from pipeline.models.torch_graph.operator_table import OPERATORS, AtenOperator
from pipeline.models.torch_graph.operators import backward_ops as backward_ops
from pipeline.models.torch_graph.operators import convolution_ops as convolution_ops
from pipeline.models.torch_graph.operators import elementwise_ops as elementwise_ops
from pipeline.models.torch_graph.operators import index_ops as index_ops
from pipeline.models.torch_graph.operators import linear_algebra_ops as linear_algebra_ops
from pipeline.models.torch_graph.operators import norm_ops as norm_ops
from pipeline.models.torch_graph.operators import pooling_ops as pooling_ops
from pipeline.models.torch_graph.operators import reduction_ops as reduction_ops
from pipeline.models.torch_graph.operators import resize_ops as resize_ops
from pipeline.models.torch_graph.operators import sequence_ops as sequence_ops
from pipeline.models.torch_graph.operators import shape_ops as shape_ops

MAX_NAMED = 8
"""Most operators that a message names."""


def find_operator(node: GraphNode) -> AtenOperator:
    """Return the operator of a node. Raises ValueError, with the node's line, if it is unknown."""
    require_known((node,))
    return OPERATORS[node.op]


def require_known(nodes: Iterable[GraphNode]) -> None:
    """Raise ValueError, with all names and their first lines, if operators are unknown."""
    unknown: dict[str, GraphNode] = {}
    for node in nodes:
        if node.op not in OPERATORS:
            unknown.setdefault(node.op, node)
    if not unknown:
        return
    first, *others = (f"{op} of {node.describe_place()}" for op, node in unknown.items())
    text = f"operator {first} isn't supported; write that line with other operators, or build the "
    text += "network of layers"
    if others:
        named = ", ".join(others[:MAX_NAMED])
        more = f", and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        noun = "operator isn't" if len(others) == 1 else "operators aren't"
        text += f". {len(others)} other {noun} either: {named}{more}"
    raise ValueError(text)


def require_computable(graph: TorchGraph) -> None:
    """Raise ValueError for the unknown operators, else for the first node that can't be computed.

    Such a node has arguments that don't match the operator's parameters, or draws random numbers
    in evaluation. Also for a custom backward pass that isn't separate, and for weights that are
    NaN or infinite.
    """
    _require_numbers(graph)
    require_known((*graph.training.nodes, *graph.evaluation.nodes))
    for form in (graph.training, graph.evaluation):
        find_backward_passes(form)
        for node in form.nodes:
            try:
                OPERATORS[node.op].bind(None, node.args, dict(node.kwargs))
            except TypeError as error:
                raise ValueError(f"{node.op} of {node.describe_place()}: {error}") from error
    for node in graph.evaluation.nodes:
        if draws(node):
            raise ValueError(
                f"{node.op} of {node.describe_place()} draws random numbers in evaluation; must do "
                "so only in training, by self.training"
            )


def _require_numbers(graph: TorchGraph) -> None:
    for spec in graph.arrays:
        array = graph.values[spec.name]
        if spec.role == "constant" or array.dtype.kind != "f":
            continue
        # A buffer may begin at infinity, such as the least value so far.
        is_usable = np.isfinite(array) if spec.role == "parameter" else ~np.isnan(array)
        if count := array.size - int(is_usable.sum()):
            kind = "NaN" if np.isnan(array).any() else "infinite"
            raise ValueError(
                f"{graph.origin}: {spec.role} {spec.name} has {count:,} {kind} among "
                f"{array.size:,} values; must be {'numbers' if kind == 'NaN' else 'finite'}"
            )


def draws(node: GraphNode) -> bool:
    """Return whether a node draws random numbers: a dropout of rate 0, for example, doesn't."""
    if not find_operator(node).draws:
        return False
    name = node.op.split(".")[1]
    match name:
        case "dropout" | "feature_dropout" | "native_dropout":
            # Arguments 1 and 2 are the dropout rate and whether it is training.
            return node.args[2] is not False and node.args[1] != 0
        case "scaled_dot_product_attention":
            # Argument 4 is the dropout rate.
            return len(node.args) > 4 and node.args[4] != 0
        case "lstm" | "gru" | "gru_reset_first" | "rnn_tanh" | "rnn_relu":
            # Arguments 5 and 6 are the dropout rate and whether it is training.
            return node.args[6] is not False and node.args[5] != 0
        case _:
            return True
