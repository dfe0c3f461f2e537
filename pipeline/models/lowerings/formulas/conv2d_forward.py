"""Formulas of a convolution's result: (window, lowering, images, kernel) -> result."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from pipeline.models.lowerings.formulas.matmuls import (
    convolve,
    make_patches,
    map_chunks,
    multiply,
    rearrange_bits,
    slice_taps,
)
from pipeline.models.lowerings.problem import ConvWindow, Lowering


def convolution(window: ConvWindow, lowering: Lowering, images: Array, kernel: Array) -> Array:
    """Convolve by the engine."""
    return convolve(lowering.engine, images, kernel, window.slide)


def im2col(window: ConvWindow, lowering: Lowering, images: Array, kernel: Array) -> Array:
    """Multiply the patches of the images, one per row (im2col), by the kernel as a matrix."""
    features = kernel.shape[-1]
    matrix = kernel.reshape(-1, features)

    def compute(chunk: Array) -> Array:
        product = multiply(lowering.engine, make_patches(window, chunk), matrix)
        return product.reshape(chunk.shape[0], *window.output_size, features)

    return map_chunks(compute, lowering.images, images)


def pointwise(window: ConvWindow, lowering: Lowering, images: Array, kernel: Array) -> Array:
    """Multiply the pixels, one per row, by a kernel of one pixel as a matrix."""
    down, across = window.strides
    pixels = rearrange_bits(lambda bits: bits[:, ::down, ::across], images)
    product = multiply(lowering.engine, pixels.reshape(-1, pixels.shape[-1]), kernel[0, 0])
    return product.reshape(*pixels.shape[:3], kernel.shape[-1])


def shifted_sum(window: ConvWindow, lowering: Lowering, images: Array, kernel: Array) -> Array:
    """Sum shifted images, each times a weight, over kernel positions and channels, in float32.

    With one to four channels in a group this is faster than a matrix product, which would sum too
    few terms.
    """
    channels, features = kernel.shape[2:]
    weights = kernel.reshape(-1, channels, window.groups, features // window.groups)
    weights = weights.astype(jnp.float32)
    terms = (
        pixels.reshape(*pixels.shape[:3], window.groups, -1)[..., channel, None]
        * weights[position, channel]
        for position, pixels in enumerate(slice_taps(window, images.astype(jnp.float32)))
        for channel in range(channels)
    )
    result = functools.reduce(jnp.add, terms)
    result = result.reshape(images.shape[0], *window.output_size, features)
    return result.astype(images.dtype)
