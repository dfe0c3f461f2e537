"""Products in 8 bits against ml_dtypes' rounding, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pipeline.models.layers.standard import Dense, GatedMlp
from pipeline.models.layers.tokens import SelfAttention
from pipeline.models.modules.float8 import FORWARD, multiply_float8, quantize
from tests.models.build import initialise, network, random

X, KERNEL, COTANGENT = 3 * random(5, 7, 12), 0.02 * random(12, 9, seed=1), random(5, 7, 9, seed=2)


def round_scaled(x: np.ndarray, dtype: Any, largest: float) -> np.ndarray:
    """The numbers that x is rounded to, float64."""
    scale = np.float32(largest) / np.abs(x).max()
    return (x * scale).astype(dtype).astype(np.float64) / np.float64(scale)


def test_products_and_gradients_are_those_of_rounded_tensors() -> None:
    x = round_scaled(X, ml_dtypes.float8_e4m3fn, 448).reshape(35, 12)
    kernel = round_scaled(KERNEL, ml_dtypes.float8_e4m3fn, 448)
    cotangent = round_scaled(COTANGENT, ml_dtypes.float8_e5m2, 57344).reshape(35, 9)
    y, backward = jax.vjp(multiply_float8, jnp.asarray(X), jnp.asarray(KERNEL))
    by_x, by_kernel = backward(jnp.asarray(COTANGENT))
    assert y.shape == (5, 7, 9)
    np.testing.assert_allclose(y.reshape(35, 9), x @ kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_x.reshape(35, 12), cotangent @ kernel.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_kernel, x.T @ cotangent, rtol=1e-5, atol=1e-5)
    assert np.abs(y - X @ KERNEL).max() > 1e-3


def test_results_have_the_types_of_the_operands() -> None:
    x, kernel = jnp.asarray(X, jnp.bfloat16), jnp.asarray(KERNEL)
    y, backward = jax.vjp(multiply_float8, x, kernel)
    by_x, by_kernel = backward(y)
    assert (y.dtype, by_x.dtype, by_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("value", [0.0, 1e-44, 3e38])
def test_extreme_peaks_neither_overflow_nor_lose_zeros(value: float) -> None:
    numbers, scale = quantize(jnp.array([0.0, value]), FORWARD)
    assert np.isfinite(scale)
    assert numbers[0] == 0
    assert np.isfinite(numbers.astype(jnp.float32)).all()


@pytest.mark.medium
def test_all_dense_layers_of_a_network_are_rounded() -> None:
    layers = (SelfAttention(heads=2), GatedMlp(hidden=8), Dense(features=3))
    plain = network(*layers)
    x = random(2, 5, 6)
    variables = initialise(plain, x)
    rounded = plain.clone(products="float8")
    text = str(jax.make_jaxpr(lambda x: rounded.apply(variables, x, train=True))(x))
    # Each of the products of attention, gated MLP and dense layer rounds two tensors.
    assert text.count("new_dtype=float8_e4m3fn") == 2 * (4 + 3 + 1)
    exact, found = (module.apply(variables, x, train=True) for module in (plain, rounded))
    assert 1e-4 < np.abs(found - exact).max() < 0.3 * np.abs(exact).max()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_make_results_that_are_not_numbers(value: float) -> None:
    x = jnp.asarray(X).at[0, 0, 0].set(value)
    y = multiply_float8(x, jnp.asarray(KERNEL))
    assert np.isnan(y[0, 0]).all()
    assert np.isfinite(y[1:]).all()
