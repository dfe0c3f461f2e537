"""The transformations of gradients by Shampoo, in blocks with Adam's step sizes, and by SOAP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from pipeline.training.features.curvature import compute_if_due

if TYPE_CHECKING:
    from pipeline.training.optimizers.layerwise import Shampoo, Soap


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
            return _update_blocks(spec, number, *arrays)

        trees = unbiased, squares, state.factors, state.roots
        parts = jax.tree.map(update_array, gradients, *trees)
        is_part = {"is_leaf": lambda value: isinstance(value, _Part)}
        directions, factors, roots = (
            jax.tree.map(lambda part, name=name: getattr(part, name), parts, **is_part)
            for name in _Part._fields
        )
        return directions, ShampooState(number, mean, square, factors, roots)

    return optax.GradientTransformation(init, update)


def _update_blocks(
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


Matrices = Mapping[str, Array]
"""A matrix (n, n) for each axis of n elements that has a basis, by the number of the axis."""


class SoapState(NamedTuple):
    """Averages in the rotated bases, factors and bases, each in the form of the parameters.
    `num_gradients`, int32 (), is the number of gradients so far."""

    num_gradients: Array
    mean: Any
    square: Any
    factors: Any
    """`Matrices` in place of each array, symmetric."""
    bases: Any
    """`Matrices` in place of each array, with an eigenvector in each column."""


@dataclass(frozen=True)
class _Updated:
    """The direction of an array, and its part of the state. It isn't a pytree."""

    direction: Array
    mean: Array
    square: Array
    factors: Matrices
    bases: Matrices


def scale_by_soap(spec: Soap) -> optax.GradientTransformation:
    """Return the transformation of gradients to directions, without weight decay."""

    def make_zeros(param: Array) -> Matrices:
        return {str(axis): jnp.zeros((n, n)) for axis, n in list_axes(spec, param).items()}

    def make_bases(param: Array) -> Matrices:
        return {str(axis): jnp.eye(n) for axis, n in list_axes(spec, param).items()}

    def init(params: Any) -> SoapState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        squares = jax.tree.map(jnp.zeros_like, params)
        factors, bases = jax.tree.map(make_zeros, params), jax.tree.map(make_bases, params)
        return SoapState(jnp.int32(0), zeros, squares, factors, bases)

    def update(gradients: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
        def update_array(*parts: Any) -> _Updated:
            return _update_array(spec, state.num_gradients, *parts)

        trees = state.mean, state.square, state.factors, state.bases
        updated = jax.tree.map(update_array, gradients, *trees)

        def collect(name: str) -> Any:
            return jax.tree.map(lambda part: getattr(part, name), updated)

        after = SoapState(
            optax.safe_increment(state.num_gradients),
            *(collect(name) for name in ("mean", "square", "factors", "bases")),
        )
        return collect("direction"), after

    return optax.GradientTransformation(init, update)


def list_axes(spec: Soap, param: Array) -> dict[int, int]:
    """Return the size of each axis that has a basis."""
    if param.ndim < 2:
        return {}
    return {axis: n for axis, n in enumerate(param.shape) if 1 < n <= spec.largest_axis}


def _update_array(
    spec: Soap,
    count: Array,
    gradient: Array,
    mean: Array,
    square: Array,
    *matrices: Matrices,
) -> _Updated:
    factors, bases = matrices
    is_first = count == 0
    rotated = rotate(gradient, bases)
    mean = jnp.where(is_first, 0, spec.b1 * mean + (1 - spec.b1) * rotated)
    square = jnp.where(is_first, 0, spec.b2 * square + (1 - spec.b2) * rotated**2)
    number = jnp.maximum(count, 1).astype(jnp.float32)
    scale = jnp.sqrt(1 - spec.b2**number) / (1 - spec.b1**number)
    direction = scale * rotate_back(mean / (jnp.sqrt(square) + spec.eps), bases)

    share = spec.factor_share
    factors = {
        axis: share * factor + (1 - share) * sum_products(gradient, int(axis))
        for axis, factor in factors.items()
    }
    if not bases:
        return _Updated(direction, mean, square, factors, bases)

    def begin() -> tuple[Array, Array, Matrices]:
        return mean, square, {axis: find_basis(factor) for axis, factor in factors.items()}

    def follow() -> tuple[Array, Array, Matrices]:
        turned, sorted_square = {}, square
        for axis, factor in factors.items():
            order = order_columns(factor, bases[axis])
            sorted_square = jnp.take(sorted_square, order, axis=int(axis))
            turned[axis] = iterate_power(factor, bases[axis][:, order])
        return rotate(rotate_back(mean, bases), turned), sorted_square, turned

    def keep() -> tuple[Array, Array, Matrices]:
        return mean, square, bases

    def continue_bases() -> tuple[Array, Array, Matrices]:
        return compute_if_due(count % spec.period == 0, follow, keep)

    mean, square, bases = compute_if_due(is_first, begin, continue_bases)
    return _Updated(direction, mean, square, factors, bases)


def rotate(array: Array, bases: Matrices) -> Array:
    """Return the coordinates of an array in the bases of its axes."""
    return _multiply(array, bases, lambda basis: basis)


def rotate_back(array: Array, bases: Matrices) -> Array:
    """Return the array with these coordinates in the bases of its axes."""
    return _multiply(array, bases, lambda basis: basis.T)


def _multiply(array: Array, bases: Matrices, choose: Callable[[Array], Array]) -> Array:
    for axis, basis in bases.items():
        product = jnp.tensordot(array, choose(basis), axes=(int(axis), 0), precision="highest")
        array = jnp.moveaxis(product, -1, int(axis))
    return array


def sum_products(array: Array, axis: int) -> Array:
    """Return the products of an array's slices along an axis, (n, n), summed over other axes."""
    others = [other for other in range(array.ndim) if other != axis]
    return jnp.tensordot(array, array, axes=(others, others), precision="highest")


def order_columns(factor: Array, basis: Array) -> Array:
    """Return the order of a basis's columns by their estimated eigenvalues, the largest first."""
    estimates = jnp.sum(basis * jnp.matmul(factor, basis, precision="highest"), axis=0)
    return jnp.argsort(-estimates)


def iterate_power(factor: Array, basis: Array) -> Array:
    """Return the basis after a step of the power method: Q of the QR decomposition of `factor @
    basis`."""
    product = jnp.matmul(factor, basis, precision="highest")
    turned: Array = lax.platform_dependent(
        product, cpu=reflect_to_basis, default=lambda matrix: jnp.linalg.qr(matrix)[0]
    )
    return turned


def find_basis(factor: Array) -> Array:
    """Return the eigenvectors of a symmetric matrix in columns, of the largest eigenvalue first."""
    vectors: Array = lax.platform_dependent(
        factor, cpu=rotate_to_basis, default=lambda matrix: jnp.linalg.eigh(matrix)[1]
    )
    return vectors[:, order_columns(factor, vectors)]


# On the CPU decompositions are written out. A batch of LAPACK's may wait forever for the threads of
# the pool that it runs on (`thor/thor_transform.py`).


def reflect_to_basis(matrix: Array) -> Array:
    """Return an orthogonal matrix Q (n, n) with `matrix` = Q R, by Householder's reflections. R is
    upper triangular. `matrix` may be singular."""
    rows = jnp.arange(len(matrix))

    def reflect(k: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        upper, transposed = pair
        column = jnp.where(rows >= k, lax.dynamic_index_in_dim(upper, k, 1, keepdims=False), 0)
        norm = jnp.sqrt(jnp.sum(column**2))
        normal = column + jnp.where(rows == k, jnp.where(column[k] < 0, -norm, norm), 0)
        square = jnp.sum(normal**2)
        normal = normal * jnp.where(square > 0, lax.rsqrt(jnp.where(square > 0, square, 1)), 0)

        def apply(array: Array) -> Array:
            return array - 2 * normal[:, None] * (normal @ array)

        return apply(upper), apply(transposed)

    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    _, transposed = lax.fori_loop(0, len(matrix), reflect, (matrix, identity))
    return transposed.T


SWEEPS = 10
"""Sweeps of Jacobi's rotations. The off-diagonal part falls quadratically: 8 suffice for 400
rows."""


def rotate_to_basis(matrix: Array) -> Array:
    """Return the eigenvectors of a symmetric matrix (n, n) in columns, by Jacobi's rotations.

    Those of a round are of disjoint pairs of rows: the first and the last, the second and the last
    but one. Then all rows but the last move on by one place, so n - 1 rounds have each pair once.
    """
    n = len(matrix)
    half = (n + 1) // 2
    padded = jnp.pad(matrix, (0, 2 * half - n))
    vectors = jnp.eye(2 * half, dtype=matrix.dtype)

    def rotate_rows(array: Array, cosine: Array, sine: Array) -> Array:
        first, second = array[:half], array[half:][::-1]
        rotated = [cosine * first - sine * second, (sine * first + cosine * second)[::-1]]
        array = jnp.concatenate(rotated)
        return jnp.concatenate([array[1:-1], array[:1], array[-1:]])

    def run_round(_: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        array, rows = pair
        diagonal, coupling = jnp.diagonal(array), jnp.diagonal(array[:half, ::-1])
        gap = diagonal[half:][::-1] - diagonal[:half]
        is_zero = coupling == 0
        ratio = gap / (2 * jnp.where(is_zero, 1, coupling))
        sign = jnp.where(ratio < 0, -1.0, 1.0)
        tangent = jnp.where(is_zero, 0, sign / (jnp.abs(ratio) + jnp.sqrt(1 + ratio**2)))
        cosine = lax.rsqrt(1 + tangent**2)[:, None]
        turn = cosine, tangent[:, None] * cosine
        return rotate_rows(rotate_rows(array, *turn).T, *turn).T, rotate_rows(rows, *turn)

    rounds = SWEEPS * (2 * half - 1)
    _, rows = lax.fori_loop(0, rounds, run_round, (padded, vectors))
    # Nothing couples the padding with another row, so its vector is still the last.
    return rows[:n, :n].T
