"""Formulas of a convolution's gradient by its kernel: (window, lowering, images, cotangent)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.lowerings.formulas import onednn
from pipeline.models.lowerings.formulas.matmuls import (
    crop,
    make_patches,
    multiply_by_rows,
    rearrange_bits,
    slice_taps,
    sum_chunks,
)
from pipeline.models.lowerings.problem import ConvWindow, Lowering, Slide

BLOCK_CHANNELS = 64
"""A block of groups that are multiplied together has at most this many channels."""


def convolution(window: ConvWindow, lowering: Lowering, images: Array, cotangent: Array) -> Array:
    """Slide the cotangent, dilated by the strides, over the images, and sum over the batch."""

    def compute(images: Array, cotangent: Array) -> Array:
        batch, height, width, channels = images.shape
        by_group = images.reshape(batch, height, width, window.groups, channels // window.groups)
        by_channel = rearrange_bits(lambda bits: bits.transpose(4, 1, 2, 3, 0), by_group).reshape(
            channels // window.groups, height, width, window.groups * batch
        )
        kernel = rearrange_bits(lambda bits: bits.transpose(1, 2, 0, 3), cotangent)
        by_channel, pads = crop(by_channel, window.weight_grad_pads)
        if lowering.engine == "onednn":
            # The cotangent is the kernel here, so strides and dilation change places.
            slide = Slide(window.dilation, pads, window.strides, window.groups)
            return onednn.convolve(by_channel, kernel, slide, jnp.float32)
        return lax.conv_general_dilated(
            by_channel,
            kernel,
            window.dilation,
            pads,
            rhs_dilation=window.strides,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=window.groups,
        )

    gradient = sum_chunks(compute, lowering.images, images, cotangent)
    return gradient.transpose(1, 2, 0, 3).astype(images.dtype)


def per_tap_matmul(
    window: ConvWindow, lowering: Lowering, images: Array, cotangent: Array
) -> Array:
    """Multiply, for each kernel position, the pixels under it by the cotangent."""
    channels = images.shape[-1]
    features = cotangent.shape[-1]

    def compute(images: Array, cotangent: Array) -> Array:
        right = cotangent.reshape(-1, features)
        return jnp.stack(
            [
                multiply_by_rows(lowering.engine, pixels.reshape(-1, channels), right)
                for pixels in slice_taps(window, images)
            ]
        )

    gradient = sum_chunks(compute, lowering.images, images, cotangent)
    return gradient.reshape(*window.kernel, channels, features).astype(images.dtype)


def im2col(window: ConvWindow, lowering: Lowering, images: Array, cotangent: Array) -> Array:
    """Multiply the patches of the images, one per row (im2col), by the cotangent."""
    channels = images.shape[-1]
    features = cotangent.shape[-1]

    def compute(images: Array, cotangent: Array) -> Array:
        rows = make_patches(window, images)
        return multiply_by_rows(lowering.engine, rows, cotangent.reshape(-1, features))

    gradient = sum_chunks(compute, lowering.images, images, cotangent)
    return gradient.reshape(*window.kernel, channels, features).astype(images.dtype)


def grouped_as_dense(
    window: ConvWindow, lowering: Lowering, images: Array, cotangent: Array
) -> Array:
    """Multiply all channels by all features of a block of groups, for each kernel position. Only
    the products within a group, on the diagonal, are used. These are more multiplications than in
    the convolution, but in large products."""
    groups = window.groups
    # `count` groups form a block: the largest divisor of `groups` with at most BLOCK_CHANNELS
    # channels.
    group_channels = max(images.shape[-1], cotangent.shape[-1]) // groups
    max_groups = max(1, BLOCK_CHANNELS // group_channels)
    count = max(n for n in range(1, groups + 1) if groups % n == 0 and n <= max_groups)
    num_blocks = groups // count

    def compute(images: Array, cotangent: Array) -> Array:
        blocks, right = (_split_channels(array, num_blocks) for array in (images, cotangent))
        right = right.reshape(num_blocks, -1, right.shape[-1])
        return jnp.stack(
            [
                multiply_by_rows(lowering.engine, pixels.reshape(*right.shape[:2], -1), right)
                for pixels in slice_taps(window, blocks)
            ]
        )

    products = sum_chunks(compute, lowering.images, images, cotangent)
    channels, features = (array.shape[-1] // groups for array in (images, cotangent))
    grid = products.reshape(-1, num_blocks, count, channels, count, features)
    diagonal = jnp.moveaxis(jnp.diagonal(grid, axis1=2, axis2=4), -1, 2)
    diagonal = diagonal.transpose(0, 3, 1, 2, 4)
    return diagonal.reshape(*window.kernel, channels, groups * features).astype(images.dtype)


def _split_channels(array: Array, blocks: int) -> Array:
    """Split channels into blocks, each with separate images: (blocks * batch, ...)."""
    split = array.reshape(*array.shape[:3], blocks, -1)
    split = rearrange_bits(lambda bits: bits.transpose(3, 0, 1, 2, 4), split)
    return split.reshape(-1, *split.shape[2:])
