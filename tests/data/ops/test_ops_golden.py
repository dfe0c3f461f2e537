"""Ops that draw nothing, or whose draw is fixed, against MindSpore's own results (D-05, D-15)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.ops import policies
from pipeline.data.ops.affine import RandomRotation
from pipeline.data.ops.color import RandomColorAdjust, look_up_blend, make_blend_table
from pipeline.data.ops.geometry import CenterCrop, Pad, RandomHorizontalFlip, RandomVerticalFlip
from pipeline.data.ops.policies import Change, make_level_table
from pipeline.data.ops.resize import Box, crop_and_resize
from pipeline.data.ops.values import Hwc2Chw, Normalize, OneHot, Rescale, TypeCast

with np.load(Path(__file__).parents[2] / "golden/map_ops/fixed.npz") as stored:
    GOLDEN = dict(stored)
CASES = [key for key in GOLDEN if not key.startswith("input/")]
NORMALIZE = {
    "floats": Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
    "noise": Normalize(mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7)),
}
RESCALE = {
    "floats": Rescale(factor=1 / 0.3081, shift=-0.1307 / 0.3081),
    "noise": Rescale(factor=1 / 255, shift=-0.5),
}


def one(number):
    return np.array([number], np.int32)


def table(values, tables):
    return policies.look_up(np, values, np.asarray(tables)[None, None])


def rotated(text, **given):
    interpolation, degrees = text.split("_")
    fixed = (float(degrees), float(degrees))
    return RandomRotation(degrees=fixed, interpolation=interpolation, **given)


def resized_crop(values, text):
    interpolation, *numbers = text.split("_")
    box = Box(*(one(int(number)) for number in numbers))
    return crop_and_resize(np, values, box, (14, 17), interpolation)


def adjusted(values, name, text):
    amount = float(text)
    op = RandomColorAdjust(**{name: (amount, amount)})
    return op(np, values, np.zeros((1, op.draws), np.float32))


def sharpened(values, text):
    tables = make_blend_table(float(text), "value")
    return look_up_blend(np, policies.smooth(np, values), values, tables, one(0))


def ours(op, name, text, values):
    """The output of this pipeline for the same input."""
    draw = np.zeros((1, 1), np.float32)
    match op:
        case "center_crop":
            output = CenterCrop(size=tuple(map(int, text.split("x"))))(np, values, None)
        case "vertical_flip":
            output = RandomVerticalFlip(prob=1.0)(np, values, draw)
        case "horizontal_flip":
            output = RandomHorizontalFlip(prob=1.0)(np, values, draw)
        case "hwc2chw":
            output = Hwc2Chw()(np, values, None)
        case "pad":
            fill = 9 if text == "constant" else 0
            output = Pad(padding=(1, 2, 3, 4), fill=fill, mode=text)(np, values, None)
        case "resized_crop":
            output = resized_crop(values, text)
        case "rotation":
            output = rotated(text, fill=7)(np, values, draw)
        case "rotation_about":
            output = rotated(text, center=(4.0, 7.0))(np, values, draw)
        case "rescale":
            output = RESCALE[name](np, values, None)
        case "normalize":
            output = NORMALIZE[name](np, values, None)
        case "one_hot":
            output = OneHot(classes=5, smoothing=float(text))(np, values, None)
        case "type_cast":
            output = TypeCast(column="image", dtype=text)(np, values, None)
        case "sharpness":
            output = sharpened(values, text)
        case "posterize":
            output = table(values, make_level_table(Change("Posterize", int(text))))
        case "solarize":
            output = table(values, make_level_table(Change("Solarize", int(text))))
        case "invert":
            output = table(values, make_level_table(Change("Invert")))
        case "autocontrast":
            output = policies.look_up(
                np,
                values,
                policies.make_stretch_table(np, policies.count_levels(np, values)),
            )
        case "equalize":
            output = policies.look_up(
                np,
                values,
                policies.make_equalize_table(np, policies.count_levels(np, values)),
            )
        case _:
            output = adjusted(values, op, text)
    return output[0]


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_parity_with_mindspore(key):
    op, name, text = key.split("/")
    expected, got = GOLDEN[key], ours(op, name, text, GOLDEN[f"input/{name}"][None])
    assert got.shape == expected.shape
    if op != "one_hot":  # There MindSpore has int32 or float64, and losses take float32.
        assert got.dtype == expected.dtype
    exact = got.dtype != np.float32
    np.testing.assert_allclose(got, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)
