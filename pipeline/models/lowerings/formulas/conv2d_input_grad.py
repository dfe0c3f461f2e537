"""Formulas of a convolution's gradient by its input: (window, lowering, kernel, cotangent)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.lowerings.formulas.conv2d_forward import shifted_sum as forward_shifted_sum
from pipeline.models.lowerings.formulas.matmuls import (
    as_bits,
    convolve,
    from_bits,
    multiply,
    pad_zeros,
)
from pipeline.models.lowerings.problem import ConvWindow, Lowering, Pair, Slide


def convolution(window: ConvWindow, lowering: Lowering, kernel: Array, cotangent: Array) -> Array:
    """Slide the flipped kernel over the cotangent, which is dilated by the strides."""
    flipped = rotate_and_swap(kernel, window.groups)
    if lowering.engine == "xla":
        return slide(window, flipped, cotangent)
    spread = _dilate(cotangent, window.strides)
    return convolve("onednn", spread, flipped, window.transpose.slide)


def slide(window: ConvWindow, flipped: Array, cotangent: Array) -> Array:
    """Slide a flipped kernel over the dilated cotangent; negative pads crop the result."""
    pads = window.input_grad_pads
    rows, columns = ((max(before, 0), max(after, 0)) for before, after in pads)
    gradient = lax.conv_general_dilated(
        cotangent,
        flipped,
        (1, 1),
        (rows, columns),
        lhs_dilation=window.strides,
        rhs_dilation=window.dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=window.groups,
    )
    top, left = (max(-before, 0) for before, _ in pads)
    return gradient[:, top : top + window.rows.size, left : left + window.columns.size]


def phases(window: ConvWindow, lowering: Lowering, kernel: Array, cotangent: Array) -> Array:
    """Compute one convolution for each phase of the stride, so that no zeros are multiplied. A
    phase is the image rows (columns) that are a stride apart. The same kernel rows reach them."""
    down, across = window.strides
    grads = [
        _compute_phase(window, lowering, kernel, cotangent, (row, column))
        for row in range(down)
        for column in range(across)
    ]
    return from_bits(_interleave(window, list(map(as_bits, grads))), grads[0].dtype)


def pointwise(window: ConvWindow, lowering: Lowering, kernel: Array, cotangent: Array) -> Array:
    """Multiply by the transpose of a kernel of one pixel; pixels that strides skip are 0."""
    product = multiply(lowering.engine, cotangent.reshape(-1, cotangent.shape[-1]), kernel[0, 0].T)
    pixels = product.reshape(*cotangent.shape[:3], kernel.shape[2])
    rows, columns = (
        (0, axis.size - 1 - axis.last_offset, axis.stride - 1)
        for axis in (window.rows, window.columns)
    )
    return pad_zeros(pixels, ((0, 0, 0), rows, columns, (0, 0, 0)))


def shifted_sum(window: ConvWindow, lowering: Lowering, kernel: Array, cotangent: Array) -> Array:
    """Sum shifted cotangents, each times a weight."""
    spread = _dilate(cotangent, window.strides)
    rotated = rotate_and_swap(kernel, window.groups)
    return forward_shifted_sum(window.transpose, lowering, spread, rotated)


def _dilate(cotangent: Array, strides: Pair) -> Array:
    if strides == (1, 1):
        return cotangent
    steps = ((0, 0, stride - 1) for stride in strides)
    return pad_zeros(cotangent, ((0, 0, 0), *steps, (0, 0, 0)))


def _compute_phase(
    window: ConvWindow, lowering: Lowering, kernel: Array, cotangent: Array, offsets: Pair
) -> Array:
    """Return rows and columns of the padded images' gradient with index % stride = `offsets`."""
    row, column = offsets
    down, across = window.strides
    part = kernel[row::down, column::across]
    # Rows and columns of one phase of the padded images.
    height = ceil((window.rows.size + sum(window.rows.pads)) / down)
    width = ceil((window.columns.size + sum(window.columns.pads)) / across)
    if 0 in part.shape:
        shape = (cotangent.shape[0], height, width, kernel.shape[2] * window.groups)
        return jnp.zeros(shape, cotangent.dtype)
    row_pads = (part.shape[0] - 1, height - window.rows.output_size)
    column_pads = (part.shape[1] - 1, width - window.columns.output_size)
    flipped = rotate_and_swap(part, window.groups)
    over_phase = Slide(pads=(row_pads, column_pads), groups=window.groups)
    return convolve(lowering.engine, cotangent, flipped, over_phase)


def _interleave(window: ConvWindow, phases: Sequence[Array]) -> Array:
    """Interleave rows and columns of the phases, and crop to the images."""
    down, across = window.strides
    batch, height, width, channels = phases[0].shape
    rows = [jnp.stack(phases[i : i + across], axis=3) for i in range(0, down * across, across)]
    padded = jnp.stack(rows, axis=2).reshape(batch, height * down, width * across, channels)
    top = window.rows.pads[0]
    left = window.columns.pads[0]
    return padded[:, top : top + window.rows.size, left : left + window.columns.size]


def rotate_and_swap(kernel: Array, groups: int) -> Array:
    """Rotate a kernel HWIO by 180 degrees, and swap channels and features within each group."""
    height, width, channels, features = kernel.shape
    rotated = jnp.flip(kernel, (0, 1)).reshape(height, width, channels, groups, features // groups)
    swapped = rotated.transpose(0, 1, 4, 3, 2)
    return swapped.reshape(height, width, features // groups, groups * channels)
