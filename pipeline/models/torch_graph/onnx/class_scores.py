"""Outputs of classifiers: the logits before the probabilities that a file computes from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pipeline.models.torch_graph.onnx.onnx_file import OnnxModel, OnnxNode

MAP = "ai.onnx.ml.ZipMap"
COPIES = ("Identity", "Cast", MAP)
"""Operators that pass scores on. Each reads one tensor."""
SUFFIX = "@logits"
"""End of the names of tensors that replace probabilities."""


def find_scores(producers: Mapping[str, OnnxNode], name: str) -> str:
    """Return the logits from which a softmax computes a tensor, or the tensor if none does.

    The tensor of a map from classes to probabilities is the one that the map is made of.
    """
    node = _find_source(producers, name)
    if node is not None and node.op == "Softmax":
        return "".join(node.inputs)
    is_map = name in producers and producers[name].op == MAP
    return "".join(producers[name].inputs) if is_map else name


def replace_class_pair(model: OnnxModel) -> OnnxModel:
    """Return a model with logits [0, z] in place of outputs [1 - p, p], p the sigmoid of z.

    scikit-learn writes these probabilities of two classes. Their softmax is the pair itself.
    """
    producers = {name: node for node in model.nodes for name in node.outputs}
    nodes = list(model.nodes)
    for output in model.outputs:
        pair = _find_source(producers, output.name)
        logits = None if pair is None else _find_pair(model, producers, pair)
        if pair is None or logits is None or pair not in nodes:
            continue
        (score,) = {name for name in logits if name}
        zero = f"{score}{SUFFIX}"
        inputs = tuple(name or zero for name in logits)
        place = nodes.index(pair)
        nodes[place : place + 1] = [
            OnnxNode("", "Sub", (score, score), (zero,), {}),
            replace(pair, inputs=inputs),
        ]
    return replace(model, nodes=tuple(nodes))


def _find_source(producers: Mapping[str, OnnxNode], name: str) -> OnnxNode | None:
    """Return the node that computes a tensor, before nodes that only pass it on."""
    node = producers.get(name)
    while node is not None and node.op in COPIES:
        node = producers.get("".join(node.inputs))
    return node


def _find_pair(
    model: OnnxModel, producers: Mapping[str, OnnxNode], pair: OnnxNode
) -> tuple[str, str] | None:
    """Return (z, "") for probabilities [p, 1 - p], ("", z) for [1 - p, p]; None for others."""
    if pair.op != "Concat" or len(pair.inputs) != 2:
        return None
    for number in (0, 1):
        probability = pair.inputs[1 - number]
        complement = producers.get(pair.inputs[number])
        sigmoid = producers.get(probability)
        if complement is None or sigmoid is None or sigmoid.op != "Sigmoid":
            continue
        one = model.initializers.get(complement.inputs[0])
        is_one = one is not None and bool(np.all(one == 1))
        if complement.op == "Sub" and complement.inputs[1] == probability and is_one:
            score = "".join(sigmoid.inputs)
            return ("", score) if number == 0 else (score, "")
    return None
