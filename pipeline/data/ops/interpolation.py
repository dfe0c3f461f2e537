"""Interpolation of resized images from pixels of the source, as in OpenCV and Pillow.

MindSpore resizes arrays with OpenCV, or for `Inter.PILCUBIC` with Pillow's algorithm. Bytes are
computed in the same fixed point as there, so that results are equal bit for bit, on every device.
The formulas of OpenCV's imgproc/resize and Pillow's Resample were derived from their results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from math import ceil, gcd
from typing import Any, Literal

import numpy as np

from pipeline.data.ops.image import Axis, read_along

OpenCv = Literal["linear", "cubic"]
Pillow = Literal["pil_cubic", "antialias"]
WEIGHT_BITS = 11
"""Bits after the point in OpenCV's weights for bytes."""
_PILLOW_BITS = 22
"""Bits after the point in Pillow's weights."""
_LANES = 8
"""Bytes that OpenCV computes at once."""


@dataclass(frozen=True)
class Taps:
    """Taps of each target pixel along an axis: a tap is a source pixel and its weight. Both arrays
    are (1 or batch, length, taps)."""

    pixels: Any
    """int32."""
    weights: Any
    """float32, or int32 in fixed point."""

    def read(self, xp: Any, values: Any, axis: Axis) -> Iterator[tuple[Any, Any]]:
        """Yield the source pixels of each tap in images (batch, height, width, channels), and its
        weights, in a shape that broadcasts to them."""
        for tap in range(self.pixels.shape[-1]):
            weights = xp.expand_dims(self.weights[..., tap], (3 - axis, 3))
            yield read_along(xp, values, self.pixels[..., tap], axis), weights

    def sum(self, xp: Any, values: Any, axis: Axis) -> Any:
        """Return the weighted sum over all taps."""
        terms = (pixels * weights for pixels, weights in self.read(xp, values, axis))
        return reduce(operator.add, terms)


def interpolate(xp: Any, values: Any, column_taps: Taps, row_taps: Taps) -> Any:
    """Return images interpolated along rows by `column_taps`, then along columns by `row_taps`.
    Bytes need two or four taps in fixed point, others are floats."""
    if values.dtype != np.uint8:
        rows = column_taps.sum(xp, values.astype(np.float32), 2)
        return row_taps.sum(xp, rows, 1).astype(values.dtype)
    rows = column_taps.sum(xp, values.astype(np.int32), 2)
    if row_taps.pixels.shape[-1] > 2:
        total = row_taps.sum(xp, rows, 1)
        # OpenCV rounds halves to even in whole groups of `_LANES` bytes, and up in the bytes of a
        # row that are left after them.
        width, channels = total.shape[2:]
        indices = np.arange(width * channels).reshape(width, channels)
        halves_up = indices >= width * channels // _LANES * _LANES
        levels = divide_rounded(total, 1 << (2 * WEIGHT_BITS), halves_up)
        return levels.clip(0, 255).astype(np.uint8)
    # OpenCV has 16 bits for each product, and so rounds to quarters before it adds.
    upper, lower = (((row >> 4) * weight) >> 16 for row, weight in row_taps.read(xp, rows, 1))
    return ((upper + lower + 2) >> 2).astype(np.uint8)


def find_nearest_pixels(source: int, target: int) -> np.ndarray:
    """Return the source pixel of each target pixel, rounded down, int32 (target,)."""
    # OpenCV's scale, here and below; source / target may differ in the last digit.
    pixels = np.floor(np.arange(target) * (1 / (target / source)))
    return np.minimum(pixels, source - 1).astype(np.int32)


def make_opencv_taps(
    interpolation: OpenCv, source: int, target: int, axis: Axis, *, fixed: bool
) -> Taps:
    """Return taps of two (linear) or four (cubic) neighbours, clamped to the source.
    `source` and `target` are lengths in pixels. With `fixed`, weights are in fixed point."""
    centres = ((np.arange(target) + 0.5) * (1 / (target / source)) - 0.5).astype(np.float32)
    first = np.floor(centres)
    fraction = centres - first
    if interpolation == "cubic":
        return _make_neighbour_taps(source, first - 1, _compute_cubic_weights(fraction), fixed)
    if axis == 2:  # On the other axis OpenCV keeps the weights of clamped taps.
        fraction = np.where((first < 0) | (first >= source - 1), np.float32(0), fraction)
    return _make_neighbour_taps(source, first, (1 - fraction, fraction), fixed)


def make_widening_taps(source: int, target: int, *, fixed: bool) -> Taps:
    """Return the taps of OpenCV's "area" for a side that grows: linear between pixel edges."""
    scale = 1 / (target / source)
    pixel = np.arange(target)
    first = np.floor(pixel * scale)
    # How far the target pixel reaches beyond the first source pixel, in target pixels.
    reach = (pixel + 1 - (first + 1) * (target / source)).astype(np.float32)
    fraction = np.where(reach <= 0, np.float32(0), reach - np.floor(reach))
    return _make_neighbour_taps(source, first, (1 - fraction, fraction), fixed)


def _compute_cubic_weights(fraction: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the weights of Keys' cubic kernel (1981), a = -0.75, in OpenCV's order, float32."""
    a = np.float32(-0.75)
    x = fraction
    before = ((a * (x + 1) - 5 * a) * (x + 1) + 8 * a) * (x + 1) - 4 * a
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a + 2) * (1 - x) - (a + 3)) * (1 - x) * (1 - x) + 1
    return before, near, far, 1 - before - near - far


def _make_neighbour_taps(
    source: int, first: np.ndarray, weights: tuple[np.ndarray, ...], fixed: bool
) -> Taps:
    """Make taps of pixels from `first` on, clamped to the source, and their weights."""
    pixels = first[:, None].astype(np.int32) + np.arange(len(weights), dtype=np.int32)
    stacked = np.stack(weights, axis=-1).astype(np.float32)
    if fixed:
        stacked = np.rint(stacked * (1 << WEIGHT_BITS)).astype(np.int32)
    return Taps(pixels.clip(0, source - 1)[None], stacked[None])


def average_areas(xp: Any, values: Any, size: tuple[int, int]) -> Any:
    """Return the mean of the area that each target pixel covers, for images that shrink."""
    height, width = values.shape[1:3]
    row_taps, row_total = _make_overlap_taps(height, size[0])
    column_taps, column_total = _make_overlap_taps(width, size[1])
    area = row_total * column_total
    if values.dtype != np.uint8:
        total = row_taps.sum(xp, column_taps.sum(xp, values.astype(np.float32), 2), 1)
        return (total * np.float32(1 / area)).astype(values.dtype)
    rows = column_taps.sum(xp, values.astype(np.int32), 2)
    if 255 * area > np.iinfo(np.int32).max:
        # The sum of an area exceeds int32, but whole levels of each row and the rests don't.
        rest = row_taps.sum(xp, rows % column_total, 1)
        levels = row_taps.sum(xp, rows // column_total, 1) + rest // column_total
        remainder = column_total * (levels % row_total) + rest % column_total
        return _round(levels // row_total, remainder, area).astype(np.uint8)
    total = row_taps.sum(xp, rows, 1)
    if (row_total, column_total) == (2, 2):  # Only for this ratio OpenCV rounds halves up.
        return ((total + 2) >> 2).astype(np.uint8)
    return divide_rounded(total, area).astype(np.uint8)


def _make_overlap_taps(source: int, target: int) -> tuple[Taps, int]:
    """Return taps whose weights are the overlaps of target and source pixels, and the sum of the
    weights of a target pixel. Weights are in the largest unit that makes all of them integers."""
    divisor = gcd(source, target)
    target_width = source // divisor
    source_width = target // divisor
    begin = np.arange(target)[:, None] * target_width
    end = begin + target_width
    first = begin // source_width
    num_taps = int((-(-end // source_width) - first).max())
    covered = first + np.arange(num_taps)
    covered_begin = covered * source_width
    overlap = np.minimum(end, covered_begin + source_width) - np.maximum(begin, covered_begin)
    pixels = covered.clip(0, source - 1)[None].astype(np.int32)
    return Taps(pixels, overlap.clip(0)[None].astype(np.int32)), target_width


def divide_rounded(total: Any, divisor: int, halves_up: Any = False) -> Any:
    """Return total / divisor, rounded to the nearest integer. Halves are rounded to even, or up if
    `halves_up`, a bool or a mask, is true."""
    quotient = total // divisor
    return _round(quotient, total - quotient * divisor, divisor, halves_up)


def _round(quotient: Any, remainder: Any, divisor: int, halves_up: Any = False) -> Any:
    """Round a quotient by its remainder, as `divide_rounded` does."""
    left = divisor - remainder
    half = (remainder == left) & ((quotient % 2 == 1) | halves_up)
    return quotient + ((remainder > left) | half).astype(np.int32)


def make_pillow_taps(interpolation: Pillow, source: int, target: int) -> Taps:
    """Return the taps of Pillow's kernel, widened if the image shrinks, in fixed point."""
    kernel, radius = _KERNELS[interpolation]
    scale = source / target
    widened = max(scale, 1.0)
    support = radius * widened
    centre = (np.arange(target)[:, None] + 0.5) * scale
    begin = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), source)
    pixels = begin + np.arange(2 * ceil(support) + 1)
    weights = np.where(pixels < end, kernel((pixels - centre + 0.5) / widened), 0)
    weights /= weights.sum(axis=1, keepdims=True)
    fixed = np.trunc(weights * (1 << _PILLOW_BITS) + np.copysign(0.5, weights)).astype(np.int32)
    is_used = fixed.any(axis=0)
    pixels = pixels.clip(0, source - 1).astype(np.int32)
    return Taps(pixels[None, :, is_used], fixed[None, :, is_used])


def filter_axis(xp: Any, values: Any, taps: Taps, axis: Axis) -> Any:
    """Return bytes scaled along an axis by Pillow's taps, and rounded to bytes."""
    if taps.pixels.shape[1] == values.shape[axis]:  # Pillow doesn't filter an axis of this length.
        return values
    total = taps.sum(xp, values.astype(np.int32), axis)
    half = 1 << (_PILLOW_BITS - 1)
    return ((total + half) >> _PILLOW_BITS).clip(0, 255).astype(np.uint8)


def _apply_cubic_kernel(distance: np.ndarray) -> np.ndarray:
    """Return Keys' cubic kernel with a = -0.5 at distances in pixels."""
    x = np.abs(distance)
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _apply_lanczos_kernel(distance: np.ndarray) -> np.ndarray:
    """Return the Lanczos kernel at distances x in pixels: sinc(x) sinc(x / 3) up to 3, else 0."""
    is_inside = np.abs(distance) < 3
    return np.where(is_inside, np.sinc(distance) * np.sinc(distance / 3), 0)


_KERNELS: dict[Pillow, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "pil_cubic": (_apply_cubic_kernel, 2.0),
    "antialias": (_apply_lanczos_kernel, 3.0),
}
"""Pillow's kernels, and the distance in pixels from which they are 0."""
