"""Captured inputs and cotangents, against the gradients that must follow from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from pipeline.models.layers import standard
from pipeline.models.modules.layer_capture import LayerCapture, grad_observing_layers
from pipeline.models.modules.standard import Network
from tests.models.build import QUICK, initialise, network, random

BATCH, CLASSES = 4, 3


def some_network(layout: str = "nhwc") -> Network:
    """Every way a kernel moves, and layers that are not observed between."""
    made = network(
        standard.Conv(features=4, kernel=3, padding=1),
        standard.BatchNorm(),
        standard.Relu(),
        standard.Conv(features=5, kernel=(3, 2), stride=2, padding="same", bias=True),
        standard.Conv(features=6, kernel=2, padding="valid", dilation=2),
        standard.Conv(features=6, kernel=1, padding=((1, 0), (0, 2))),
        standard.Conv(features=5, kernel=3, stride=2, padding="symmetric"),
        standard.Flatten(),
        standard.Dense(features=7),
        standard.Relu(),
        standard.Dense(features=CLASSES, bias=False),
    )
    return replace(made, layout=layout)


def scalar(module: nn.Module, variables: dict[str, Any], images: np.ndarray) -> Any:
    """A function of parameters in which every logit weighs differently, with the logits."""

    def function(params: Any) -> tuple[jax.Array, jax.Array]:
        logits, _ = module.apply(
            {**variables, "params": params}, images, train=True, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.sin(1 + jnp.arange(logits.size)).reshape(logits.shape) * logits), logits

    return function


def observe(module: nn.Module, images: np.ndarray) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients and logits as jax has them, then both and the observations as we have them."""
    variables = initialise(module, images)
    function = scalar(module, variables, images)
    plain = jax.jit(jax.grad(function, has_aux=True), compiler_options=QUICK)
    ours = jax.jit(grad_observing_layers(function), compiler_options=QUICK)
    return *plain(variables["params"]), *ours(variables["params"])


def patches(layer: LayerCapture) -> np.ndarray:
    """The patch of every output pixel: (batch, height, width, kernel * channels)."""
    assert layer.window is not None
    chwn = layer.layout == "chwn"
    images = np.asarray(layer.inputs)
    images = images.transpose(3, 1, 2, 0) if chwn else images
    rows, columns = layer.window.rows, layer.window.columns
    padded = np.pad(images, ((0, 0), rows.pads, columns.pads, (0, 0)))
    found = [
        [
            padded[
                :,
                y * rows.stride : y * rows.stride + rows.dilated_extent + 1 : rows.dilation,
                x * columns.stride : x * columns.stride
                + columns.dilated_extent
                + 1 : columns.dilation,
            ].reshape(len(images), -1)
            for x in range(columns.output_size)
        ]
        for y in range(rows.output_size)
    ]
    return np.array(found).transpose(2, 0, 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
def test_inputs_times_cotangents_are_the_gradients(layout: str) -> None:
    """L-06: of every kernel that is observed, the sum over positions of input x cotangent."""
    gradients, logits, ours, our_logits, seen = observe(
        some_network(layout), random(BATCH, 12, 12, 2)
    )
    assert sorted(seen) == ["conv_0", "conv_1", "conv_2", "conv_3", "conv_4", "dense_0", "dense_1"]
    np.testing.assert_allclose(our_logits, logits, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, gradients
    )
    for path, layer in seen.items():
        inputs = np.asarray(layer.inputs) if layer.window is None else patches(layer)
        cotangents = np.asarray(layer.cotangents)
        if layer.layout == "chwn":
            cotangents = cotangents.transpose(3, 1, 2, 0)
        assert inputs.shape[:-1] == cotangents.shape[:-1]
        product = np.tensordot(inputs, cotangents, axes=(range(inputs.ndim - 1),) * 2)
        kernel = np.asarray(gradients[path]["kernel"])
        np.testing.assert_allclose(product.reshape(kernel.shape), kernel, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_scopes_are_part_of_the_path_and_tokens_are_observed() -> None:
    class Tokens(nn.Module):
        @nn.compact
        def __call__(self, images: jax.Array, train: bool) -> jax.Array:
            tokens = images.reshape(images.shape[0], 6, -1)
            return nn.Dense(CLASSES, name="head")(Inner(name="inner")(tokens).mean(1))

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return nn.relu(nn.Dense(5, name="mix")(tokens))

    *_, seen = observe(Tokens(), random(BATCH, 3, 4, 2))
    assert {path: layer.cotangents.shape for path, layer in seen.items()} == {
        "inner/mix": (BATCH, 6, 5),
        "head": (BATCH, CLASSES),
    }


@pytest.mark.slow
def test_grouped_and_transposed_convolutions_are_not_observed() -> None:
    made = network(
        standard.Conv(features=4, kernel=3, groups=2),
        standard.ConvTranspose(features=4, kernel=3),
        standard.GlobalAvgPool(),
        standard.Dense(features=CLASSES),
    )
    *_, seen = observe(made, random(BATCH, 6, 6, 2))
    assert list(seen) == ["dense_0"]


@pytest.mark.slow
def test_a_layer_that_is_applied_twice_is_refused() -> None:
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, images: jax.Array, train: bool) -> jax.Array:
            same = nn.Dense(4, name="same")
            return same(same(images.reshape(images.shape[0], -1)))

    with pytest.raises(ValueError, match=r"^same: is applied twice in a step"):
        observe(Twice(), random(BATCH, 2, 2, 1))
