"""The Kronecker factors of a layer's curvature, their damped inverses, and what those do.

The curvature of a layer with weights (n, m), which is its Fisher matrix averaged over samples, is
taken to be T * A (x) G with T positions per sample (the pixels that a convolution gives, or
tokens; 1 for vectors), where over all positions of all samples

    A = mean of a a'     a (n): what the weights multiply, for a convolution a patch of the images
    G = mean of d d'     d (m): the gradient of one sample's loss at the layer's output

(Grosse & Martens 2016, secs. 3 and 4; THOR, Chen et al. 2021). A bias is no part of it. Both are
cut into blocks along their diagonal and the rest is left out: a block costs its size cubed.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pipeline.models.layout import batch_first
from pipeline.models.lowerings.products import patches
from pipeline.models.observation import Observation


class Blocks(NamedTuple):
    """How many blocks a factor is cut into, and how many rows each has; the last may reach over."""

    number: int
    size: int


class Factors(NamedTuple):
    """One matrix for the inputs, one for the outputs; float32 (blocks, size, size) each."""

    inputs: Array
    outputs: Array


def cut(features: int, split_dim: int) -> Blocks:
    """The fewest blocks of at most `split_dim` rows, of one size, that hold so many features."""
    number = ceil(features / split_dim)
    return Blocks(number, ceil(features / number))


def curvature_factors(
    observation: Observation, count: Array | int, scale: Array | float, split_dim: int
) -> Factors:
    """The blocks of A and G.

    The first `count` samples are real, the others padding. `scale` times the cotangents are the
    gradients of each sample's own loss.
    """
    inputs, outputs = _rows(observation)
    real = jnp.arange(observation_batch(observation)) < count
    seen = jnp.repeat(real, inputs.shape[0] // real.shape[0])
    inputs = jnp.where(seen[:, None], inputs, 0)
    positions = jnp.asarray(count, jnp.float32) * positions_per_sample(observation)
    return Factors(
        _second_moment(inputs, split_dim) / positions,
        _second_moment(outputs, split_dim) * (scale**2 / positions),
    )


def damped_inverses(factors: Factors, damping: Array, positions: int) -> Factors:
    """(A + r)^-1 and (G + r)^-1 with r = sqrt(damping / positions).

    Their product over `positions` stands for the inverse of T * A (x) G + damping: half of the
    damping, as a factor, goes to each side whatever the size of A and G, as in MindSpore.
    """
    share = jnp.sqrt(damping / positions)
    return Factors(*(_damped_inverse(blocks, share) for blocks in factors))


def precondition(gradient: Array, inverses: Factors, positions: int) -> Array:
    """A^-1 * gradient * G^-1 / positions; the gradient (..., m) is read as a matrix (n, m)."""
    (rows, height, _), (columns, width, _) = inverses.inputs.shape, inverses.outputs.shape
    matrix = gradient.reshape(-1, gradient.shape[-1])
    missing = [(0, rows * height - matrix.shape[0]), (0, columns * width - matrix.shape[1])]
    padded = jnp.pad(matrix, missing).reshape(rows, height, -1)
    left = (inverses.inputs @ padded).reshape(-1, columns, width).swapaxes(0, 1)
    whole = (left @ inverses.outputs).swapaxes(0, 1).reshape(rows * height, -1) / positions
    return whole[: matrix.shape[0], : matrix.shape[1]].reshape(gradient.shape)


def positions_per_sample(observation: Observation) -> int:
    """How many outputs of each feature one sample has."""
    cotangents = observation.cotangents
    features = cotangents.shape[0 if observation.layout == "chwn" else -1]
    return cotangents.size // (features * observation_batch(observation))


def observation_batch(observation: Observation) -> int:
    """How many samples a layer saw, padding included."""
    return observation.inputs.shape[-1 if observation.layout == "chwn" else 0]


def _rows(observation: Observation) -> tuple[Array, Array]:
    """Inputs (samples * positions, n) and cotangents (samples * positions, m), samples slowest."""
    inputs = batch_first(observation.inputs, observation.layout)
    cotangents = batch_first(observation.cotangents, observation.layout)
    if observation.window is None:
        rows = inputs.reshape(-1, inputs.shape[-1])
    else:
        rows = patches(observation.window, inputs)
    return rows, cotangents.reshape(-1, cotangents.shape[-1])


def _second_moment(rows: Array, split_dim: int) -> Array:
    """The blocks of the sum of r r' over rows r."""
    blocks = cut(rows.shape[1], split_dim)
    padded = jnp.pad(rows, [(0, 0), (0, blocks.number * blocks.size - rows.shape[1])])
    tiles = padded.reshape(-1, blocks.number, blocks.size)
    return jnp.einsum("nbi,nbj->bij", tiles, tiles, preferred_element_type=jnp.float32)


def _damped_inverse(blocks: Array, damping: Array) -> Array:
    size = blocks.shape[-1]
    lower = jnp.linalg.cholesky(blocks + damping * jnp.eye(size, dtype=blocks.dtype))
    inverse = _inverse_of_lower(lower)
    return inverse.mT @ inverse


def _inverse_of_lower(lower: Array) -> Array:
    """Of lower triangular matrices (batch, n, n), by ever larger blocks on their diagonals.

    [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]], for all blocks of one size at once: a
    few products for each power of two below n. LAPACK's triangular solve, which jax calls on the
    CPU, spins on threads of its own: 0.6 ms of a free machine, 100 to 400 ms of a busy one.
    """
    n = lower.shape[-1]
    whole = 1 << (n - 1).bit_length()
    padding = jnp.pad(jnp.zeros(n, lower.dtype), (0, whole - n), constant_values=1)
    padded = jnp.pad(lower, [(0, 0), (0, whole - n), (0, whole - n)]) + jnp.diag(padding)
    inverses = 1 / jnp.diagonal(padded, axis1=1, axis2=2)[..., None, None]
    while (size := inverses.shape[-1]) < whole:
        pairs = whole // (2 * size)
        tiles = padded.reshape(-1, pairs, 2 * size, pairs, 2 * size)
        corners = jnp.diagonal(tiles[:, :, size:, :, :size], axis1=1, axis2=3).transpose(0, 3, 1, 2)
        first, second = inverses[:, ::2], inverses[:, 1::2]
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        bottom = jnp.concatenate([-second @ corners @ first, second], -1)
        inverses = jnp.concatenate([top, bottom], -2)
    return inverses[:, 0, :n, :n]
