"""Brightness, contrast, saturation and hue of bytes, computed as in OpenCV.

In all functions `factors` or `shifts` are the amounts that can be drawn, (n,), and `numbers` is the
index of each image's amount, int32 (batch,).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import permutations
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator

from pipeline.core.registry import component
from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.image import (
    MAX_SUMMED_PIXELS,
    ImageOp,
    Range,
    draw_rows,
    list_steps,
    repeat_op,
    require_image,
)
from pipeline.data.ops.interpolation import divide_rounded
from pipeline.data.random import scale_to_integers

Adjust = Callable[[Any, Any, np.ndarray, Any], Any]
"""(xp, bytes, amounts (n,), index of each image's amount, int32 (batch,)) -> bytes."""
_FACTOR_BITS = 16
"""Bits of a rounded factor. Its product with a byte fits into the 24 bits of a float32."""
_MAX_TABLES = 32
"""The most factors for which results are tabulated, 64 KiB each. For more they are computed."""
_GREY_BITS = 15
_GREY = np.array([9798, 19235, 3735], np.int32)
"""Weights of red, green and blue in the luma: 0.299, 0.587 and 0.114 with `_GREY_BITS` bits."""
_HUE_BITS = 12
"""Bits after the point in OpenCV's tables for the conversion to HSV."""
_SIXTH = 85
"""A sixth of the colour circle, in half steps of OpenCV's 255 hues."""


def _make_range_check(
    low: float, high: float, quantity: str
) -> Callable[[tuple[float, float]], tuple[float, float]]:
    """Return a validator that raises ValueError for a range that isn't within `low` and `high`."""

    def check(bounds: tuple[float, float]) -> tuple[float, float]:
        if not low <= bounds[0] <= bounds[1] <= high:
            raise ValueError(f"{list(bounds)}: {quantity} must be from {low:g} to {high:g}")
        return bounds

    return check


FactorRange = Annotated[Range, AfterValidator(_make_range_check(0, 128, "a factor"))]
HueRange = Annotated[Range, AfterValidator(_make_range_check(-0.5, 0.5, "a shift of the hue"))]


@component("op")
class RandomColorAdjust(ImageOp):
    """Change brightness, contrast, saturation and hue in an order drawn for each sample.

    The first three are factors; 1 changes nothing. `hue` is a shift in rotations of the colour
    circle. Each is drawn evenly from its range [least, most]. Images must be RGB bytes.
    """

    name: Literal["random_color_adjust"] = "random_color_adjust"
    brightness: FactorRange = (1.0, 1.0)
    contrast: FactorRange = (1.0, 1.0)
    saturation: FactorRange = (1.0, 1.0)
    hue: HueRange = (0.0, 0.0)

    draws: ClassVar[int] = 5

    def output(self, value: ColumnSpec) -> ColumnSpec:
        require_rgb_bytes(value)
        if self.contrast != (1.0, 1.0):
            require_summable(value)
        return value

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        changes = self._list_changes(xp, uniforms)
        orders = np.array(list(permutations(range(len(changes)))), np.int32)
        order = draw_rows(xp, uniforms[:, 4], orders)

        def change_once(iteration: Any, values: Any) -> Any:
            selected = broadcast_per_image(order[:, iteration])
            result = values
            for index, (change, amounts, numbers) in enumerate(changes):
                result = xp.where(selected == index, change(xp, values, amounts, numbers), result)
            return result

        return repeat_op(xp, change_once, len(changes), values)

    def _list_changes(self, xp: Any, uniforms: Any) -> list[tuple[Adjust, np.ndarray, Any]]:
        """Return the adjustments that change something, each with its amounts, (n,), and the index
        of each image's amount, int32 (batch,)."""
        amounts: dict[Adjust, np.ndarray] = {
            adjust_brightness: list_steps(*self.brightness),
            adjust_contrast: list_steps(*self.contrast),
            adjust_saturation: list_steps(*self.saturation),
            adjust_hue: list_steps(*self.hue),
        }
        neutral: dict[Adjust, float] = {adjust_hue: 0.0}
        return [
            (change, table, scale_to_integers(xp, uniforms[:, draw], len(table)))
            for draw, (change, table) in enumerate(amounts.items())
            if table.tolist() != [neutral.get(change, 1.0)]
        ]


def require_rgb_bytes(value: ColumnSpec) -> None:
    """Raise ValueError for values other than images of three channels of bytes."""
    *_, channels = require_image(value)
    if value.dtype != "uint8" or channels != 3:
        raise ValueError(
            f"needs uint8 images of 3 channels, not {value.dtype} of {channels}; list it before "
            "rescale and normalize"
        )


def require_summable(value: ColumnSpec) -> None:
    """Raise ValueError for images of more than `MAX_SUMMED_PIXELS`, whose mean is needed."""
    height, width, _ = require_image(value)
    if height * width > MAX_SUMMED_PIXELS:
        raise ValueError(
            f"can't average over images as large as {height}x{width}; crop or resize first"
        )


def round_factors(factors: np.ndarray) -> np.ndarray:
    """Round factors f to 16 bits, float32, so that products of bytes with f and 1 - f are exact."""
    _, exponents = np.frexp(factors)
    unit = np.maximum(exponents, 0) - _FACTOR_BITS
    return np.ldexp(np.rint(np.ldexp(factors, -unit)), unit).astype(np.float32)


def broadcast_per_image(amount: Any) -> Any:
    """Reshape an amount for each image, (batch,), to (batch, 1, 1, 1)."""
    return amount[:, None, None, None]


def _round_to_bytes(xp: Any, levels: Any) -> Any:
    return xp.rint(levels).clip(0, 255).astype(np.uint8)


def adjust_brightness(xp: Any, values: Any, factors: np.ndarray, numbers: Any) -> Any:
    """Multiply bytes by the factors."""
    factor = xp.asarray(factors.astype(np.float32))[numbers]
    return _round_to_bytes(xp, values.astype(np.float32) * broadcast_per_image(factor))


def blend(xp: Any, base: Any, values: Any, factors: np.ndarray, numbers: Any) -> Any:
    """Return base + (values - base) * factor, rounded to bytes. Up to `_MAX_TABLES` factors have
    tables, with the rounding of OpenCV's fused multiplication. More factors are rounded to 16 bits,
    so that results don't depend on whether a compiler fuses the multiplication."""
    if len(factors) > _MAX_TABLES:
        factor = round_factors(factors)
        value_part = values.astype(np.float32) * broadcast_per_image(xp.asarray(factor)[numbers])
        base_part = base.astype(np.float32) * broadcast_per_image(xp.asarray(1 - factor)[numbers])
        return _round_to_bytes(xp, base_part + value_part)
    tables = np.concatenate([make_blend_table(factor, "base") for factor in factors.tolist()])
    return look_up_blend(xp, base, values, tables, numbers)


def look_up_blend(xp: Any, base: Any, values: Any, tables: np.ndarray, numbers: Any) -> Any:
    """Blend bytes with their base by tables, uint8 (n, 256, 256)."""
    row = broadcast_per_image(numbers) * 256 + base.astype(np.int32)
    return xp.take(tables.reshape(-1), row * 256 + values.astype(np.int32), mode="clip")


@lru_cache(maxsize=_MAX_TABLES)
def make_blend_table(factor: float, fused: Literal["base", "value"]) -> np.ndarray:
    """Return the blends of every base and value by a factor, uint8 (1, 256, 256). `fused` is the
    product that OpenCV doesn't round before it adds the other product."""
    value = np.arange(256, dtype=np.float32)
    base = value[:, None]
    share = np.float32(factor)
    if fused == "base":
        total = base.astype(np.float64) * np.float64(1 - share) + value * share
    else:
        total = value.astype(np.float64) * np.float64(share) + base * (1 - share)
    return np.rint(total.astype(np.float32)).clip(0, 255).astype(np.uint8)[None]


def compute_luma(values: Any) -> Any:
    """Return the luma of RGB bytes, int32 (batch, height, width)."""
    weighted = (values.astype(np.int32) * _GREY).sum(axis=-1, dtype=np.int32)
    return (weighted + (1 << (_GREY_BITS - 1))) >> _GREY_BITS


def compute_mean_luma(values: Any) -> Any:
    """Return the rounded mean of each image's luma, int32 (batch, 1, 1, 1)."""
    luma = compute_luma(values)
    total = luma.sum(axis=(1, 2), dtype=np.int32)
    return broadcast_per_image(divide_rounded(total, luma.shape[1] * luma.shape[2]))


def adjust_contrast(xp: Any, values: Any, factors: np.ndarray, numbers: Any) -> Any:
    """Blend with the mean luma of each image."""
    return blend(xp, compute_mean_luma(values), values, factors, numbers)


def adjust_saturation(xp: Any, values: Any, factors: np.ndarray, numbers: Any) -> Any:
    """Blend with the luma of each pixel."""
    return blend(xp, compute_luma(values)[..., None], values, factors, numbers)


def adjust_hue(xp: Any, values: Any, shifts: np.ndarray, numbers: Any) -> Any:
    """Shift the hue by rotations of the colour circle."""
    shift = xp.asarray((shifts * 255).astype(np.int32))[numbers]
    hue, saturation, value = to_hsv(xp, values.astype(np.int32))
    return to_rgb(xp, (hue + shift[:, None, None]) & 255, saturation, value)


def to_hsv(xp: Any, rgb: Any) -> tuple[Any, Any, Any]:
    """Return hue in 256ths of a circle, saturation and value, int32 in 0..255, as OpenCV does."""
    red, green, blue = (rgb[..., channel] for channel in range(3))
    value = rgb.max(axis=-1)
    chroma = value - rgb.min(axis=-1)
    byte = np.maximum(np.arange(256), 1)
    # OpenCV's tables of 255 / value and of 256 / (6 * chroma), in fixed point.
    per_value = np.rint((255 << _HUE_BITS) / byte).astype(np.int32)
    per_chroma = np.rint((256 << _HUE_BITS) / (6 * byte)).astype(np.int32)
    half = 1 << (_HUE_BITS - 1)
    saturation = (chroma * xp.asarray(per_value)[value] + half) >> _HUE_BITS
    # The hue in sixths of the circle, times the chroma: red is at 0, green at 2, blue at 4.
    scaled_hue = xp.where(
        value == red,
        green - blue,
        xp.where(value == green, blue - red + 2 * chroma, red - green + 4 * chroma),
    )
    hue = (scaled_hue * xp.asarray(per_chroma)[chroma] + half) >> _HUE_BITS
    return xp.where(hue < 0, hue + 256, hue), saturation, value


def to_rgb(xp: Any, hue: Any, saturation: Any, value: Any) -> Any:
    """Return RGB bytes of int32 hue, saturation and value. As in OpenCV, a circle has 255 hues."""
    sector = 2 * hue // _SIXTH % 6
    offset = 2 * hue % _SIXTH
    unit = 255 * _SIXTH

    def darken(share: Any) -> Any:
        return (2 * value * (unit - saturation * share) + unit) // (2 * unit)

    low = darken(_SIXTH)
    falling = darken(offset)
    rising = darken(_SIXTH - offset)
    channels = (
        (value, falling, low, low, rising, value),
        (rising, value, value, falling, low, low),
        (low, low, rising, value, value, falling),
    )
    selected = []
    for levels in channels:
        level = levels[0]
        for number in range(1, 6):
            level = xp.where(sector == number, levels[number], level)
        selected.append(level)
    return xp.stack(selected, axis=-1).astype(np.uint8)
