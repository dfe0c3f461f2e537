"""The dense layer is flax's, but for the sum of its bias's gradient in short types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import Array

from pipeline.models.modules.convolution import DenseModule, add_bias

X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)


@pytest.mark.medium
@pytest.mark.parametrize("use_bias", [True, False])
def test_dense_in_float32_is_bit_equal_to_flax(use_bias: bool) -> None:
    settings: dict[str, Any] = {"features": 6, "use_bias": use_bias, "dtype": "float32"}
    settings["bias_init"] = nn.initializers.normal(1.0)
    ours, flaxs = DenseModule(**settings), nn.Dense(**settings)
    weights = flaxs.init(jax.random.key(1), X)
    jax.tree.map(np.testing.assert_array_equal, ours.init(jax.random.key(1), X), weights)

    def loss(module: nn.Dense) -> Any:
        return jax.value_and_grad(lambda w: jnp.sin(module.apply(w, X)).sum())(weights)

    jax.tree.map(np.testing.assert_array_equal, loss(ours), loss(flaxs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_bias_gradient_is_summed_in_float32(dtype: str, axis: int) -> None:
    """4096 times 1 is 256 in bfloat16 where each sum is rounded: 256 + 1 is 256 again."""
    rows, features = 4096, 3
    shape = (rows, features) if axis == -1 else (features, rows)
    x, bias = jnp.ones(shape, dtype), jnp.arange(features, dtype=jnp.float32)
    y, backward = jax.vjp(lambda x, b: add_bias(x, b, axis), x, bias)
    by_x, by_bias = backward(jnp.ones(shape, dtype))
    expected = np.ones(shape) + np.arange(features).reshape((1, -1) if axis == -1 else (-1, 1))
    np.testing.assert_array_equal(y.astype(np.float32), expected)
    assert (y.dtype, by_x.dtype, by_bias.dtype) == (dtype, dtype, "float32")
    np.testing.assert_array_equal(by_bias, np.full(features, rows, np.float32))


def test_bias_is_added_along_the_first_axis() -> None:
    images = np.zeros((2, 3, 4, 5), np.float32)
    added: Array = add_bias(jnp.asarray(images), jnp.asarray([1.0, 2.0]), 0)
    np.testing.assert_array_equal(added[:, 0, 0, 0], [1.0, 2.0])
    assert added.shape == images.shape


@pytest.mark.medium
def test_unrounded_bias_is_added_in_full_precision() -> None:
    """2^-8 + 2^-16 is 2^-8 in bfloat16, and 1 + 2^-8 lies between 1 and 1 + 2^-7."""
    x = jnp.ones((1, 1), jnp.bfloat16)
    bias = jnp.asarray([2**-8 + 2**-16], jnp.float32)
    sums = [float(add_bias(x, bias, rounds_bias=rounds)[0, 0]) for rounds in (True, False)]
    assert sums == [1, 1 + 2**-7]
