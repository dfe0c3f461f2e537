"""Convolutions with a 3x3 kernel by Winograd's minimal filtering: fewer multiplications.

A tile of m x m results needs (m + 2)^2 products per channel and feature instead of 9 m^2. That is
2.25 times fewer for m = 2, and 4 times fewer for m = 4 (Lavin and Gray 2016, "Fast algorithms for
convolutional neural networks", sec. 4.1). In float32 m = 2 is as accurate as a direct sum, and
m = 4 loses about a digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.lowerings.formulas.conv2d_input_grad import rotate_and_swap
from pipeline.models.lowerings.formulas.matmuls import (
    map_chunks,
    multiply,
    multiply_by_rows,
    sum_chunks,
)
from pipeline.models.lowerings.problem import ConvWindow, Lowering

Matrix = Sequence[Sequence[float]]

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
"""`_IMAGES`, `_KERNEL` and `_RESULTS` are the paper's matrices B^T, G and A^T, by the size of a
tile."""


def forward(
    tile: int, window: ConvWindow, lowering: Lowering, images: Array, kernel: Array
) -> Array:
    """Compute the convolution in tiles of `tile` x `tile` results."""
    before = window.rows.pads[0], window.columns.pads[0]
    return _convolve(tile, lowering, images, kernel, before, window.output_size)


def input_grad(
    tile: int, window: ConvWindow, lowering: Lowering, kernel: Array, cotangent: Array
) -> Array:
    """Compute the gradient by the input: the cotangent convolved with the rotated kernel."""
    (top, _), (left, _) = window.input_grad_pads
    rotated = rotate_and_swap(kernel, 1)
    return _convolve(tile, lowering, cotangent, rotated, (top, left), window.sizes)


def weight_grad(
    tile: int, window: ConvWindow, lowering: Lowering, images: Array, cotangent: Array
) -> Array:
    """Compute the gradient by the kernel: the adjoint of the filtering, summed over tiles.

    For Y = A^T [(G k G^T) * (B^T x B)] A it is G^T [sum of (B^T x B) * (A dY A^T)] G. Computations
    are in float32 for any dtype of the operands.
    """
    before = window.rows.pads[0], window.columns.pads[0]

    def sum_products(images: Array, cotangent: Array) -> Array:
        tiles = _filter_images(tile, images.astype(jnp.float32), before, window.output_size)
        results = _spread_results(tile, cotangent.astype(jnp.float32))
        return multiply_by_rows(lowering.engine, tiles, results)

    products = sum_chunks(sum_products, lowering.images, images, cotangent)
    grid = products.reshape(tile + 2, tile + 2, *products.shape[1:])
    transposed = tuple(zip(*_KERNEL[tile], strict=True))
    return _transform_axes(transposed, grid).astype(images.dtype)


def _convolve(
    tile: int,
    lowering: Lowering,
    images: Array,
    kernel: Array,
    before: tuple[int, int],
    positions: tuple[int, int],
) -> Array:
    """Convolve images, padded by `before`, with a 3x3 kernel to `positions` results."""
    # G k G^T: ((tile + 2)^2, channels, features)
    filters = _transform_axes(_KERNEL[tile], kernel).reshape(-1, *kernel.shape[2:])

    def compute(chunk: Array) -> Array:
        tiles = _filter_images(tile, chunk, before, positions)
        products = multiply(lowering.engine, tiles, filters)
        return _join_results(tile, products, positions)

    return map_chunks(compute, lowering.images, images)


def _filter_images(
    tile: int, images: Array, before: tuple[int, int], positions: tuple[int, int]
) -> Array:
    """Compute B^T x B of tiles x that overlap by two pixels: ((tile + 2)^2, tiles, channels)."""
    down, across = (-(-count // tile) for count in positions)
    config = [
        (low, count * tile + 2 - size - low, 0)
        for size, low, count in zip(images.shape[1:3], before, (down, across), strict=True)
    ]
    padded = lax.pad(images, jnp.zeros((), images.dtype), ((0, 0, 0), *config, (0, 0, 0)))
    return _transform_tiles(_IMAGES[tile], padded, tile, (down, across))


def _spread_results(tile: int, cotangent: Array) -> Array:
    """Compute A dY A^T of all tiles dY, 0 beyond the edge: ((tile + 2)^2, tiles, features)."""
    config = [(0, -size % tile, 0) for size in cotangent.shape[1:3]]
    zero = jnp.zeros((), cotangent.dtype)
    padded = lax.pad(cotangent, zero, ((0, 0, 0), *config, (0, 0, 0)))
    tiles = padded.shape[1] // tile, padded.shape[2] // tile
    transposed = tuple(zip(*_RESULTS[tile], strict=True))
    return _transform_tiles(transposed, padded, tile, tiles)


def _transform_tiles(matrix: Matrix, images: Array, tile: int, tiles: tuple[int, int]) -> Array:
    """Compute M x M^T of tiles x that begin every `tile` pixels: (positions, tiles, channels)."""
    down, across = tiles
    # The height is first, since rows are contiguous. Without the barrier XLA would compute the sums
    # along the height again for every column.
    rows = lax.optimization_barrier(_combine(matrix, _slice_tiles(images, 1, tile, down), axis=0))
    squares = _combine(matrix, _slice_tiles(rows, 3, tile, across), axis=1)
    return squares.reshape(len(matrix) ** 2, -1, images.shape[-1])


def _slice_tiles(array: Array, axis: int, tile: int, tiles: int) -> Iterator[Array]:
    """Yield the first, second, ... value of each tile along an axis."""
    for first in range(array.shape[axis] - (tiles - 1) * tile):
        yield lax.slice_in_dim(array, first, first + (tiles - 1) * tile + 1, tile, axis)


def _join_results(tile: int, products: Array, positions: tuple[int, int]) -> Array:
    """Compute A^T P A of the products P of all tiles, and join them: (B, H', W', features)."""
    side = tile + 2
    features = products.shape[-1]
    down, across = (-(-count // tile) for count in positions)
    grid = products.reshape(side, side, -1, down, across, features)
    rows = _combine(_RESULTS[tile], (grid[:, place] for place in range(side)), axis=4)
    rows = lax.optimization_barrier(rows.reshape(side, -1, down, across * tile, features))
    results = _combine(_RESULTS[tile], rows, axis=2)
    results = results.reshape(-1, down * tile, across * tile, features)
    return results[:, : positions[0], : positions[1]]


def _transform_axes(matrix: Matrix, grid: Array) -> Array:
    """Compute M X M^T over the first two axes of X."""
    rows = _combine(matrix, grid, axis=0)
    return _combine(matrix, (rows[:, column] for column in range(grid.shape[1])), axis=1)


def _combine(matrix: Matrix, arrays: Iterable[Array], axis: int) -> Array:
    """Stack the sums of the arrays weighted by each row of the matrix, without products by 0, 1 and
    -1."""
    arrays = list(arrays)
    return jnp.stack([_sum_weighted(row, arrays) for row in matrix], axis)


def _sum_weighted(weights: Sequence[float], arrays: Sequence[Array]) -> Array:
    total: Array | None = None
    for weight, array in zip(weights, arrays, strict=True):
        if weight:
            term = array if abs(weight) == 1 else abs(weight) * array
            if total is None:
                total = term if weight > 0 else -term
            else:
                total = total + term if weight > 0 else total - term
    assert total is not None, "every row of the matrices has a number other than 0"
    return total
