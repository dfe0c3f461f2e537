"""Ways to slide a kernel over images: (window, lowering, images, kernel) -> result."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from pipeline.lowerings.formulas.bf16_bits import via_bits
from pipeline.lowerings.formulas.matmuls import convolve, multiply, over_chunks, patches, shifted
from pipeline.lowerings.problem.conv_window import Window
from pipeline.lowerings.problem.lowering import Lowering


def by_convolution(window: Window, how: Lowering, images: Array, kernel: Array) -> Array:
    """The engine's own convolution."""
    return convolve(
        how.engine,
        images,
        kernel,
        window.strides,
        window.pads,
        window.dilation,
        window.groups,
    )


def im2col(window: Window, how: Lowering, images: Array, kernel: Array) -> Array:
    """im2col: every patch of the images in a row, times the kernel as a matrix."""
    features = kernel.shape[-1]
    matrix = kernel.reshape(-1, features)

    def compute(chunk: Array) -> Array:
        product = multiply(how.engine, patches(window, chunk), matrix)
        return product.reshape(chunk.shape[0], *window.output_size, features)

    return over_chunks(compute, how.images, images)


def pointwise(window: Window, how: Lowering, images: Array, kernel: Array) -> Array:
    """A kernel of one pixel is a matrix that all pixels are multiplied by."""
    down, across = window.strides
    seen = via_bits(lambda bits: bits[:, ::down, ::across], images)
    product = multiply(how.engine, seen.reshape(-1, seen.shape[-1]), kernel[0, 0])
    return product.reshape(*seen.shape[:3], kernel.shape[-1])


def shifted_sum(window: Window, how: Lowering, images: Array, kernel: Array) -> Array:
    """The sum, over positions in the kernel and channels, of shifted images times a weight each.

    No product of matrices: with one to four channels, of all images or of a group, those find too
    little to sum over. Summed in float32.
    """
    channels, features = kernel.shape[2:]
    weights = kernel.reshape(-1, channels, window.groups, features // window.groups)
    weights = weights.astype(jnp.float32)
    terms = (
        _of_groups(pixels, window.groups)[..., channel, None] * weights[position, channel]
        for position, pixels in enumerate(shifted(window, images.astype(jnp.float32)))
        for channel in range(channels)
    )
    whole = functools.reduce(jnp.add, terms).reshape(
        *images.shape[:1], *window.output_size, features
    )
    return whole.astype(images.dtype)


def _of_groups(pixels: Array, groups: int) -> Array:
    return pixels.reshape(*pixels.shape[:3], groups, -1)
