"""Formulas of max pooling, and pools of one axis to any number of windows.

Formulas take (problem, lowering, images), and a cotangent for the gradient. `lowering.images` is
the number of images in a chunk, None for all.

To pool an axis, counted from 0, of n positions to k windows, window i has the positions from
floor(i n / k) up to, not including, ceil((i + 1) n / k), as in PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.models.lowerings.formulas.matmuls import map_chunks
from pipeline.models.lowerings.problem import Formula, Lowering, Pair, PoolingProblem, Role


def pool_axes(images: Array, window: Pair, strides: Pair, pads: tuple[Pair, Pair]) -> Array:
    """Reduce one axis after the other, by maxima of strided slices. 16-bit values are compared, and
    their gradients summed, in float32. Otherwise XLA:CPU would convert them back and forth at every
    slice."""
    wide = jnp.promote_types(images.dtype, jnp.float32)
    values = jnp.pad(images.astype(wide), ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
    for axis, size, stride in zip((1, 2), window, strides, strict=True):
        stop = values.shape[axis] - size + 1
        slices = [
            lax.slice_in_dim(values, first, first + stop, stride, axis) for first in range(size)
        ]
        values = functools.reduce(jnp.maximum, slices)
    return values.astype(images.dtype)


def axes(problem: PoolingProblem, lowering: Lowering, images: Array) -> Array:
    """Apply `pool_axes` to chunks of images."""
    return map_chunks(lambda chunk: _pool_chunk(problem, chunk), lowering.images, images)


def reduce_window(problem: PoolingProblem, lowering: Lowering, images: Array) -> Array:
    """Apply XLA's `reduce_window`."""
    lowest = jnp.array(-jnp.inf, images.dtype)
    pads = ((0, 0), *problem.pads, (0, 0))
    window = (1, *problem.window, 1)
    return lax.reduce_window(images, lowest, lax.max, window, (1, *problem.strides, 1), pads)


def axes_gradient(
    problem: PoolingProblem, lowering: Lowering, images: Array, cotangent: Array
) -> Array:
    """Compute the gradient that jax derives for `pool_axes`, in chunks of images. Tied values share
    it."""

    def differentiate(chunk: tuple[Array, Array]) -> Array:
        images, cotangent = chunk
        _, backward = jax.vjp(functools.partial(_pool_chunk, problem), images)
        (gradient,) = backward(cotangent)
        return gradient

    return map_chunks(differentiate, lowering.images, (images, cotangent))


def _pool_chunk(problem: PoolingProblem, images: Array) -> Array:
    return pool_axes(images, problem.window, problem.strides, problem.pads)


POOLINGS: Mapping[Role, Mapping[str, Formula]] = {
    "forward": {
        "axes": Formula(axes, engines=("xla",), chunked=True),
        "reduced": Formula(reduce_window, engines=("xla",)),
    },
    "input_grad": {"axes": Formula(axes_gradient, engines=("xla",), chunked=True)},
}
"""Formulas by role and name. The first, of all images at once, always works."""


def average_windows(x: Array, axis: int, count: int) -> Array:
    """Return the mean of each window, with `count` in place of the size of the axis."""
    size = x.shape[axis]
    if count == size:
        return x
    if count == 1:
        return x.mean(axis, keepdims=True)
    if size % count == 0:
        return _split_axis(x, axis, count).mean(axis + 1)
    # No product with weights: of an infinite value and a weight of 0 it is NaN.
    windows = _find_windows(size, count)
    lengths = np.array([end - start for start, end in windows])
    is_repeated = np.arange(lengths.max()) >= lengths[:, None]
    trailing = (1,) * (x.ndim - axis - 1)

    def compute(x: Array) -> Array:
        taken = jnp.take(x, index_windows(size, count), axis=axis)
        zero = jnp.zeros((), x.dtype)
        total = jnp.where(is_repeated.reshape(*is_repeated.shape, *trailing), zero, taken)
        return total.sum(axis + 1) / jnp.asarray(lengths.reshape(-1, *trailing), x.dtype)

    return compute_wide(compute, x)


def compute_wide(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a sum over windows to x, and return its result in the type of x.

    Values are summed in float32, in which no sum of 16-bit values overflows; for an emulated chip
    in the type of x, as its kernel sums them.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return function(x)

    def apply(x: Array) -> Array:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    def apply_narrow(x: Array) -> Array:
        # flax divides by float32 counts.
        return function(x).astype(x.dtype)

    platforms = dict.fromkeys(("cpu", "cuda", "rocm", "tpu"), apply)
    result: Array = jax.lax.platform_dependent(x, **platforms, default=apply_narrow)
    return result


def max_windows(x: Array, axis: int, count: int) -> Array:
    """Return the maximum of each window, with `count` in place of the size of the axis."""
    size = x.shape[axis]
    if size % count == 0:
        return _split_axis(x, axis, count).max(axis + 1)
    return jnp.take(x, index_windows(size, count), axis=axis).max(axis + 1)


def multiply_axis(x: Array, axis: int, weights: np.ndarray) -> Array:
    """Multiply an axis by a matrix (new size, old size)."""
    product = jnp.tensordot(x, jnp.asarray(weights, x.dtype), axes=((axis,), (1,)))
    return jnp.moveaxis(product, -1, axis)


def weigh_windows(size: int, count: int) -> np.ndarray:
    """Return the matrix of the means, float32 (count, size)."""
    weights = np.zeros((count, size), np.float32)
    for row, (start, end) in enumerate(_find_windows(size, count)):
        weights[row, start:end] = 1 / (end - start)
    return weights


def index_windows(size: int, count: int) -> np.ndarray:
    """Return the positions of each window, int64 (count, longest). Shorter windows repeat their
    last position."""
    windows = _find_windows(size, count)
    steps = np.arange(max(end - start for start, end in windows))
    return np.stack([np.minimum(start + steps, end - 1) for start, end in windows])


def _find_windows(size: int, count: int) -> list[tuple[int, int]]:
    return [(row * size // count, -(-(row + 1) * size // count)) for row in range(count)]


def _split_axis(x: Array, axis: int, count: int) -> Array:
    return x.reshape((*x.shape[:axis], count, -1, *x.shape[axis + 1 :]))
