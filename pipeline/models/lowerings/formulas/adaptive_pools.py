"""Pools of one axis to any number of windows.

Of n positions, window i of k has those from floor(i n / k) up to, not including, ceil((i + 1) n /
k), as in PyTorch.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array


def average_windows(x: Array, axis: int, count: int) -> Array:
    """Return the mean of each window, with `count` in place of the size of the axis."""
    size = x.shape[axis]
    if count == size:
        return x
    if count == 1:
        return x.mean(axis, keepdims=True)
    if size % count == 0:
        return _split_axis(x, axis, count).mean(axis + 1)
    return multiply_axis(x, axis, weigh_windows(size, count))


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
