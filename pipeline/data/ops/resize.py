"""Map ops that scale images (D-05)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import PositiveInt

from pipeline.core.registry import Expected, part
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import GeometricOp
from pipeline.data.ops.image import Size, image_shape, pixels_along
from pipeline.data.ops.interpolation import (
    Pillow,
    average,
    filtered,
    mix,
    nearest_pixels,
    opencv_taps,
    pillow_taps,
    widening_taps,
)

Interpolation = Literal["linear", "nearest", "cubic", "area", "pil_cubic", "antialias"]

_AREA_LIMIT = 2**31 // 255
"""Sums of bytes weighted by areas up to this one fit in int32."""


@part("op")
class Resize(GeometricOp):
    """Scale to `size`, [height, width] or the length of the shorter edge, as MindSpore does.

    `linear`, `nearest`, `cubic` and `area` are OpenCV's, `pil_cubic` and `antialias` (Lanczos)
    Pillow's, which widen their kernel where the image shrinks. The images are uint8, float16 or
    float32 and keep their dtype; Pillow's take uint8 alone.
    """

    name: Literal["resize"] = "resize"
    size: Annotated[
        Size | PositiveInt, Expected("a whole number above 0, or two of them: [height, width]")
    ]
    interpolation: Interpolation = "linear"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = image_shape(value)
        _check_dtype(self.interpolation, value.dtype)
        if self.interpolation == "area" and value.dtype == "uint8" and height * width > _AREA_LIMIT:
            raise ValueError(f"can't average over images as large as {height}x{width}; crop first")
        return replace(value, shape=(*target_size(self.size, height, width), channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        size = target_size(self.size, *values.shape[1:3])
        return resized(xp, values, size, self.interpolation)

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        return resized(xp, labels, target_size(self.size, *labels.shape[1:3]), "nearest")


def _check_dtype(interpolation: Interpolation, dtype: str) -> None:
    if interpolation in ("pil_cubic", "antialias"):
        if dtype != "uint8":
            raise ValueError(
                f"{interpolation} takes uint8 images, not {dtype}; resize before rescale, or take "
                "linear, nearest, cubic or area"
            )
    elif dtype not in ("uint8", "float16", "float32"):
        raise ValueError(f"takes uint8, float16 or float32 images, not {dtype}")


def target_size(size: Size | int, height: int, width: int) -> Size:
    """[height, width] after scaling; one number is the shorter edge's, the other side's floor."""
    if not isinstance(size, int):
        return size
    if height < width:
        return size, int(np.float32(width) / np.float32(height) * np.float32(size))
    return int(np.float32(height) / np.float32(width) * np.float32(size)), size


def resized(xp: Any, values: Any, size: Size, interpolation: Interpolation) -> Any:
    """Images (batch, height, width, channels) scaled to `size`."""
    (height, width), (rows, columns) = values.shape[1:3], size
    fixed = values.dtype == np.uint8
    if interpolation == "nearest":
        values = pixels_along(xp, values, nearest_pixels(height, rows)[None], 1)
        return pixels_along(xp, values, nearest_pixels(width, columns)[None], 2)
    if interpolation == "pil_cubic" or interpolation == "antialias":
        return _filtered(xp, values, size, interpolation)
    if interpolation != "area":
        across = opencv_taps(interpolation, width, columns, 2, fixed=fixed)
        return mix(xp, values, across, opencv_taps(interpolation, height, rows, 1, fixed=fixed))
    if rows <= height and columns <= width:
        return average(xp, values, size)
    across = widening_taps(width, columns, fixed=fixed)
    return mix(xp, values, across, widening_taps(height, rows, fixed=fixed))


def _filtered(xp: Any, values: Any, size: Size, interpolation: Pillow) -> Any:
    """Filter along one axis after the other; bytes are rounded between, so the order matters."""
    (height, width), (rows, columns) = values.shape[1:3], size
    down, across = (
        pillow_taps(interpolation, source, target)
        for source, target in ((height, rows), (width, columns))
    )
    # Pillow 13 begins with the columns where that shrinks the image more; MindSpore never does.
    if interpolation == "antialias" and rows < height and 2 * (width - columns) < height - rows:
        return filtered(xp, filtered(xp, values, down, 1), across, 2)
    return filtered(xp, filtered(xp, values, across, 2), down, 1)
