"""Inverses of many small symmetric positive definite matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

AT_ONCE_BYTES = 256 << 10
"""Bytes of matrices that are eliminated at once. Elimination passes over them once for each row, so
they should fit into the cache of a core."""


def invert_stacks(stacks: Sequence[Array]) -> list[Array]:
    """Return the inverses of stacks of symmetric positive definite matrices, float32 (number, n,
    n).

    Matrices of one size are inverted together, so that the program grows with the number of sizes,
    not of stacks. The inverse is NaN if a matrix isn't positive definite.
    """
    places: dict[int, list[int]] = defaultdict(list)
    for place, stack in enumerate(stacks):
        places[stack.shape[-1]].append(place)
    inverses: dict[int, Array] = {}
    for same_size in places.values():
        stacked = jnp.concatenate([stacks[place] for place in same_size])
        # jax's Cholesky decomposition can't be used on the CPU. Its batches wait for threads of the
        # pool that they run on: on two cores, two calls at a time never end.
        inverted = lax.platform_dependent(
            stacked, cpu=invert_by_elimination, default=invert_by_cholesky
        )
        # Without AVX-512 the last product on the CPU isn't exactly symmetric.
        inverted = (inverted + inverted.mT) / 2
        ends = np.cumsum([stacks[place].shape[0] for place in same_size])
        inverses |= zip(same_size, jnp.split(inverted, ends[:-1]), strict=True)
    return [inverses[place] for place in range(len(stacks))]


def invert_by_elimination(matrices: Array) -> Array:
    """Return the inverses of matrices (number, n, n), by Gauss's elimination, a few at a time."""
    _, n, _ = matrices.shape
    batch_size = max(1, AT_ONCE_BYTES // (matrices.dtype.itemsize * n**2))
    inverses: Array = lax.map(_eliminate, matrices, batch_size=batch_size)
    return inverses


def _eliminate(matrix: Array) -> Array:
    """Return the inverse of a matrix M (n, n), from its factors M = L D L'.

    Elimination below the diagonal transforms M into D L', and the identity into the inverse of L.
    The first is upper and the second lower triangular, so one matrix holds both.
    """
    rows = jnp.arange(matrix.shape[0])

    def eliminate(k: Array, matrix: Array) -> Array:
        column, row = (lax.dynamic_index_in_dim(matrix, k, axis, False) for axis in (1, 0))
        multiples = jnp.where(rows > k, column / column[k], 0)
        return matrix - multiples[:, None] * (row + (rows == k))

    eliminated = lax.fori_loop(0, len(rows), eliminate, matrix)
    lower = jnp.tril(eliminated, -1) + jnp.eye(len(rows), dtype=matrix.dtype)
    scaled = lower * lax.rsqrt(jnp.diagonal(eliminated))[:, None]
    return scaled.T @ scaled


def invert_by_cholesky(matrices: Array) -> Array:
    """Return the inverses of matrices (number, n, n), by products that suit a matrix unit."""
    inverse = _invert_lower(jnp.linalg.cholesky(matrices))
    return inverse.mT @ inverse


def _invert_lower(lower: Array) -> Array:
    """Return the inverses of lower triangular matrices (batch, n, n), by blocks of doubling sizes.

    [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]], for all blocks of one size at once.
    This takes a few products for each power of two below n.
    """
    n = lower.shape[-1]
    padded_size = 1 << (n - 1).bit_length()
    padding = jnp.pad(jnp.zeros(n, lower.dtype), (0, padded_size - n), constant_values=1)
    padded = jnp.pad(lower, [(0, 0), (0, padded_size - n), (0, padded_size - n)]) + jnp.diag(
        padding
    )
    inverses = 1 / jnp.diagonal(padded, axis1=1, axis2=2)[..., None, None]
    while (size := inverses.shape[-1]) < padded_size:
        pairs = padded_size // (2 * size)
        tiles = padded.reshape(-1, pairs, 2 * size, pairs, 2 * size)
        corners = jnp.diagonal(tiles[:, :, size:, :, :size], axis1=1, axis2=3).transpose(0, 3, 1, 2)
        first = inverses[:, ::2]
        second = inverses[:, 1::2]
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        bottom = jnp.concatenate([-second @ corners @ first, second], -1)
        inverses = jnp.concatenate([top, bottom], -2)
    return inverses[:, 0, :n, :n]
