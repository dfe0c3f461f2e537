"""The transformation of gradients by Shampoo, in blocks, with Adam's step sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pipeline.training.features.curvature import compute_if_due
from pipeline.training.optimizers.soap_transform import find_basis

if TYPE_CHECKING:
    from pipeline.training.optimizers.kronecker import Shampoo


class ShampooState(NamedTuple):
    """Averages in the form of the parameters, and of each array with a matrix its factors and their
    inverse roots: (rows' and columns', blocks, n, n) each, in a tuple; () for other arrays.
    `num_gradients`, int32 (), is the number of gradients so far."""

    num_gradients: Array
    mean: Any
    square: Any
    factors: Any
    roots: Any


class _Part(NamedTuple):
    """An array's direction, and its factors and roots."""

    direction: Array
    factors: tuple[Array, ...]
    roots: tuple[Array, ...]


def scale_by_shampoo(spec: Shampoo) -> optax.GradientTransformation:
    """Return the transformation of gradients to directions, without weight decay."""

    def make_factors(param: Array) -> tuple[Array, ...]:
        if param.ndim < 2:
            return ()
        blocks = to_blocks(param, spec.block)
        return tuple(jnp.zeros((len(blocks), n, n)) for n in blocks.shape[1:])

    def init(params: Any) -> ShampooState:
        factors = jax.tree.map(make_factors, params)
        mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return ShampooState(jnp.int32(0), mean, square, factors, jax.tree.map(jnp.array, factors))

    def update(gradients: Any, state: ShampooState, params: Any = None) -> tuple[Any, ShampooState]:
        number = optax.safe_increment(state.num_gradients)
        mean = optax.tree.update_moment(gradients, state.mean, spec.b1, 1)
        square = optax.tree.update_moment(gradients, state.square, spec.b2, 2)
        unbiased = optax.tree.bias_correction(mean, spec.b1, number)
        squares = optax.tree.bias_correction(square, spec.b2, number)

        def update_array(*arrays: Any) -> _Part:
            return _update_array(spec, number, *arrays)

        trees = unbiased, squares, state.factors, state.roots
        parts = jax.tree.map(update_array, gradients, *trees)
        is_part = {"is_leaf": lambda value: isinstance(value, _Part)}
        directions, factors, roots = (
            jax.tree.map(lambda part, name=name: getattr(part, name), parts, **is_part)
            for name in _Part._fields
        )
        return directions, ShampooState(number, mean, square, factors, roots)

    return optax.GradientTransformation(init, update)


def _update_array(
    spec: Shampoo,
    number: Array,
    gradient: Array,
    mean: Array,
    square: Array,
    *matrices: tuple[Array, ...],
) -> _Part:
    factors, roots = matrices
    adam = mean / (jnp.sqrt(square) + spec.graft_eps)
    if not factors:
        return _Part(adam, (), ())
    blocks = to_blocks(gradient, spec.block)
    products = (
        jnp.einsum("bij,bkj->bik", blocks, blocks, precision="highest"),
        jnp.einsum("bji,bjk->bik", blocks, blocks, precision="highest"),
    )
    factors = tuple(
        spec.b2 * factor + (1 - spec.b2) * product
        for factor, product in zip(factors, products, strict=True)
    )
    correction = 1 - spec.b2 ** number.astype(jnp.float32)

    def compute_roots() -> tuple[Array, ...]:
        return tuple(
            jax.vmap(lambda factor: compute_inverse_root(factor, spec.eps))(factor / correction)
            for factor in factors
        )

    roots = compute_if_due(number % spec.period == 0, compute_roots, lambda: roots)
    turned = jnp.einsum(
        "bij,bjk,bkl->bil", roots[0], to_blocks(mean, spec.block), roots[1], precision="highest"
    )
    sizes, lengths = (
        jnp.sqrt(jnp.square(values).sum(axis=(1, 2), keepdims=True))
        for values in (to_blocks(adam, spec.block), turned)
    )
    scaled = turned * sizes / jnp.where(lengths > 0, lengths, 1)
    direction = jnp.where(number < spec.period, adam, from_blocks(scaled, gradient, spec.block))
    return _Part(direction, factors, roots)


def compute_inverse_root(factor: Array, eps: float) -> Array:
    """Return (factor + eps I)^(-1/4) of a symmetric matrix (n, n) without negative eigenvalues."""
    vectors = find_basis(factor)
    values = jnp.sum(vectors * jnp.matmul(factor, vectors, precision="highest"), axis=0)
    powers = (jnp.maximum(values, 0) + eps) ** -0.25
    return jnp.matmul(vectors * powers, vectors.T, precision="highest")


def to_blocks(array: Array, block: int) -> Array:
    """Return an array of two or more axes as blocks of a matrix, whose columns are the last axis:
    (blocks, rows, columns), of at most `block` each. The last blocks are filled with zeros."""
    matrix = array.reshape(-1, array.shape[-1])
    rows, columns = (min(n, block) for n in matrix.shape)
    padding = [(0, -n % size) for n, size in zip(matrix.shape, (rows, columns), strict=True)]
    padded = jnp.pad(matrix, padding)
    grid = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return grid.swapaxes(1, 2).reshape(-1, rows, columns)


def from_blocks(blocks: Array, like: Array, block: int) -> Array:
    """Return the array in the shape of `like` whose blocks these are."""
    height, width = like.size // like.shape[-1], like.shape[-1]
    rows, columns = blocks.shape[1:]
    grid = blocks.reshape(-(-height // rows), -(-width // columns), rows, columns).swapaxes(1, 2)
    matrix = grid.reshape(grid.shape[0] * rows, grid.shape[2] * columns)
    return matrix[:height, :width].reshape(like.shape)
