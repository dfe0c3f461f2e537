"""Inverses of stacks of matrices against numpy.linalg in float64."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.optimizers.thor.inverses import (
    invert_by_cholesky,
    invert_by_elimination,
    invert_stacks,
)
from tests.models.build import QUICK

NUMBERS_AND_SIZES = [(2, 3), (1, 128), (3, 1), (1, 3), (2, 75), (9, 128)]
"""Some sizes twice; of 128 there are more than are worked on at once."""


def positive_definite(number: int, size: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(number, 2 * size, size))
    return rows.mT @ rows / (2 * size) + 0.2 * np.eye(size)


@pytest.mark.slow
def test_matrices_of_a_stack_are_inverted_in_order() -> None:
    stacks = [positive_definite(*shape, seed) for seed, shape in enumerate(NUMBERS_AND_SIZES)]
    inverses = jax.jit(invert_stacks, compiler_options=QUICK)(
        [jnp.float32(stack) for stack in stacks]
    )
    for stack, inverse in zip(stacks, inverses, strict=True):
        np.testing.assert_allclose(inverse, np.linalg.inv(stack), rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(inverse, inverse.mT)


@pytest.mark.slow
@pytest.mark.parametrize("invert", [invert_by_elimination, invert_by_cholesky])
@pytest.mark.parametrize("share", [1e-2, 1e-4])
def test_low_rank_matrix_is_inverted_to_float32_accuracy(
    share: float, invert: Callable[[jax.Array], jax.Array]
) -> None:
    """8 rows of 64 and a small damping: the error is within float32's rounding of the matrix."""
    rows = np.random.default_rng(0).normal(size=(8, 64))
    system = rows.T @ rows / 8 + share * np.eye(64)
    exact = np.linalg.inv(system)
    inverse = jax.jit(invert, compiler_options=QUICK)(jnp.float32(system)[None])[0]
    bound = np.finfo(np.float32).eps * np.linalg.cond(system) * np.linalg.norm(exact, 2)
    assert np.linalg.norm(inverse - exact, 2) < bound
    assert np.linalg.eigvalsh(np.float64(inverse)).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 75])
def test_cholesky_inverse_matches_numpy(size: int) -> None:
    """As other devices than the CPU compute it: sizes that are powers of two and others."""
    stack = positive_definite(2, size, seed=3)
    inverse = jax.jit(invert_by_cholesky, compiler_options=QUICK)(jnp.float32(stack))
    np.testing.assert_allclose(inverse, np.linalg.inv(stack), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_indefinite_matrix_becomes_nan() -> None:
    (inverse,) = invert_stacks([jnp.float32([[[1.0, 2.0], [2.0, 1.0]], [[2.0, 0.0], [0.0, 1.0]]])])
    assert np.isnan(inverse[0]).all()
    np.testing.assert_allclose(inverse[1], [[0.5, 0.0], [0.0, 1.0]], rtol=1e-6)


@pytest.mark.medium
def test_inversion_does_not_call_lapack() -> None:
    """No call of LAPACK: its batches wait for the threads that they run on."""
    shapes = [jax.ShapeDtypeStruct((number, 20, 20), jnp.float32) for number in (3, 4)]
    lowered = jax.jit(invert_stacks).trace(shapes).lower(lowering_platforms=("cpu",))
    assert "custom_call" not in lowered.as_text()
