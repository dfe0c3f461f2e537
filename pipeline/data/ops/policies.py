"""AutoAugment and RandAugment: ops that draw several changes for each image."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.registry import component
from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.affine import Fill, Interpolation, list_fill_levels
from pipeline.data.ops.color import require_rgb_bytes, require_summable
from pipeline.data.ops.color_changes import Change, Changes, apply_changes, tabulate
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
