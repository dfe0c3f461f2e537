"""ONNX's layers, translated to PyTorch's operators: with weights, recurrent, pooling, dropout.

Recurrent layers are LSTM, GRU and RNN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.models.lowerings.problem import compute_reach
from pipeline.models.torch_graph.graph import ArrayOf, TypeOf
from pipeline.models.torch_graph.onnx.graph_builder import (
    TRAINING,
    OnnxNodeReader,
    OnnxValue,
    Results,
    onnx_operator,
)

Pads = tuple[tuple[int, int], ...]
"""Padding before and after, by spatial axis."""
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


@dataclass(frozen=True)
class OnnxWindow:
    """The window of a convolution or of pooling over the spatial axes, and its pads."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: Pads

    @property
    def reach(self) -> tuple[int, ...]:
        """Pixels from the first to the last of a dilated window, by axis."""
        return compute_reach(self.kernel, self.dilations)

    @property
    def is_symmetric(self) -> bool:
        return all(before == after for before, after in self.pads)

    @property
    def symmetric_pads(self) -> tuple[int, ...]:
        return tuple(before for before, _ in self.pads)


def read_window(reader: OnnxNodeReader, kernel: Sequence[int]) -> OnnxWindow:
    """Read the attributes of a window. Raises ValueError for numbers that don't fit the kernel."""
    num_axes = len(kernel)
    strides = reader.attribute("strides", (1,) * num_axes)
    dilations = reader.attribute("dilations", (1,) * num_axes)
    flat_pads = reader.attribute("pads", (0,) * (2 * num_axes))
    if (len(strides), len(dilations), len(flat_pads)) != (num_axes, num_axes, 2 * num_axes):
        raise ValueError(f"strides, dilations or pads don't fit a window of {tuple(kernel)}")
    if min((*kernel, *strides, *dilations)) < 1 or min(flat_pads) < 0:
        raise ValueError("a kernel, stride or dilation below 1, or negative pads")
    pads = tuple(zip(flat_pads[:num_axes], flat_pads[num_axes:], strict=True))
    return OnnxWindow(tuple(kernel), strides, dilations, pads)


def _read_padded_window(reader: OnnxNodeReader, kernel: Sequence[int]) -> OnnxWindow:
    """Read a window whose pads depend on the size of the images if `auto_pad` is set."""
    window = read_window(reader, kernel)
    mode = reader.attribute("auto_pad", "NOTSET")
    if mode == "NOTSET":
        return window
    pads = [(0, 0)] * len(kernel)
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        axes = zip(reader.fixed_sizes(first_axis=2), window.strides, window.reach, strict=True)
        pads = []
        for size, stride, reach in axes:
            num_windows = math.ceil(size / stride)
            pads.append(_split_pads(max((num_windows - 1) * stride + reach - size, 0), mode))
    elif mode != "VALID":
        raise ValueError(f"unknown auto_pad {mode!r}")
    return replace(window, pads=tuple(pads))


def _split_pads(total: int, mode: str) -> tuple[int, int]:
    """Return the pads before and after; an odd pixel is after for SAME_UPPER, else before."""
    half = total // 2
    return (half, total - half) if mode == "SAME_UPPER" else (total - half, half)


def _add_pads(reader: OnnxNodeReader, x: OnnxValue, pads: Pads, value: float = 0.0) -> OnnxValue:
    """Pad the spatial axes; negative pads crop."""
    flat_pads = tuple(size for pair in reversed(pads) for size in pair)
    return reader.graph.call("constant_pad_nd.default", x, flat_pads, value)


@onnx_operator("Conv")
def read_conv(reader: OnnxNodeReader) -> Results:
    """Read a convolution of sequences or images."""
    x = reader.value(0)
    weight = reader.value(1)
    kernel = reader.graph.fixed_shape(weight)[2:]
    if x.ndim != weight.ndim or len(kernel) not in (1, 2, 3):
        raise ValueError(f"a convolution of {x.ndim} axes with a kernel of {weight.ndim}")
    window = _read_padded_window(reader, kernel)
    if not window.is_symmetric:
        x = _add_pads(reader, x, window.pads)
        window = replace(window, pads=((0, 0),) * len(kernel))
    return reader.graph.call(
        f"conv{len(kernel)}d.default",
        x,
        weight,
        reader.optional(2),
        window.strides,
        window.symmetric_pads,
        window.dilations,
        reader.attribute("group", 1),
    )


@onnx_operator("ConvTranspose")
def read_conv_transpose(reader: OnnxNodeReader) -> Results:
    """Read the transpose of a convolution of images; uneven or negative pads follow it."""
    weight = reader.value(1)
    kernel = reader.graph.fixed_shape(weight)[2:]
    if len(kernel) != 2:
        raise ValueError(f"a transposed convolution of {len(kernel)} axes; must be of images")
    window = read_window(reader, kernel)
    output_padding = reader.attribute("output_padding", (0, 0))
    pads = window.pads
    mode = reader.attribute("auto_pad", "NOTSET")
    target = reader.attribute("output_shape")
    if mode in ("SAME_UPPER", "SAME_LOWER") or target is not None:
        sizes = reader.fixed_sizes(first_axis=2)
        axes = zip(sizes, window.strides, window.reach, output_padding, strict=True)
        unpadded = [(size - 1) * stride + reach + extra for size, stride, reach, extra in axes]
        if target is None:
            target = [size * stride for size, stride in zip(sizes, window.strides, strict=True)]
        # The `output_shape` of some files begins with batch and channels.
        totals = [size - goal for size, goal in zip(unpadded, target[-2:], strict=True)]
        pads = tuple(_split_pads(total, mode) for total in totals)
    is_symmetric_crop = all(before == after >= 0 for before, after in pads)
    y = reader.graph.call(
        "conv_transpose2d.input",
        reader.value(0),
        weight,
        reader.optional(2),
        window.strides,
        tuple(before for before, _ in pads) if is_symmetric_crop else (0, 0),
        output_padding,
        reader.attribute("group", 1),
        window.dilations,
    )
    if is_symmetric_crop:
        return y
    return _add_pads(reader, y, tuple((-before, -after) for before, after in pads))


def _add_dense(
    reader: OnnxNodeReader, x: OnnxValue, weight: OnnxValue, bias: OnnxValue | None
) -> OnnxValue:
    """Multiply x (..., in) with a weight (in, out), and add the bias if it isn't None."""
    name = weight.reference.name if isinstance(weight.reference, ArrayOf) else ""
    # If only this node reads the weight, it is stored transposed. Else a node transposes it.
    if name in reader.transposable:
        kernel = reader.graph.transpose_weight(name)
    else:
        kernel = reader.graph.call("t.default", weight)
    return reader.graph.call("linear.default", x, kernel, bias)


@onnx_operator("Gemm")
def read_gemm(reader: OnnxNodeReader) -> Results:
    """Read alpha * A @ B + beta * C, which is a dense layer if alpha and beta are 1."""
    graph = reader.graph
    x = reader.value(0)
    weight = reader.value(1)
    bias = reader.optional(2)
    if x.ndim != 2 or weight.ndim != 2:
        raise ValueError("Gemm of arrays that aren't matrices")
    x = graph.call("t.default", x) if reader.attribute("transA", 0) else x
    features = graph.shape(weight)[0 if reader.attribute("transB", 0) else 1]
    alpha = reader.attribute("alpha", 1.0)
    if bias is not None and reader.attribute("beta", 1.0) != 1:
        bias = graph.call("mul.Tensor", bias, graph.constant(reader.attribute("beta", 1.0)))
    is_layer_bias = bias is not None and graph.shape(bias) == (features,) and alpha == 1
    layer_bias = bias if is_layer_bias else None
    if reader.attribute("transB", 0):
        y = graph.call("linear.default", x, weight, layer_bias)
    else:
        y = _add_dense(reader, x, weight, layer_bias)
    if alpha != 1:
        y = graph.call("mul.Tensor", y, graph.constant(np.float32(alpha)))
    return y if bias is None or is_layer_bias else graph.call("add.Tensor", y, bias)


@onnx_operator("MatMul")
def read_matmul(reader: OnnxNodeReader) -> Results:
    """Read a matrix product. With a weight as second factor it is a dense layer without a bias."""
    x = reader.value(0)
    other = reader.value(1)
    if isinstance(other.reference, ArrayOf) and other.ndim == 2 and x.ndim >= 2:
        return _add_dense(reader, x, other, None)
    return reader.graph.call("matmul.default", x, other)


@onnx_operator("BatchNormalization")
def read_batch_norm(reader: OnnxNodeReader) -> Results:
    """Read a batch norm, which in training normalises by the batch and updates its statistics."""
    mean = reader.value(3)
    var = reader.value(4)
    if not isinstance(mean.reference, ArrayOf) or not isinstance(var.reference, ArrayOf):
        raise ValueError("its mean and variance must be initializers")
    return reader.graph.call(
        "batch_norm.default",
        reader.value(0),
        reader.value(1),
        reader.value(2),
        mean,
        var,
        TRAINING,
        round(1 - reader.attribute("momentum", 0.9), 6),
        reader.attribute("epsilon", 1e-5),
        True,
    )


@onnx_operator("LayerNormalization")
def read_layer_norm(reader: OnnxNodeReader) -> Results:
    """Read a layer norm over the last axes."""
    sizes = reader.fixed_sizes(first_axis=reader.axis(-1))
    epsilon = reader.attribute("epsilon", 1e-5)
    return reader.graph.call(
        "layer_norm.default", reader.value(0), sizes, reader.value(1), reader.optional(2), epsilon
    )


@onnx_operator("InstanceNormalization")
def read_instance_norm(reader: OnnxNodeReader) -> Results:
    """Read a norm of each channel, as a group norm."""
    (channels,) = reader.fixed_sizes(first_axis=1)[:1]
    return _add_group_norm(reader, channels, reader.value(1), reader.value(2))


@onnx_operator("GroupNormalization")
def read_group_norm(reader: OnnxNodeReader) -> Results:
    """Read a group norm. Before opset 21, scale and bias have one value per group."""
    groups = reader.attribute("num_groups", 1)
    scale = reader.value(1)
    bias = reader.value(2)
    (channels,) = reader.fixed_sizes(first_axis=1)[:1]
    if groups < 1 or channels % groups:
        raise ValueError(f"{channels} channels don't divide into {groups} groups")
    if reader.opset < 21:
        repeat = "repeat_interleave.self_int"
        scale = reader.graph.call(repeat, scale, channels // groups, 0)
        bias = reader.graph.call(repeat, bias, channels // groups, 0)
    return _add_group_norm(reader, groups, scale, bias)


def _add_group_norm(
    reader: OnnxNodeReader, groups: int, scale: OnnxValue, bias: OnnxValue
) -> OnnxValue:
    epsilon = reader.attribute("epsilon", 1e-5)
    return reader.graph.call("group_norm.default", reader.value(0), groups, scale, bias, epsilon)


@onnx_operator("MaxPool", "AveragePool")
def read_pool(reader: OnnxNodeReader) -> Results:
    """Read pooling of images, of volumes, or of sequences as images of height 1."""
    graph = reader.graph
    x = reader.value(0)
    window = _read_padded_window(reader, reader.attribute("kernel_shape", ()))
    if len(window.kernel) == 1 and x.ndim == 3:
        kernel, strides, dilations = (
            (1, *sizes) for sizes in (window.kernel, window.strides, window.dilations)
        )
        row_window = OnnxWindow(kernel, strides, dilations, ((0, 0), *window.pads))
        y = _add_pool(reader, graph.call("unsqueeze.default", x, 2), row_window)
        return graph.call("squeeze.dim", y, 2)
    if len(window.kernel) not in (2, 3) or x.ndim != len(window.kernel) + 2:
        raise ValueError(
            f"a window of {window.kernel} on {x.ndim} axes; must have 1 to 3 spatial axes"
        )
    return _add_pool(reader, x, window)


def _add_pool(reader: OnnxNodeReader, x: OnnxValue, window: OnnxWindow) -> OnnxValue:
    graph = reader.graph
    ceil_mode = bool(reader.attribute("ceil_mode", 0))
    num_axes = len(window.kernel)
    zeros = (0,) * num_axes
    if reader.node.op == "MaxPool":
        pads = window.symmetric_pads
        if not window.is_symmetric:
            x = _add_pads(reader, x, window.pads, -math.inf)
            pads = zeros
        op = f"max_pool{num_axes}d.default"
        return graph.call(op, x, window.kernel, window.strides, pads, window.dilations, ceil_mode)
    if set(window.dilations) != {1}:
        raise ValueError("dilated average pooling isn't supported")
    counts_pads = bool(reader.attribute("count_include_pad", 0))
    op = f"avg_pool{num_axes}d.default"
    if window.is_symmetric:
        pads = window.symmetric_pads
        return graph.call(op, x, window.kernel, window.strides, pads, ceil_mode, counts_pads)
    padded = _add_pads(reader, x, window.pads)
    if counts_pads:
        return graph.call(op, padded, window.kernel, window.strides, zeros, ceil_mode, True)
    ones = graph.constant(np.ones((1, 1, *graph.fixed_shape(x, 2)), np.float32))

    def sum_windows(values: OnnxValue) -> OnnxValue:
        # An average with the divisor 1 is a sum.
        return graph.call(op, values, window.kernel, window.strides, zeros, ceil_mode, True, 1)

    num_pixels = sum_windows(_add_pads(reader, ones, window.pads))
    return graph.call("div.Tensor", sum_windows(padded), num_pixels)


@onnx_operator("GlobalAveragePool", "GlobalMaxPool")
def read_global_pool(reader: OnnxNodeReader) -> Results:
    """Read the mean or the largest value over all positions."""
    op = "mean.dim" if reader.node.op == "GlobalAveragePool" else "amax.default"
    x = reader.value()
    return reader.graph.call(op, x, tuple(range(2, x.ndim)), True)


@onnx_operator("Dropout")
def read_dropout(reader: OnnxNodeReader) -> Results:
    """Read dropout, which is active in training."""
    rate = reader.number("ratio", 1, 0.5)
    return reader.graph.call("dropout.default", reader.value(), rate, TRAINING)


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
