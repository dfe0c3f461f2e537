"""Products in 8 bits, with current scaling: e4m3 inputs and weights, e5m2 gradients.

Each tensor is multiplied by the largest number of its type over its largest magnitude, rounded to
8 bits, and multiplied by others; float32 sums are divided by both scales (Micikevicius et al.
2022, "FP8 formats for deep learning"; NVIDIA's Transformer Engine, Float8CurrentScaling). A CPU
multiplies the rounded numbers in float32, so results are as exact as the definition. Other devices
get products of 8-bit types.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
"""Types of inputs and weights, and of gradients."""


def quantize(x: Array, dtype: Any) -> tuple[Array, Array]:
    """Return x in 8 bits, and its scale, float32 (): 1 if x is 0 or isn't finite. What isn't finite
    becomes NaN."""
    largest = float(jnp.finfo(dtype).max)
    values = x.astype(jnp.float32)
    peak = jnp.abs(values).max(initial=0)
    has_scale = (peak > 0) & jnp.isfinite(peak) & jnp.isfinite(largest / peak)
    scale = jnp.where(has_scale, largest / peak, 1)
    # A quotient that rounds up must not become infinite, and e4m3 has no infinity.
    scaled = jnp.clip(values * scale, -largest, largest)
    scaled = lax.platform_dependent(
        scaled, cpu=partial(_round_once, dtype=dtype), default=lambda numbers: numbers
    )
    return jnp.where(jnp.isfinite(values), scaled, jnp.nan).astype(dtype), scale


def _round_once(numbers: Array, dtype: Any) -> Array:
    """Return the nearest numbers that an 8-bit type has, float32; of two the even one.

    XLA may convert float32 to 8 bits by way of float16, which rounds twice on a CPU.
    """
    info = jnp.finfo(dtype)
    _, exponents = jnp.frexp(numbers)
    steps = jnp.ldexp(jnp.float32(1), jnp.maximum(exponents - 1, info.minexp) - info.nmant)
    return jnp.round(numbers / steps) * steps


def _multiply(first: Array, second: Array) -> Array:
    """Return first (rows, n) @ second (n, columns), float32, of 8-bit types."""

    def multiply_exactly(first: Array, second: Array) -> Array:
        wide = first.astype(jnp.float32), second.astype(jnp.float32)
        return lax.dot(*wide, precision=lax.Precision.HIGHEST)

    def multiply_directly(first: Array, second: Array) -> Array:
        return lax.dot_general(
            first, second, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    product: Array = lax.platform_dependent(
        first, second, cpu=multiply_exactly, default=multiply_directly
    )
    return product


@jax.custom_vjp
def multiply_float8(x: Array, kernel: Array) -> Array:
    """Return x (..., channels) @ kernel (channels, features), in the type of x. The gradient of the
    kernel has the kernel's type."""
    return _forward(x, kernel)[0]


def _forward(x: Array, kernel: Array) -> tuple[Array, Any]:
    rows, row_scale = quantize(x.reshape(-1, x.shape[-1]), FORWARD)
    weights, scale = quantize(kernel, FORWARD)
    product = _multiply(rows, weights) / (row_scale * scale)
    y = product.astype(x.dtype).reshape(*x.shape[:-1], -1)
    # Empty arrays have the types of the gradients.
    types = jnp.zeros((0,), x.dtype), jnp.zeros((0,), kernel.dtype)
    return y, (rows, row_scale, weights, scale, types)


def _backward(stored: Any, cotangent: Array) -> tuple[Array, Array]:
    rows, row_scale, weights, scale, (x_type, kernel_type) = stored
    gradients, gradient_scale = quantize(cotangent.reshape(-1, cotangent.shape[-1]), BACKWARD)
    by_x = _multiply(gradients, weights.T) / (gradient_scale * scale)
    by_kernel = _multiply(rows.T, gradients) / (row_scale * gradient_scale)
    shape = *cotangent.shape[:-1], -1
    return by_x.astype(x_type.dtype).reshape(shape), by_kernel.astype(kernel_type.dtype)


multiply_float8.defvjp(_forward, _backward)
