"""Corruptions of images in five severities, after Hendrycks and Dietterich 2019 (arXiv 1903.12261).

Images are pixels (B, H, W, C) from 0 to 1. Random numbers are a pure function of (seed, severity,
sample). Rotations and shifts are computed by the map ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.data.dataset_spec import Op
from pipeline.data.ops.affine import RandomAffine, RandomRotation
from pipeline.data.ops.resize import resize_images
from pipeline.training.robustness.attacks import draw_uniforms, to_normals

FIRST_DRAW = 3
"""Number of the draws of the first corruption."""
Corruption = Callable[[Array, Array, Any], Array]
"""(pixels, uniform numbers like the pixels, parameter of the severity) -> pixels."""


def _add_noise(pixels: Array, draws: Array, deviation: float) -> Array:
    return pixels + deviation * to_normals(draws)


def _set_pixels(pixels: Array, draws: Array, share: float) -> Array:
    """Set a share of the pixels to 0 or 1. All channels of a pixel have one draw."""
    draw = draws[..., :1]
    return jnp.where(draw < share / 2, 0.0, jnp.where(draw < share, 1.0, pixels))


def _blur(pixels: Array, _: Array, deviation: float) -> Array:
    """Blur by a Gaussian. Its standard deviation is in pixels if the image is scaled to 32x32."""
    for axis in (1, 2):
        size = pixels.shape[axis]
        position = np.arange(size)
        distance = (position[:, None] - position) / (deviation * size / 32)
        weights = np.exp(-0.5 * distance**2)
        weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
        pixels = jnp.moveaxis(jnp.tensordot(pixels, weights, ((axis,), (1,))), -1, axis)
    return pixels


def _brighten(pixels: Array, _: Array, increase: float) -> Array:
    return pixels + increase


def _reduce_contrast(pixels: Array, _: Array, factor: float) -> Array:
    mean = pixels.mean(axis=(1, 2), keepdims=True)
    return mean + factor * (pixels - mean)


def _pixelate(pixels: Array, _: Array, share: float) -> Array:
    """Shrink the sides to a share, and enlarge them again."""
    height, width = pixels.shape[1:3]
    small = (max(1, round(height * share)), max(1, round(width * share)))
    shrunk = resize_images(jnp, pixels, small, "area")
    return resize_images(jnp, shrunk, (height, width), "nearest")  # type: ignore[no-any-return]


def _rotate(pixels: Array, _: Array, degrees: float) -> Array:
    return _apply_op(RandomRotation(degrees=(degrees, degrees), interpolation="linear"), pixels)


def _shift(pixels: Array, _: Array, share: float) -> Array:
    shares = (share, share)
    op = RandomAffine(translate_x=shares, translate_y=shares, interpolation="linear")
    return _apply_op(op, pixels)


def _apply_op(op: Op, pixels: Array) -> Array:
    """Apply a map op for uint8. The random numbers are 0: the op's ranges have one value each."""
    levels = jnp.rint(pixels * 255).astype(jnp.uint8)
    changed = op(jnp, levels, jnp.zeros((len(levels), op.draws), jnp.float32))
    return changed.astype(jnp.float32) / 255  # type: ignore[no-any-return]


CORRUPTIONS: Mapping[str, tuple[Corruption, Sequence[float]]] = {
    "noise": (_add_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "salt and pepper": (_set_pixels, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "blur": (_blur, (0.4, 0.6, 0.8, 1.0, 1.3)),
    "brightness": (_brighten, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (_reduce_contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "pixelate": (_pixelate, (0.8, 0.7, 0.6, 0.5, 0.4)),
    "rotate": (_rotate, (6.0, 12.0, 18.0, 24.0, 30.0)),
    "shift": (_shift, (0.04, 0.07, 0.1, 0.13, 0.16)),
}
"""The corruptions by name, and their parameter at each severity."""


def corrupt(name: str, severity: int, pixels: Array, seed: Array, sample: Array) -> Array:
    """Return the pixels, from 0 to 1, after a corruption of a severity from 1 to 5."""
    compute, levels = CORRUPTIONS[name]
    number = FIRST_DRAW + list(CORRUPTIONS).index(name)
    draws = draw_uniforms(seed, severity, sample, number, prod(pixels.shape[1:]))
    return compute(pixels, draws.reshape(pixels.shape), levels[severity - 1]).clip(0.0, 1.0)
