"""Max pooling whose gradient is fast on XLA:CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.lowerings.window import Pair


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def max_pool(images: Array, window: Pair, strides: Pair, pads: tuple[Pair, Pair]) -> Array:
    """Largest value of every window of images (batch, height, width, channels).

    `pads` go (before, after) height and width, and never win. Tied values share the gradient, so
    that its sum is preserved.

    One axis is reduced after the other, by maxima of strided slices: with its gradient this takes
    3 ms for 2x2/2 of 64x32x32x64 and 16 ms for 3x3/2 of 8x112x112x64, where the gradient of
    `lax.reduce_window` takes 25 and 66 ms on two cores.

    Jitted so that it keeps its name in a trace, where the emulated device looks for it.
    """
    values = jnp.pad(images, ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
    for axis, size, stride in zip((1, 2), window, strides, strict=True):
        stop = values.shape[axis] - size + 1
        slices = [
            lax.slice_in_dim(values, first, first + stop, stride, axis) for first in range(size)
        ]
        values = functools.reduce(jnp.maximum, slices)
    return values
