"""Weights in 8 and 4 bits: numbers and scales against definitions, and a session's products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.stages.export.onnx.weight_quantization import (
    LARGEST,
    WeightType,
    quantize_weights,
    round_weights,
)

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
RNG = np.random.default_rng(4)
KERNEL = RNG.standard_normal((6, 3, 2, 2)).astype(np.float32)
MATRIX = (RNG.standard_normal((70, 5)) * np.arange(1, 6)).astype(np.float32)


def make_model() -> bytes:
    """A convolution, and a dense layer of both forms, of which the second is transposed."""
    from onnx import TensorProto, helper, numpy_helper

    arrays = {"kernel": KERNEL, "matrix": MATRIX, "turned": MATRIX.T.copy(), "shape": [-1, 24]}
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["y"]),
        helper.make_node("MatMul", ["v", "matrix"], ["z"]),
        helper.make_node("Gemm", ["v", "turned"], ["t"], transB=1),
    ]
    shapes = {"x": ["n", 3, 3, 3], "v": ["n", 70]}
    outputs = {"y": ["n", 6, 2, 2], "z": ["n", 5], "t": ["n", 5]}
    infos = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in d.items()]
        for d in (shapes, outputs)
    ]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "graph", *infos, weights)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


def run(content: bytes) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # By default ONNX Runtime rounds the inputs of products with 4 bits too.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 3, 3)).astype(np.float32)
    return session.run(None, {"x": x, "v": rng.standard_normal((2, 70)).astype(np.float32)})


def restore(weights: np.ndarray, axis: int, kind: WeightType, block: int | None) -> np.ndarray:
    """Each number by its definition: the nearest multiple of the peak of its channel or block."""
    moved = np.moveaxis(weights, axis, 0)
    rows = moved.reshape(len(moved), -1)
    found = np.empty_like(rows)
    for index in np.ndindex(rows.shape):
        first = 0 if block is None else index[1] // block * block
        last = None if block is None else first + block
        scale = np.abs(rows[index[0], first:last]).max() / LARGEST[kind]
        found[index] = np.rint(rows[index] / scale) * scale
    return np.moveaxis(found.reshape(moved.shape), 0, axis)


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "block"), [("int8", None), ("int4", 32)])
def test_session_multiplies_by_the_rounded_weights(kind: WeightType, block: int | None) -> None:
    content = make_model()
    quantized = quantize_weights(content, kind)
    assert len(quantized) < len(content)
    model = onnx.load_from_string(content)
    rounded = {
        "kernel": restore(KERNEL, 0, kind, None),
        "matrix": restore(MATRIX, 1, kind, block),
        "turned": restore(MATRIX, 1, kind, block).T,
    }
    for tensor in model.graph.initializer:
        if tensor.name in rounded:
            array = np.ascontiguousarray(rounded[tensor.name])
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    exact, found = run(model.SerializeToString()), run(quantized)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert max(abs(a - b).max() for a, b in zip(found, run(content), strict=True)) > 1e-3


def test_channels_of_zeros_stay_zero() -> None:
    numbers, scales = round_weights(np.zeros((40, 2), np.float32), 1, 7, 32)
    assert not numbers.any()
    assert (scales == 1).all()
    assert scales.shape == (2, 2)


def test_weights_of_a_transposed_convolution_in_groups_stay_as_they_are() -> None:
    """Its outputs along axis 1 belong to both groups, whose sizes may differ by 10,000."""
    from onnx import TensorProto, helper, numpy_helper

    kernel = RNG.standard_normal((4, 3, 2, 2)).astype(np.float32)
    kernel[2:] *= 1e-4
    infos = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", channels, size, size])]
        for name, channels, size in (("x", 4, 3), ("y", 6, 4))
    ]
    for group, is_quantized in ((2, False), (1, True)):
        node = helper.make_node("ConvTranspose", ["x", "kernel"], ["y"], group=group)
        infos[1][0].type.tensor_type.shape.dim[1].dim_value = 3 * group
        graph = helper.make_graph([node], "g", *infos, [numpy_helper.from_array(kernel, "kernel")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        made = onnx.load_from_string(quantize_weights(model.SerializeToString(), "int8"))
        assert ("kernel_int8" in {item.name for item in made.graph.initializer}) == is_quantized


@pytest.mark.parametrize("peak", [2e-43, 1e-44, 1e-37])
@pytest.mark.parametrize("block", [None, 2])
def test_tiny_weights_are_0(peak: float, block: int | None) -> None:
    """Their scale would be no normal float32: 1e-44 / 127 is 0."""
    weights = np.full((4, 2), 0.5, np.float32)
    weights[:, 1] = peak
    numbers, scales = round_weights(weights, 1, 127, block)
    assert np.all(numbers[:, 1] == 0)
    assert np.all(scales[..., 1] == 1)
    assert np.all(numbers[:, 0] == 127)
