from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.geometry import RandomCrop
from pipeline.data.ops.values import Hwc2Chw, Normalize, Rescale, TypeCast, Whiten
from pipeline.data.transform import apply_ops
from pipeline.training.robustness.adversarial_rule import PixelScale, find_pixel_scale, find_white

OPS = (
    RandomCrop(size=(6, 6), padding=(1, 1, 1, 1)),
    Rescale(factor=1 / 255, shift=0.1),
    Normalize(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1)),
    TypeCast(dtype="int32"),
    Hwc2Chw(),
)


def test_pixel_scale_matches_the_ops() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3)).astype(np.uint8)
    columns = {"image": images, "label": np.zeros(2)}
    mapped = apply_ops(np, OPS[1:], columns, np.zeros(2, np.uint32), 0, np.arange(2))["image"]
    inputs = np.moveaxis(mapped, 1, -1)
    scale = find_pixel_scale(OPS, find_white(ColumnSpec((6, 6, 3), "uint8"), 255))
    np.testing.assert_allclose(scale.to_inputs(images / np.float32(255)), inputs, atol=1e-5)
    np.testing.assert_allclose(scale.to_pixels(inputs), images / 255, atol=1e-6)


def test_white_pixel_maps_to_1() -> None:
    assert find_white(ColumnSpec((8, 8, 1), "uint8"), 16) == 16
    assert find_white(ColumnSpec((8, 8, 1), "float32"), 255) == 1
    assert find_pixel_scale((), 16) == PixelScale((16.0,), (0.0,))


def test_non_affine_ops_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"ops\.1 \(whiten\): changes values so that they have no radius"
    ):
        find_pixel_scale((Hwc2Chw(), Whiten()), 255)
    with pytest.raises(ValueError, match=r"ops\.0 \(rescale\): must not have factor 0"):
        find_pixel_scale((Rescale(factor=0.0, shift=1.0),), 255)
