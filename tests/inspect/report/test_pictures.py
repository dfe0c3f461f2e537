"""Samples as pictures: bytes as they are, other numbers over their range, and sheets of them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from pipeline.data.mask_colours import IGNORED_COLOUR, draw_masks
from pipeline.inspect.report.pictures import (
    MAX_SIDE,
    can_picture,
    draw_training_charts,
    join_masks,
    list_mask_colours,
    picture,
    png,
    sheet,
)

STEPS = np.arange(1, 4)


@pytest.mark.parametrize(
    ("shape", "is_image"),
    [((8, 8, 1), True), ((8, 8, 3), True), ((8, 8, 2), False), ((1, 8, 3), False), ((8,), False)],
)
def test_grey_and_colour_images_can_be_shown(shape: tuple[int, ...], is_image: bool) -> None:
    assert can_picture(shape) == is_image


def test_bytes_are_shown_unchanged() -> None:
    sample = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5
    np.testing.assert_array_equal(np.asarray(picture(sample)), sample)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png(picture(sample))))), sample)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int16"])
def test_values_are_stretched_to_their_range(dtype: str) -> None:
    sample = np.array([[0, 4], [8, 16]], dtype)[..., None]
    np.testing.assert_array_equal(np.asarray(picture(sample)), [[0, 63], [127, 255]])


def test_constant_and_nan_images_are_drawn() -> None:
    even = np.full((4, 4, 1), 2.5, np.float32)
    assert len(set(np.asarray(picture(even)).ravel().tolist())) == 1
    even[0, 0, 0] = np.nan
    assert picture(even).size == (4, 4)


def test_large_image_is_downscaled() -> None:
    assert picture(np.zeros((400, 200, 3), np.uint8)).size == (MAX_SIDE // 2, MAX_SIDE)


def test_sheet_grows_by_rows() -> None:
    images = [picture(np.full((8, 8, 3), 200, np.uint8))] * 7
    captions = [("predicted", "a label that is longer than a line")] * 7
    short = sheet(images[:6], captions[:6])
    tall = sheet(images, captions)
    assert short.width == tall.width
    assert tall.height > 1.8 * short.height


def test_colours_are_those_of_classes_that_masks_have() -> None:
    masks = [np.array([[0, 2], [2, 0]]), np.array([[3, 3], [255, 0]])]
    names = ["sky", "road", "car", "tree"]
    colours = list_mask_colours(masks, names)
    assert list(colours.values()) == ["sky", "car", "tree", "not counted"]
    drawn = draw_masks(np.array([[0, 2, 3, 255]]), 4)[0]
    assert list(colours) == [f"#{bytes(colour).hex()}" for colour in drawn]
    assert list_mask_colours([], names) == {}


def test_masks_are_scaled_to_the_size_of_the_image() -> None:
    image = picture(np.full((8, 4, 3), 200, np.uint8))
    strip = join_masks(image, np.array([[0], [1]]), np.array([[1], [-1]]), 2)
    assert strip.size == (3 * 4 + 4, 8)
    pixels = np.asarray(strip)
    assert (pixels[:, :4] == 200).all()
    assert (pixels[:, 4:6] == 255).all()
    assert (pixels[4:, 6:10] == pixels[:4, 12:]).all()
    assert (pixels[:4, 6:10] == 0).all()
    assert (pixels[4:, 12:] == IGNORED_COLOUR).all()
    wide = sheet([strip.resize((96, 32))] * 3, [("a", "b")] * 3)
    assert wide.width > 6 * 128
    assert wide.height > 2 * 128


def test_charts_are_of_the_logged_values_and_the_first_headline() -> None:
    log = {"step": STEPS, "loss": np.array([3.0, 2.0, 1.0]), "learning_rate": np.ones(3)}
    evaluations = {"step": STEPS, "r2": np.ones(3), "micro_f1": np.zeros(3), "loss": np.ones(3)}
    charts = draw_training_charts(log, evaluations)
    labels = {name: chart.label for name, chart in charts.items()}
    titles = {"loss.svg": "loss", "metric.svg": "micro f1", "learning_rate.svg": "learning rate"}
    assert labels == titles
    assert len(list(charts["loss.svg"].marks.iter("polyline"))) == 2


def test_empty_logs_have_no_charts() -> None:
    assert draw_training_charts({}, {}) == {}
