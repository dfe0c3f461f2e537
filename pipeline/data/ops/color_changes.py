"""The changes of images that policies draw, applied without branches: one change for each image.

The host computes tables with a row for each change: an affine map, new levels of bytes, and a
blend. Rows are the identity in tables that a change doesn't use. Each image selects a row, so the
compiled step computes each table's kind of change once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.data.ops.affine import (
    Interpolation,
    Maps,
    make_rotation,
    make_shear,
    make_translation,
    to_fixed_point,
    warp,
)
from pipeline.data.ops.color import compute_luma, compute_mean_luma, look_up_blend, make_blend_table
from pipeline.data.ops.image import Size

BLENDS = ("Contrast", "Color", "Sharpness")
"""Changes that blend an image with a base: its mean luma, its luma, or the smoothed image."""
LEVELS = 256
"""Number of values of a byte."""
_IDENTITY = np.arange(LEVELS, dtype=np.int32)
_SPREAD = np.maximum(_IDENTITY, 1).astype(np.float32)[:, None]
_STRETCHED = _IDENTITY.astype(np.float32) * (np.float32(255) / _SPREAD)
"""level * (255 / spread), float32 (256, 256) by spread (highest - lowest level) and level. As in
MindSpore, the quotient is rounded to float32 before the product."""


@dataclass(frozen=True)
class Change:
    """A change and its magnitude, in the units of `list_strengths`."""

    name: str
    magnitude: float = 0.0


@dataclass(frozen=True)
class Changes:
    """Tables of n changes."""

    maps: Maps
    """The affine map of each change."""
    levels: np.ndarray
    """The new level for each level, int32 (n, 256)."""
    names: np.ndarray
    """Names of the changes, (n,)."""
    blends: np.ndarray
    """The different tables of `make_blend_table`, uint8 (blends, 256, 256)."""
    blend_numbers: np.ndarray
    """The index in `blends` of each change's table, int32 (n,)."""


def tabulate(changes: Sequence[Change], size: Size) -> Changes:
    """Return the tables of changes to images of a size, (height, width)."""
    height, width = size
    matrices = np.stack([_make_matrix(change, height, width) for change in changes])
    blends = [_find_blend(change) for change in changes]
    numbers = {blend: number for number, blend in enumerate(dict.fromkeys(blends))}
    return Changes(
        maps=to_fixed_point(matrices, height, width),
        levels=np.stack([make_level_table(change) for change in changes]).astype(np.int32),
        names=np.array([change.name for change in changes]),
        blends=np.concatenate([make_blend_table(factor, fused) for factor, fused in numbers]),
        blend_numbers=np.array([numbers[blend] for blend in blends], np.int32),
    )


def _find_blend(change: Change) -> tuple[float, Literal["base", "value"]]:
    """Return the arguments of `make_blend_table` for a change."""
    if change.name not in BLENDS:
        return 1.0, "base"
    return _compute_factor(change), "value" if change.name == "Sharpness" else "base"


def _compute_factor(change: Change) -> float:
    """Return 1 + magnitude, added in float32 as in MindSpore."""
    return float(np.float32(1) + np.float32(change.magnitude))


def _make_matrix(change: Change, height: int, width: int) -> np.ndarray:
    """Return the map from target to source pixels, float64 (2, 3)."""
    centre = ((width - 1) / 2, (height - 1) / 2)
    amount = change.magnitude
    match change.name:
        case "ShearX":
            return make_shear(amount, 0, centre)
        case "ShearY":
            return make_shear(0, amount, centre)
        case "TranslateX":
            return make_translation(amount, 0)
        case "TranslateY":
            return make_translation(0, amount)
        case "Rotate":
            return make_rotation(np.array(amount), centre)
    return make_translation(0, 0)


def make_level_table(change: Change) -> np.ndarray:
    """Return the new level for each level, (256,). Changes of another kind keep all levels."""
    match change.name:
        case "Brightness":  # as `adjust_brightness` computes it
            levels = _IDENTITY.astype(np.float32) * np.float32(_compute_factor(change))
            return np.rint(levels).clip(0, 255)
        case "Posterize":  # the highest bits of a level
            return _IDENTITY & (LEVELS - (1 << (8 - int(change.magnitude))))
        case "Solarize":  # inverted from a threshold up
            return np.where(change.magnitude <= _IDENTITY, 255 - _IDENTITY, _IDENTITY)
        case "Invert":
            return LEVELS - 1 - _IDENTITY
    return _IDENTITY


def apply_changes(
    xp: Any,
    values: Any,
    changes: Changes,
    numbers: Any,
    interpolation: Interpolation,
    fill: np.ndarray,
) -> Any:
    """Return images of RGB bytes, each changed by the change with its number in `numbers`, int32
    (batch,). Pixels from outside the image are `fill`, uint8 (3,)."""
    values = warp(xp, values, changes.maps.select(xp, numbers), interpolation, fill)
    counts = count_levels(xp, values)
    levels = xp.asarray(changes.levels)[numbers][:, None]
    for name, table in (
        ("AutoContrast", make_stretch_table(xp, counts)),
        ("Equalize", make_equalize_table(xp, counts)),
    ):
        levels = xp.where(_has_name(xp, changes, numbers, (name,))[..., 0], table, levels)
    values = look_up(xp, values, levels)
    base = compute_mean_luma(values)
    for name, candidate in (
        ("Color", compute_luma(values)[..., None]),
        ("Sharpness", smooth(xp, values)),
    ):
        base = xp.where(_has_name(xp, changes, numbers, (name,)), candidate, base)
    blend = xp.asarray(changes.blend_numbers)[numbers]
    blended = look_up_blend(xp, base, values, changes.blends, blend)
    return xp.where(_has_name(xp, changes, numbers, BLENDS), blended, values)


def _has_name(xp: Any, changes: Changes, numbers: Any, names: Sequence[str]) -> Any:
    """Return whether each image's change is one of `names`, bool (batch, 1, 1, 1)."""
    return xp.asarray(np.isin(changes.names, names))[numbers][:, None, None, None]


def look_up(xp: Any, values: Any, tables: Any) -> Any:
    """Return bytes replaced by the tables (batch, channels or 1, 256) of image and channel."""
    batch, channels = tables.shape[:2]
    row = np.arange(batch, dtype=np.int32)[:, None] * channels + np.arange(channels, dtype=np.int32)
    indices = row[:, None, None, :] * LEVELS + values.astype(np.int32)
    return xp.take(tables.reshape(-1), indices, mode="clip").astype(np.uint8)


def count_levels(xp: Any, values: Any) -> Any:
    """Return the histogram of levels of each channel, int32 (batch, channels, 256)."""
    batch, *_, channels = values.shape
    row = np.arange(batch, dtype=np.int32)[:, None] * channels + np.arange(channels, dtype=np.int32)
    indices = (row[:, None, None, :] * LEVELS + values.astype(np.int32)).reshape(-1)
    size = batch * channels * LEVELS
    counts = np.bincount(indices, minlength=size) if xp is np else xp.bincount(indices, length=size)
    return counts.reshape(batch, channels, LEVELS).astype(np.int32)


def make_stretch_table(xp: Any, counts: Any) -> Any:
    """Return tables that stretch each channel's levels to 0..255, as MindSpore's AutoContrast does:
    int32 (batch, channels, 256), from the histograms `counts` of the same shape."""
    lowest = xp.argmax(counts > 0, axis=-1)[..., None]
    highest = LEVELS - 1 - xp.argmax(counts[..., ::-1] > 0, axis=-1)[..., None]
    scaled = xp.asarray(_STRETCHED)[(highest - lowest)[..., 0]]
    table = xp.trunc(scaled - xp.take_along_axis(scaled, lowest, axis=-1)).astype(np.int32)
    return xp.where(highest > lowest, table.clip(0, 255), _IDENTITY)


def make_equalize_table(xp: Any, counts: Any) -> Any:
    """Return tables that equalize each channel's levels, as OpenCV's equalizeHist does: int32
    (batch, channels, 256), from the histograms `counts` of the same shape."""
    lowest = xp.argmax(counts > 0, axis=-1)[..., None]
    lowest_count = xp.take_along_axis(counts, lowest, axis=-1)
    cumulative = xp.cumsum(counts, axis=-1) - lowest_count
    total = counts.sum(axis=-1, keepdims=True) - lowest_count
    scale = np.float32(255) / xp.maximum(total, 1).astype(np.float32)
    table = xp.rint(cumulative.clip(0).astype(np.float32) * scale).astype(np.int32)
    return xp.where(total > 0, table.clip(0, 255), _IDENTITY)


def smooth(xp: Any, values: Any) -> Any:
    """Return bytes filtered by [1 1 1; 1 5 1; 1 1 1] / 13, int32. The outermost pixels stay."""
    height, width = values.shape[1:3]
    levels = values.astype(np.int32)
    if min(height, width) < 3:
        return levels
    total = 4 * levels[:, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + levels[:, row : height - 2 + row, column : width - 2 + column]
    rounded = (2 * total + 13) // 26  # total / 13 to the nearest integer
    filtered = xp.pad(rounded, ((0, 0), (1, 1), (1, 1), (0, 0)))
    is_inner = np.pad(np.ones((height - 2, width - 2), bool), 1)
    return xp.where(is_inner[..., None], filtered, levels)
