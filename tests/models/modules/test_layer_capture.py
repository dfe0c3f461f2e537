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
from pipeline.models.modules.layer_capture import grad_observing_layers
from pipeline.models.modules.network import Network
from tests.models.build import network, random
from tests.models.observed import observe, require_products

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


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
def test_inputs_times_cotangents_are_the_gradients(layout: str) -> None:
    """L-06: of every kernel that is observed, the sum over positions of input x cotangent."""
    seen = require_products(some_network(layout), random(BATCH, 12, 12, 2))
    assert sorted(seen) == ["conv_0", "conv_1", "conv_2", "conv_3", "conv_4", "dense_0", "dense_1"]


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
def test_layer_applied_twice_is_refused() -> None:
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, images: jax.Array, train: bool) -> jax.Array:
            same = nn.Dense(4, name="same")
            return same(same(images.reshape(images.shape[0], -1)))

    with pytest.raises(ValueError, match=r"^same: is applied twice in a step"):
        observe(Twice(), random(BATCH, 2, 2, 1))


def test_inputs_may_be_passed_by_name() -> None:
    class ByName(nn.Module):
        @nn.compact
        def __call__(self, images: jax.Array) -> jax.Array:
            return nn.Dense(2, name="last")(inputs=images)

    x = jnp.ones((2, 3))
    module = ByName()
    params = module.init(jax.random.key(0), x)["params"]

    def compute_loss(params: Any) -> tuple[jax.Array, None]:
        return module.apply({"params": params}, x).sum(), None

    _, _, observations = grad_observing_layers(compute_loss, params)
    np.testing.assert_array_equal(observations["last"].inputs, x)
