"""Images of mean 0 and variance 1."""

from __future__ import annotations

import numpy as np

from pipeline.data.ops.values import Whiten

NONE = np.zeros((3, 0), np.float32)


def test_each_image_gets_its_own_mean_and_deviation() -> None:
    images = np.random.default_rng(1).integers(0, 256, (3, 6, 5, 3), np.uint8)
    images[1] //= 9
    result = Whiten()(np, images, NONE)
    for image, found in zip(images.astype(np.float64), result, strict=True):
        expected = (image - image.mean()) / max(image.std(), 1 / np.sqrt(image.size))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert result.dtype == np.float32


def test_an_image_of_one_colour_is_zero() -> None:
    images = np.full((3, 4, 4, 1), 200, np.uint8)
    np.testing.assert_array_equal(Whiten()(np, images, NONE), 0)
