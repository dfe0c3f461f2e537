"""Changes of images that keep their classes: affine maps, brightness, contrast, blur and noise.

Images are bytes (B, H, W, C) of 1 or 3 channels. Random numbers are a pure function of (seed,
round, place in the round).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
from jax import Array

from pipeline.data.ops.affine import RandomAffine
from pipeline.data.ops.color import adjust_brightness, adjust_contrast
from pipeline.data.ops.image import list_steps
from pipeline.data.random import scale_to_integers, uniforms

AFFINE = RandomAffine(
    degrees=15.0,
    translate_x=(-0.1, 0.1),
    translate_y=(-0.1, 0.1),
    scale=(0.9, 1.1),
    shear_x=(-10.0, 10.0),
    interpolation="linear",
)
KINDS = ("affine", "brightness", "contrast", "blur", "noise")
FACTORS = list_steps(0.7, 1.3)
"""Factors of brightness and contrast."""
FIRST_DRAW = 1 << 20
"""Number of the first draw, which no map op has."""


@dataclass(frozen=True)
class ChangeLimits:
    """The limits of all changes except affine maps."""

    radius: float
    """Largest change of a pixel from its reference, as a share of `white`."""
    white: int
    """The brightest value of a pixel."""


def mutate(
    limits: ChangeLimits,
    images: Array,
    references: Array,
    is_affine: Array,
    seed: Array,
    number: Array,
) -> tuple[Array, Array, Array]:
    """Change images at random; return them, their references, and indices of KINDS, int32 (B,).

    `number` is the round's. An affine map also changes the reference, and is applied only without
    `is_affine`, bool (B,). Other changes keep pixels within `limits` of the reference (DeepHunter,
    Xie et al. 2019).
    """
    places = jnp.arange(len(images))

    def draw(index: int, count: int) -> Array:
        numbers: Array = uniforms(jnp, seed, number, places, FIRST_DRAW + index, count)
        return numbers

    affine = draw(0, AFFINE.draws)
    factors = scale_to_integers(jnp, draw(1, 1)[:, 0], len(FACTORS))
    kinds = scale_to_integers(jnp, draw(2, 1)[:, 0], len(KINDS))
    kinds = jnp.where(is_affine & (kinds == 0), len(KINDS) - 1, kinds)
    max_change = limits.radius * limits.white
    noise = (2 * draw(3, prod(images.shape[1:])).reshape(images.shape) - 1) * max_change
    is_kind = [(kinds == kind)[:, None, None, None] for kind in range(len(KINDS))]
    references = jnp.where(is_kind[0], AFFINE(jnp, references, affine), references)
    changed = jnp.select(
        is_kind,
        [
            AFFINE(jnp, images, affine),
            adjust_brightness(jnp, images, FACTORS, factors),
            adjust_contrast(jnp, images, FACTORS, factors),
            _blur(images),
            jnp.rint(images + noise).clip(0, 255).astype(jnp.uint8),
        ],
    )
    levels = references.astype(jnp.int32)
    limit = int(max_change + 1e-6)
    high = jnp.minimum(levels + limit, limits.white)
    changed = changed.astype(jnp.int32).clip(jnp.maximum(levels - limit, 0), high)
    return changed.astype(jnp.uint8), references, kinds


def _blur(images: Array) -> Array:
    """Average 3x3 pixels with binomial weights; pixels outside repeat the edge."""
    levels = images.astype(jnp.int32)
    for axis in (1, 2):
        size = levels.shape[axis]
        before = jnp.take(levels, jnp.maximum(jnp.arange(size) - 1, 0), axis=axis)
        after = jnp.take(levels, jnp.minimum(jnp.arange(size) + 1, size - 1), axis=axis)
        levels = before + 2 * levels + after
    return ((levels + 8) // 16).astype(jnp.uint8)
