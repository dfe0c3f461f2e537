"""Graphs as lists of this project's layers."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from pipeline.models.layers import standard
from pipeline.models.modules.network import Network
from pipeline.models.torch_graph.conversion.known_layers import UnknownLayerError
from pipeline.models.torch_graph.conversion.layer_list import list_layers, set_class_features
from tests.models.build import network
from tests.models.torch_graph.golden_graphs import golden_graph, golden_results


@pytest.mark.medium
@pytest.mark.parametrize("name", ["residual", pytest.param("mobile", marks=pytest.mark.slow)])
def test_layer_list_logits_match_pytorch(name: str) -> None:
    found, theirs = list_layers(golden_graph(name)), golden_results(name)
    own: Network = network(*found.layers)
    variables = unflatten_dict(dict(found.arrays), sep="/")
    logits = jax.jit(lambda v, x: own.apply(v, x, train=False))(variables, theirs["images"])
    np.testing.assert_allclose(logits, theirs["logits"], rtol=1e-4, atol=1e-5)


def test_residual_block_and_gate_are_recognised() -> None:
    residual = list_layers(golden_graph("residual")).layers
    assert [layer.name for layer in residual] == [
        *("conv", "batch_norm", "relu", "max_pool", "residual", "relu", "global_avg_pool", "dense"),
    ]
    block = residual[4]
    assert isinstance(block, standard.Residual)
    assert [layer.name for layer in block.shortcut] == ["conv", "batch_norm"]
    mobile = list_layers(golden_graph("mobile")).layers
    bodies = [each.body for each in mobile if isinstance(each, standard.Residual)]
    gates = [layer for body in bodies for layer in body if isinstance(layer, standard.Gate)]
    assert [layer.name for layer in gates[-1].body] == [
        *("global_avg_pool", "dense", "relu", "dense", "hard_sigmoid"),
    ]


def test_weights_have_layer_list_names() -> None:
    arrays = list_layers(golden_graph("residual")).arrays
    assert arrays["params/residual_0/shortcut/conv_0/kernel"].shape == (1, 1, 8, 8)
    assert {"batch_stats/batch_norm_0/mean", "params/dense_0/kernel"} <= set(arrays)


def test_momentum_is_converted_to_the_retained_share() -> None:
    norm = list_layers(golden_graph("residual")).layers[1]
    assert isinstance(norm, standard.BatchNorm)
    assert norm.momentum == 0.8


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("patches", r"aten\.expand|aten\.add|aten\.flatten"),
        ("recurrent", r"aten\.mean|aten\.lstm|it must read whole values"),
        ("dropped", "it must read a value before it"),
        ("shuffle", "it must read whole values"),
    ],
)
def test_unknown_module_is_reported(name: str, module: str) -> None:
    with pytest.raises(UnknownLayerError, match=r"module .* isn't a known layer") as caught:
        list_layers(golden_graph(name))
    assert caught.match(module)


def test_last_layer_is_generalised_to_the_classes() -> None:
    opened = set_class_features(list_layers(golden_graph("residual")).layers)
    assert isinstance(opened[-1], standard.Dense)
    assert opened[-1].features == "$classes"
    with pytest.raises(UnknownLayerError, match="must come from a convolution or a dense layer"):
        set_class_features((standard.Relu(),))


def test_node_with_two_unjoined_uses_is_refused() -> None:
    graph = golden_graph("residual")
    nodes = tuple(
        dataclasses.replace(node, op="aten.sub.Tensor") if node.op == "aten.add.Tensor" else node
        for node in graph.training.nodes
    )
    form = dataclasses.replace(graph.training, nodes=nodes)
    with pytest.raises(UnknownLayerError, match=r"must be a residual block, a gate or branches"):
        list_layers(dataclasses.replace(graph, training=form))
