"""The kernel that a convolution's images gradient slides."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def rotate_and_swap(kernel: Array, groups: int) -> Array:
    """Turned about by half a circle, channels and features changing places within each group."""
    height, width, channels, features = kernel.shape
    rotate_and_swap = jnp.flip(kernel, (0, 1)).reshape(
        height, width, channels, groups, features // groups
    )
    rotate_and_swap = rotate_and_swap.transpose(0, 1, 4, 3, 2)
    return rotate_and_swap.reshape(height, width, features // groups, groups * channels)
