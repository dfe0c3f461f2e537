"""Resize against MindSpore's own results: bytes exactly, floats to 1e-6 (D-05)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.resize import Resize

with np.load(Path(__file__).parents[2] / "golden/map_ops/resize.npz") as stored:
    GOLDEN = dict(stored)
CASES = [key for key in GOLDEN if not key.startswith("image/")]


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_resize_parity_with_mindspore(key):
    interpolation, name, text = key.split("/")
    numbers, image, expected = (
        tuple(map(int, text.split("x"))),
        GOLDEN[f"image/{name}"],
        GOLDEN[key],
    )
    size = numbers if len(numbers) == 2 else numbers[0]
    op = Resize(size=size, interpolation=interpolation)
    got = op(np, image[None], None)[0]
    assert op.output(ColumnSpec(image.shape, image.dtype.name)).shape == expected.shape
    assert got.dtype == expected.dtype
    if image.dtype != np.uint8:
        np.testing.assert_allclose(got, expected, atol=1e-6)
    elif interpolation == "area":
        only_ties_differ(got, expected, image)
    else:
        np.testing.assert_array_equal(got, expected)


def only_ties_differ(got, expected, image):
    """OpenCV adds areas in float32, whose noise decides where the mean is half a level exactly."""
    differing = got != expected
    if differing.any():
        exact = area_means(image, got.shape)[differing]
        np.testing.assert_array_equal(exact % 1, 0.5)
        np.testing.assert_array_equal(abs(expected[differing] - exact), 0.5)
        assert differing.mean() < 0.01


def area_means(image, shape):
    """Means over the area of each target pixel, worked out on a grid as fine as both."""
    rows, columns = shape[:2]
    fine = image.astype(np.int64).repeat(rows, axis=0).repeat(columns, axis=1)
    cells = fine.reshape(rows, image.shape[0], columns, image.shape[1], -1)
    return cells.sum(axis=(1, 3)) / (image.shape[0] * image.shape[1])


def test_golden_covers_every_interpolation_of_bytes():
    covered = {key.split("/")[0] for key in CASES if "/uint8_" in key}
    assert covered == {"linear", "nearest", "cubic", "area", "pil_cubic", "antialias"}
