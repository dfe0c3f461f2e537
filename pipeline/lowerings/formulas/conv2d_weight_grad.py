"""Ways to bring a result's cotangent back to the kernel: (window, lowering, images, cotangent)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pipeline.lowerings.formulas import onednn
from pipeline.lowerings.formulas.bf16_bits import via_bits
from pipeline.lowerings.formulas.matmuls import crop, in_chunks, multiply_by_rows, patches, shifted
from pipeline.lowerings.problem.conv_window import Window
from pipeline.lowerings.problem.lowering import Lowering

BLOCK_CHANNELS = 64
"""Of groups that are multiplied together."""


def by_convolution(window: Window, how: Lowering, images: Array, cotangent: Array) -> Array:
    """Slide the cotangent, spread by the strides, over the images; the batch is what is summed."""

    def compute(images: Array, cotangent: Array) -> Array:
        batch, height, width, channels = images.shape
        by_group = images.reshape(batch, height, width, window.groups, channels // window.groups)
        by_channel = via_bits(lambda bits: bits.transpose(4, 1, 2, 3, 0), by_group).reshape(
            channels // window.groups, height, width, window.groups * batch
        )
        kernel = via_bits(lambda bits: bits.transpose(1, 2, 0, 3), cotangent)
        if how.engine == "onednn":
            return _onednn(window, by_channel, kernel)
        return _xla(window, by_channel, kernel)

    gradient = in_chunks(compute, how.images, images, cotangent)
    return gradient.transpose(1, 2, 0, 3).astype(images.dtype)


def _xla(window: Window, by_channel: Array, kernel: Array) -> Array:
    by_channel, pads = crop(by_channel, window.kernel_gradient_pads)
    return lax.conv_general_dilated(
        by_channel,
        kernel,
        window.dilation,
        pads,
        rhs_dilation=window.strides,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=window.groups,
    )


def _onednn(window: Window, by_channel: Array, kernel: Array) -> Array:
    by_channel, pads = crop(by_channel, window.kernel_gradient_pads)
    return onednn.convolve(
        by_channel,
        kernel,
        window.dilation,
        pads,
        window.strides,
        window.groups,
        jnp.float32,
    )


def per_tap_matmul(window: Window, how: Lowering, images: Array, cotangent: Array) -> Array:
    """One product for each position in the kernel: the pixels it met times the cotangent."""
    channels, features = images.shape[-1], cotangent.shape[-1]

    def compute(images: Array, cotangent: Array) -> Array:
        right = cotangent.reshape(-1, features)
        return jnp.stack(
            [
                multiply_by_rows(how.engine, pixels.reshape(-1, channels), right)
                for pixels in shifted(window, images)
            ]
        )

    gradient = in_chunks(compute, how.images, images, cotangent)
    return gradient.reshape(*window.kernel, channels, features).astype(images.dtype)


def im2col(window: Window, how: Lowering, images: Array, cotangent: Array) -> Array:
    """im2col: every patch of the images in a row, all rows times the cotangent at once."""
    channels, features = images.shape[-1], cotangent.shape[-1]

    def compute(images: Array, cotangent: Array) -> Array:
        rows = patches(window, images)
        return multiply_by_rows(how.engine, rows, cotangent.reshape(-1, features))

    gradient = in_chunks(compute, how.images, images, cotangent)
    return gradient.reshape(*window.kernel, channels, features).astype(images.dtype)


def grouped_as_dense(window: Window, how: Lowering, images: Array, cotangent: Array) -> Array:
    """Several groups at a time: one product for each position in the kernel and block of groups,
    of which what lies within a group is kept. More products than are needed, but large ones."""
    groups, count = window.groups, _groups_in_a_block(window.groups, images, cotangent)

    def compute(images: Array, cotangent: Array) -> Array:
        blocks, right = (_split(array, groups // count) for array in (images, cotangent))
        right = right.reshape(groups // count, -1, right.shape[-1])
        return jnp.stack(
            [
                multiply_by_rows(how.engine, pixels.reshape(*right.shape[:2], -1), right)
                for pixels in shifted(window, blocks)
            ]
        )

    products = in_chunks(compute, how.images, images, cotangent)
    channels, features = (array.shape[-1] // groups for array in (images, cotangent))
    grid = products.reshape(-1, groups // count, count, channels, count, features)
    within = jnp.moveaxis(jnp.diagonal(grid, axis1=2, axis2=4), -1, 2)
    within = within.transpose(0, 3, 1, 2, 4)
    return within.reshape(*window.kernel, channels, groups * features).astype(images.dtype)


def _groups_in_a_block(groups: int, images: Array, cotangent: Array) -> int:
    """As many as divide them all and have no more channels than `BLOCK_CHANNELS`, one at least."""
    largest = max(images.shape[-1], cotangent.shape[-1]) // groups
    return max(
        n
        for n in range(1, groups + 1)
        if groups % n == 0 and (n == 1 or n * largest <= BLOCK_CHANNELS)
    )


def _split(array: Array, blocks: int) -> Array:
    """Images whose channels are in blocks as that many times as many images: (blocks * B, ...)."""
    split = array.reshape(*array.shape[:3], blocks, -1)
    split = via_bits(lambda bits: bits.transpose(3, 0, 1, 2, 4), split)
    return split.reshape(-1, *split.shape[2:])
