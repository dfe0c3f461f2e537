"""Activations: the library's in float32, rounded once in shorter types."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.layers import standard
from pipeline.models.modules.standard import ACTIVATIONS, EXACT, activate
from tests.models.build import network
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


class Mish(standard.Activation):
    name: Literal["test_mish"] = "test_mish"

    def compute(self, x: Any, context: Any) -> Any:
        return x * jnp.tanh(jax.nn.softplus(x))


class Nameless(standard.Activation):
    name: Literal["test_nameless"] = "test_nameless"


class Doubled(standard.LeakyRelu):
    def compute(self, x: Any, context: Any) -> Any:
        return 2 * x


def test_custom_activation_is_computed_by_its_method() -> None:
    x = jnp.asarray(X)[None]
    for layer in (Mish(), Doubled()):
        y = network(layer).apply({}, x, train=False)
        np.testing.assert_array_equal(y, layer.compute(x, None))
        assert not network(layer).can_be_batch_last((1, 1, 1))
    assert network(standard.LeakyRelu()).can_be_batch_last((1, 1, 1))
    with pytest.raises(TypeError, match="layer test_nameless has no computation; its class must"):
        network(Nameless()).apply({}, x, train=False)


@pytest.mark.medium
def test_gelu_rounded_at_each_operation_is_less_accurate() -> None:
    """So that the test above would see it."""
    assert "gelu" not in EXACT
    short = jnp.asarray(X, "bfloat16")
    exact = jax.nn.gelu(short.astype(jnp.float32))
    once = jnp.abs(activate("gelu", short).astype(jnp.float32) - exact).sum()
    often = jnp.abs(jax.nn.gelu(short).astype(jnp.float32) - exact).sum()
    assert once < often
