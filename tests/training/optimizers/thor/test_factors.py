"""Factors, inverses and preconditioned gradients against loops and numpy.linalg in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.lowerings.formulas.matmuls import make_patches
from pipeline.models.lowerings.problem.conv_window import ConvWindow, make_window
from pipeline.models.modules.apply_layers import to_nhwc
from pipeline.models.modules.layer_capture import LayerCapture
from pipeline.training.features.curvature import count_positions
from pipeline.training.optimizers.thor.factors import (
    Factors,
    compute_factors,
    invert_damped,
    make_blocks,
    precondition,
    sum_moments,
)
from tests.models.build import QUICK

MODULE = "pipeline.training.optimizers.thor.factors"
WHOLE = 10**6
"""A limit that splits nothing."""


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def dense(inputs: np.ndarray, cotangents: np.ndarray) -> LayerCapture:
    return LayerCapture(jnp.float32(inputs), jnp.float32(cotangents), None, "nhwc")


def convolution(images: np.ndarray, cotangents: np.ndarray, layout: str = "nhwc") -> LayerCapture:
    """A 3x2 kernel with stride 2, padded by a row above and a column after."""
    window = make_window(images.shape[1:3], (3, 2), (2, 2), ((1, 0), (0, 1)), (1, 1), 1)
    if layout == "chwn":
        images, cotangents = images.transpose(3, 1, 2, 0), cotangents.transpose(3, 1, 2, 0)
    return LayerCapture(jnp.float32(images), jnp.float32(cotangents), window, layout)


def patches_of(images: np.ndarray) -> np.ndarray:
    """The inputs of `convolution` at its 2 x 2 positions of each 5 x 4 image."""
    padded = np.pad(images, ((0, 0), (1, 0), (0, 1), (0, 0)))
    rows = [
        padded[sample, 2 * y : 2 * y + 3, 2 * x : 2 * x + 2].ravel()
        for sample in range(len(images))
        for y in range(2)
        for x in range(2)
    ]
    return np.array(rows)


def factors_of(seen: LayerCapture, count: int, scale: float, split_dim: int) -> Factors:
    """A and G of the first `count` samples of a batch."""
    mask = jnp.arange(to_nhwc(seen.inputs, seen.layout).shape[0]) < count
    rows = jnp.int32(count * count_positions(seen))
    return compute_factors(sum_moments(seen, mask, split_dim), rows, scale)


def inverted(factors: Factors, damping: float, positions: int) -> Factors:
    """The damped inverses of one layer alone."""

    def invert(factors: Factors, damping: jax.Array) -> dict[str, Factors]:
        return invert_damped({"layer": factors}, damping, {"layer": positions})

    return jax.jit(invert, compiler_options=QUICK)(factors, jnp.float32(damping))["layer"]


def second_moment(rows: np.ndarray) -> np.ndarray:
    """The mean of r r', one row after the other."""
    return sum(np.outer(row, row) for row in rows) / len(rows)


@given(features=st.integers(1, 5000), split_dim=st.integers(1, 600))
def test_blocks_cover_all_features_in_minimal_number(features: int, split_dim: int) -> None:
    blocks = make_blocks(features, split_dim)
    assert blocks.size <= split_dim
    assert blocks.number * blocks.size >= features
    assert (blocks.number - 1) * split_dim < features
    assert (blocks.size - 1) * blocks.number < features


@pytest.mark.slow
def test_dense_factors_are_second_moments_of_inputs_and_gradients() -> None:
    """L-06: for one sample's gradients, the cotangents of a mean times the batch."""
    x, d = draw(5, 4), draw(5, 3, seed=1)
    factors = factors_of(dense(x, d / 5), 5, 5.0, WHOLE)
    np.testing.assert_allclose(factors.inputs[0], second_moment(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(factors.outputs[0], second_moment(d), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_tokens_count_as_positions() -> None:
    x, d = draw(5, 6, 4), draw(5, 6, 3, seed=1)
    seen = dense(x, d)
    factors = factors_of(seen, 5, 1.0, WHOLE)
    assert count_positions(seen) == 6
    np.testing.assert_allclose(
        factors.inputs[0], second_moment(x.reshape(30, 4)), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        factors.outputs[0], second_moment(d.reshape(30, 3)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
def test_convolution_factors_are_second_moments_of_patches(layout: str) -> None:
    images, d = draw(2, 5, 4, 2), draw(2, 2, 2, 3, seed=1)
    seen = convolution(images, d, layout)
    factors = factors_of(seen, 2, 1.0, WHOLE)
    assert count_positions(seen) == 4
    np.testing.assert_allclose(
        factors.inputs[0], second_moment(patches_of(images)), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        factors.outputs[0], second_moment(d.reshape(8, 3)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
@pytest.mark.parametrize("samples", [1, 2, 4, 6])
def test_rows_are_written_in_portions_of_samples(
    samples: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the limit lets in, or less, to divide the batch: 2 x 2 patches of 12 values."""
    images, d = draw(6, 5, 4, 2), draw(6, 2, 2, 3, seed=1)
    whole = factors_of(convolution(images, d, layout), 5, 2.0, 7)
    written: list[int] = []

    def counted(window: ConvWindow, images: jax.Array) -> jax.Array:
        written.append(images.shape[0])
        return make_patches(window, images)

    monkeypatch.setattr(f"{MODULE}.MAX_CHUNK_BYTES", samples * 4 * 2 * 2 * 12)
    monkeypatch.setattr(f"{MODULE}.make_patches", counted)
    split = factors_of(convolution(images, d, layout), 5, 2.0, 7)
    assert written[-1] == {4: 3}.get(samples, samples)
    for one, other in zip(whole, split, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_padding_does_not_count_as_a_sample() -> None:
    """Its cotangents are 0 already; what it shows to the layer must not count."""
    x, d = draw(5, 4), draw(5, 3, seed=1)
    d[3:] = 0
    factors = factors_of(dense(x, d), 3, 1.0, WHOLE)
    np.testing.assert_allclose(factors.inputs[0], second_moment(x[:3]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(factors.outputs[0], second_moment(d[:3]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_blocks_are_on_the_diagonal() -> None:
    """7 features by at most 3: blocks of 3, 3 and 1, the last filled up with 0."""
    x = draw(5, 7)
    whole = second_moment(x)
    blocks = factors_of(dense(x, x), 5, 1.0, 3).inputs
    assert blocks.shape == (3, 3, 3)
    for number, block in enumerate(blocks):
        rows = slice(3 * number, min(3 * number + 3, 7))
        expected = np.zeros((3, 3))
        size = rows.stop - rows.start
        expected[:size, :size] = whole[rows, rows]
        np.testing.assert_allclose(block, expected, rtol=1e-5, atol=1e-6)


def block_diagonal(matrix: np.ndarray, split_dim: int) -> np.ndarray:
    """The matrix with all but its blocks on the diagonal put to 0."""
    size = make_blocks(len(matrix), split_dim).size
    number = np.arange(len(matrix)) // size
    return np.where(number[:, None] == number[None, :], matrix, 0)


@pytest.mark.slow
@pytest.mark.parametrize("split_dim", [WHOLE, 4, 3, 1])
@pytest.mark.parametrize("positions", [1, 9])
def test_direction_solves_the_damped_kronecker_system(split_dim: int, positions: int) -> None:
    """numpy.linalg on T * (A + r) (x) (G + r), r = sqrt(damping / T), written out in full."""
    x, d, gradient, damping = draw(20, 7), draw(20, 5, seed=1), draw(7, 5, seed=2), 0.3
    factors = factors_of(dense(x, d), 20, 1.0, split_dim)
    direction = precondition(
        jnp.float32(gradient), inverted(factors, damping, positions), positions
    )
    share = np.sqrt(damping / positions)
    a = block_diagonal(second_moment(x), split_dim) + share * np.eye(7)
    g = block_diagonal(second_moment(d), split_dim) + share * np.eye(5)
    expected = np.linalg.solve(positions * np.kron(a, g), gradient.ravel())
    np.testing.assert_allclose(direction, expected.reshape(7, 5), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_convolution_kernel_is_preconditioned_as_a_patch_matrix() -> None:
    gradient = draw(3, 2, 2, 5)
    inverses = Factors(
        *(jnp.float32(np.linalg.inv(second_moment(draw(40, n)))[None]) for n in (12, 5))
    )
    direction = jax.jit(precondition, static_argnums=2)(jnp.float32(gradient), inverses, 4)
    expected = inverses.inputs[0] @ gradient.reshape(12, 5) @ inverses.outputs[0] / 4
    np.testing.assert_allclose(direction.reshape(12, 5), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("split_dim", "blocks"), [(5, (3, 1)), (2, (6, 2))])
def test_split_convolution_solves_the_system_of_its_patches(
    split_dim: int, blocks: tuple[int, int]
) -> None:
    """As for a dense layer: 12 inputs of a patch and 3 outputs in blocks, at 4 positions."""
    images, d, gradient = draw(5, 5, 4, 2), draw(5, 2, 2, 3, seed=1), draw(3, 2, 2, 3, seed=2)
    factors = factors_of(convolution(images, d), 5, 1.0, split_dim)
    assert (len(factors.inputs), len(factors.outputs)) == blocks
    direction = precondition(jnp.float32(gradient), inverted(factors, 0.3, 4), 4)
    share = np.sqrt(0.3 / 4)
    a = block_diagonal(second_moment(patches_of(images)), split_dim) + share * np.eye(12)
    g = block_diagonal(second_moment(d.reshape(20, 3)), split_dim) + share * np.eye(3)
    expected = np.linalg.solve(4 * np.kron(a, g), gradient.ravel())
    np.testing.assert_allclose(direction, expected.reshape(gradient.shape), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_direction_without_curvature_is_gradient_over_damping() -> None:
    """A and G of 0: the direction is gradient / damping whatever the positions."""
    zero = Factors(jnp.zeros((2, 2, 2)), jnp.zeros((1, 3, 3)))
    gradient = jnp.float32(draw(4, 3))
    for positions in (1, 16):
        inverses = inverted(zero, 0.04, positions)
        np.testing.assert_allclose(
            precondition(gradient, inverses, positions), gradient / 0.04, rtol=1e-5
        )
