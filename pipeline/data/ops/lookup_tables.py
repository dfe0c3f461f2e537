"""Changes of bytes by a table of 256 levels, and the smoothing for sharpness.

`equalized` and `stretched` compute their tables from each image's own levels, channel by channel,
as OpenCV's equalizeHist and MindSpore's AutoContrast do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LEVELS = 256
_IDENTITY = np.arange(LEVELS, dtype=np.int32)
_SPREAD = np.maximum(_IDENTITY, 1).astype(np.float32)[:, None]
_STRETCHED = _IDENTITY.astype(np.float32) * (np.float32(255) / _SPREAD)
"""Levels times 255 / spread by spread and level, each product rounded to float32 as MindSpore's."""


def look_up(xp: Any, values: Any, tables: Any) -> Any:
    """Map bytes through the tables of each sample's channels, (batch, channels or 1, 256)."""
    batch, channels = tables.shape[:2]
    row = np.arange(batch, dtype=np.int32)[:, None] * channels + np.arange(channels, dtype=np.int32)
    places = row[:, None, None, :] * LEVELS + values.astype(np.int32)
    return xp.take(tables.reshape(-1), places, mode="clip").astype(np.uint8)


def histograms(xp: Any, values: Any) -> Any:
    """Histograms of the levels of each channel, int32 (batch, channels, 256)."""
    batch, *_, channels = values.shape
    row = np.arange(batch, dtype=np.int32)[:, None] * channels + np.arange(channels, dtype=np.int32)
    places = (row[:, None, None, :] * LEVELS + values.astype(np.int32)).reshape(-1)
    size = batch * channels * LEVELS
    counts = np.bincount(places, minlength=size) if xp is np else xp.bincount(places, length=size)
    return counts.reshape(batch, channels, LEVELS).astype(np.int32)


def stretched(xp: Any, counts: Any) -> Any:
    """Tables that spread the levels of each channel over 0..255, of its histogram."""
    least = xp.argmax(counts > 0, axis=-1)[..., None]
    most = LEVELS - 1 - xp.argmax(counts[..., ::-1] > 0, axis=-1)[..., None]
    scaled = xp.asarray(_STRETCHED)[(most - least)[..., 0]]
    table = xp.trunc(scaled - xp.take_along_axis(scaled, least, axis=-1)).astype(np.int32)
    return xp.where(most > least, table.clip(0, 255), _IDENTITY)


def equalized(xp: Any, counts: Any) -> Any:
    """Tables that make the levels of each channel equally frequent, of its histogram."""
    least = xp.argmax(counts > 0, axis=-1)[..., None]
    first = xp.take_along_axis(counts, least, axis=-1)
    above = xp.cumsum(counts, axis=-1) - first
    rest = counts.sum(axis=-1, keepdims=True) - first
    scale = np.float32(255) / xp.maximum(rest, 1).astype(np.float32)
    table = xp.rint(above.clip(0).astype(np.float32) * scale).astype(np.int32)
    return xp.where(rest > 0, table.clip(0, 255), _IDENTITY)


def brightened(factor: float) -> np.ndarray:
    """The table of a brightness factor, as `adjust_brightness` computes it."""
    return np.rint(_IDENTITY.astype(np.float32) * np.float32(factor)).clip(0, 255)


def inverted() -> np.ndarray:
    """The table that inverts all levels."""
    return LEVELS - 1 - _IDENTITY


def posterized(bits: int) -> np.ndarray:
    """The table that keeps the highest bits of a level."""
    return _IDENTITY & (LEVELS - (1 << (8 - bits)))


def solarized(threshold: float) -> np.ndarray:
    """The table that inverts the levels from a threshold up."""
    return np.where(threshold <= _IDENTITY, 255 - _IDENTITY, _IDENTITY)


def smoothed(xp: Any, values: Any) -> Any:
    """Filter bytes with the kernel [1 1 1; 1 5 1; 1 1 1] / 13, the outermost pixels as they are."""
    height, width = values.shape[1:3]
    levels = values.astype(np.int32)
    if min(height, width) < 3:
        return levels
    total = 4 * levels[:, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + levels[:, row : height - 2 + row, column : width - 2 + column]
    inner = xp.pad((2 * total + 13) // 26, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = np.arange(height), np.arange(width)
    edge = ((rows == 0) | (rows == height - 1))[:, None] | (columns == 0) | (columns == width - 1)
    return xp.where(edge[..., None], levels, inner)
