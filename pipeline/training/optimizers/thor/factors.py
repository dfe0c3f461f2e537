"""The Kronecker factors of a layer's curvature, their damped inverses, and preconditioning.

The curvature of a layer with weights (n, m) is its Fisher matrix, averaged over samples. It is
approximated by T * A (x) G, with T positions per sample: the output pixels of a convolution, or
tokens; 1 for vectors. Over all positions of all samples,

    A = mean of a a'     a (n): input of the weights, for a convolution a patch of the images
    G = mean of d d'     d (m): the gradient of one sample's loss at the layer's output

(Grosse & Martens 2016, secs. 3 and 4; THOR, Chen et al. 2021). A bias isn't included. A and G are
replaced by blocks along their diagonals, since inversion costs the size cubed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import ceil, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.lowerings.formulas.matmuls import make_patches, multiply_by_rows
from pipeline.models.lowerings.problem.conv_window import ConvWindow
from pipeline.models.modules.layer_capture import LayerCapture
from pipeline.models.modules.layout import shape_nhwc, to_nhwc
from pipeline.training.optimizers.thor.inverses import invert_stacks

ROWS_LIMIT_BYTES = 8 << 20
"""Most bytes of the rows of a chunk. Patches are several times as large as their images, and a
product within the cache is faster."""


class Blocks(NamedTuple):
    """The number of blocks of a factor, and their rows; the last block is padded."""

    number: int
    size: int


class Factors(NamedTuple):
    """Blocks for the inputs and for the outputs of a layer, float32 (blocks, size, size)."""

    inputs: Array
    outputs: Array


def make_blocks(features: int, split_dim: int) -> Blocks:
    """Return the fewest blocks of equal size, at most `split_dim` rows, that hold `features`."""
    number = ceil(features / split_dim)
    return Blocks(number, ceil(features / number))


def sum_moments(capture: LayerCapture, mask: Array, split_dim: int) -> Factors:
    """Return the blocks of the sums of a a' and d d' over samples of the mask, bool (batch,)."""
    inputs = to_nhwc(capture.inputs, capture.layout)
    cotangents = to_nhwc(capture.cotangents, capture.layout)
    inputs = jnp.where(mask.reshape(-1, *[1] * (inputs.ndim - 1)), inputs, 0)
    return Factors(
        _sum_second_moment(inputs, capture.window, split_dim),
        _sum_second_moment(cotangents, None, split_dim),
    )


def compute_factors(sums: Factors, rows: Array, scale: Array | float) -> Factors:
    """Return the blocks of A and G from sums over `rows` positions of all samples.

    Cotangents times `scale` are the gradients of each sample's loss.
    """
    return Factors(sums.inputs / rows, sums.outputs * (scale**2 / rows))


def invert_damped(
    factors: Mapping[str, Factors], damping: Array, positions: Mapping[str, Array]
) -> dict[str, Factors]:
    """Return (A + r)^-1 and (G + r)^-1 of every layer, with r = sqrt(damping / positions).

    Their product over `positions` approximates the inverse of T * A (x) G + damping. Both sides
    have the same r, whatever the sizes of A and G, as in MindSpore.
    """

    def add_damping(blocks: Array, share: Array) -> Array:
        return blocks + share * jnp.eye(blocks.shape[-1], dtype=blocks.dtype)

    shares = {path: jnp.sqrt(damping / positions[path]) for path in factors}
    systems = {
        path: Factors(*(add_damping(blocks, shares[path]) for blocks in layer))
        for path, layer in factors.items()
    }
    stacks, structure = jax.tree.flatten(systems)
    inverses: dict[str, Factors] = jax.tree.unflatten(structure, invert_stacks(stacks))
    return inverses


def precondition(gradient: Array, inverses: Factors, positions: Array) -> Array:
    """Return A^-1 * gradient * G^-1 / positions. The gradient (..., m) is reshaped to (n, m)."""
    (row_blocks, height, _) = inverses.inputs.shape
    (column_blocks, width, _) = inverses.outputs.shape
    matrix = gradient.reshape(-1, gradient.shape[-1])
    rows = row_blocks * height
    padding = [(0, rows - matrix.shape[0]), (0, column_blocks * width - matrix.shape[1])]
    padded = jnp.pad(matrix, padding).reshape(row_blocks, height, -1)
    columns = (inverses.inputs @ padded).reshape(-1, column_blocks, width).swapaxes(0, 1)
    product = (columns @ inverses.outputs).swapaxes(0, 1).reshape(rows, -1) / positions
    return product[: matrix.shape[0], : matrix.shape[1]].reshape(gradient.shape)


def count_positions(capture: LayerCapture) -> int:
    """Return the number of outputs of each feature in one sample."""
    return prod(shape_nhwc(capture.cotangents, capture.layout)[1:-1])


def _sum_second_moment(samples: Array, window: ConvWindow | None, split_dim: int) -> Array:
    """Return the blocks of the sum of r r' over rows r: patches of the window, or all positions.
    Samples (batch, ..., features) are processed in chunks."""
    moment = functools.partial(_sum_row_products, window=window, split_dim=split_dim)
    size = _choose_chunk_size(samples, window)
    if size == samples.shape[0]:
        return moment(samples)
    chunks = samples.reshape(-1, size, *samples.shape[1:])
    shape = jax.eval_shape(moment, chunks[0])
    zero = jnp.zeros(shape.shape, shape.dtype)
    return lax.scan(lambda total, chunk: (total + moment(chunk), None), zero, chunks)[0]


def _choose_chunk_size(samples: Array, window: ConvWindow | None) -> int:
    """Return the largest divisor of the batch size whose rows fit into the limit, at least 1."""
    batch, *_ = samples.shape
    rows = jax.eval_shape(functools.partial(_list_rows, window=window), samples)
    batch_bytes = 4 * rows.size  # As float32.
    max_size = max(1, ROWS_LIMIT_BYTES * batch // batch_bytes)
    return next(size for size in range(min(batch, max_size), 0, -1) if batch % size == 0)


def _sum_row_products(samples: Array, window: ConvWindow | None, split_dim: int) -> Array:
    """Return the blocks of the sum of r r' over the rows r of some samples."""
    rows = _list_rows(samples, window)
    blocks = make_blocks(rows.shape[1], split_dim)
    padded = jnp.pad(rows, [(0, 0), (0, blocks.number * blocks.size - rows.shape[1])])
    # Blocks are outermost: as a middle dimension they would make XLA loop over scalars.
    tiles = padded.reshape(-1, blocks.number, blocks.size).swapaxes(0, 1)
    return multiply_by_rows("xla", tiles, tiles)


def _list_rows(samples: Array, window: ConvWindow | None) -> Array:
    """Return rows (samples * positions, features), sample by sample."""
    return (
        samples.reshape(-1, samples.shape[-1]) if window is None else make_patches(window, samples)
    )
