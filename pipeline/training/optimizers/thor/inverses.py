"""Inverses of many small symmetric positive definite matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

MAX_CHUNK_BYTES = 256 << 10
"""Largest size of the matrices that are inverted at once. Elimination reads all of them once for
each row, so they should fit into the cache of a core."""


def invert_stacks(stacks: Sequence[Array]) -> list[Array]:
    """Return the inverses of stacks of symmetric positive definite matrices, float32 (number, n,
    n). Matrices of one size are inverted together, so the length of the program depends on the
    number of sizes, not of stacks. The inverse is NaN if a matrix isn't positive definite."""
    indices_by_size: dict[int, list[int]] = defaultdict(list)
    for index, stack in enumerate(stacks):
        indices_by_size[stack.shape[-1]].append(index)
    inverses: dict[int, Array] = {}
    for indices in indices_by_size.values():
        matrices = jnp.concatenate([stacks[index] for index in indices])
        # jax's Cholesky decomposition can't be used on the CPU. Its batches wait for threads of the
        # pool that they run on: on two cores, two calls at a time never end.
        inverted = lax.platform_dependent(
            matrices, cpu=invert_by_elimination, default=invert_by_cholesky
        )
        # Without AVX-512 the last product on the CPU isn't exactly symmetric.
        inverted = (inverted + inverted.mT) / 2
        ends = np.cumsum([stacks[index].shape[0] for index in indices])
        inverses |= zip(indices, jnp.split(inverted, ends[:-1]), strict=True)
    return [inverses[index] for index in range(len(stacks))]


def invert_by_elimination(matrices: Array) -> Array:
    """Return the inverses of matrices (number, n, n), by Gauss's elimination, a few at a time."""
    matrix_bytes = matrices.dtype.itemsize * matrices.shape[-1] ** 2
    batch_size = max(1, MAX_CHUNK_BYTES // matrix_bytes)
    inverses: Array = lax.map(_eliminate, matrices, batch_size=batch_size)
    return inverses


def _eliminate(matrix: Array) -> Array:
    """Return the inverse of a matrix M (n, n), from its factors M = L D L'. Elimination below the
    diagonal transforms M into D L', and the identity into the inverse of L. The first is upper and
    the second lower triangular, so one matrix holds both."""
    rows = jnp.arange(matrix.shape[0])

    def eliminate(k: Array, matrix: Array) -> Array:
        column = lax.dynamic_index_in_dim(matrix, k, axis=1, keepdims=False)
        row = lax.dynamic_index_in_dim(matrix, k, axis=0, keepdims=False)
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
    This takes a few products for each power of two below n."""
    n = lower.shape[-1]
    padded_size = 1 << (n - 1).bit_length()
    # Rows and columns of the identity matrix pad n to a power of two.
    num_padding = padded_size - n
    diagonal = jnp.pad(jnp.zeros(n, lower.dtype), (0, num_padding), constant_values=1)
    padded = jnp.pad(lower, [(0, 0), (0, num_padding), (0, num_padding)]) + jnp.diag(diagonal)
    # The inverses of the blocks along the diagonal, (batch, blocks, size, size), from size 1 on.
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
