"""Weights of an ONNX model in 8 or 4 bits, which a session turns back into float32 numbers.

Activations stay float32, so nothing is calibrated. Weights are symmetric: a whole number times a
scale. Each output channel has a scale, but with 4 bits each block of `BLOCK` inputs of a channel of
a dense layer has one (as in Frantar et al. 2023, "GPTQ", sec. 4).

Weights are the constants that only convolutions and products read, as their second input, the means
of an adaptive pooling too. The weights of a transposed convolution in groups stay float32: its
groups have outputs of their own, which aren't along an axis.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

WeightType = Literal["int8", "int4"]
LARGEST = {"int8": 127, "int4": 7}
"""The largest number; the least is its negative."""
_DTYPES = {"int8": np.dtype(jnp.int8), "int4": np.dtype(jnp.int4)}
BLOCK = 32
"""Inputs that share a scale with 4 bits."""
INT4_OPSET, INT4_IR_VERSION = 21, 10
"""First versions of ONNX with 4 bits."""
_CHANNEL_AXES = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1, "MatMul": -1}
"""Axis of the output channels in the weights of an operator, its second input."""


def quantize_weights(content: bytes, kind: WeightType) -> bytes:
    """Return the model with the weights of convolutions and dense layers in `kind`."""
    import onnx
    from onnx import helper, numpy_helper, version_converter

    model = onnx.load_from_string(content)
    if kind == "int4":
        model = version_converter.convert_version(model, INT4_OPSET)
        model.ir_version = max(model.ir_version, INT4_IR_VERSION)
    graph = model.graph
    axes = _find_channel_axes(graph)
    tensors, nodes = [], []
    for tensor in graph.initializer:
        axis = axes.get(tensor.name)
        if axis is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
            tensors.append(tensor)
            continue
        weights = numpy_helper.to_array(tensor)
        block = BLOCK if kind == "int4" and weights.ndim == 2 else None
        axis %= weights.ndim
        numbers, scales = round_weights(weights, axis, LARGEST[kind], block)
        names = [f"{tensor.name}_{part}" for part in (kind, "scale")]
        tensors += [
            numpy_helper.from_array(numbers.astype(_DTYPES[kind]), names[0]),
            numpy_helper.from_array(scales, names[1]),
        ]
        settings: dict[str, Any] = {"axis": axis}
        if block is not None:
            settings = {"axis": 1 - axis, "block_size": block}
        nodes.append(helper.make_node("DequantizeLinear", names, [tensor.name], **settings))
    nodes += graph.node
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(tensors)
    graph.node.extend(nodes)
    onnx.checker.check_model(model)
    quantized: bytes = model.SerializeToString()
    return quantized


def round_weights(
    weights: np.ndarray, axis: int, largest: int, block: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return whole numbers from -`largest` to `largest` in the shape of the weights, and scales,
    float32: (channels,), or with a block of inputs of a matrix, (blocks, channels) or (channels,
    blocks). `axis` has the channels."""
    if block is None:
        input_axes = tuple(number for number in range(weights.ndim) if number != axis)
        scales = _find_scales(np.abs(weights).max(axis=input_axes), largest)
        shape = [-1 if other == axis else 1 for other in range(weights.ndim)]
        return np.rint(weights / scales.reshape(shape)), scales
    inputs = 1 - axis
    starts = np.arange(0, weights.shape[inputs], block)
    scales = _find_scales(np.maximum.reduceat(np.abs(weights), starts, axis=inputs), largest)
    spread = np.repeat(scales, block, axis=inputs).take(np.arange(weights.shape[inputs]), inputs)
    return np.rint(weights / spread), scales


def _find_scales(peaks: np.ndarray, largest: int) -> np.ndarray:
    """Return the scales of peaks; 1 for a peak whose scale isn't a normal float32, which is 0."""
    scales = (peaks / largest).astype(np.float32)
    return np.where(scales >= np.finfo(np.float32).tiny, scales, np.float32(1))


def _find_channel_axes(graph: Any) -> dict[str, int]:
    """Return the axis of the channels of each initialiser that is read as weights alone."""
    axes: dict[str, int] = {}
    others = set()
    for node in graph.node:
        for place, name in enumerate(node.input):
            if place != 1 or node.op_type not in _CHANNEL_AXES:
                others.add(name)
                continue
            axis = _CHANNEL_AXES[node.op_type]
            if any(a.name == "group" and a.i > 1 for a in node.attribute) and axis == 1:
                others.add(name)
            is_transposed = any(a.name == "transB" and a.i for a in node.attribute)
            axes[name] = 0 if is_transposed else axis
    return {name: axis for name, axis in axes.items() if name not in others}
