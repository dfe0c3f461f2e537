from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.layers.tokens import Rotary
from pipeline.models.modules.tokens import (
    compute_frequencies,
    compute_slopes,
    rotate_heads,
)
from tests.models.build import random

HEADS = random(2, 5, 3, 6)


def test_frequencies_fall_from_one_to_the_base() -> None:
    found = compute_frequencies(Rotary(base=100.0), 8)
    np.testing.assert_allclose(found, [1, 100**-0.25, 0.1, 100**-0.75])
    np.testing.assert_allclose(compute_frequencies(Rotary(base=100.0, factor=4.0), 8), found / 4)


def test_scaling_by_trained_tokens_changes_long_waves_only() -> None:
    """Wavelengths 2 pi base^(2i / size) of 8192 trained tokens: below 2048, between, above."""
    rotary = Rotary(base=500_000.0, factor=8.0, trained_tokens=8192)
    plain = compute_frequencies(Rotary(base=500_000.0), 128)
    ratios = plain / compute_frequencies(rotary, 128)
    waves = 2 * np.pi / plain
    np.testing.assert_allclose(ratios[waves < 2048], 1)
    np.testing.assert_allclose(ratios[waves > 8192], 8)
    between = (waves > 2048) & (waves < 8192)
    share = (8192 / waves[between] - 1) / 3
    np.testing.assert_allclose(1 / ratios[between], (1 - share) / 8 + share)
    assert between.sum() == 6


@pytest.mark.medium
def test_rotation_is_a_product_of_complex_numbers() -> None:
    rotary = Rotary(base=50.0)
    positions = np.array([0, 1, 2, 7, 1000], np.int32)
    found = np.asarray(rotate_heads(jnp.asarray(HEADS), jnp.asarray(positions), rotary))
    turns = np.exp(1j * positions[:, None, None] * 50.0 ** (-np.arange(3) / 3))
    turned = (HEADS[..., :3] + 1j * HEADS[..., 3:]) * turns
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_array_equal(found[:, 0], HEADS[:, 0])


@pytest.mark.medium
def test_rotation_of_16_bits_is_rounded_once() -> None:
    half = jnp.asarray(HEADS, jnp.bfloat16)
    positions = jnp.arange(300, 305)
    exact = rotate_heads(half.astype(jnp.float32), positions, Rotary())
    rotated = rotate_heads(half, positions, Rotary())
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (8, [2.0**-k for k in range(1, 9)]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [*(2.0**-k for k in range(1, 9)), *(2.0 ** (-k / 2) for k in (1, 3, 5, 7))]),
    ],
)
def test_slopes_are_those_of_the_paper(heads: int, slopes: list[float]) -> None:
    np.testing.assert_allclose(compute_slopes(heads), slopes)
