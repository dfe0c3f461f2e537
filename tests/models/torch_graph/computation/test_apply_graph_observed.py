"""Layers of PyTorch's graphs, against the gradients."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.models.lowerings.problem import Layout
from tests.models.observed import require_products
from tests.models.torch_graph.golden_graphs import golden_graph, network_of

IMAGES = np.random.default_rng(0).normal(size=(4, 12, 12, 3)).astype(np.float32)


ATTENTION = {"encoder/self_attn/in_proj/kernel", "encoder/self_attn/out_proj/kernel"}
"""PyTorch computes them with the samples as the second axis."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "unobserved"),
    [
        ("residual", "nhwc", set()),
        ("residual", "chwn", set()),
        ("mobile", "nhwc", None),
        ("encoder", "nhwc", ATTENTION),
    ],
)
def test_inputs_times_cotangents_are_the_gradients(
    name: str, layout: Layout, unobserved: set[str] | None
) -> None:
    """L-06: of convolutions without groups and dense layers, also over tokens."""
    graph = golden_graph(name)
    seen = require_products(network_of(graph, layout=layout), IMAGES)
    kernels = [spec.path for spec in graph.arrays if spec.path.endswith("/kernel")]
    assert len(seen) > 1
    if unobserved is not None:
        assert {path for path in kernels if path.removesuffix("/kernel") not in seen} == unobserved
