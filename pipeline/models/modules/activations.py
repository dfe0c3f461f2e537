"""Activations by name. A 16-bit result is rounded only once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "swish": jax.nn.swish,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
}
EXACT = ("relu", "relu6")
"""Activations whose results need no rounding in any type."""


def activate(name: str, x: Array) -> Array:
    """Apply an activation to each value; the result has the type of x.

    For bfloat16 and float16 the activation and its derivative are computed in float32 and rounded
    once, since on a CPU the rounding of an operation takes longer than the operation. The
    derivative is stored for the backward pass, so forward mode isn't supported in these types.
    """
    if name in EXACT or x.dtype.itemsize >= 4:
        return ACTIVATIONS[name](x)
    return _round_once(name, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _round_once(name: str, x: Array) -> Array:
    return ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype)


def _forward(name: str, x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.float32)
    y, derivative = jax.jvp(ACTIVATIONS[name], (wide,), (jnp.ones_like(wide),))
    return y.astype(x.dtype), derivative.astype(x.dtype)


def _backward(name: str, derivative: Array, cotangent: Array) -> tuple[Array]:
    return (cotangent * derivative,)


_round_once.defvjp(_forward, _backward)
