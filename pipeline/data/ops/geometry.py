"""Map ops that move pixels, on images of shape (batch, height, width, channels) (D-05)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.image import Padding, Size, image_shape, pixels_at
from pipeline.data.random import integers
from pipeline.data.spec import Op
from pipeline.registry import part

_WEIGHT_BITS = 11


@part("op")
class Resize(Op):
    """Scale to `size` as OpenCV does: centres at half pixels, edges clamped, no antialiasing.

    uint8 images stay uint8. Their linear weights are integers of 11 bits, OpenCV's as well, so that
    the result is the same to the bit on every device and lies within one level of the exact one.
    """

    name: Literal["resize"] = "resize"
    size: Size
    interpolation: Literal["linear", "nearest"] = "linear"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        *_, channels = image_shape(value)
        if value.dtype not in ("uint8", "float16", "float32"):
            raise ValueError(f"takes uint8, float16 or float32 images, not {value.dtype}")
        return replace(value, shape=(*self.size, channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        if self.interpolation == "nearest":
            return _resize_nearest(xp, values, self.size)
        if values.dtype == np.uint8:
            fixed = _resize_linear(xp, values.astype(np.int32), self.size)
            half = 1 << (2 * _WEIGHT_BITS - 1)
            return ((fixed + half) >> (2 * _WEIGHT_BITS)).astype(np.uint8)
        return _resize_linear(xp, values.astype(np.float32), self.size).astype(values.dtype)


def _resize_nearest(xp: Any, values: Any, size: Size) -> Any:
    for axis, length in enumerate(size, start=1):
        nearest = np.arange(length) * values.shape[axis] // length
        values = _take(xp, values, nearest, axis)
    return values


def _take(xp: Any, values: Any, indices: np.ndarray, axis: int) -> Any:
    # The indices are always in range; "clip" spares numpy a check that doubles the time.
    return xp.take(values, indices, axis=axis, mode="clip")


def _resize_linear(xp: Any, values: Any, size: Size) -> Any:
    """Mix the two nearest pixels, axis by axis; int32 comes out scaled by the weights' unit**2."""
    for axis, length in enumerate(size, start=1):
        lower, upper, fraction = _taps(values.shape[axis], length)
        one, weight = _weights(fraction, values.dtype)
        weight = np.expand_dims(weight, tuple(range(1, values.ndim - axis)))
        below, above = (_take(xp, values, tap, axis) for tap in (lower, upper))
        values = below * (one - weight) + above * weight
    return values


def _taps(source: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pixels before and after each target pixel's centre, and how far it is between them."""
    centre = (np.arange(target) + 0.5) * source / target - 0.5
    centre = np.clip(centre, 0, source - 1)
    lower = np.floor(centre).astype(np.int32)
    return lower, np.minimum(lower + 1, source - 1), centre - lower


def _weights(fraction: np.ndarray, dtype: Any) -> tuple[Any, np.ndarray]:
    """The unit of the weights and the weights: fixed point for int32, else float32."""
    if dtype == np.int32:
        one = 1 << _WEIGHT_BITS
        return one, np.rint(fraction * one).astype(np.int32)
    return 1, fraction.astype(np.float32)


@part("op")
class Pad(Op):
    """Surround the image with pixels of the value `fill`."""

    name: Literal["pad"] = "pad"
    padding: Padding
    fill: float = 0.0

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = image_shape(value)
        _check_fill(self.fill, value.dtype)
        return replace(value, shape=(*_padded(height, width, self.padding), channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        return _pad(xp, values, self.padding, self.fill)


def _check_fill(fill: float, dtype: str) -> None:
    if not np.issubdtype(dtype, np.integer):
        return
    limits = np.iinfo(dtype)
    if fill not in range(limits.min, limits.max + 1):
        raise ValueError(
            f"can't fill {dtype} images with {fill}; "
            f"take a whole number from {limits.min} to {limits.max}"
        )


def _padded(height: int, width: int, padding: Padding) -> tuple[int, int]:
    top, bottom, left, right = padding
    return top + height + bottom, left + width + right


def _pad(xp: Any, values: Any, padding: Padding, fill: float) -> Any:
    top, bottom, left, right = padding
    return xp.pad(values, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=fill)


@part("op")
class RandomCrop(Op):
    """Pad with zeros, then cut out `size` at a place drawn anew for each sample and pass."""

    name: Literal["random_crop"] = "random_crop"
    size: Size
    padding: Padding = (0, 0, 0, 0)

    draws: ClassVar[int] = 2

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = image_shape(value)
        _check_crop(self.size, _padded(height, width, self.padding))
        return replace(value, shape=(*self.size, channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        (height, width), (top, bottom, left, right) = values.shape[1:3], self.padding
        rows, row_in = _cut(xp, uniforms[:, :1], self.size[0], height, (top, bottom))
        columns, column_in = _cut(xp, uniforms[:, 1:], self.size[1], width, (left, right))
        pixels = pixels_at(xp, values, rows, columns)
        if not any(self.padding):
            return pixels
        # Masking what the padding would hold is cheaper than gathering from a padded copy.
        inside = row_in[:, :, None] & column_in[:, None, :]
        return xp.where(inside[..., None], pixels, 0)


def _cut(
    xp: Any, uniforms: Any, size: int, length: int, padding: tuple[int, int]
) -> tuple[Any, Any]:
    """Where a crop lies along an axis of `length` pixels, padded before and after.

    The pixels it takes, clamped to the image, int32 (batch, size); and which of them the image has.
    """
    first = integers(xp, uniforms, sum(padding) + length - size + 1) - padding[0]
    pixel = first + np.arange(size, dtype=np.int32)
    return pixel.clip(0, length - 1), (pixel >= 0) & (pixel < length)


@part("op")
class CenterCrop(Op):
    """Cut `size` out of the middle; where the rest is odd, the larger half is dropped last."""

    name: Literal["center_crop"] = "center_crop"
    size: Size

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = image_shape(value)
        _check_crop(self.size, (height, width))
        return replace(value, shape=(*self.size, channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        height, width = self.size
        top, left = (values.shape[1] - height) // 2, (values.shape[2] - width) // 2
        return values[:, top : top + height, left : left + width]


def _check_crop(size: Size, image: tuple[int, int]) -> None:
    if size[0] > image[0] or size[1] > image[1]:
        raise ValueError(
            f"can't crop {size[0]}x{size[1]} from {image[0]}x{image[1]}, padding included; "
            "crop less or pad more"
        )


@part("op")
class RandomHorizontalFlip(Op):
    """Mirror each image left to right with probability `prob`."""

    name: Literal["random_horizontal_flip"] = "random_horizontal_flip"
    prob: Annotated[float, Field(ge=0, le=1)] = 0.5

    draws: ClassVar[int] = 1

    def output(self, value: ColumnSpec) -> ColumnSpec:
        image_shape(value)
        return value

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        height, width = (np.arange(n, dtype=np.int32)[None] for n in values.shape[1:3])
        # One read at an index; a choice between two reads makes XLA compute what feeds them twice.
        columns = xp.where(uniforms[:, :1] < self.prob, width[:, ::-1], width)
        return pixels_at(xp, values, height, columns)


@part("op")
class Cutout(Op):
    """Blank square holes with zeros, `size` pixels a side (DeVries and Taylor, 2017).

    Centres are uniform over the image, so a hole may lie partly outside of it.
    """

    name: Literal["cutout"] = "cutout"
    size: PositiveInt
    holes: PositiveInt = 1

    @property
    def draws(self) -> int:
        return 2 * self.holes

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, _ = image_shape(value)
        if self.size > min(height, width):
            raise ValueError(
                f"a hole of {self.size}x{self.size} is larger than the image of {height}x{width}"
            )
        return value

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        _, height, width, _ = values.shape
        rows = self._covered(xp, uniforms[:, : self.holes], height)
        columns = self._covered(xp, uniforms[:, self.holes :], width)
        hole = (rows[:, :, :, None] & columns[:, :, None, :]).any(axis=1)
        return xp.where(hole[..., None], 0, values)

    def _covered(self, xp: Any, uniforms: Any, length: int) -> Any:
        """Which of `length` pixels lie in each hole: bool (batch, holes, length)."""
        first = integers(xp, uniforms, length)[:, :, None] - self.size // 2
        pixel = np.arange(length)
        return (first <= pixel) & (pixel < first + self.size)
