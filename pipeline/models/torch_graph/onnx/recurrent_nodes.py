"""ONNX's recurrent layers (LSTM, GRU and RNN), translated to PyTorch's operators."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.onnx.graph_builder import OnnxValue
from pipeline.models.torch_graph.onnx.node_reader import OnnxNodeReader, Results, onnx_operator

_GATES: Mapping[str, tuple[int, ...]] = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Indices of PyTorch's gates in ONNX's order: input, output, forget, cell; or update, reset, new.
"""
_ACTIVATIONS: Mapping[tuple[str, ...], str] = {
    ("LSTM", "sigmoid", "tanh", "tanh"): "lstm.input",
    ("GRU", "sigmoid", "tanh"): "gru.input",
    ("RNN", "tanh"): "rnn_tanh.input",
    ("RNN", "relu"): "rnn_relu.input",
}
"""Operators by the layer and the activations of a direction."""
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
# Indices of optional inputs.
_SEQUENCE_LENGTHS = 4
_STATES = 5
_PEEPHOLES = 7


@onnx_operator(*_GATES)
def read_recurrent(reader: OnnxNodeReader) -> Results:
    """Read a recurrent layer: outputs (time, directions, batch, features) and last states.

    With `layout` 1 the batch is the first axis of each. The direction `reverse` becomes a forward
    layer between two reversals of the time.
    """
    graph = reader.graph
    direction = reader.attribute("direction", "forward")
    if direction not in _DIRECTIONS:
        raise ValueError(f"direction {direction!r}; must be one of {', '.join(_DIRECTIONS)}")
    directions = _DIRECTIONS[direction]
    op = _choose_operator(reader, directions)
    batch_first = bool(reader.attribute("layout", 0))
    x = reader.value(0)
    if x.ndim != 3 or graph.fixed_shape(reader.value(2))[0] != directions:
        raise ValueError(f"{x.ndim} axes, or weights that aren't of {directions} directions")
    x = graph.call("transpose.int", x, 0, 1) if batch_first else x
    x = graph.call("flip.default", x, (0,)) if direction == "reverse" else x
    # An LSTM has a hidden state and a cell, others have a hidden state.
    places = (_STATES, _STATES + 1) if reader.node.op == "LSTM" else (_STATES,)
    states = tuple(_read_state(reader, place, x, batch_first) for place in places)
    weights = tuple(
        weight for number in range(directions) for weight in _read_weights(reader, number)
    )
    has_biases = reader.optional(3) is not None
    initial = states if reader.node.op == "LSTM" else states[0]
    y, *last = graph.call_all(
        op, x, initial, weights, has_biases, 1, 0.0, False, directions == 2, False
    )
    y = graph.call("flip.default", y, (0,)) if direction == "reverse" else y
    time, batch = graph.shape(y)[:2]
    y = graph.call("view.default", y, (time, batch, directions, -1))
    if not batch_first:
        return (graph.call("permute.default", y, (0, 2, 1, 3)), *last)
    last = [graph.call("transpose.int", state, 0, 1) for state in last]
    return (graph.call("transpose.int", y, 0, 1), *last)


def _choose_operator(reader: OnnxNodeReader, directions: int) -> str:
    """Return PyTorch's operator for a layer. Raises ValueError if it has none."""
    layer = reader.node.op
    names = reader.attribute("activations", _DEFAULTS[layer] * directions)
    activations = tuple(str(name).lower() for name in names)
    first_activations = activations[: len(_DEFAULTS[layer])]
    op = _ACTIVATIONS.get((layer, *first_activations))
    if op is None or activations != first_activations * directions:
        raise ValueError(f"activations {names}; must be {_DEFAULTS[layer]} in each direction")
    if "clip" in reader.node.attributes or reader.attribute("input_forget", 0):
        raise ValueError("its gates are clipped, or its input and forget gates are coupled")
    if reader.optional(_PEEPHOLES) is not None:
        raise ValueError("it has peepholes")
    lengths = reader.optional(_SEQUENCE_LENGTHS)
    time = reader.shape()[1 if reader.attribute("layout", 0) else 0]
    if lengths is not None and not (
        lengths.is_constant and all((array == time).all() for array in lengths.arrays)
    ):
        raise ValueError(f"its sequences have various lengths; all must have {time} steps")
    if layer == "GRU" and not reader.attribute("linear_before_reset", 0):
        return "gru_reset_first.input"
    return op


def _read_state(reader: OnnxNodeReader, place: int, x: OnnxValue, batch_first: bool) -> OnnxValue:
    """Return the initial state (directions, batch, features); zeros if the input is missing."""
    graph = reader.graph
    directions, _, features = graph.fixed_shape(reader.value(2))
    batch = graph.shape(x)[1]
    state = reader.optional(place)
    if state is None:
        sizes = (directions, batch, features)
        return graph.call("full.default", sizes, 0.0, dtype=TypeOf("float32"))
    state = graph.call("transpose.int", state, 0, 1) if batch_first else state
    return graph.call("expand.default", state, (directions, batch, features))


def _read_weights(reader: OnnxNodeReader, direction: int) -> list[OnnxValue]:
    """Return a direction's kernels of input and state, and their biases, in PyTorch's order."""
    graph = reader.graph
    gates = _GATES[reader.node.op]
    features = graph.fixed_shape(reader.value(2))[-1]

    def reorder(rows: OnnxValue) -> OnnxValue:
        pieces = graph.call_all("split.Tensor", rows, features, 0)
        return graph.call("cat.default", tuple(pieces[gate] for gate in gates), 0)

    kernels = [graph.call("select.int", reader.value(place), 0, direction) for place in (1, 2)]
    bias = reader.optional(3)
    if bias is None:
        return list(map(reorder, kernels))
    row = graph.call("select.int", bias, 0, direction)
    halves = graph.call_all("split.Tensor", row, len(gates) * features, 0)
    return list(map(reorder, (*kernels, *halves)))
