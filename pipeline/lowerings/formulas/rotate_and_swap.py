"""The kernel that a convolution's images gradient slides."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def turned(kernel: Array, groups: int) -> Array:
    """Turned about by half a circle, channels and features changing places within each group."""
    height, width, channels, features = kernel.shape
    turned = jnp.flip(kernel, (0, 1)).reshape(height, width, channels, groups, features // groups)
    turned = turned.transpose(0, 1, 4, 3, 2)
    return turned.reshape(height, width, features // groups, groups * channels)
