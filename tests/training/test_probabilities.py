"""Networks that end in probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from pipeline.training.probabilities import find_probabilities

X = jnp.ones((2, 3))


def exponents(x: Any) -> Any:
    """A softmax that is written by hand."""
    return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)


def pair(x: Any) -> Any:
    """Probabilities of two classes."""
    p = jax.nn.sigmoid(x[:, :1])
    return jnp.concatenate([1 - p, p], 1)


def shift(x: Any) -> Any:
    """A softmax that computes each part twice."""
    return jnp.exp(x - x.max(-1, keepdims=True)) / exponents_sum(x)


def exponents_sum(x: Any) -> Any:
    return jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)


def printed(x: Any) -> Any:
    """A softmax after an equation without results."""
    jax.debug.print("{}", x)
    return jax.nn.softmax(x)


def other_sum(x: Any) -> Any:
    """A quotient of exponents of two inputs, by one jitted function."""
    exponent = jax.jit(lambda x: jnp.exp(x))
    return exponent(x) / exponent(x + 1).sum(-1, keepdims=True)


def other_pair(x: Any) -> Any:
    p = jax.nn.sigmoid(x[:, :1])
    return jnp.concatenate([1 - jax.nn.sigmoid(x[:, 1:2]), p], 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (jax.nn.softmax, "softmax"),
        (exponents, "softmax"),
        (lambda x: nn.softmax(x @ jnp.eye(3)).astype("bfloat16").reshape(1, 2, 3), "softmax"),
        (lambda x: jax.nn.softmax(x.T[None], 1).swapaxes(1, 2), "softmax"),
        (lambda x: jax.nn.softmax(x[:, None])[:, 0], "softmax"),
        (lambda x: jax.nn.softmax(x, 0), None),
        (lambda x: jax.nn.softmax(x, (0, 1)), None),
        (lambda x: jax.nn.softmax(x.reshape(1, 2, 3, 1), (1, 2)), None),
        (lambda x: jax.nn.softmax(x).T, None),
        (lambda x: jax.nn.softmax(x).reshape(-1), None),
        (lambda x: jnp.concatenate([1 - jax.nn.sigmoid(x), jax.nn.sigmoid(x)], 0), None),
        (jax.jit(jax.jit(jax.nn.softmax)), "softmax"),
        (jax.nn.sigmoid, "sigmoid"),
        (printed, "softmax"),
        (pair, "sigmoid"),
        (shift, "softmax"),
        (lambda x: pair(x)[:, ::1], "sigmoid"),
        (jax.nn.log_softmax, None),
        (lambda x: jnp.exp(x) / x.sum(-1, keepdims=True), None),
        (lambda x: jnp.exp(x) / jnp.exp(x + 1).sum(-1, keepdims=True), None),
        (other_sum, None),
        (other_pair, None),
        (lambda x: jnp.concatenate([jax.nn.sigmoid(x), x - 3], 1), None),
        (lambda x: jnp.concatenate([jax.nn.sigmoid(x), 2 - jax.nn.sigmoid(x)], 1), None),
        (lambda x: jnp.concatenate([np.ones((2, 3)) - x, jax.nn.sigmoid(x)], 1), None),
        (jax.nn.silu, None),
        (lambda x: x / x.sum(), None),
        (lambda x: jax.nn.softmax(x) @ jnp.eye(3), None),
        (lambda x: x, None),
    ],
)
def test_last_activation_is_recognised(function: Callable[..., Any], expected: str | None) -> None:
    assert find_probabilities(jax.make_jaxpr(function)(X)) == expected
