"""Weights of resizes: they sum to one, and constant images stay."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.ops.interpolation import (
    WEIGHT_BITS,
    average_areas,
    find_nearest_pixels,
    interpolate,
    make_opencv_taps,
    make_widening_taps,
)

sides = st.integers(1, 20)


@given(source=sides, target=sides)
def test_nearest_uses_the_pixel_at_the_floor(source: int, target: int) -> None:
    expected = [min(n * source // target, source - 1) for n in range(target)]
    assert np.abs(find_nearest_pixels(source, target) - expected).max() <= 1
    if target % source == 0 or source % target == 0:
        np.testing.assert_array_equal(find_nearest_pixels(source, target), expected)


@given(source=sides, target=sides, interpolation=st.sampled_from(["linear", "cubic"]))
def test_interpolation_weights_sum_to_one(source: int, target: int, interpolation: Any) -> None:
    for axis in (1, 2):
        floats = make_opencv_taps(interpolation, source, target, axis, fixed=False)  # type: ignore[arg-type]
        np.testing.assert_allclose(floats.weights.sum(axis=-1), 1, atol=1e-6)
        fixed = make_opencv_taps(interpolation, source, target, axis, fixed=True)  # type: ignore[arg-type]
        assert np.abs(fixed.weights.sum(axis=-1) - (1 << WEIGHT_BITS)).max() <= 2
        assert fixed.pixels.min() >= 0
        assert fixed.pixels.max() < source


@pytest.mark.medium
@given(source=st.integers(1, 8), grown=st.integers(0, 12))
def test_widening_by_a_whole_factor_repeats_pixels(source: int, grown: int) -> None:
    target = source + grown
    taps = make_widening_taps(source, target, fixed=False)
    np.testing.assert_allclose(taps.weights.sum(axis=-1), 1, atol=1e-6)
    if target % source == 0:
        nearest = np.take_along_axis(taps.pixels, taps.weights.argmax(axis=-1)[..., None], -1)
        np.testing.assert_array_equal(nearest[0, :, 0], np.arange(target) // (target // source))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("level", [0, 1, 127, 255])
def test_constant_image_is_unchanged(dtype: str, level: int) -> None:
    image = np.full((1, 6, 5, 3), level, dtype)
    is_fixed = dtype == "uint8"
    across = make_opencv_taps("linear", 5, 9, 2, fixed=is_fixed)
    down = make_opencv_taps("linear", 6, 4, 1, fixed=is_fixed)
    np.testing.assert_allclose(interpolate(np, image, across, down), level, atol=1e-4)


@given(rows=st.integers(1, 3), columns=st.integers(1, 3))
def test_area_average_over_whole_pixels_is_their_mean(rows: int, columns: int) -> None:
    image = np.random.default_rng(0).random((2, 4 * rows, 5 * columns, 3)).astype(np.float32)
    blocks = image.reshape(2, 4, rows, 5, columns, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(average_areas(np, image, (4, 5)), blocks, rtol=1e-5)


@pytest.mark.parametrize("xp", [np, jnp])
def test_areas_of_large_images_do_not_overflow(xp: Any) -> None:
    """255 times the weights of a target pixel, 2,903 * 2,903, exceeds int32."""
    images = np.random.default_rng(0).integers(0, 256, (1, 2903, 2903, 1), np.uint8)
    images[:, 1451:, 1451:] = 255
    found = np.asarray(average_areas(xp, xp.asarray(images), (2, 2)))[0, :, :, 0]
    half = np.array([1.0] * 1451 + [0.5] + [0.0] * 1451)
    weights = np.stack([half, half[::-1]]) / half.sum()
    np.testing.assert_array_equal(found, np.rint(weights @ images[0, :, :, 0] @ weights.T))


def test_areas_of_large_images_round_halves_to_even() -> None:
    images = np.zeros((1, 2904, 2904, 1), np.uint8)
    images[:, :, 1::2] = 3
    assert average_areas(np, images, (1, 1)).item() == 2
    images[:, :, 1::2] = 1
    assert average_areas(np, images, (1, 1)).item() == 0
