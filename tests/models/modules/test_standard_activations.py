"""Activations: the library's in float32, rounded once in shorter types."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.modules.standard import ACTIVATIONS, EXACT, activate
from tests.slow_cases import mark_slow_except

X = np.linspace(-6, 6, 241, dtype=np.float32)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_in_float32_is_the_plain_function(name: str) -> None:
    np.testing.assert_array_equal(activate(name, jnp.asarray(X)), ACTIVATIONS[name](X))


@pytest.mark.medium
@pytest.mark.parametrize("name", mark_slow_except([*ACTIVATIONS][:1], ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activation_in_half_precision_is_rounded_once(name: str, dtype: str) -> None:
    short = jnp.asarray(X, dtype)
    wide = short.astype(jnp.float32)
    y, backward = jax.vjp(lambda x: activate(name, x), short)
    expected, wide_backward = jax.vjp(ACTIVATIONS[name], wide)
    ones = jnp.ones_like(short)
    np.testing.assert_array_equal(y, expected.astype(dtype))
    (by_x,), (wide_by_x,) = backward(ones), wide_backward(jnp.ones_like(wide))
    # Forward and reverse mode add up the derivative in different orders, at times 1 bit apart.
    np.testing.assert_allclose(
        by_x.astype(np.float32), wide_by_x, rtol=float(jnp.finfo(dtype).eps), atol=1e-6
    )


@pytest.mark.medium
def test_gelu_rounded_at_each_operation_is_less_accurate() -> None:
    """So that the test above would see it."""
    assert "gelu" not in EXACT
    short = jnp.asarray(X, "bfloat16")
    exact = jax.nn.gelu(short.astype(jnp.float32))
    once = jnp.abs(activate("gelu", short).astype(jnp.float32) - exact).sum()
    often = jnp.abs(jax.nn.gelu(short).astype(jnp.float32) - exact).sum()
    assert once < often
