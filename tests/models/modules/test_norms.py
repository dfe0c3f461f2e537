from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Flatten, GroupNorm, LayerNorm, RmsNorm
from tests.models.build import network, random
from tests.models.modules.test_standard import IMAGES, images_out


@pytest.mark.slow
def test_layer_norm_normalises_every_position_over_its_channels() -> None:
    y, _ = images_out(LayerNorm(epsilon=0.1))
    mean, variance = IMAGES.mean(-1, keepdims=True), IMAGES.var(-1, keepdims=True)
    expected = (IMAGES - mean) / np.sqrt(variance + 0.1)
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [LayerNorm(), GroupNorm(groups=2, epsilon=1e-7)])
@pytest.mark.parametrize("mean", [1, 30, 1000])
def test_norms_keep_digits_of_means_far_from_zero(layer: LayerSpec, mean: int) -> None:
    """Promise: an error of at most 1e-6 and 4e-7 of mean / deviation, of y and of its gradient."""
    images = (mean + random(8, 6, 5, 64)).astype(np.float32)
    weights = random(8, 6, 5, 64)
    module = network(layer)
    variables = module.init(jax.random.key(0), images, train=False)

    def normalise(x: Any) -> Any:
        return module.apply(variables, x, train=False)

    y, differentiate = jax.vjp(jax.jit(normalise), images)
    groups = getattr(layer, "groups", None)
    shape = (8, 6, 5, 1, 64) if groups is None else (8, 1, 30, groups, 64 // groups)
    axes = (4,) if groups is None else (2, 4)

    def average(x: np.ndarray) -> np.ndarray:
        return x.mean(axes, keepdims=True)

    exact, cotangent = (array.reshape(shape).astype(float) for array in (images, weights))
    deviation = np.sqrt(average((exact - average(exact)) ** 2) + 1e-7)
    expected = (exact - average(exact)) / deviation
    gradient = cotangent - average(cotangent) - expected * average(expected * cotangent)
    atol = 1e-6 + 4e-7 * mean  # The deviation is 1.
    np.testing.assert_allclose(y.reshape(shape), expected, rtol=0, atol=atol)
    (computed,) = differentiate(jnp.asarray(weights))
    np.testing.assert_allclose(computed.reshape(shape), gradient / deviation, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_rms_norm_divides_by_the_root_of_the_mean_square(dtype: str, tolerance: float) -> None:
    """A 16-bit result is the exact one, rounded once."""
    x = np.asarray(jnp.asarray(40 * IMAGES, dtype).astype(np.float32)).reshape(3, 30, 4)
    module = network(RmsNorm(epsilon=0.1), Flatten(), dtype=dtype)
    scale = np.array([1, 2, -0.5, 3], np.float32)
    y = module.apply({"params": {"rms_norm_0": {"scale": scale}}}, x, train=False)
    exact = x.astype(float)
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 0.1) * scale
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=tolerance)


@pytest.mark.slow
def test_group_norm_normalises_every_sample_over_a_group() -> None:
    y, _ = images_out(GroupNorm(groups=2, epsilon=0.1))
    grouped = IMAGES.reshape(3, 6, 5, 2, 2)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    expected = (grouped - mean) / np.sqrt(grouped.var((1, 2, 4), keepdims=True) + 0.1)
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-4, atol=1e-5)
