"""The kernel of a convolution's gradient by its input."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def rotate_and_swap(kernel: Array, groups: int) -> Array:
    """Rotate a kernel HWIO by 180 degrees, and swap channels and features within each group."""
    height, width, channels, features = kernel.shape
    rotated = jnp.flip(kernel, (0, 1)).reshape(height, width, channels, groups, features // groups)
    swapped = rotated.transpose(0, 1, 4, 3, 2)
    return swapped.reshape(height, width, features // groups, groups * channels)
