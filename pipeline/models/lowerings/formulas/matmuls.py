"""Matrix products and convolutions by XLA or oneDNN, and formulas of a dense layer's products.

A dense layer has three: (problem, lowering, first, second) -> result. Images are cut into chunks
and patches.

XLA:CPU converts bfloat16 arrays to float32 for every operation, also for slices, pads, transposes
and concatenations, and rounds the result back. It doesn't convert integers. So bfloat16 values are
rearranged as integers with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from pipeline.models.lowerings.formulas import onednn
from pipeline.models.lowerings.problem import (
    ConvWindow,
    DenseProblem,
    Engine,
    Formula,
    Lowering,
    Pair,
    Role,
    Slide,
)

Images = TypeVar("Images")
"""An array, or a tree of arrays, with an image in every row."""
SUM_AXES: Mapping[Role, tuple[int, int]] = {
    "forward": (1, 0),
    "input_grad": (1, 1),
    "weight_grad": (0, 0),
}
"""Axes of the left and of the right matrix over which a product sums, by role. Left and right are
inputs and kernel (forward), cotangent and kernel (input_grad), inputs and cotangent
(weight_grad)."""


def as_bits(values: Array) -> Array:
    """Return bfloat16 values as uint16 of the same shape; other types unchanged."""
    is_bfloat16 = values.dtype == jnp.bfloat16
    return lax.bitcast_convert_type(values, jnp.uint16) if is_bfloat16 else values


def from_bits(bits: Array, dtype: Any) -> Array:
    """Invert `as_bits` for an array of this dtype."""
    return lax.bitcast_convert_type(bits, dtype) if jnp.dtype(dtype) == jnp.bfloat16 else bits


def rearrange_bits(rearrange: Callable[..., Array], *arrays: Array) -> Array:
    """Apply `rearrange`, which only copies values or adds zeros, to arrays of the same dtype."""
    return from_bits(rearrange(*map(as_bits, arrays)), arrays[0].dtype)


def pad_zeros(images: Array, config: tuple[tuple[int, int, int], ...]) -> Array:
    """Pad with zeros; `config` is as for `lax.pad`."""
    return rearrange_bits(lambda bits: lax.pad(bits, jnp.zeros((), bits.dtype), config), images)


def multiply(engine: Engine, a: Array, b: Array) -> Array:
    """Multiply (..., m, k) x (..., k, n) -> (..., m, n) in the operands' dtype; sum in float32."""
    if engine == "onednn":
        return onednn.matmul(a, b)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def multiply_by_rows(engine: Engine, a: Array, b: Array) -> Array:
    """Multiply (..., k, m) x (..., k, n) -> (..., m, n), float32: the sum is over rows of both."""
    if engine == "onednn":
        return onednn.matmul(a, b, transpose_a=True, dtype=jnp.float32)
    batch_axes = tuple(range(a.ndim - 2))
    row_axis = (a.ndim - 2,)
    dimensions = ((row_axis, row_axis), (batch_axes, batch_axes))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def convolve(engine: Engine, images: Array, kernel: Array, slide: Slide) -> Array:
    """Convolve NHWC x HWIO -> NHWC by either engine. Negative pads crop the images.

    XLA:CPU (jaxlib 0.10.2) would ignore pads of (-1, 1) and read out of bounds.
    """
    images, pads = crop(images, slide.pads)
    if engine == "onednn":
        return onednn.convolve(images, kernel, replace(slide, pads=pads))
    return lax.conv_general_dilated(
        images,
        kernel,
        slide.strides,
        pads,
        rhs_dilation=slide.dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=slide.groups,
    )


def crop(images: Array, pads: tuple[Pair, Pair]) -> tuple[Array, tuple[Pair, Pair]]:
    """Crop the images by the negative pads, and return them with the remaining pads."""
    crops = [(min(before, 0), min(after, 0), 0) for before, after in pads]
    if any(low or high for low, high, _ in crops):
        images = pad_zeros(images, ((0, 0, 0), *crops, (0, 0, 0)))
    rows, columns = ((max(before, 0), max(after, 0)) for before, after in pads)
    return images, (rows, columns)


def sum_chunks(
    compute: Callable[[Array, Array], Array], size: int | None, images: Array, other: Array
) -> Array:
    """Return the sum of `compute(images, other)` over chunks of `size` images; None: one chunk. The
    arrays have the same dtype and number of images, a multiple of `size`."""
    if size is None or size >= images.shape[0]:
        return compute(images, other)
    count = images.shape[0] // size
    stacks = [as_bits(a).reshape(count, size, *a.shape[1:]) for a in (images, other)]

    def take_chunks(i: Array | int) -> Iterator[Array]:
        for stack in stacks:
            bits = lax.dynamic_index_in_dim(stack, i, keepdims=False)
            yield from_bits(bits, images.dtype)

    result = jax.eval_shape(lambda: compute(*take_chunks(0)))
    start = jnp.zeros(result.shape, result.dtype)
    return lax.fori_loop(0, count, lambda i, total: total + compute(*take_chunks(i)), start)


def map_chunks(compute: Callable[[Images], Array], size: int | None, images: Images) -> Array:
    """Apply `compute` to chunks of `size` images, and concatenate the results.

    `images` is an array, or a tree of arrays of the same dtype, each with an image in every row. A
    `size` less than the number of images must divide it. None: one chunk.
    """
    first, *_ = jax.tree.leaves(images)
    batch = first.shape[0]
    if size is None or size >= batch:
        return compute(images)

    def compute_bits(bits: Images) -> Array:
        return as_bits(compute(jax.tree.map(lambda b: from_bits(b, first.dtype), bits)))

    chunks = jax.tree.map(lambda a: as_bits(a).reshape(-1, size, *a.shape[1:]), images)
    results = lax.map(compute_bits, chunks)
    return from_bits(results.reshape(batch, *results.shape[2:]), first.dtype)


def slice_taps(window: ConvWindow, images: Array) -> Iterator[Array]:
    """Yield the pixels (B, H', W', C) under each kernel position; H' x W' is the result's size."""
    config = ((0, 0, 0), *((*pad, 0) for pad in window.pads), (0, 0, 0))
    bits = as_bits(pad_zeros(images, config))
    batch, _, _, channels = bits.shape
    for i in range(window.rows.kernel):
        for j in range(window.columns.kernel):
            rows = window.rows.slice_tap(i)
            columns = window.columns.slice_tap(j)
            starts = (0, rows.start, columns.start, 0)
            stops = (batch, rows.stop, columns.stop, channels)
            tap = lax.slice(bits, starts, stops, (1, *window.strides, 1))
            yield from_bits(tap, images.dtype)


def make_patches(window: ConvWindow, images: Array) -> Array:
    """Return the pixels under each result as a row: (B * H' * W', kernel height * width * C)."""
    rows = rearrange_bits(lambda *bits: jnp.concatenate(bits, axis=-1), *slice_taps(window, images))
    return rows.reshape(-1, rows.shape[-1])


def product(problem: DenseProblem, lowering: Lowering, first: Array, second: Array) -> Array:
    """Multiply the role's left and right matrix, see `SUM_AXES`."""
    left, right = _order_operands(problem, first, second)
    return _multiply(lowering, left, right, *SUM_AXES[problem.role])


def transposed_product(
    problem: DenseProblem, lowering: Lowering, first: Array, second: Array
) -> Array:
    """Multiply the transposes, right by left, and transpose the result.

    Libraries split the rows of a product among cores and its columns among vectors, so the order
    decides the speed.
    """
    left, right = _order_operands(problem, first, second)
    left_axis, right_axis = SUM_AXES[problem.role]
    transposed = _multiply(lowering, right, left, right_axis, left_axis)
    # Without a separate call, XLA would move the transpose back into the product.
    with set_xla_metadata(inlineable="false"):
        return jax.jit(jnp.transpose)(transposed)


def _order_operands(problem: DenseProblem, first: Array, second: Array) -> tuple[Array, Array]:
    """Return the left and the right matrix of `SUM_AXES` from the operands of the role. Those of
    `input_grad` are kernel and cotangent."""
    return (second, first) if problem.role == "input_grad" else (first, second)


def _multiply(
    lowering: Lowering, left: Array, right: Array, left_axis: int, right_axis: int
) -> Array:
    if lowering.engine == "onednn":
        return onednn.matmul(left, right, transpose_a=left_axis == 0, transpose_b=right_axis == 1)
    dimensions = (((left_axis,), (right_axis,)), ((), ()))
    summed = lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
    return summed.astype(left.dtype)


PRODUCTS: Mapping[Role, Mapping[str, Formula]] = {
    role: {"product": Formula(product), "transposed": Formula(transposed_product)}
    for role in SUM_AXES
}
"""Formulas by role and name. The first always works with XLA's engine."""
