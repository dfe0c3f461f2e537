from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.lowerings import lowered_layers
from pipeline.models.lowerings.lowered_layers import FEW_FEATURES, multiply_dense
from tests.models.build import random


def gradients(
    product: Callable[..., jax.Array], inputs: np.ndarray, kernel: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Of the sum of squares of a product."""

    def squares(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        return (product(inputs, kernel) ** 2).sum()

    return jax.jit(jax.grad(squares, argnums=(0, 1)))(inputs, kernel)


def assert_derived(inputs: np.ndarray, kernel: np.ndarray) -> None:
    ours = gradients(multiply_dense, inputs, kernel)
    derived = gradients(jnp.matmul, inputs, kernel)
    for our, theirs in zip(ours, derived, strict=True):
        np.testing.assert_allclose(our, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.slow
@pytest.mark.parametrize("features", [1, 10, FEW_FEATURES, FEW_FEATURES + 1])
def test_gradients_match_jax(features: int) -> None:
    assert_derived(random(6, 17), random(17, features, seed=1))


def test_token_gradients_match_jax() -> None:
    assert_derived(random(3, 5, 17), random(17, 10, seed=1))


def test_gradients_on_other_platforms_match_jax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elsewhere(*operands: jax.Array, cpu: Any, default: Callable[..., Any]) -> Any:
        return default(*operands)

    inputs, kernel = random(6, 17), random(17, 10, seed=1)
    expected = gradients(jnp.matmul, inputs, kernel)
    monkeypatch.setattr(lowered_layers.lax, "platform_dependent", elsewhere)
    for ours, derived in zip(gradients(multiply_dense, inputs, kernel), expected, strict=True):
        np.testing.assert_array_equal(ours, derived)


@pytest.mark.parametrize(("features", "turned"), [(10, 1), (FEW_FEATURES + 1, 0)])
def test_kernel_gradient_of_few_features_is_transposed_in_a_call(
    features: int, turned: int
) -> None:
    def gradient(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.grad(lambda kernel: jnp.sin(multiply_dense(inputs, kernel)).sum())(kernel)

    text = jax.jit(gradient).lower(random(6, 170), random(170, features)).compile().as_text()
    assert text is not None
    assert len(re.findall(r" call\(.*transpose", text)) == turned
