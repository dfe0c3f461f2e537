"""Kernels of transposed convolutions, against their definition written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.models.layers.standard import ConvTranspose
from pipeline.stages.export.network import NetworkArrays, convert_layout
from tests.models.build import network, random


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
