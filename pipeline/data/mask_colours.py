"""Colours of classes, in pictures of masks."""

from __future__ import annotations

import colorsys

import numpy as np

IGNORED_COLOUR = (128, 128, 128)
"""RGB of pixels of a mask without a class."""
_HUE_STEP = 0.6180339887498949
"""Difference of successive hues, in turns. With the golden ratio any number of hues differ."""


def make_class_colours(classes: int) -> np.ndarray:
    """Return a colour for each class, uint8 (classes, 3): first black, then hues far apart."""
    colours = np.zeros((classes, 3), np.uint8)
    for class_id in range(1, classes):
        hue = (0.11 + class_id * _HUE_STEP) % 1
        # Many classes have similar hues. Two brightnesses help to tell them apart.
        brightness = 1.0 if class_id % 2 else 0.75
        colours[class_id] = np.rint(255 * np.array(colorsys.hsv_to_rgb(hue, 0.85, brightness)))
    return colours


def draw_masks(mask: np.ndarray, classes: int) -> np.ndarray:
    """Return masks of classes, int (..., H, W), as RGB, uint8 (..., H, W, 3). Values that aren't
    classes get `IGNORED_COLOUR`."""
    colours = np.concatenate([make_class_colours(classes), np.array([IGNORED_COLOUR], np.uint8)])
    is_class = (mask >= 0) & (mask < classes)
    return colours[np.where(is_class, mask, classes)]
