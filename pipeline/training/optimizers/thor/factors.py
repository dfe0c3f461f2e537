"""The Kronecker factors of a layer's curvature, their damped inverses, and preconditioning.

The curvature of a layer with weights (n, m) is its Fisher matrix, averaged over samples. It is
approximated by T * A (x) G. T is the number of positions in a sample: the output pixels of a
convolution, the tokens of a text, or 1 for a vector. Over all positions of all samples,

    A = mean of a a'     a (n): input of the weights, for a convolution a patch of the images
    G = mean of d d'     d (m): the gradient of one sample's loss at the layer's output

(Grosse & Martens 2016, secs. 3 and 4; THOR, Chen et al. 2021). A bias isn't included. A and G are
replaced by blocks along their diagonals, since the time of an inversion grows with the cube of the
size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.lowerings.formulas.matmuls import make_patches, multiply_by_rows
from pipeline.models.lowerings.problem.conv_window import ConvWindow
from pipeline.models.modules.apply_layers import to_nhwc
from pipeline.models.modules.layer_capture import LayerCapture
from pipeline.training.optimizers.thor.inverses import invert_stacks

MAX_CHUNK_BYTES = 8 << 20
"""Largest size of the rows of a chunk. Patches are several times as large as their images, and
products are faster if the rows fit into the cache."""


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
    inputs = to_nhwc(capture.inputs, capture.layout)
    cotangents = to_nhwc(capture.cotangents, capture.layout)
    inputs = jnp.where(mask.reshape(-1, *[1] * (inputs.ndim - 1)), inputs, 0)
    return Factors(
        _sum_second_moment(inputs, capture.window, split_dim),
        _sum_second_moment(cotangents, None, split_dim),
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
