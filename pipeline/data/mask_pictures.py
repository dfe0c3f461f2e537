"""Masks as pictures: a colour for each class."""

from __future__ import annotations

import colorsys

import numpy as np
from PIL import Image

IGNORED_COLOUR = (128, 128, 128)
_GOLDEN = 0.6180339887498949
"""Hues this share of a turn apart stay apart, however many there are."""


def class_colours(classes: int) -> np.ndarray:
    """A colour for each class, uint8 (classes, 3): black for the first, hues far apart after it."""
    colours = np.zeros((classes, 3), np.uint8)
    for label in range(1, classes):
        hue, value = (0.11 + label * _GOLDEN) % 1, 1.0 if label % 2 else 0.75
        colours[label] = np.rint(255 * np.array(colorsys.hsv_to_rgb(hue, 0.85, value)))
    return colours


def mask_picture(mask: np.ndarray, classes: int) -> np.ndarray:
    """Draw integer masks (..., H, W) as RGB, uint8 (..., H, W, 3); other values are grey."""
    colours = np.concatenate([class_colours(classes), np.array([IGNORED_COLOUR], np.uint8)])
    known = (mask >= 0) & (mask < classes)
    return colours[np.where(known, mask, classes)]


def mask_image(mask: np.ndarray, classes: int, size: tuple[int, int]) -> Image.Image:
    """A mask of classes, uint8 (H, W), as an image with a palette, scaled to (width, height).

    The value of a pixel is its class, as in the masks that a network is trained on.
    """
    image = Image.fromarray(mask.astype(np.uint8))
    image.putpalette(class_colours(classes).tobytes())
    if image.size != size:
        image = image.resize(size, Image.Resampling.NEAREST)
    return image
