"""Copy and rearrange bfloat16 values as their bits.

XLA:CPU computes nothing in bfloat16, not even slices, pads, transposes and concatenations: it
converts the array to float32, rearranges it, and rounds it back. It copies integers as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def as_bits(values: Array) -> Array:
    """bfloat16 as uint16 of the same shape; other types unchanged."""
    return lax.bitcast_convert_type(values, jnp.uint16) if _is_bfloat16(values.dtype) else values


def from_bits(bits: Array, dtype: Any) -> Array:
    """Inverse of `as_bits` for an array of that type."""
    return lax.bitcast_convert_type(bits, dtype) if _is_bfloat16(dtype) else bits


def via_bits(rearrange: Callable[..., Array], *arrays: Array) -> Array:
    """Apply `rearrange`, which only copies values or adds zeros, to arrays of one type."""
    return from_bits(rearrange(*map(as_bits, arrays)), arrays[0].dtype)


def pad_zeros(images: Array, config: tuple[tuple[int, int, int], ...]) -> Array:
    """`lax.pad` with zeros."""
    return via_bits(lambda bits: lax.pad(bits, jnp.zeros((), bits.dtype), config), images)


def _is_bfloat16(dtype: Any) -> bool:
    return jnp.dtype(dtype) == jnp.bfloat16
