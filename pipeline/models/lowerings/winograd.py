"""Convolutions with a 3x3 kernel by Winograd's minimal filtering: fewer multiplications.

A tile of m x m results takes (m + 2)^2 products a channel and feature instead of 9 m^2: 2.25 times
fewer for m = 2, 4 times for m = 4 (Lavin and Gray 2016, "Fast algorithms for convolutional neural
networks", sec. 4.1). Exact in exact arithmetic; in float32 m = 2 is as accurate as a direct sum,
m = 4 loses about a digit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.models.lowerings.lowering import Lowering
from pipeline.models.lowerings.products import over_chunks
from pipeline.models.lowerings.turning import turned
from pipeline.models.lowerings.window import Window

Matrix = Sequence[Sequence[float]]
Rows = list[list[Array]]

_IMAGES: dict[int, Matrix] = {
    2: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    4: (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
}
_KERNEL: dict[int, Matrix] = {
    2: ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    4: (
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
}
_RESULTS: dict[int, Matrix] = {
    2: ((1, 1, 1, 0), (0, 1, -1, -1)),
    4: (
        (1, 1, 1, 1, 1, 0),
        (0, 1, -1, 2, -2, 0),
        (0, 1, 1, 4, 4, 0),
        (0, 1, -1, 8, -8, 1),
    ),
}
"""B^T, G and A^T by the size of a tile of results."""


def forward_by_tiles(tile: int) -> Callable[[Window, Lowering, Array, Array], Array]:
    """A lowering of the convolution itself, in tiles of so many rows and columns."""

    def compute(window: Window, how: Lowering, images: Array, kernel: Array) -> Array:
        before = window.rows.pads[0], window.columns.pads[0]
        return _convolve(tile, how, images, kernel, before, window.positions)

    return compute


def images_gradient_by_tiles(tile: int) -> Callable[[Window, Lowering, Array, Array], Array]:
    """A lowering of the gradient: the same of the cotangent with the kernel turned about."""

    def compute(window: Window, how: Lowering, kernel: Array, cotangent: Array) -> Array:
        (top, _), (left, _) = window.images_gradient_pads
        return _convolve(tile, how, cotangent, turned(kernel, 1), (top, left), window.sizes)

    return compute


def _convolve(
    tile: int,
    how: Lowering,
    images: Array,
    kernel: Array,
    before: tuple[int, int],
    positions: tuple[int, int],
) -> Array:
    """Slide a 3x3 kernel over images padded so much before, to so many results."""
    filters = _transformed_kernel(tile, kernel)

    def compute(chunk: Array) -> Array:
        points = _tile_points(tile, chunk, before, positions)
        tiles = jnp.stack([point for row in _both_ways(_IMAGES[tile], points) for point in row])
        count, *rest, channels = tiles.shape
        products = jnp.matmul(tiles.reshape(count, -1, channels), filters)
        side = tile + 2
        results = products.reshape(side, side, *rest, -1)
        grid = [[results[row, column] for column in range(side)] for row in range(side)]
        return _joined(_both_ways(_RESULTS[tile], grid), positions)

    return over_chunks(compute, how.images, images)


def _transformed_kernel(tile: int, kernel: Array) -> Array:
    """((tile + 2)^2, channels, features)."""
    matrix = jnp.asarray(np.array(_KERNEL[tile], np.float32), kernel.dtype)
    filters = jnp.einsum("ik,jl,klcf->ijcf", matrix, matrix, kernel)
    return filters.reshape(-1, *kernel.shape[2:])


def _tile_points(
    tile: int, images: Array, before: tuple[int, int], positions: tuple[int, int]
) -> Rows:
    """The images' pixels at each place within a tile of side tile + 2: (B, tiles, tiles, C)."""
    pads, spans = [(0, 0, 0)], []
    for size, low, count in zip(images.shape[1:3], before, positions, strict=True):
        tiles = -(-count // tile)
        pads.append((low, tiles * tile + 2 - size - low, 0))
        spans.append((tiles - 1) * tile + 1)
    padded = lax.pad(images, jnp.zeros((), images.dtype), (*pads, (0, 0, 0)))
    rows, columns = spans
    side = range(tile + 2)
    return [
        [padded[:, top : top + rows : tile, left : left + columns : tile] for left in side]
        for top in side
    ]


def _both_ways(matrix: Matrix, grid: Rows) -> Rows:
    """M X M^T of a grid X of arrays."""
    by_column = [_combined(matrix, list(column)) for column in zip(*grid, strict=True)]
    return [_combined(matrix, list(row)) for row in zip(*by_column, strict=True)]


def _combined(matrix: Matrix, arrays: list[Array]) -> list[Array]:
    """Sums of arrays weighted by a row each; zeros and ones cost nothing."""
    return [_weighted_sum(row, arrays) for row in matrix]


def _weighted_sum(weights: Sequence[float], arrays: list[Array]) -> Array:
    terms = [(w, array) for w, array in zip(weights, arrays, strict=True) if w]
    total: Array | None = None
    for weight, array in terms:
        term = array if abs(weight) == 1 else abs(weight) * array
        if total is None:
            total = term if weight > 0 else -term
        else:
            total = total + term if weight > 0 else total - term
    assert total is not None
    return total


def _joined(tiles: Rows, positions: tuple[int, int]) -> Array:
    """Results by their place within a tile, put where they belong."""
    stacked = jnp.stack([jnp.stack(row, axis=3) for row in tiles], axis=2)
    batch, down, tile, across, _, features = stacked.shape
    whole = stacked.reshape(batch, down * tile, across * tile, features)
    return whole[:, : positions[0], : positions[1]]
