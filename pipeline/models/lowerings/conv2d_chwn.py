"""Convolution of images whose batch is the innermost axis, as a few products of matrices.

A few channels don't fill the processor's vectors, but the batch does. In the layout CHWN a row of
an image is one contiguous block with all samples. So the patches of the images (im2col) are copies
of long blocks, and each of the three computations is one product of matrices:

    forward           kernel (features, window) x patches (window, positions)
    weight gradient   patches (window, positions) x cotangent (positions, features)
    input gradient    kernel (rows * channels, columns * features) x shifted cotangents; the rows of
                      the product are then added where they overlap

A window holds kernel rows, kernel columns and channels, and positions hold the height and the width
of the result and the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from pipeline.models.lowerings.problem import ConvWindow, Pair, make_window


def conv2d_chwn(
    images: Array,
    kernel: Array,
    *,
    strides: Pair = (1, 1),
    padding: str | Sequence[Pair] = "SAME",
    dilation: Pair = (1, 1),
) -> Array:
    """Convolve images (channels, height, width, batch) with a kernel of the same dtype.

    The kernel is HWIO: (height, width, channels, features). The result has shape (features, height,
    width, batch). `padding` is "SAME", "VALID" or the numbers of zeros ((top, bottom), (left,
    right)); `dilation` spreads the kernel. Computations are in float32; the result and the
    gradients are rounded to their operand's dtype. Forward-mode differentiation isn't supported.
    """
    _, height, width, _ = images.shape
    rows, columns, _, _ = kernel.shape
    window = make_window((height, width), (rows, columns), strides, padding, dilation, 1)
    # XLA:CPU computes bfloat16 in float32 and rounds after every operation, also after copies.
    result = _conv2d(window, images.astype(jnp.float32), kernel.astype(jnp.float32))
    return result.astype(images.dtype)


Residuals = tuple[Array, Array, Array | None]
"""The images, the kernel, and the patches or None."""


def _forward(window: ConvWindow, images: Array, kernel: Array) -> tuple[Array, Residuals]:
    # With one channel a product sums too few terms: a sum of shifted images takes a third as long.
    if kernel.shape[2] == 1:
        with _forbid_inlining():
            return _sum_shifted(window, images, kernel), (images, kernel, None)
    patches = _make_patches(window, images)
    with _forbid_inlining():
        return _multiply_patches(window, patches, kernel), (images, kernel, patches)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv2d(window: ConvWindow, images: Array, kernel: Array) -> Array:
    return _forward(window, images, kernel)[0]


def _backward(window: ConvWindow, residuals: Residuals, cotangent: Array) -> tuple[Array, Array]:
    images, kernel, patches = residuals
    if patches is None:
        patches = _make_patches(window, images)
    with _forbid_inlining():
        kernel_grad = _compute_weight_grad(patches, cotangent)
    return _compute_input_grad(window, kernel, cotangent), kernel_grad.reshape(kernel.shape)


_conv2d.defvjp(_forward, _backward)


def _forbid_inlining() -> AbstractContextManager[None]:
    """Return a context in which XLA fuses nothing into or out of a jitted function. XLA:CPU would
    otherwise recompute cheap values for every reader, and compute a result that ends in a reshape
    one element at a time."""
    return set_xla_metadata(inlineable="false")


_jit = functools.partial(jax.jit, static_argnums=0)


@_jit
def _sum_shifted(window: ConvWindow, images: Array, kernel: Array) -> Array:
    """Return the sum of shifted images, each times a weight per feature."""
    padded = _pad(window, images)
    terms = (
        kernel[i, j, channel][:, None, None, None]
        * padded[channel, window.rows.slice_tap(i), window.columns.slice_tap(j)]
        for i in range(window.rows.kernel)
        for j in range(window.columns.kernel)
        for channel in range(kernel.shape[2])
    )
    return functools.reduce(jnp.add, terms)


def _pad(window: ConvWindow, images: Array) -> Array:
    config = ((0, 0, 0), (*window.rows.pads, 0), (*window.columns.pads, 0), (0, 0, 0))
    return lax.pad(images, jnp.zeros((), images.dtype), config)


def _make_patches(window: ConvWindow, images: Array) -> Array:
    """Return the patches: (kernel rows * kernel columns * channels, height * width * batch). Images
    are shifted along the width, then whole rows along the height. This takes half the time of one
    shift for every kernel position."""
    with _forbid_inlining():
        return _shift_rows(window, _shift_columns(window, images))


@_jit
def _shift_columns(window: ConvWindow, images: Array) -> Array:
    """Stack shifted images: (kernel columns * channels, padded height, width * batch)."""
    padded = _pad(window, images)
    taps = [padded[:, :, window.columns.slice_tap(j)] for j in range(window.columns.kernel)]
    shifted = jnp.concatenate(taps)
    return shifted.reshape(*shifted.shape[:2], -1)


@_jit
def _shift_rows(window: ConvWindow, shifted: Array) -> Array:
    rows = [shifted[:, window.rows.slice_tap(i)] for i in range(window.rows.kernel)]
    return jnp.concatenate([row.reshape(row.shape[0], -1) for row in rows])


@_jit
def _multiply_patches(window: ConvWindow, patches: Array, kernel: Array) -> Array:
    features = kernel.shape[-1]
    product = kernel.reshape(-1, features).T @ patches
    return product.reshape(features, *window.output_size, -1)


@jax.jit
def _compute_weight_grad(patches: Array, cotangent: Array) -> Array:
    """Return the gradient (kernel rows * kernel columns * channels, features)."""
    return patches @ cotangent.reshape(cotangent.shape[0], -1).T


def _compute_input_grad(window: ConvWindow, kernel: Array, cotangent: Array) -> Array:
    """Return the gradient (channels, height, width, batch)."""
    with _forbid_inlining():
        spread = _spread_columns(window, cotangent)
        products = _multiply_rows(window, kernel, spread)
        images = _add_overlaps(window, products)
    return images.reshape(kernel.shape[2], *window.sizes, cotangent.shape[-1])


@_jit
def _spread_columns(window: ConvWindow, cotangent: Array) -> Array:
    """Return the pixels of the cotangent under every column of the flipped kernel. The result is
    (kernel columns * features, cotangent height * image width * batch)."""
    axis = window.columns
    config = ((0, 0, 0), (0, 0, 0), (*axis.input_grad_pads, axis.stride - 1), (0, 0, 0))
    padded = lax.pad(cotangent, jnp.zeros((), cotangent.dtype), config)
    offsets = [j * axis.dilation for j in range(axis.kernel)]
    spread = jnp.concatenate([padded[:, :, first : first + axis.size] for first in offsets])
    return spread.reshape(spread.shape[0], -1)


@_jit
def _multiply_rows(window: ConvWindow, kernel: Array, spread: Array) -> Array:
    """Multiply by each kernel row: (kernel rows, channels, cotangent height, width * batch)."""
    rows, columns, channels, features = kernel.shape
    matrix = kernel[:, ::-1].transpose(0, 2, 1, 3).reshape(rows * channels, columns * features)
    return (matrix @ spread).reshape(rows, channels, window.output_size[0], -1)


@_jit
def _add_overlaps(window: ConvWindow, products: Array) -> Array:
    """Sum the products, each shifted to its rows: (channels, height, width * batch)."""
    axis = window.rows
    zero = jnp.zeros((), products.dtype)

    def place(row: int) -> Array:
        before = row * axis.dilation - axis.pads[0]
        after = axis.size - 1 - before - axis.last_offset
        config = ((0, 0, 0), (before, after, axis.stride - 1), (0, 0, 0))
        return lax.pad(products[row], zero, config)

    return functools.reduce(jnp.add, map(place, range(axis.kernel)))
