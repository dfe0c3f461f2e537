"""ONNX nodes of LSTM and GRU."""

from __future__ import annotations

import numpy as np

from pipeline.models.layers import tokens
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput
from pipeline.stages.export.onnx.layer_nodes import register_translation

GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}
"""Order of ONNX's gates, input, output, forget, cell and update, reset, new, among the layers'."""


@register_translation(tokens.Lstm, tokens.Gru)
def _add_recurrent(layer: tokens.Recurrent, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    x = graph.to_order(x, "nhwc")
    prefixes = ("", "reverse_") if layer.bidirectional else ("",)
    gates = GATES[layer.name]

    def read_weights(name: str) -> np.ndarray:
        """Return the weights of both directions, (directions, gates * features, inputs)."""
        arrays = [graph.read_weight(prefix + name) for prefix in prefixes]
        parts = [np.split(array, len(gates), -1) for array in arrays]
        return np.stack([np.concatenate([part[g] for g in gates], -1).T for part in parts])

    weights = [read_weights(name) for name in ("kernel", "recurrent_kernel")]
    if layer.bias:
        weights.append(np.hstack([read_weights(name) for name in ("bias", "recurrent_bias")]))
    names = ("kernel", "recurrent_kernel", "bias")
    inputs = [graph.add_weight(name, w) for name, w in zip(names, weights, strict=False)]
    features = weights[1].shape[-1]
    attributes = {"linear_before_reset": 1} if layer.name == "gru" else {}
    steps = graph.add_node("Transpose", [x.name], perm=(1, 0, 2))
    name = graph.add_node(
        layer.name.upper(),
        [steps, *inputs],
        outputs=2,
        hidden_size=features,
        direction="bidirectional" if layer.bidirectional else "forward",
        **attributes,
    )
    width = features * len(prefixes)
    if layer.output == "last":
        last = graph.add_node("Transpose", [f"{name}_2"], perm=(1, 0, 2))
        return graph.reshape(NodeOutput(last, ()), [-1, width], (width,))
    # (tokens, directions, batch, features) -> (batch, tokens, directions, features)
    moved = graph.add_node("Transpose", [name], perm=(2, 0, 1, 3))
    shape = (x.shape[0], width)
    return graph.reshape(NodeOutput(moved, ()), [-1, *shape], shape)
