"""Layers of imported networks, found in their jaxprs, against the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from pipeline.core.errors import RecipeError
from pipeline.models.imported.imported_network import ImportedNetwork
from tests.models.build import random
from tests.models.observed import observe, require_products

IMAGES = random(4, 8, 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "layers"),
    [
        ("ConvNet", {"width": 4}, {"Conv_0", "Conv_1", "Dense_0"}),
        ("NnxNet", {"width": 4}, {"blocks/0", "blocks/1", "out"}),
    ],
)
def test_inputs_times_cotangents_are_the_gradients(
    name: str, arguments: dict[str, Any], layers: set[str], imported: Callable[..., nn.Module]
) -> None:
    """L-06: of linen and nnx, with batch norm and dropout."""
    assert set(require_products(imported("flax", name, **arguments), IMAGES)) == layers


class Functions:
    """A network of functions, whose kernels are used in several ways."""

    root = ""
    has_dtype = True

    def init(self, key: jax.Array, images: jax.Array, seed: int) -> Any:
        def draw(*shape: int) -> dict[str, jax.Array]:
            return {"kernel": 0.1 * jax.random.normal(jax.random.fold_in(key, len(shape)), shape)}

        params = {
            "turned": draw(3, 3, 1, 4),
            "square": draw(4, 4),
            "looped": draw(4, 4),
            "called": draw(4, 4),
            "grouped": draw(3, 3, 1, 4),
            "head": draw(4, 3),
        }
        return {"params": params, "batch_stats": {}}

    def apply(self, variables: Any, images: jax.Array, key: Any, *, train: bool) -> Any:
        kernels = {name: layer["kernel"] for name, layer in variables["params"].items()}
        x = jax.lax.conv_general_dilated(
            images.transpose(0, 3, 1, 2),
            kernels["turned"].transpose(3, 2, 0, 1),
            (2, 1),
            ((1, 0), (2, 2)),
            rhs_dilation=(1, 2),
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        ).transpose(0, 2, 3, 1)
        x = x + jax.lax.conv_general_dilated(
            x, kernels["grouped"], (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4,
        )  # fmt: skip
        x = jnp.tanh(x).mean((1, 2))
        x = x + x @ kernels["square"].T
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ kernels["looped"]), None), x, length=2)
        x = jax.jit(lambda x, kernel: x @ kernel)(x, kernels["called"])
        return x @ kernels["head"], {}


@pytest.mark.medium
def test_kernels_are_tracked_through_transposes_and_calls() -> None:
    """But a kernel that is used the other way round, in a loop or in groups isn't observed."""
    network = ImportedNetwork(Functions(), "functions", "float32")
    assert set(require_products(network, IMAGES)) == {"turned", "called", "head"}


class Shared(Functions):
    """A network that uses a kernel twice."""

    def init(self, key: jax.Array, images: jax.Array, seed: int) -> Any:
        return {"params": {"same": {"kernel": jnp.eye(64)}}, "batch_stats": {}}

    def apply(self, variables: Any, images: jax.Array, key: Any, *, train: bool) -> Any:
        kernel = variables["params"]["same"]["kernel"]
        return images.reshape(len(images), -1) @ kernel @ kernel, {}


@pytest.mark.medium
def test_kernel_used_twice_is_refused() -> None:
    network = ImportedNetwork(Shared(), "shared", "float32")
    with pytest.raises(ValueError, match=r"same: is applied twice in a step"):
        observe(network, IMAGES)


def test_layers_without_a_leading_sample_axis_are_not_observed() -> None:
    class Turned(Shared):
        def apply(self, variables: Any, images: jax.Array, key: Any, *, train: bool) -> Any:
            tokens = images.reshape(len(images), 1, 64).swapaxes(0, 1)
            return (tokens @ variables["params"]["same"]["kernel"])[0], {}

    network = ImportedNetwork(Turned(), "turned", "float32")
    with pytest.raises(RecipeError, match="has none that can be observed"):
        observe(network, IMAGES)
