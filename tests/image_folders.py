"""Folders of made-up images in two classes, as `image_folder` and `convert records` read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def save_images(
    root: Path, counts: Mapping[str, int], shape: tuple[int, int, int] = (8, 8, 3), seed: int = 0
) -> Path:
    """So many noisy PNG files of each class in each split, numbered; returns the root."""
    rng = np.random.default_rng(seed)
    for split, count in counts.items():
        for name in ("ant", "owl"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, shape, np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number:02}.png")
    return root


def save_masks(root: Path, count: int, side: int = 32) -> Path:
    """Noisy PNG files and masks of two classes, with a row that is 255; returns the root."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for number in range(count):
        mask = rng.integers(0, 2, (side, side), np.uint8)
        mask[0] = 255
        pixels = rng.integers(0, 256, (side, side, 3), np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{number:02}.png")
        Image.fromarray(mask).save(root / "masks" / f"{number:02}.png")
    return root
