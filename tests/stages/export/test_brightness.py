"""Images that are inverted or have another scale, by their brightness."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.stages.export.brightness import (
    Brightness,
    explain_unusual_images,
    find_unusual_image,
    measure_brightness,
    parse_brightness,
)

INK = Brightness(33.0, 10.0, 255.0)
"""White strokes on black, as in MNIST."""
PHOTOS = Brightness(120.0, 40.0, 255.0)
DIM = Brightness(4.9, 0.6, 16.0)
"""Scans of 4 bits, as in the digits that ship with the package."""


def stroke(background: int, ink: int) -> np.ndarray:
    """An image (20, 20, 1) of which an eighth is ink."""
    image = np.full((20, 20, 1), background, np.uint8)
    image[:10, :5] = ink
    return image


@pytest.mark.parametrize(
    ("usual", "image", "words"),
    [
        (INK, stroke(0, 255), None),
        (INK, stroke(255, 0), "x.png looks inverted: the mean pixel is 223, in training 33 "),
        (INK, np.zeros((20, 20, 1), np.uint8), "nothing is nearer"),
        (INK, np.full((20, 20, 1), 128, np.uint8), "nothing is nearer"),
        (PHOTOS, stroke(255, 0), "the means of photographs spread widely"),
        (DIM, stroke(0, 16), None),
        (DIM, stroke(0, 255), "x.png has another scale: pixels reach 255, in training 16. If so: "),
        (DIM, stroke(255, 0), "x.png has another scale and looks inverted: pixels reach 255"),
        (DIM, stroke(16, 0), "x.png looks inverted: the mean pixel is 14, in training 4.9 "),
    ],
)
def test_image_is_compared_with_the_training_images(
    usual: Brightness, image: np.ndarray, words: str | None
) -> None:
    found = find_unusual_image("x.png", image, usual)
    if words is None or not words.startswith("x.png"):
        assert found is None, words
    else:
        assert found is not None
        text = explain_unusual_images([found], 1, usual)
        assert text.startswith(words)
        assert "\n" not in text


def test_many_images_have_one_line_with_their_number() -> None:
    found = find_unusual_image("a\n.png", stroke(255, 0), INK)
    assert found is not None
    assert explain_unusual_images([found] * 2, 3, INK) == (
        r"2 of 3 images look inverted, such as a\n.png: the mean pixel is 223, in training 33 "
        "(standard deviation 10). If so: PIL.ImageOps.invert, which makes it 32"
    )


def test_inverted_pixels_are_those_that_the_advice_makes() -> None:
    """Of a scan of 4 bits, 16 is white."""
    found = find_unusual_image("x.png", stroke(16, 0), DIM)
    assert found is not None
    assert explain_unusual_images([found], 1, DIM).endswith("If so: 16 - pixel, which makes it 2")


@pytest.mark.parametrize("samples", [1, 5, 16, 1000])
def test_brightness_is_that_of_evenly_spread_images(samples: int) -> None:
    values = np.arange(samples) * 200 // samples
    images = np.repeat(values, 12).reshape(samples, 2, 2, 3).astype(np.uint8)
    found = measure_brightness(images)
    assert found is not None
    assert found.mean == pytest.approx(values.mean(), abs=7)
    assert found.std == pytest.approx(values.std(), abs=1)
    assert parse_brightness(found.to_dict()) == found


def test_other_samples_and_unreadable_images_have_none() -> None:
    class Damaged:
        shape = (3, 2, 2, 1)
        dtype = np.dtype(np.uint8)

        def __getitem__(self, rows: object) -> np.ndarray:
            raise DataError("images/1.png: is damaged")

    assert measure_brightness(Damaged()) is None
    assert measure_brightness(np.zeros((3, 2, 2, 1), np.float32)) is None
    assert measure_brightness(np.zeros((3, 8), np.uint8)) is None
    assert measure_brightness(np.zeros((0, 2, 2, 1), np.uint8)) is None


@pytest.mark.parametrize(
    "tree",
    [3, {}, {"mean": 1.0, "std": 1.0}, {"mean": "1", "std": 1.0, "largest": 255}]
    + [{"mean": value, "std": 1.0, "largest": 255} for value in (float("nan"), -1.0, 1e9)],
)
def test_damaged_brightness_is_refused(tree: object) -> None:
    with pytest.raises(ValueError, match="brightness must"):
        parse_brightness(tree)
