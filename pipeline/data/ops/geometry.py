"""Map ops that crop, pad, flip and blank images (batch, height, width, channels)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from pipeline.core.registry import component
from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.image import (
    GeometricOp,
    ImageOp,
    Padding,
    Probability,
    Size,
    Window,
    read_crossings,
    require_image,
)
from pipeline.data.random import scale_to_integers


@component("op")
class Pad(GeometricOp):
    """Surround the image with pixels of the value `fill`, or with pixels of the image.

    With `mode` constant they are `fill`. edge repeats the outermost pixels. symmetric mirrors the
    image including its outermost pixels, reflect excluding them.
    """

    name: Literal["pad"] = "pad"
    padding: Padding
    fill: float = 0.0
    mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = require_image(value)
        _require_fill(self.fill, value.dtype)
        if self.mode in ("reflect", "symmetric"):
            top, bottom, left, right = self.padding
            edge = 1 if self.mode == "reflect" else 0
            if max(top, bottom) > height - edge or max(left, right) > width - edge:
                raise ValueError(
                    f"can't mirror {list(self.padding)} pixels of an image of {height}x{width}; "
                    f"{self.mode} allows at most {height - edge} rows and {width - edge} columns"
                )
        return replace(value, shape=(*_compute_padded_size(height, width, self.padding), channels))

    @property
    def creates_border(self) -> bool:
        return self.mode == "constant" and any(self.padding)

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        top, bottom, left, right = self.padding
        widths = ((0, 0), (top, bottom), (left, right), (0, 0))
        if self.mode != "constant":
            return xp.pad(values, widths, mode=self.mode)
        return xp.pad(values, widths, constant_values=self.fill)

    def find_window(self, xp: Any, uniforms: Any, height: int, width: int) -> Window:
        top, _, left, _ = self.padding
        return -top, -left, *_compute_padded_size(height, width, self.padding)

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        return self.model_copy(update={"fill": fill})(xp, labels, uniforms)


def _require_fill(fill: float, dtype: str) -> None:
    """Raise ValueError if an integer dtype can't hold the fill."""
    if not np.issubdtype(dtype, np.integer):
        return
    limits = np.iinfo(dtype)
    if fill not in range(limits.min, limits.max + 1):
        raise ValueError(
            f"can't fill {dtype} images with {fill}; "
            f"must be a whole number from {limits.min} to {limits.max}"
        )


def _compute_padded_size(height: int, width: int, padding: Padding) -> tuple[int, int]:
    top, bottom, left, right = padding
    return top + height + bottom, left + width + right


@component("op")
class RandomCrop(GeometricOp):
    """Pad with `fill`, then crop to `size` at a place drawn for each sample and epoch."""

    name: Literal["random_crop"] = "random_crop"
    size: Size
    padding: Padding = (0, 0, 0, 0)
    fill: float = 0.0

    draws: ClassVar[int] = 2

    @property
    def creates_border(self) -> bool:
        return any(self.padding)

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = require_image(value)
        _require_fill(self.fill, value.dtype)
        _require_crop(self.size, _compute_padded_size(height, width, self.padding))
        return replace(value, shape=(*self.size, channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        height, width = values.shape[1:3]
        top, bottom, left, right = self.padding
        rows, in_rows = _crop_axis(xp, uniforms[:, :1], self.size[0], height, (top, bottom))
        columns, in_columns = _crop_axis(xp, uniforms[:, 1:], self.size[1], width, (left, right))
        pixels = read_crossings(xp, values, rows, columns)
        if not any(self.padding):
            return pixels
        # Masking the padding is cheaper than gathering from a padded copy.
        is_inside = in_rows[:, :, None] & in_columns[:, None, :]
        return xp.where(is_inside[..., None], pixels, np.asarray(self.fill, pixels.dtype))

    def find_window(self, xp: Any, uniforms: Any, height: int, width: int) -> Window:
        top, bottom, left, right = self.padding
        first_row = _draw_first(xp, uniforms[:, 0], self.size[0], height, (top, bottom))
        first_column = _draw_first(xp, uniforms[:, 1], self.size[1], width, (left, right))
        return first_row, first_column, *self.size

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        return self.model_copy(update={"fill": fill})(xp, labels, uniforms)


def _draw_first(xp: Any, uniforms: Any, size: int, length: int, padding: tuple[int, int]) -> Any:
    """Draw the first pixel of crops as `_crop_axis` does, int32 of the shape of `uniforms`."""
    num_places = sum(padding) + length - size + 1
    return scale_to_integers(xp, uniforms, num_places) - padding[0]


def _crop_axis(
    xp: Any, uniforms: Any, size: int, length: int, padding: tuple[int, int]
) -> tuple[Any, Any]:
    """Draw the pixels of crops along an axis of `length` pixels, with `padding` (before, after), by
    `uniforms`, (batch, 1). Returns the pixels, int32 (batch, size), clamped to the image, and a
    mask of those that are inside it."""
    first = _draw_first(xp, uniforms, size, length, padding)
    pixel = first + np.arange(size, dtype=np.int32)
    return pixel.clip(0, length - 1), (pixel >= 0) & (pixel < length)


@component("op")
class CenterCrop(GeometricOp):
    """Crop to `size` in the middle. If an odd number of rows or columns is cut off, one more is cut
    off at the end than at the start."""

    name: Literal["center_crop"] = "center_crop"
    size: Size

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = require_image(value)
        _require_crop(self.size, (height, width))
        return replace(value, shape=(*self.size, channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        top, left, height, width = self.find_window(xp, uniforms, *values.shape[1:3])
        return values[:, top : top + height, left : left + width]

    def find_window(self, xp: Any, uniforms: Any, height: int, width: int) -> Window:
        rows, columns = self.size
        return (height - rows) // 2, (width - columns) // 2, rows, columns


def _require_crop(size: Size, padded_size: tuple[int, int]) -> None:
    """Raise ValueError for a crop that is larger than the padded image."""
    height, width = padded_size
    if size[0] > height or size[1] > width:
        raise ValueError(
            f"can't crop {size[0]}x{size[1]} from {height}x{width}, padding included; "
            "crop less or pad more"
        )


class _Flip(GeometricOp):
    """Mirror each image along one axis with probability `prob`."""

    prob: Probability = 0.5

    draws: ClassVar[int] = 1
    axis: ClassVar[int]
    """0: top to bottom, 1: left to right."""

    def output(self, value: ColumnSpec) -> ColumnSpec:
        require_image(value)
        return value

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        pixels = [np.arange(length, dtype=np.int32)[None] for length in values.shape[1:3]]
        # Reads pixels once, by index. With a choice between two reads XLA computes the image twice.
        along = pixels[self.axis]
        pixels[self.axis] = xp.where(uniforms[:, :1] < self.prob, along[:, ::-1], along)
        return read_crossings(xp, values, rows=pixels[0], columns=pixels[1])

    def find_window(self, xp: Any, uniforms: Any, height: int, width: int) -> Window:
        edges: list[Any] = [0, 0, height, width]
        length = edges[2 + self.axis]
        is_flipped = uniforms[:, 0] < self.prob
        edges[self.axis] = xp.where(is_flipped, length, 0)
        edges[2 + self.axis] = xp.where(is_flipped, -length, length)
        return edges[0], edges[1], edges[2], edges[3]


@component("op")
class RandomHorizontalFlip(_Flip):
    """Mirror each image left to right with probability `prob`."""

    name: Literal["random_horizontal_flip"] = "random_horizontal_flip"
    axis: ClassVar[int] = 1


@component("op")
class RandomVerticalFlip(_Flip):
    """Mirror each image top to bottom with probability `prob`."""

    name: Literal["random_vertical_flip"] = "random_vertical_flip"
    axis: ClassVar[int] = 0


@component("op")
class Cutout(ImageOp):
    """Fill square holes of `size` pixels a side with zeros.

    A hole may be partly outside the image. With convention `devries` (DeVries and Taylor, 2017) its
    centre is uniform over the image. With `mindspore` its start is uniform from `size` pixels
    before the image to its end, so that some holes are outside and have no effect.
    """

    name: Literal["cutout"] = "cutout"
    size: PositiveInt
    holes: PositiveInt = 1
    convention: Literal["devries", "mindspore"] = "devries"

    @property
    def draws(self) -> int:
        return 2 * self.holes

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, _ = require_image(value)
        if self.size > min(height, width):
            raise ValueError(
                f"a hole of {self.size}x{self.size} is larger than the image of {height}x{width}"
            )
        return value

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        _, height, width, _ = values.shape
        rows = self._mark_holes(xp, uniforms[:, : self.holes], height)
        columns = self._mark_holes(xp, uniforms[:, self.holes :], width)
        hole = (rows[:, :, :, None] & columns[:, :, None, :]).any(axis=1)
        return xp.where(hole[..., None], 0, values)

    def _mark_holes(self, xp: Any, uniforms: Any, length: int) -> Any:
        """Return a mask of the pixels of each hole along an axis: bool (batch, holes, length)."""
        if self.convention == "devries":
            first = scale_to_integers(xp, uniforms, length) - self.size // 2
        else:
            first = scale_to_integers(xp, uniforms, length + self.size + 1) - self.size
        pixel = np.arange(length)
        first = first[:, :, None]
        return (first <= pixel) & (pixel < first + self.size)
