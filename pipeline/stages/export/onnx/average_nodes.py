"""The average of an ensemble in ONNX, by the formulas of `average_outputs`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeline.data.targets import Task
from pipeline.stages.export.ensemble import require_equal_shapes
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput


def average_nodes(outputs: Sequence[NodeOutput], task: Task, graph: GraphBuilder) -> NodeOutput:
    """Add the nodes of an ensemble's outputs. Raises DataError for outputs of different shapes."""
    require_equal_shapes([output.shape for output in outputs])
    names = [output.name for output in outputs]
    if task == "regression":
        return NodeOutput(graph.add_node("Mean", names), outputs[0].shape)
    if task == "multi_label":
        negated = [graph.add_node("Neg", [name]) for name in names]
        # log sigmoid(x) = -softplus(-x)
        positive = [graph.add_node("Neg", [graph.add_node("Softplus", [name])]) for name in negated]
        negative = [graph.add_node("Neg", [graph.add_node("Softplus", [name])]) for name in names]
        terms = [_add_log_of_sum(logs, graph) for logs in (positive, negative)]
        return NodeOutput(graph.add_node("Sub", terms), outputs[0].shape)
    logs = [graph.add_node("LogSoftmax", [name], axis=-1) for name in names]
    count = graph.add_scalar(math.log(len(logs)))
    return NodeOutput(
        graph.add_node("Sub", [_add_log_of_sum(logs, graph), count]), outputs[0].shape
    )


def _add_log_of_sum(logs: Sequence[str], graph: GraphBuilder) -> str:
    """Add the logarithm of a sum of values whose logarithms are given; return its name."""
    axes = graph.add_constant("axes", np.array([0], np.int64))
    rows = [graph.add_node("Unsqueeze", [name, axes]) for name in logs]
    stacked = graph.add_node("Concat", rows, axis=0)
    return graph.add_node("ReduceLogSumExp", [stacked], axes=[0], keepdims=0)
