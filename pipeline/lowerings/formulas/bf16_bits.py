"""Values of bfloat16 moved about as the bits that they are.

XLA:CPU computes nothing in bfloat16, and takes slices, pads, transposes and joins for computations:
it converts a whole array to float32, moves that, and rounds it back. Bits it moves as they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def as_bits(values: Array) -> Array:
    """bfloat16 as uint16 of the same shape; other types as they are."""
    return lax.bitcast_convert_type(values, jnp.uint16) if _is_bfloat16(values.dtype) else values


def from_bits(bits: Array, dtype: Any) -> Array:
    """Back from `as_bits` of an array of that type."""
    return lax.bitcast_convert_type(bits, dtype) if _is_bfloat16(dtype) else bits


def via_bits(move: Callable[..., Array], *arrays: Array) -> Array:
    """`move` of arrays of one type, which puts their values elsewhere or zeros beside them."""
    return from_bits(move(*map(as_bits, arrays)), arrays[0].dtype)


def padded(images: Array, config: tuple[tuple[int, int, int], ...]) -> Array:
    """`lax.pad` with zeros."""
    return via_bits(lambda bits: lax.pad(bits, jnp.zeros((), bits.dtype), config), images)


def _is_bfloat16(dtype: Any) -> bool:
    return jnp.dtype(dtype) == jnp.bfloat16
