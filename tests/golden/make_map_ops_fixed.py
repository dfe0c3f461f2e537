"""What MindSpore's ops make of images and labels where nothing is drawn: map_ops/fixed.npz.

    python tests/golden/make_map_ops_fixed.py     with mindspore 2.10.0

The keys are op/input/argument; what goes in stands beside them under input/name.
"""

from __future__ import annotations

from pathlib import Path

import mindspore
import numpy as np
from mindspore.dataset import transforms, vision
from mindspore.dataset.vision import Border, Inter

FILE = Path(__file__).parent / "map_ops" / "fixed.npz"
RNG = np.random.default_rng(21)
NOISE = RNG.integers(0, 256, (19, 26, 3), dtype=np.uint8)
SMOOTH = np.stack(
    [
        np.linspace(0, 255, 26)[None] * k + np.linspace(0, 255, 19)[:, None] * (1 - k)
        for k in (0.2, 0.5, 0.9)
    ],
    axis=-1,
).astype(np.uint8)
FLOATS = RNG.uniform(-1, 1, (19, 26, 3)).astype(np.float32)
SPREAD = np.abs(FLOATS) * 100
LABELS = np.array([0, 3, 2, 4, 1], np.int32)
MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]
FACTORS = (0.0, 0.25, 0.7, 1.3, 1.75)
INTERPOLATIONS = {"linear": Inter.LINEAR, "nearest": Inter.NEAREST, "cubic": Inter.CUBIC}
BOXES = [(0, 0, 19, 26), (3, 5, 11, 8), (10, 2, 5, 20), (18, 25, 1, 1)]


def geometry() -> dict[str, np.ndarray]:
    """Crops, padding, flips and axes."""
    made = {
        "center_crop/noise/10x15": vision.CenterCrop((10, 15))(NOISE),
        "center_crop/noise/7x26": vision.CenterCrop((7, 26))(NOISE),
        "vertical_flip/noise/": vision.VerticalFlip()(NOISE),
        "horizontal_flip/noise/": vision.HorizontalFlip()(NOISE),
        "hwc2chw/noise/": vision.HWC2CHW()(NOISE),
    }
    for mode in Border:
        # MindSpore's order is left, top, right, bottom.
        made[f"pad/noise/{mode.value}"] = vision.Pad((3, 1, 4, 2), 9, mode)(NOISE)
    for top, left, height, width in BOXES:
        for name, inter in (
            ("linear", Inter.LINEAR),
            ("nearest", Inter.NEAREST),
            ("cubic", Inter.CUBIC),
        ):
            op = vision.ResizedCrop(top, left, height, width, (14, 17), inter)
            made[f"resized_crop/noise/{name}_{top}_{left}_{height}_{width}"] = op(NOISE)
    for degrees in (-170, -30, 0, 12.5, 45, 90, 123):
        for name, inter in list(INTERPOLATIONS.items())[:2]:
            op = vision.RandomRotation((degrees, degrees), inter, fill_value=7)
            made[f"rotation/noise/{name}_{degrees}"] = op(NOISE)
            if degrees == 45:
                op = vision.RandomRotation((45, 45), inter, center=(4, 7))
                made[f"rotation_about/noise/{name}_{degrees}"] = op(NOISE)
    return made


def values() -> dict[str, np.ndarray]:
    """Scales, dtypes and encodings."""
    made = {
        "rescale/noise/": vision.Rescale(1 / 255, -0.5)(NOISE),
        "rescale/floats/": vision.Rescale(1 / 0.3081, -0.1307 / 0.3081)(FLOATS),
        "normalize/floats/": vision.Normalize(MEAN, STD)(FLOATS),
        "normalize/noise/": vision.Normalize([125.3, 123.0, 113.9], [63.0, 62.1, 66.7])(NOISE),
    }
    for smoothing in (0.0, 0.1):
        rows = [transforms.OneHot(5, smoothing)(np.array(label)) for label in LABELS]
        made[f"one_hot/labels/{smoothing}"] = np.stack(rows)
    for name in ("uint8", "int32", "float16", "float32", "bool"):
        dtype = mindspore.bool_ if name == "bool" else getattr(mindspore, name)
        made[f"type_cast/spread/{name}"] = transforms.TypeCast(dtype)(SPREAD)
    return made


def colours() -> dict[str, np.ndarray]:
    """Changes of colour by a given amount."""
    made = {}
    for name, image in (("noise", NOISE), ("smooth", SMOOTH)):
        for factor in FACTORS:
            made[f"brightness/{name}/{factor}"] = vision.AdjustBrightness(factor)(image)
            made[f"contrast/{name}/{factor}"] = vision.AdjustContrast(factor)(image)
            made[f"saturation/{name}/{factor}"] = vision.AdjustSaturation(factor)(image)
            made[f"sharpness/{name}/{factor}"] = vision.AdjustSharpness(factor)(image)
        for turn in (-0.5, -0.2, 0.1, 0.37, 0.5):
            made[f"hue/{name}/{turn}"] = vision.AdjustHue(turn)(image)
        for bits in range(1, 9):
            made[f"posterize/{name}/{bits}"] = vision.Posterize(bits)(image)
        for threshold in (0, 100, 255):
            made[f"solarize/{name}/{threshold}"] = vision.Solarize((threshold, 255))(image)
        made[f"autocontrast/{name}/"] = vision.AutoContrast()(image)
        made[f"equalize/{name}/"] = vision.Equalize()(image)
        made[f"invert/{name}/"] = vision.Invert()(image)
    return made


def main() -> None:
    """Ask MindSpore for every case."""
    inputs = {
        "noise": NOISE,
        "smooth": SMOOTH,
        "floats": FLOATS,
        "spread": SPREAD,
        "labels": LABELS,
    }
    golden = {f"input/{name}": array for name, array in inputs.items()}
    np.savez_compressed(FILE, **golden, **geometry(), **values(), **colours())


if __name__ == "__main__":
    main()
