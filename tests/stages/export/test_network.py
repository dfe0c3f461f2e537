"""Layouts of kernels, against their definitions written out in numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.columns import ColumnSpec
from pipeline.data.inputs import NetworkInput, NetworkInputs
from pipeline.models.layers.standard import ConvTranspose
from pipeline.stages.export.matching import match_weights
from pipeline.stages.export.network import NetworkArrays, convert_layout, trace_model_arrays
from tests.models.build import conf_model, network, random


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (4, 2)])
def test_transposed_convolution_matches_torch(kernel: int, stride: int) -> None:
    image, theirs = random(1, 3, 4, 2), random(2, 5, kernel, kernel, seed=1)
    name = "params/conv_transpose_0/kernel"
    needed = NetworkArrays("unet", {name: (kernel, kernel, 2, 5)}, {})
    ours = convert_layout(theirs, name, needed)
    expected = np.zeros((1, 2 * stride + kernel, 3 * stride + kernel, 5), np.float32)
    for y, x in np.ndindex(3, 4):
        at = np.s_[:, y * stride : y * stride + kernel, x * stride : x * stride + kernel]
        expected[at] += np.einsum("nc,cohw->nhwo", image[:, y, x], theirs)
    layer = ConvTranspose(features=5, kernel=kernel, stride=stride, padding="valid")
    variables = {"params": {"conv_transpose_0": {"kernel": ours}}}
    found = network(layer).apply(variables, image, train=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


CONV1D = {"name": "conv1d", "features": 6, "kernel": 3}
TOKEN_DENSE = {"name": "dense", "features": 6}
ATTENTION = {"name": "self_attention", "heads": 2}
BRANCHES = {"name": "branches", "branches": [[CONV1D], [CONV1D]]}
CONV3D = {"name": "conv3d", "features": 6, "kernel": 3}


def trace_before_flatten(layers: Sequence[Any], shape: tuple[int, ...]) -> NetworkArrays:
    """The arrays of `layers`, then flatten and a dense layer with the scope `reader`."""
    reader = {"name": "dense", "features": "$classes", "scope": "reader"}
    model = conf_model("layers", layers=[*layers, "flatten", reader], blocks={})
    column = NetworkInput("x", "x", ColumnSpec(shape, "float32"))
    return trace_model_arrays(model, 4, NetworkInputs((column,)))


@pytest.mark.parametrize(
    ("layers", "shape", "output"),
    [
        ([CONV1D, "relu"], (5, 2), (5, 6)),
        ([CONV1D, "batch_norm", {"name": "max_pool1d", "kernel": 2}], (8, 2), (4, 6)),
        ([{"name": "residual", "body": [TOKEN_DENSE, CONV1D, "relu"]}], (5, 6), (5, 6)),
        ([CONV3D, "relu"], (2, 3, 4, 1), (2, 3, 4, 6)),
    ],
    ids=["conv1d", "pool", "residual", "conv3d"],
)
def test_dense_layer_after_a_convolution_reads_channel_by_channel(
    layers: Sequence[Any], shape: tuple[int, ...], output: tuple[int, ...]
) -> None:
    found = trace_before_flatten(layers, shape)
    theirs, values = random(4, math.prod(output)), random(*output, seed=1)
    ours = convert_layout(theirs, "params/reader/kernel", found)
    # PyTorch's layer reads (channels, *positions).
    expected = theirs @ np.moveaxis(values, -1, 0).reshape(-1)
    np.testing.assert_allclose(values.reshape(-1) @ ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layers", [[TOKEN_DENSE], [CONV1D, TOKEN_DENSE, "relu"], [CONV1D, ATTENTION], ["layer_norm"]]
)
def test_dense_layer_after_features_of_tokens_reads_token_by_token(layers: Sequence[Any]) -> None:
    found = trace_before_flatten(layers, (5, 6))
    theirs = random(4, 30)
    np.testing.assert_array_equal(convert_layout(theirs, "params/reader/kernel", found), theirs.T)
    assert not found.unconverted


@pytest.mark.parametrize("after", [[CONV1D, "layer_norm"], [BRANCHES, "relu"]])
def test_unknown_order_of_tokens_is_not_converted(after: Sequence[Any]) -> None:
    found = trace_before_flatten(after, (5, 6))
    problem = r"(layer_norm|branches) is before a flatten of tokens; the order of"
    assert re.match(problem, found.unconverted)
    arrays = {name: random(*shape) for name, shape in found.shapes.items()}
    with pytest.raises(DataError, match=f"model layers: {problem}"):
        match_weights("f", arrays, found, rules="torch")
    # TensorFlow has this package's order.
    matching = match_weights("f", arrays, found, rules="tensorflow")
    matching.require(partial=False)
    for name, array in arrays.items():
        np.testing.assert_array_equal(matching.arrays[name], array)


def test_tensorflow_convolution_over_a_whole_image_is_a_dense_layer() -> None:
    theirs, values = random(2, 3, 6, 4), random(2, 3, 6, seed=1)
    name = "params/dense_0/kernel"
    found = convert_layout(
        theirs, name, NetworkArrays("vgg", {name: (36, 4)}, {"dense_0": 6}), "tensorflow"
    )
    expected = np.einsum("hwc,hwco->o", values, theirs)
    np.testing.assert_allclose(values.reshape(-1) @ found, expected, rtol=1e-4, atol=1e-5)
