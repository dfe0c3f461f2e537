"""Positions of tokens in attention: rotary embeddings, and slopes of distances (ALiBi)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.models.layers.tokens import Rotary

_LOW, _HIGH = 1, 4
"""Wavelengths in the trained tokens between which Llama 3.1 changes a frequency in part."""


def compute_frequencies(rotary: Rotary, size: int) -> np.ndarray:
    """Return the rotations of a head's `size` features, float64 (size / 2,), radians per token.

    Scaling is linear (Chen et al. 2023), or Llama 3.1's (llama-models, llama3/model.py)."""
    frequencies = rotary.base ** (-np.arange(0, size, 2) / size)
    scaled = frequencies / rotary.factor
    if rotary.trained_tokens is None:
        return scaled
    waves = rotary.trained_tokens * frequencies / (2 * math.pi)
    kept = np.clip((waves - _LOW) / (_HIGH - _LOW), 0, 1)
    return (1 - kept) * scaled + kept * frequencies


def rotate_heads(x: Array, positions: Array, rotary: Rotary) -> Array:
    """Rotate features of heads x, (batch, tokens, heads, size), by positions int32 (tokens,).

    Angles and products are float32; a 16-bit result is rounded once."""
    frequencies = jnp.asarray(compute_frequencies(rotary, x.shape[-1]), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def compute_slopes(heads: int) -> np.ndarray:
    """Return the slope of each head, float64 (heads,): Press et al. 2022.

    Slopes are powers of 2^(-8 / heads). If heads isn't a power of two, the first slopes are those
    of the largest power of two below, the others each second one of twice that power."""
    power = 2 ** int(math.log2(heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    others = 2.0 ** (-4 / power * np.arange(1, 2 * (heads - power) + 1, 2))
    return np.concatenate([slopes, others])
