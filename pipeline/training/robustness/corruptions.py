"""Corruptions of images in five severities, after Hendrycks and Dietterich 2019
(arXiv 1903.12261), by map ops if one fits.

Images are pixels (B, H, W, C) from 0 to 1. Random numbers are a pure function of (seed, severity,
sample).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.data.dataset_spec import Op
from pipeline.data.ops.affine import RandomAffine, RandomRotation
from pipeline.data.ops.resize import resize_images
from pipeline.training.robustness.ball import draw_uniforms

FIRST_DRAW = 3
"""Number of the draws of the first corruption."""
NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)
"""Standard deviation."""
SALT_AND_PEPPER = (0.03, 0.06, 0.09, 0.17, 0.27)
"""Share of pixels that become 0 or 1."""
BLUR = (0.4, 0.6, 0.8, 1.0, 1.3)
"""Standard deviation in pixels of an image of 32x32; larger images have more."""
BRIGHTNESS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Values to add."""
CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)
"""Factor of the difference from the image's mean."""
PIXELATE = (0.8, 0.7, 0.6, 0.5, 0.4)
"""Share of the side that is left."""
ROTATE = (6, 12, 18, 24, 30)
"""Degrees."""
SHIFT = (0.04, 0.07, 0.1, 0.13, 0.16)
"""Share of the side."""

Corruption = Callable[[Array, Array, int], Array]
"""(pixels, uniform numbers like the pixels, index of the severity) -> pixels."""


def _add_noise(pixels: Array, draws: Array, level: int) -> Array:
    normals = jax.scipy.special.ndtri(draws * (1 - 2.0**-23) + 2.0**-25)
    return pixels + NOISE[level] * normals


def _set_pixels(pixels: Array, draws: Array, level: int) -> Array:
    # All channels of a pixel have one draw.
    draw = draws[..., :1]
    share = SALT_AND_PEPPER[level]
    return jnp.where(draw < share / 2, 0.0, jnp.where(draw < share, 1.0, pixels))


def _blur(pixels: Array, draws: Array, level: int) -> Array:
    del draws
    for axis in (1, 2):
        size = pixels.shape[axis]
        deviation = BLUR[level] * size / 32
        position = np.arange(size)
        weights = np.exp(-0.5 * ((position[:, None] - position) / deviation) ** 2)
        weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
        pixels = jnp.moveaxis(jnp.tensordot(pixels, weights, ((axis,), (1,))), -1, axis)
    return pixels


def _brighten(pixels: Array, draws: Array, level: int) -> Array:
    del draws
    return pixels + BRIGHTNESS[level]


def _reduce_contrast(pixels: Array, draws: Array, level: int) -> Array:
    del draws
    mean = pixels.mean(axis=(1, 2), keepdims=True)
    return mean + CONTRAST[level] * (pixels - mean)


def _pixelate(pixels: Array, draws: Array, level: int) -> Array:
    del draws
    height, width = pixels.shape[1:3]
    small = (max(1, round(height * PIXELATE[level])), max(1, round(width * PIXELATE[level])))
    shrunk = resize_images(jnp, pixels, small, "area")
    return resize_images(jnp, shrunk, (height, width), "nearest")  # type: ignore[no-any-return]


def _rotate(pixels: Array, draws: Array, level: int) -> Array:
    degrees = float(ROTATE[level])
    return _apply_op(RandomRotation(degrees=(degrees, degrees), interpolation="linear"), pixels)


def _shift(pixels: Array, draws: Array, level: int) -> Array:
    share = SHIFT[level], SHIFT[level]
    op = RandomAffine(translate_x=share, translate_y=share, interpolation="linear")
    return _apply_op(op, pixels)


def _apply_op(op: Op, pixels: Array) -> Array:
    """Apply a map op of bytes, whose ranges have one value."""
    levels = jnp.rint(pixels * 255).astype(jnp.uint8)
    changed = op(jnp, levels, jnp.zeros((len(levels), op.draws), jnp.float32))
    return changed.astype(jnp.float32) / 255  # type: ignore[no-any-return]


CORRUPTIONS: Mapping[str, Corruption] = {
    "noise": _add_noise,
    "salt and pepper": _set_pixels,
    "blur": _blur,
    "brightness": _brighten,
    "contrast": _reduce_contrast,
    "pixelate": _pixelate,
    "rotate": _rotate,
    "shift": _shift,
}


def corrupt(name: str, severity: int, pixels: Array, seed: Array, sample: Array) -> Array:
    """Return pixels after a corruption of a severity from 1 to 5, from 0 to 1."""
    number = FIRST_DRAW + list(CORRUPTIONS).index(name)
    draws = draw_uniforms(seed, severity, sample, number, prod(pixels.shape[1:]))
    changed = CORRUPTIONS[name](pixels, draws.reshape(pixels.shape), severity - 1)
    return changed.clip(0.0, 1.0)
