"""Adapters of matrices in either order of axes, and what has none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.modules.adapted_network import AdapterRule, adapt_network
from pipeline.models.torch_graph.computation.torch_network import OnnxFile, TorchNetwork
from tests.conftest import ROOT
from tests.training.test_step import Noisy, TwoLayers

ONNX = ROOT / "tests" / "golden" / "onnx"
GENERATOR = np.random.default_rng(3)
RULE = AdapterRule(("*",), rank=2, scale=0.5)


def draw(*shape: int) -> np.ndarray:
    return GENERATOR.normal(size=shape).astype(np.float32)


def make_params() -> dict[str, Any]:
    """A dense layer of this package, one of PyTorch, a convolution, a table and a lone matrix."""
    return {
        "dense": {"kernel": draw(4, 3), "bias": draw(3)},
        "linear": {"weight": draw(3, 4)},
        "conv": {"kernel": draw(3, 3, 2, 4)},
        "tokens": {"table": draw(9, 4)},
        "lone": draw(4, 4),
    }


@pytest.mark.parametrize("dora", [False, True])
def test_matrices_of_both_orders_are_changed_alike(dora: bool) -> None:
    rule = AdapterRule(("*",), rank=2, scale=0.5, scales_outputs=dora)
    params = make_params()
    params["linear"]["weight"] = params["dense"]["kernel"].T
    adapted = rule.add_adapters(params, jax.random.key(0))
    assert "lora_down" not in adapted["conv"] | adapted["tokens"]
    assert adapted["dense"]["lora_down"].shape == adapted["linear"]["lora_down"].shape == (4, 2)
    assert np.abs(adapted["dense"]["lora_down"]).max() <= 0.5
    for path, leaf in jax.tree.leaves_with_path(rule.merge(adapted)):
        # Each begins with the frozen weights: `up` is 0.
        expected: Any = params
        for key in path:
            expected = expected[key.key]
        np.testing.assert_allclose(leaf, expected, rtol=1e-6)
    up, down, magnitude = draw(2, 3), draw(4, 2), draw(3)
    for name in ("dense", "linear"):
        adapted[name] |= {"lora_up": jnp.asarray(up), "lora_down": jnp.asarray(down)}
        adapted[name] |= {"lora_magnitude": jnp.asarray(magnitude)} if dora else {}
    merged = rule.merge(adapted)
    kernel = params["dense"]["kernel"]
    changed = kernel + 0.5 * down @ up
    if dora:
        length = np.linalg.norm(kernel, axis=0) + magnitude
        changed *= length / np.linalg.norm(changed, axis=0)
    np.testing.assert_allclose(merged["dense"]["kernel"], changed, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged["linear"]["weight"].T, changed, rtol=1e-5, atol=1e-6)


def test_adapters_of_equal_shapes_are_drawn_differently() -> None:
    params = {"one": {"kernel": draw(4, 4)}, "two": {"kernel": draw(4, 4)}}
    adapted = RULE.add_adapters(params, jax.random.key(0))
    assert not np.array_equal(adapted["one"]["lora_down"], adapted["two"]["lora_down"])
    again = RULE.add_adapters({"two": params["two"]}, jax.random.key(0))
    np.testing.assert_array_equal(adapted["two"]["lora_down"], again["two"]["lora_down"])


@pytest.mark.parametrize("name", ["recurrent_kernel", "reverse_kernel", "router"])
def test_matrices_of_other_layers_have_the_inputs_first(name: str) -> None:
    rule = AdapterRule(("*",), rank=2, scale=1.0, scales_outputs=True)
    adapted = rule.add_adapters({"layer": {name: draw(4, 12)}}, jax.random.key(0))["layer"]
    assert adapted["lora_down"].shape == (4, 2)
    assert adapted["lora_magnitude"].shape == (12,)


def test_two_matrices_of_one_scope_are_refused() -> None:
    params = {"cell": {"input": draw(4, 8), "hidden": draw(2, 8)}}
    with pytest.raises(ValueError, match="cell/input and cell/hidden are in one scope"):
        RULE.require_fit(params)
    AdapterRule(("cell/hidden",), rank=2, scale=1.0).require_fit(params)


@pytest.mark.parametrize("targets", [("conv",), ("tokens/table",), ("lone",), ("dens",)])
def test_pattern_without_a_matrix_is_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"'{targets[0]}' matches none of the 2 matrices"):
        AdapterRule(targets, rank=2, scale=1.0).require_fit(make_params())


@pytest.mark.medium
@pytest.mark.parametrize("network", [TwoLayers(), Noisy()])
def test_network_keeps_its_class_and_its_outputs(network: Any) -> None:
    images = draw(4, 2, 2, 1)
    adapted: Any = adapt_network(network, RULE)
    assert isinstance(adapted, type(network))
    assert type(adapted).__name__ == type(network).__name__
    assert adapted.clone().adapters == RULE
    plain, variables = network.init_with_output(jax.random.key(1), images, train=False)
    logits, adapted_variables = adapted.init_with_output(jax.random.key(1), images, train=False)
    np.testing.assert_array_equal(logits, plain)
    np.testing.assert_array_equal(adapted.apply(adapted_variables, images, train=False), plain)
    assert len(jax.tree.leaves(adapted_variables)) > len(jax.tree.leaves(variables))


@pytest.mark.slow
def test_network_of_an_onnx_file_has_adapters() -> None:
    """And begins with the weights of its file."""
    network: Any = TorchNetwork(OnnxFile(ONNX / "mobile.onnx", None), "float32")
    adapted: Any = adapt_network(network, RULE)
    images = jnp.asarray(draw(2, 12, 12, 3))
    logits, variables = adapted.init_with_output(jax.random.key(1), images, train=False)
    plain, _ = network.init_with_output(jax.random.key(1), images, train=False)
    np.testing.assert_array_equal(logits, plain)
    assert variables["params"]["fc"]["lora_up"].shape == (2, 3)
    variables["params"]["fc"]["lora_up"] += 1.0
    assert not np.allclose(adapted.apply(variables, images, train=False), plain)
