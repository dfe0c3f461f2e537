"""Logits, losses, gradients and statistics of graphs are those of PyTorch."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.lowerings.problem import DEFAULTS
from pipeline.models.torch_graph.computation.torch_network import initial_variables_of
from pipeline.models.torch_graph.graph import GraphNode, TypeOf
from pipeline.models.torch_graph.operator_table import OPERATORS, OperatorContext, to_tensor
from tests.models.torch_graph.golden_graphs import (
    NAMES,
    golden_graph,
    golden_results,
    network_of,
    train_once,
)

QUICK = ("custom", "mobile", "shuffle")


def marked(names: list[str]) -> list[object]:
    """Names, those that take long marked as slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def test_golden_networks_are_complete() -> None:
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", marked(NAMES))
def test_logits_match_pytorch(name: str) -> None:
    graph, theirs = golden_graph(name), golden_results(name)
    network, variables = network_of(graph), initial_variables_of(graph)
    logits = jax.jit(lambda v, x: network.apply(v, x, train=False))(variables, theirs["images"])
    np.testing.assert_allclose(logits, theirs["logits"], rtol=1e-4, atol=1e-5)


LAID_OUT = [(name, "nhwc") for name in NAMES] + [("residual", "chwn")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), LAID_OUT)
def test_training_step_matches_pytorch(name: str, layout: str) -> None:
    theirs = golden_results(name)
    loss, gradients, buffers = train_once(golden_graph(name), theirs["images"], layout=layout)
    assert loss == pytest.approx(float(theirs["loss"]), rel=1e-5)
    expected = {k.removeprefix("gradient "): v for k, v in theirs.items() if k[:8] == "gradient"}
    assert set(gradients) == set(expected)
    for parameter, gradient in expected.items():
        np.testing.assert_allclose(
            gradients[parameter], gradient, rtol=2e-3, atol=2e-5, err_msg=parameter
        )
    left = {k.removeprefix("buffer "): v for k, v in theirs.items() if k[:6] == "buffer"}
    for buffer, value in left.items():
        if buffer in buffers:
            np.testing.assert_allclose(buffers[buffer], value, rtol=1e-4, atol=1e-6)
    changing = {name for name in left if "running" in name or name == "seen"}
    assert changing <= set(buffers)


@pytest.mark.medium
def test_custom_backward_pass_decides_the_gradients() -> None:
    """Gradients through a rounded weight and a reversed activation: JAX's would be zero."""
    theirs = golden_results("custom")
    _, gradients, _ = train_once(golden_graph("custom"), theirs["images"])
    for name in ("hidden.weight", "scale", "conv.weight"):
        expected = theirs[f"gradient {name}"]
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-4, atol=1e-6)


def test_custom_backward_pass_computes_in_another_dtype() -> None:
    theirs = golden_results("custom")
    loss, gradients, _ = train_once(golden_graph("custom"), theirs["images"], dtype="bfloat16")
    assert loss == pytest.approx(float(theirs["loss"]), rel=1e-2)
    expected = theirs["gradient hidden.weight"]
    assert np.abs(gradients["hidden.weight"] - expected).max() < 0.05 * np.abs(expected).max()


FLOATS = [-3e9, -129.5, -1.5, -0.5, 1.5, 127.9, 256.0, 300.0, 70000.0, 3e9, np.inf, np.nan]
LOWEST = -(2**31)
CASTS = {
    "uint8": [0, 127, 255, 0, 1, 127, 0, 44, 112, 0, 0, 0],
    "int8": [0, 127, -1, 0, 1, 127, 0, 44, 112, 0, 0, 0],
    "int16": [0, -129, -1, 0, 1, 127, 256, 300, 4464, 0, 0, 0],
    "int32": [LOWEST, -129, -1, 0, 1, 127, 256, 300, 70000, LOWEST, LOWEST, LOWEST],
    "int64": [LOWEST, -129, -1, 0, 1, 127, 256, 300, 70000, 2**31 - 1, LOWEST, LOWEST],
}
"""What torch 2.13 and ONNX Runtime 1.32 cast the numbers to, int64 within int32."""


@pytest.mark.parametrize("dtype", CASTS)
def test_floats_wrap_in_a_cast_to_integers(dtype: str) -> None:
    context = OperatorContext("float32", DEFAULTS, "nhwc", None)
    x = to_tensor(np.array(FLOATS, np.float32))
    cast = OPERATORS["aten.to.dtype"](context, x, TypeOf(dtype)).plain()
    assert cast.tolist() == CASTS[dtype]
    if dtype != "int64":
        like = to_tensor(np.zeros(len(FLOATS), dtype))
        assert OPERATORS["aten.type_as.default"](context, x, like).plain().tolist() == CASTS[dtype]
        assert OPERATORS["aten.copy.default"](context, like, x).plain().tolist() == CASTS[dtype]


def test_images_are_not_transposed_in_nhwc() -> None:
    """A residual network transposes nothing but the kernels' gradients."""
    graph = golden_graph("residual")
    network, variables = network_of(graph), initial_variables_of(graph)
    jaxpr = jax.make_jaxpr(lambda v, x: network.apply(v, x, train=False))(
        variables, jnp.zeros((4, 12, 12, 3))
    )
    assert " transpose[" not in str(jaxpr)


def test_chwn_transposes_only_input_kernels_and_rows() -> None:
    """Of two convolutions, pooling and a product, input, kernels and rows alone are transposed."""
    graph = golden_graph("twoconvs")
    network, variables = network_of(graph, layout="chwn"), initial_variables_of(graph)
    images = jnp.zeros((4, 12, 12, 3))
    text = str(jax.make_jaxpr(lambda v, x: network.apply(v, x, train=False))(variables, images))
    moved = re.findall(r":f32\[([\d,]+)\] = transpose\[", text)
    assert moved == ["3,12,12,4", "16,27", "32,144", "4,288"]
    assert "conv_general_dilated" not in text


def test_frozen_weight_is_a_buffer() -> None:
    graph = golden_graph("buffers")
    roles = {spec.name: spec.role for spec in graph.arrays}
    assert (roles["fc.weight"], roles["fc.bias"], roles["seen"]) == (
        "parameter",
        "buffer",
        "buffer",
    )


def test_error_has_operator_module_and_line() -> None:
    graph = golden_graph("residual")

    def broken(node: GraphNode) -> GraphNode:
        return (
            dataclasses.replace(node, args=(*node.args[:3], "wide"))
            if node.module == "conv1"
            else node
        )

    form = dataclasses.replace(graph.evaluation, nodes=tuple(map(broken, graph.evaluation.nodes)))
    network = network_of(dataclasses.replace(graph, evaluation=form))
    with pytest.raises(ValueError, match=r"aten\.conv2d\.default of module conv1 \(make_torch_gr"):
        jax.eval_shape(
            lambda v, x: network.apply(v, x, train=False),
            initial_variables_of(graph),
            jnp.zeros((4, 12, 12, 3)),
        )


def test_images_of_another_size_are_refused() -> None:
    graph = golden_graph("residual")
    with pytest.raises(ValueError, match=r"images are 8x8x3 .*; must be 12x12x3"):
        jax.eval_shape(
            lambda v, x: network_of(graph).apply(v, x, train=False),
            initial_variables_of(graph),
            jnp.zeros((4, 8, 8, 3)),
        )
