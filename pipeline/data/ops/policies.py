"""AutoAugment and RandAugment: ops that draw several changes for each image.

The host computes tables with a row for each change: an affine map, new levels of bytes, and a
blend. Rows are the identity in tables that a change doesn't use. Each image selects a row, so the
compiled step computes each table's kind of change once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.registry import component
from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.affine import (
    Fill,
    Interpolation,
    Maps,
    list_fill_levels,
    make_rotation,
    make_shear,
    make_translation,
    to_fixed_point,
    warp,
)
from pipeline.data.ops.color import (
    compute_luma,
    compute_mean_luma,
    look_up_blend,
    make_blend_table,
    require_rgb_bytes,
    require_summable,
)
from pipeline.data.ops.image import ImageOp, Size, repeat_op
from pipeline.data.random import scale_to_integers

_SIGNED = frozenset(
    {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"}
    | {"Brightness", "Color", "Contrast", "Sharpness"}
)
"""Changes whose magnitude is negated for some images."""
_BINS = 10
"""Number of magnitudes of AutoAugment."""
_RANDOM = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness"),
    *("Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
"""The changes of RandAugment."""
_POLICIES = Path(__file__).with_name("auto_augment.json")
"""Policies of 25 pairs of (change, probability, index of a magnitude or None): tables 7 to 9 of
Cubuk et al., "AutoAugment: Learning Augmentation Policies from Data", 2019, as in MindSpore."""
Convention = Literal["mindspore", "paper"]
"""mindspore: translations are multiplied by the image's side twice, so that most move the whole
image out; RandAugment negates a third of the magnitudes and draws AutoContrast twice as often as
other changes. paper: translations are multiplied by the side once; RandAugment negates half of the
magnitudes and draws all changes equally often."""
BLENDS = ("Contrast", "Color", "Sharpness")
"""Changes that blend an image with a base: its mean luma, its luma, or the smoothed image."""
LEVELS = 256
"""Number of values of a byte."""
_IDENTITY = np.arange(LEVELS, dtype=np.int32)
_SPREAD = np.maximum(_IDENTITY, 1).astype(np.float32)[:, None]
_STRETCHED = _IDENTITY.astype(np.float32) * (np.float32(255) / _SPREAD)
"""level * (255 / spread), float32 (256, 256) by spread (highest - lowest level) and level. As in
MindSpore, the quotient is rounded to float32 before the product."""


class Policy(ImageOp):
    """Base of the policies, for RGB bytes."""

    moves_pixels: ClassVar[bool] = True
    convention: Convention = "mindspore"
    interpolation: Interpolation = "nearest"
    fill: Fill = 0

    def output(self, value: ColumnSpec) -> ColumnSpec:
        require_rgb_bytes(value)
        require_summable(value)
        list_fill_levels(self.fill, 3)
        return value

    def _apply(self, xp: Any, values: Any, changes: Changes, numbers: Any) -> Any:
        """Return images after the changes in the rows `numbers`, int32 (batch, iterations)."""
        fill = list_fill_levels(self.fill, 3)

        def change_once(iteration: Any, values: Any) -> Any:
            row = numbers[:, iteration]
            return apply_changes(xp, values, changes, row, self.interpolation, fill)

        return repeat_op(xp, change_once, numbers.shape[1], values)


@component("op")
class RandAugment(Policy):
    """Apply `num_ops` changes, drawn from 14, at strength number `magnitude` of
    `num_magnitude_bins`: Cubuk et al., 2020, with MindSpore's changes and strengths."""

    name: Literal["rand_augment"] = "rand_augment"
    num_ops: PositiveInt = 2
    magnitude: NonNegativeInt = 9
    num_magnitude_bins: Annotated[int, Field(ge=2)] = 31

    @property
    def draws(self) -> int:
        return 2 * self.num_ops

    @model_validator(mode="after")
    def _require_magnitude(self) -> Self:
        if self.magnitude >= self.num_magnitude_bins:
            raise ValueError(
                f"magnitude = {self.magnitude}: must be below num_magnitude_bins = "
                f"{self.num_magnitude_bins}"
            )
        return self

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        size = values.shape[1], values.shape[2]
        bins = self.num_magnitude_bins
        changes, rows = _tabulate_random_changes(self.magnitude, bins, self.convention, size)
        negative_share = np.float32(1 / 3 if self.convention == "mindspore" else 1 / 2)
        number = scale_to_integers(xp, uniforms[:, : self.num_ops], len(rows))
        is_negative = (uniforms[:, self.num_ops :] < negative_share).astype(np.int32)
        return self._apply(xp, values, changes, xp.asarray(rows)[number, is_negative])


@component("op")
class AutoAugment(Policy):
    """Apply one of 25 pairs of changes of a learned policy, each change with its probability: Cubuk
    et al., 2019, with MindSpore's changes and strengths."""

    name: Literal["auto_augment"] = "auto_augment"
    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"

    draws: ClassVar[int] = 5

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        size = values.shape[1], values.shape[2]
        changes, rows, probabilities = _tabulate_policy(self.policy, self.convention, size)
        pair = scale_to_integers(xp, uniforms[:, 0], len(rows))
        is_changed = uniforms[:, 1:3] < xp.asarray(probabilities)[pair]
        numbers = xp.asarray(rows)[
            pair[:, None], np.arange(2), scale_to_integers(xp, uniforms[:, 3:5], 2)
        ]
        return self._apply(xp, values, changes, xp.where(is_changed, numbers, 0))


def list_strengths(
    name: str, bins: int, convention: Convention, size: Size, solarize_from: int
) -> np.ndarray:
    """Return the strength of a change at each of `bins` magnitudes, float64 (bins,). Shears are in
    radians, translations in pixels, rotations in degrees. Thresholds of Solarize fall from
    `solarize_from` to 0. The ranges are from Cubuk et al., 2019, table 6."""
    height, width = size
    power = 1 if convention == "paper" else 2  # exponent of the side in a translation
    match name:
        case "ShearX" | "ShearY":
            return _space_evenly(0, 0.3, bins)
        case "TranslateX":
            return 150 / 331 * width**power * np.linspace(0, 1, bins)
        case "TranslateY":
            return 150 / 331 * height**power * np.linspace(0, 1, bins)
        case "Rotate":
            return _space_evenly(0, 30, bins)
        case "Brightness" | "Color" | "Contrast" | "Sharpness":
            return _space_evenly(0, 0.9, bins)
        case "Posterize":
            return 8 - np.rint(np.arange(bins) / ((bins - 1) / 4))
        case "Solarize":
            return _space_evenly(solarize_from, 0, bins)
    return np.zeros(bins)


def _space_evenly(first: float, last: float, count: int) -> np.ndarray:
    """Return evenly spaced numbers in MindSpore's float32 steps, float64 (count,)."""
    step = (np.float32(last) - np.float32(first)) / np.float32(count - 1)
    numbers = np.float32(first) + np.arange(count, dtype=np.float32) * step
    numbers[-1] = last
    return numbers.astype(np.float64)


def _make_both_signs(name: str, magnitude: float) -> tuple[Change, Change]:
    """Return a change and its negative. Changes without a sign are their own negatives."""
    negative = -magnitude if name in _SIGNED else magnitude
    return Change(name, magnitude), Change(name, negative)


@lru_cache
def _tabulate_random_changes(
    magnitude: int, bins: int, convention: Convention, size: Size
) -> tuple[Changes, np.ndarray]:
    """Return the tables of all changes of RandAugment at a magnitude, and the row of each change
    and of its negative, int32 (14 or 15, 2)."""
    names = _RANDOM if convention == "paper" else (*_RANDOM, "AutoContrast")
    changes: list[Change] = []
    for name in names:
        strengths = list_strengths(name, bins, convention, size, 255)
        changes.extend(_make_both_signs(name, float(strengths[magnitude])))
    return tabulate(changes, size), np.arange(len(changes), dtype=np.int32).reshape(-1, 2)


@lru_cache
def _tabulate_policy(
    policy: str, convention: Convention, size: Size
) -> tuple[Changes, np.ndarray, np.ndarray]:
    """Return the tables of the identity, in row 0, and of all changes of a policy; the rows of the
    changes, int32 (25, 2, 2) by pair, position and sign; and their probabilities, float32 (25, 2).
    """
    pairs = json.loads(_POLICIES.read_bytes())[policy]
    changes = [Change("Identity")]
    probabilities = []
    for name, probability, bin_ in chain.from_iterable(pairs):
        strengths = list_strengths(name, _BINS, convention, size, 256)
        changes.extend(_make_both_signs(name, 0.0 if bin_ is None else float(strengths[bin_])))
        probabilities.append(probability)
    rows = np.arange(1, len(changes), dtype=np.int32).reshape(-1, 2, 2)
    return tabulate(changes, size), rows, np.array(probabilities, np.float32).reshape(-1, 2)


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
