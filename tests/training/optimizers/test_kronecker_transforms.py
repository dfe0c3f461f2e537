"""SOAP against its algorithm in numpy float64, with LAPACK's decompositions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.optimizers.kronecker_transforms import reflect_to_basis, rotate_to_basis
from pipeline.training.optimizers.layerwise import Soap

LR, DECAY, B1, B2, SHARE, EPS, PERIOD, STEPS = 0.02, 0.1, 0.9, 0.8, 0.7, 1e-4, 4, 50
SOAP = Soap(
    lr=LR, weight_decay=DECAY, decay_rules=(), b1=B1, b2=B2, factor_share=SHARE, eps=EPS,
    period=PERIOD, largest_axis=8,
)  # fmt: skip


def some_params() -> dict[str, np.ndarray]:
    """The axes of every array have factors of full rank from the first gradient on, so eigenvectors
    are unique up to their signs. `wide` has an axis that keeps its basis."""
    rng = np.random.default_rng(11)
    shapes = {"bias": (4,), "conv": (2, 2, 3, 4), "square": (5, 5), "wide": (3, 9)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def gradient_at(p: Any, t: int, sin: Any) -> Any:
    return sin(3 * p + 0.3 * t) + 0.2


def unfold(array: np.ndarray, axis: int) -> np.ndarray:
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


def turn(array: np.ndarray, bases: dict[int, np.ndarray], *, back: bool) -> np.ndarray:
    for axis, basis in bases.items():
        matrix = basis if back else basis.T
        array = np.moveaxis(np.tensordot(matrix, array, (1, axis)), 0, axis)
    return array


def soap(p: np.ndarray) -> list[np.ndarray]:
    """Parameters after each of the updates."""
    axes = [axis for axis, n in enumerate(p.shape) if p.ndim > 1 and n <= 8]
    factors = {axis: np.zeros((p.shape[axis],) * 2) for axis in axes}
    bases: dict[int, np.ndarray] = {}
    m = v = np.zeros_like(p)
    result = []
    for t in range(STEPS):
        g = gradient_at(p, t, np.sin)
        direction = np.zeros_like(p)
        if t:
            rotated = turn(g, bases, back=False)
            m, v = B1 * m + (1 - B1) * rotated, B2 * v + (1 - B2) * rotated**2
            scale = np.sqrt(1 - B2**t) / (1 - B1**t)
            direction = scale * turn(m / (np.sqrt(v) + EPS), bases, back=True)
        for axis in axes:
            matrix = unfold(g, axis)
            factors[axis] = SHARE * factors[axis] + (1 - SHARE) * matrix @ matrix.T
        if t == 0:
            bases = {axis: np.linalg.eigh(factors[axis])[1][:, ::-1] for axis in axes}
        elif t % PERIOD == 0:
            plain = turn(m, bases, back=True)
            for axis in axes:
                basis = bases[axis]
                order = np.argsort(-np.diag(basis.T @ factors[axis] @ basis))
                v = np.take(v, order, axis)
                bases[axis] = np.linalg.qr(factors[axis] @ basis[:, order])[0]
            m = turn(plain, bases, back=False)
        p = p - LR * (direction + DECAY * p)
        result.append(p)
    return result


@pytest.mark.slow
def test_fifty_updates_match_the_algorithm_in_float64() -> None:
    optimizer, params = SOAP.build(), jax.tree.map(jnp.float32, some_params())

    @jax.jit
    def update(params: Any, state: Any, t: jax.Array) -> Any:
        gradients = jax.tree.map(lambda p: gradient_at(p, t, jnp.sin), params)
        directions, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, d: p - LR * d, params, directions), state

    state = optimizer.init(params)
    expected = {name: soap(p) for name, p in some_params().items()}
    for t in range(STEPS):
        params, state = update(params, state, jnp.float32(t))
        for name, param in params.items():
            np.testing.assert_allclose(param, expected[name][t], rtol=1e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank"), [(1, 1), (2, 1), (5, 5), (6, 3), (25, 25)])
def test_decompositions_match_those_of_lapack(size: int, rank: int) -> None:
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, rank))
    matrix = root @ root.T
    vectors = np.float64(rotate_to_basis(jnp.float32(matrix)))
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(size), atol=1e-5)
    values = np.sort(np.diag(vectors.T @ matrix @ vectors))
    np.testing.assert_allclose(values, np.linalg.eigvalsh(matrix), atol=1e-5 * values.max())
    basis = np.float64(reflect_to_basis(jnp.float32(matrix)))
    np.testing.assert_allclose(basis.T @ basis, np.eye(size), atol=1e-5)
    upper = basis.T @ matrix
    np.testing.assert_allclose(upper, np.triu(upper), atol=1e-5 * values.max())


@pytest.mark.medium
def test_first_gradient_of_zero_leaves_finite_bases() -> None:
    """As a layer has whose outputs begin at zero."""
    optimizer, params = SOAP.build(), jax.tree.map(jnp.float32, some_params())
    state = optimizer.init(params)
    for scale in (0.0, 1.0, 1.0):
        gradients = jax.tree.map(lambda p, scale=scale: scale * p, params)
        directions, state = optimizer.update(gradients, state, params)
    assert all(np.isfinite(array).all() for array in jax.tree.leaves((directions, state)))
