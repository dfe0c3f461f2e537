"""THOR as an optax transformation: precondition gradients by inverses, refreshed at intervals.

At a refresh the factors of all observed layers are computed from one batch and inverted. Other
updates reuse the inverses. Both are branches of one compiled step. The number of the update selects
the branch, so a sink may begin and end at any update.

The factors approximate the curvature of a layer with weights (n, m): its Fisher matrix, averaged
over samples, is about T * A (x) G. T is the number of positions in a sample: the output pixels of a
convolution, the tokens of a text, or 1 for a vector. Over all positions of all samples,

    A = mean of a a'     a (n): input of the weights, for a convolution a patch of the images
    G = mean of d d'     d (m): the gradient of one sample's loss at the layer's output

(Grosse & Martens 2016, secs. 3 and 4; THOR, Chen et al. 2021). A bias isn't included. A and G are
replaced by blocks along their diagonals, since the time of an inversion grows with the cube of the
size.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from pipeline.core.host.tree_paths import flatten_by_path, format_path
from pipeline.models.lowerings.formulas.matmuls import make_patches, multiply_by_rows
from pipeline.models.lowerings.problem import ConvWindow
from pipeline.models.modules.apply_layers import to_nhwc
from pipeline.models.modules.layer_capture import LayerCapture
from pipeline.training.features.curvature import Curvature, compute_if_due

MAX_CHUNK_BYTES = 8 << 20
"""Largest size of the rows of a chunk. Patches are several times as large as their images, and
products are faster if the rows fit into the cache."""
MAX_INVERTED_BYTES = 256 << 10
"""Largest size of the matrices that are inverted at once. Elimination reads all of them once for
each row, so they should fit into the cache of a core."""


class ThorState(NamedTuple):
    """The number of updates so far, int32 (), and the damped inverses by the kernel's path."""

    updates: Array
    inverses: dict[str, Factors]


def scale_by_thor(
    damping: Callable[[Array], Array], split_dim: int
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation: the gradient of an observed layer's kernel -> A^-1 * gradient *
    G^-1 / T. Other gradients don't change.

    `damping` maps the number of an update, from 0 on, to its damping. Factors are split into blocks
    of at most `split_dim` rows. `update` raises ValueError without `curvature=Curvature(...)`. Only
    `update` gets the observed layers, so `init` makes inverses for every kernel of two or four
    axes. Those of unobserved layers stay 0.
    """

    def init(params: optax.Params) -> ThorState:
        inverses = {}
        for path, leaf in flatten_by_path(params).items():
            if path.endswith("/kernel") and leaf.ndim in (2, 4):
                inverses[path] = Factors(
                    inputs=_make_zeros(prod(leaf.shape[:-1]), split_dim),
                    outputs=_make_zeros(leaf.shape[-1], split_dim),
                )
        return ThorState(jnp.zeros((), jnp.int32), inverses)

    def update(
        updates: optax.Updates,
        state: ThorState,
        params: optax.Params | None = None,
        *,
        curvature: Curvature | None = None,
        **_: Any,
    ) -> tuple[optax.Updates, ThorState]:
        if curvature is None:
            raise ValueError("thor needs sums of layers: update(gradients, ..., curvature=...)")
        observed = {
            path: curvature.layers[path.removesuffix("/kernel")]
            for path in state.inverses
            if path.removesuffix("/kernel") in curvature.layers
        }
        old_inverses = {path: state.inverses[path] for path in observed}
        num_positions = {
            path: layer.num_positions.astype(jnp.float32) for path, layer in observed.items()
        }
        positions = {path: number / curvature.count for path, number in num_positions.items()}

        def refresh() -> dict[str, Factors]:
            factors = {
                path: compute_factors(layer.moments, num_positions[path], curvature.scale)
                for path, layer in observed.items()
            }
            return invert_damped(factors, damping(state.updates), positions)

        def find_direction(path: Any, gradient: Array) -> Array:
            kernel = format_path(path)
            if kernel not in positions:
                return gradient
            return precondition(gradient, inverses[kernel], positions[kernel])

        inverses = compute_if_due(curvature.due, refresh, lambda: old_inverses)
        directions = jax.tree.map_with_path(find_direction, updates)
        return directions, ThorState(state.updates + 1, {**state.inverses, **inverses})

    return optax.GradientTransformationExtraArgs(init, update)


def _make_zeros(features: int, split_dim: int) -> Array:
    """Return zeros in the shape of a factor of `features` rows in blocks, (blocks, size, size)."""
    blocks = make_blocks(features, split_dim)
    return jnp.zeros((blocks.number, blocks.size, blocks.size))


def clip_each_by_norm(limit: float) -> optax.GradientTransformation:
    """Return a transformation that scales every array with an L2 norm above `limit` down to it."""

    def clip(update: Array) -> Array:
        return update * jnp.minimum(1, limit / jnp.maximum(jnp.linalg.norm(update), 1e-30))

    return optax.stateless(lambda updates, _: jax.tree.map(clip, updates))


class Blocks(NamedTuple):
    """The blocks of a factor; the last block is padded."""

    number: int
    size: int
    """Rows of a block."""


class Factors(NamedTuple):
    """The blocks of A and of G, or of their inverses or sums, float32 (blocks, size, size)."""

    inputs: Array
    outputs: Array


def make_blocks(features: int, split_dim: int) -> Blocks:
    """Return the fewest blocks of equal size, at most `split_dim` rows, that hold `features`."""
    number = ceil(features / split_dim)
    return Blocks(number, ceil(features / number))


def sum_moments(capture: LayerCapture, mask: Array, split_dim: int) -> Factors:
    """Return the blocks of the sums of a a' and d d' over the samples that the mask, bool (batch,),
    marks."""

    def select(array: Array) -> Array:
        # Batch norm passes losses of valid samples on to padding, which so has cotangents too.
        array = to_nhwc(array, capture.layout)
        return jnp.where(mask.reshape(-1, *[1] * (array.ndim - 1)), array, 0)

    return Factors(
        _sum_second_moment(select(capture.inputs), capture.window, split_dim),
        _sum_second_moment(select(capture.cotangents), None, split_dim),
    )


def compute_factors(sums: Factors, num_positions: Array, scale: Array | float) -> Factors:
    """Return the blocks of A and G from sums over `num_positions` positions of all samples.
    Cotangents times `scale` are the gradients of each sample's loss."""
    return Factors(sums.inputs / num_positions, sums.outputs * (scale**2 / num_positions))


def invert_damped(
    factors: Mapping[str, Factors], damping: Array, positions: Mapping[str, Array]
) -> dict[str, Factors]:
    """Return (A + r I)^-1 and (G + r I)^-1 of every layer, with r = sqrt(damping / T) and T =
    `positions`. Their Kronecker product, divided by T, approximates the inverse of T * A (x) G +
    damping * I. As in MindSpore, A and G have the same r, whatever their sizes."""

    def add_damping(blocks: Array, root: Array) -> Array:
        return blocks + root * jnp.eye(blocks.shape[-1], dtype=blocks.dtype)

    roots = {path: jnp.sqrt(damping / positions[path]) for path in factors}
    damped = {
        path: Factors(
            add_damping(layer.inputs, roots[path]), add_damping(layer.outputs, roots[path])
        )
        for path, layer in factors.items()
    }
    stacks, structure = jax.tree.flatten(damped)
    inverses: dict[str, Factors] = jax.tree.unflatten(structure, invert_stacks(stacks))
    return inverses


def precondition(gradient: Array, inverses: Factors, positions: Array) -> Array:
    """Return A^-1 * gradient * G^-1 / positions. The gradient (..., m) is reshaped to (n, m)."""
    row_blocks, height, _ = inverses.inputs.shape
    column_blocks, width, _ = inverses.outputs.shape
    matrix = gradient.reshape(-1, gradient.shape[-1])
    rows, columns = matrix.shape
    padded_rows = row_blocks * height
    padding = [(0, padded_rows - rows), (0, column_blocks * width - columns)]
    padded = jnp.pad(matrix, padding).reshape(row_blocks, height, -1)
    left = (inverses.inputs @ padded).reshape(-1, column_blocks, width).swapaxes(0, 1)
    product = (left @ inverses.outputs).swapaxes(0, 1).reshape(padded_rows, -1) / positions
    return product[:rows, :columns].reshape(gradient.shape)


def _sum_second_moment(samples: Array, window: ConvWindow | None, split_dim: int) -> Array:
    """Return the blocks of the sum of r r' over the rows r of all samples; see `_list_rows`.
    Samples (batch, ..., features) are processed in chunks."""
    sum_products = functools.partial(_sum_row_products, window=window, split_dim=split_dim)
    size = _choose_chunk_size(samples, window)
    if size == samples.shape[0]:
        return sum_products(samples)

    def add(total: Array, chunk: Array) -> tuple[Array, None]:
        return total + sum_products(chunk), None

    chunks = samples.reshape(-1, size, *samples.shape[1:])
    result = jax.eval_shape(sum_products, chunks[0])
    total, _ = lax.scan(add, jnp.zeros(result.shape, result.dtype), chunks)
    return total


def _choose_chunk_size(samples: Array, window: ConvWindow | None) -> int:
    """Return the largest number of samples that divides the batch size and whose rows have at most
    MAX_CHUNK_BYTES; 1 if a sample has more."""
    batch_size = samples.shape[0]
    rows = jax.eval_shape(functools.partial(_list_rows, window=window), samples)
    batch_bytes = 4 * rows.size  # Rows are float32.
    max_size = min(batch_size, MAX_CHUNK_BYTES * batch_size // batch_bytes)
    return next((size for size in range(max_size, 0, -1) if batch_size % size == 0), 1)


def _sum_row_products(samples: Array, window: ConvWindow | None, split_dim: int) -> Array:
    """Return the blocks of the sum of r r' over the rows r of some samples."""
    rows = _list_rows(samples, window)
    blocks = make_blocks(rows.shape[1], split_dim)
    padded = jnp.pad(rows, [(0, 0), (0, blocks.number * blocks.size - rows.shape[1])])
    # Blocks are outermost: as a middle dimension they would make XLA loop over scalars.
    tiles = padded.reshape(-1, blocks.number, blocks.size).swapaxes(0, 1)
    return multiply_by_rows("xla", tiles, tiles)


def _list_rows(samples: Array, window: ConvWindow | None) -> Array:
    """Return rows (samples * positions, features), sample by sample: patches of images if there is
    a window, else the features at each position."""
    if window is None:
        return samples.reshape(-1, samples.shape[-1])
    return make_patches(window, samples)


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
    batch_size = max(1, MAX_INVERTED_BYTES // matrix_bytes)
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
