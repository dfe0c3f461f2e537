"""Map ops that scale images, or a crop of each image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import log
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from pipeline.core.registry import Expected, Seq, component
from pipeline.data.columns import BOXES, ColumnSpec
from pipeline.data.dataset_spec import MapOp
from pipeline.data.ops.image import (
    MAX_SUMMED_PIXELS,
    Axis,
    GeometricOp,
    Range,
    Size,
    Window,
    crop_boxes,
    draw_rows,
    list_steps,
    read_along,
    read_crossings,
    require_image,
    require_image_dtype,
)
from pipeline.data.ops.interpolation import (
    Taps,
    average_areas,
    filter_axis,
    find_nearest_pixels,
    interpolate,
    make_opencv_taps,
    make_pillow_taps,
    make_widening_taps,
)
from pipeline.data.random import scale_to_integers

Interpolation = Literal["linear", "nearest", "cubic", "area", "pil_cubic", "antialias"]
MAX_SIZES = 32
"""The most sizes of `random_size`. Each is a branch of the compiled program."""


@component("op")
class Resize(GeometricOp):
    """Scale to `size`, [height, width] or the length of the shorter edge, as in MindSpore.

    `linear`, `nearest`, `cubic` and `area` are OpenCV's methods, for uint8, float16 and float32.
    `pil_cubic` and `antialias` (Lanczos) are Pillow's, for uint8; they widen the kernel if the
    image shrinks. Images keep their dtype.
    """

    name: Literal["resize"] = "resize"
    size: Annotated[
        Size | PositiveInt, Expected("a whole number above 0, or two of them: [height, width]")
    ]
    interpolation: Interpolation = "linear"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = require_image(value)
        if self.interpolation not in ("pil_cubic", "antialias"):
            require_image_dtype(value.dtype)
        elif value.dtype != "uint8":
            raise ValueError(
                f"{self.interpolation} needs uint8 images, not {value.dtype}; resize before "
                "rescale, or use linear, nearest, cubic or area"
            )
        is_summed = self.interpolation == "area" and value.dtype == "uint8"
        if is_summed and height * width > MAX_SUMMED_PIXELS:
            raise ValueError(f"can't average over images as large as {height}x{width}; crop first")
        return replace(value, shape=(*compute_target_size(self.size, height, width), channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        target = compute_target_size(self.size, *values.shape[1:3])
        return resize_images(xp, values, target, self.interpolation)

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        return resize_images(
            xp, labels, compute_target_size(self.size, *labels.shape[1:3]), "nearest"
        )

    def find_window(self, xp: Any, uniforms: Any, height: int, width: int) -> Window:
        return 0, 0, height, width


def compute_target_size(size: Size | int, height: int, width: int) -> Size:
    """Return (height, width) after scaling to `size`. If that is the length of the shorter edge,
    the longer edge is scaled in the same ratio, and rounded down."""
    if not isinstance(size, int):
        return size
    if height < width:
        return size, int(np.float32(width) / np.float32(height) * np.float32(size))
    return int(np.float32(height) / np.float32(width) * np.float32(size)), size


def resize_images(xp: Any, values: Any, size: Size, interpolation: Interpolation) -> Any:
    """Return images (batch, height, width, channels) scaled to `size`."""
    height, width = values.shape[1:3]
    rows, columns = size
    fixed = values.dtype == np.uint8
    if interpolation == "nearest":
        values = read_along(xp, values, find_nearest_pixels(height, rows)[None], 1)
        return read_along(xp, values, find_nearest_pixels(width, columns)[None], 2)
    if interpolation == "pil_cubic" or interpolation == "antialias":
        row_taps = make_pillow_taps(interpolation, height, rows)
        column_taps = make_pillow_taps(interpolation, width, columns)
        # Bytes are rounded between both axes, so the order matters. Pillow 13 begins with the
        # columns if that shrinks the image more; MindSpore never does.
        if interpolation == "antialias" and rows < height and 2 * (width - columns) < height - rows:
            return filter_axis(xp, filter_axis(xp, values, row_taps, 1), column_taps, 2)
        return filter_axis(xp, filter_axis(xp, values, column_taps, 2), row_taps, 1)
    if interpolation != "area":
        column_taps = make_opencv_taps(interpolation, width, columns, 2, fixed=fixed)
        row_taps = make_opencv_taps(interpolation, height, rows, 1, fixed=fixed)
        return interpolate(xp, values, column_taps, row_taps)
    if rows <= height and columns <= width:
        return average_areas(xp, values, size)
    column_taps = make_widening_taps(width, columns, fixed=fixed)
    return interpolate(xp, values, column_taps, make_widening_taps(height, rows, fixed=fixed))


class SeveralSizes(GeometricOp):
    """Base of the ops that scale all images of a batch to one of `sizes`, [height, width]. The
    network must support all sizes."""

    sizes: Annotated[Seq[Size], Field(min_length=2, max_length=MAX_SIZES)]
    interpolation: Interpolation = "linear"

    @field_validator("sizes")
    @classmethod
    def _require_different(cls, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"sizes = {[list(size) for size in sizes]}: must be different")
        return sizes

    @property
    def choices(self) -> int:
        return len(self.sizes)

    def select_variant(self, number: int) -> Resize:
        """Return the op that scales to one of the sizes."""
        return Resize(size=self.sizes[number], interpolation=self.interpolation, column=self.column)

    def output(self, value: ColumnSpec) -> ColumnSpec:
        """Return the spec of an image of the first size."""
        return self.select_variant(0).output(value)

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        """Return images of the first size. Training applies `select_variant`."""
        return self.select_variant(0)(xp, values, uniforms)

    def find_window(self, xp: Any, uniforms: Any, height: int, width: int) -> Window:
        return 0, 0, height, width


@component("op")
class RandomSize(SeveralSizes):
    """Scale all images of a batch to one of `sizes`, [height, width], drawn for each step, as in
    YOLOv3's training. The network must support all sizes."""

    name: Literal["random_size"] = "random_size"


@component("op")
class ProgressiveSize(SeveralSizes):
    """Scale images to the first of `sizes`, [height, width], and to the next one after each of
    `after_epochs`: progressive resizing (Howard, fast.ai's DAWNBench entry, 2018).

    The network must support all sizes. With `dataset.train.repeat` each reading of the
    split counts as an epoch.
    """

    name: Literal["progressive_size"] = "progressive_size"
    after_epochs: Seq[PositiveInt]
    """Numbers of epochs before each change of the size, ascending; one fewer than sizes."""

    @model_validator(mode="after")
    def _require_a_change_for_each_size(self) -> Self:
        changes = list(self.after_epochs)
        if len(changes) != len(self.sizes) - 1:
            raise ValueError(
                f"after_epochs = {changes}: must have {len(self.sizes) - 1} numbers, one for each "
                "size after the first"
            )
        if any(first >= second for first, second in pairwise(changes)):
            raise ValueError(f"after_epochs = {changes}: must be in ascending order")
        return self

    def choose_variant(self, xp: Any, seed: Any, epoch: Any, step: Any) -> Any:
        """Return the number of the size in an epoch, which is counted from 0."""
        changes = xp.asarray(self.after_epochs, dtype=np.int32)
        return xp.sum(xp.asarray(epoch) >= changes, dtype=np.int32)


CropInterpolation = Literal["linear", "nearest", "cubic"]
_LONGEST_SIDE = 2**30
"""Limit of a drawn side in pixels, which is longer than any image and fits into int32."""


def _require_positive(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] <= 0:
        raise ValueError(f"the range {list(bounds)} must be above 0")
    return bounds


PositiveRange = Annotated[Range, AfterValidator(_require_positive)]


@dataclass(frozen=True)
class Box:
    """A box for each image, in pixels. Each field is int32 (batch,)."""

    top: Any
    left: Any
    height: Any
    width: Any


@component("op")
class RandomResizedCrop(GeometricOp):
    """Crop to a box of drawn area and aspect, and scale it to `size`: the Inception crop.

    `scale` is the range of the box's share of the area, `ratio` the range of width / height, drawn
    evenly in its logarithm. A box that doesn't fit is drawn again, up to `max_attempts` draws. If
    none fits, it is the largest central box with a ratio in the range, as in MindSpore.
    """

    name: Literal["random_resized_crop"] = "random_resized_crop"
    size: Size
    scale: PositiveRange = (0.08, 1.0)
    ratio: PositiveRange = (0.75, 1.3333333333333333)
    interpolation: CropInterpolation = "linear"
    max_attempts: PositiveInt = 10

    @property
    def draws(self) -> int:
        return 2 * self.max_attempts + 2

    def output(self, value: ColumnSpec) -> ColumnSpec:
        *_, channels = require_image(value)
        require_image_dtype(value.dtype)
        return replace(value, shape=(*self.size, channels))

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        box = self.draw_box(xp, uniforms, *values.shape[1:3])
        return crop_and_resize(xp, values, box, self.size, self.interpolation)

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        box = self.draw_box(xp, uniforms, *labels.shape[1:3])
        return crop_and_resize(xp, labels, box, self.size, "nearest")

    def find_window(self, xp: Any, uniforms: Any, height: int, width: int) -> Window:
        box = self.draw_box(xp, uniforms, height, width)
        return box.top, box.left, box.height, box.width

    def draw_box(self, xp: Any, uniforms: Any, height: int, width: int) -> Box:
        """Draw the box of each sample, within images of height x width."""
        rows, columns = self.draw_sides(xp, uniforms, height, width)
        fits = (rows <= height) & (columns <= width)
        first_fit = xp.argmax(fits, axis=1)[:, None]
        rows = xp.take_along_axis(rows, first_fit, axis=1)[:, 0]
        columns = xp.take_along_axis(columns, first_fit, axis=1)[:, 0]
        top = scale_to_integers(xp, uniforms[:, -2], (height - rows + 1).astype(np.float32))
        left = scale_to_integers(xp, uniforms[:, -1], (width - columns + 1).astype(np.float32))
        any_fits = fits.any(axis=1)
        central = self._find_central(height, width)

        def select(edges: Any, fallback: int) -> Any:
            return xp.where(any_fits, edges, fallback).astype(np.int32)

        return Box(
            top=select(top, central.top),
            left=select(left, central.left),
            height=select(rows, central.height),
            width=select(columns, central.width),
        )

    def draw_sides(self, xp: Any, uniforms: Any, height: int, width: int) -> tuple[Any, Any]:
        """Draw the height and width of the box of each attempt, int32 (batch, attempts)."""
        attempts = self.max_attempts
        side = np.sqrt(list_steps(*self.scale) * height * width).astype(np.float32)
        aspect = np.exp(list_steps(log(self.ratio[0]), log(self.ratio[1])))
        root = np.sqrt(aspect).astype(np.float32)
        inverse = (1 / aspect).astype(np.float32)
        number = scale_to_integers(xp, uniforms[:, attempts : 2 * attempts], len(aspect))
        sides = draw_rows(xp, uniforms[:, :attempts], side)
        columns = xp.rint(sides * xp.asarray(root)[number]).clip(1, _LONGEST_SIDE)
        rows = xp.rint(columns * xp.asarray(inverse)[number]).clip(1, _LONGEST_SIDE)
        return rows.astype(np.int32), columns.astype(np.int32)

    def _find_central(self, height: int, width: int) -> Box:
        """Return the largest central box with a ratio in the range. Its fields are integers."""
        min_ratio, max_ratio = self.ratio
        rows = max(1, round(width / min_ratio)) if width / height < min_ratio else height
        columns = max(1, round(height * max_ratio)) if width / height > max_ratio else width
        # As in MindSpore, an odd border is larger at the top and at the right.
        return Box(
            top=(height - rows + 1) // 2, left=(width - columns) // 2, height=rows, width=columns
        )


def crop_and_resize(
    xp: Any, values: Any, box: Box, size: Size, interpolation: CropInterpolation
) -> Any:
    """Return each image's box, scaled to `size`. Pixels outside the box have no influence."""
    height, width = values.shape[1:3]
    if interpolation == "nearest":
        rows = box.top[:, None] + xp.asarray(_list_nearest_pixels(height, size[0]))[box.height]
        columns = box.left[:, None] + xp.asarray(_list_nearest_pixels(width, size[1]))[box.width]
        return read_crossings(xp, values, rows, columns)
    fixed = values.dtype == np.uint8
    column_taps = _list_taps(interpolation, width, size[1], 2, fixed)
    row_taps = _list_taps(interpolation, height, size[0], 1, fixed)
    column_taps = _select_taps(xp, column_taps, box.left, box.width)
    return interpolate(xp, values, column_taps, _select_taps(xp, row_taps, box.top, box.height))


def _select_taps(xp: Any, taps: Taps, first: Any, length: Any) -> Taps:
    """Return the taps of a crop that begins at `first` and is `length` pixels long."""
    pixels = first[:, None, None] + xp.asarray(taps.pixels)[length]
    return Taps(pixels, xp.asarray(taps.weights)[length])


@lru_cache
def _list_nearest_pixels(max_length: int, target: int) -> np.ndarray:
    """Return the nearest pixels for crops of each length from 0, which is unused, to `max_length`:
    int32 (max_length + 1, target)."""
    pixels = [find_nearest_pixels(max(length, 1), target) for length in range(max_length + 1)]
    return np.stack(pixels)


@lru_cache
def _list_taps(
    interpolation: Literal["linear", "cubic"], max_length: int, target: int, axis: Axis, fixed: bool
) -> Taps:
    """Return the taps for crops of each length from 0, which is unused, to `max_length`. The first
    axis of the arrays is the length."""
    taps_by_length = [
        make_opencv_taps(interpolation, max(length, 1), target, axis, fixed=fixed)
        for length in range(max_length + 1)
    ]
    return Taps(
        np.concatenate([taps.pixels for taps in taps_by_length]),
        np.concatenate([taps.weights for taps in taps_by_length]),
    )


@component("op")
class BoundingBoxCrop(MapOp):
    """Crop to a drawn box that covers a share of an object, and scale it to `size`.

    Boxes are drawn as by `random_resized_crop`, each with a place of its own. The first that fits,
    and covers at least `min_covered` of the area of one of the sample's bounding boxes, is taken. A
    sample without boxes has the whole image as its box. If no draw is taken, nothing is cropped, as
    by TensorFlow's `sample_distorted_bounding_box`. Boxes are moved with the image.
    """

    moves_pixels: ClassVar[bool] = True
    name: Literal["bounding_box_crop"] = "bounding_box_crop"
    size: Size
    min_covered: Annotated[float, Field(ge=0, le=1)] = 0.1
    scale: PositiveRange = (0.05, 1.0)
    ratio: PositiveRange = (0.75, 1.33)
    interpolation: CropInterpolation = "linear"
    max_attempts: PositiveInt = 100

    @property
    def columns(self) -> tuple[str, ...]:
        return "image", BOXES

    @property
    def draws(self) -> int:
        return 4 * self.max_attempts

    @property
    def _crop(self) -> RandomResizedCrop:
        """The crop that draws sides."""
        fields = self.model_dump(include={"size", "scale", "ratio", "max_attempts"})
        return RandomResizedCrop(**fields, interpolation=self.interpolation)

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        image, boxes = values
        return self._crop.output(image), boxes

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        images, boxes = values
        height, width = images.shape[1:3]
        box = self.draw_box(xp, boxes, uniforms, height, width)
        window = (box.top, box.left, box.height, box.width)
        cropped = crop_and_resize(xp, images, box, self.size, self.interpolation)
        return cropped, crop_boxes(xp, boxes, window, height, width)

    def draw_box(self, xp: Any, boxes: Any, uniforms: Any, height: int, width: int) -> Box:
        """Draw the box of each sample, from bounding boxes (batch, boxes, 4) float32, the shares
        of height and width (top, left, bottom, right). Boxes without an area don't count."""
        attempts = self.max_attempts
        rows, columns = self._crop.draw_sides(xp, uniforms, height, width)
        places = uniforms[:, 2 * attempts :]
        highest = (height - rows + 1).clip(1).astype(np.float32)
        leftmost = (width - columns + 1).clip(1).astype(np.float32)
        top = scale_to_integers(xp, places[:, :attempts], highest)
        left = scale_to_integers(xp, places[:, attempts:], leftmost)
        taken = (rows <= height) & (columns <= width)
        taken &= self._find_covering(
            xp, boxes, (top, left, top + rows, left + columns), width, height
        )
        first = xp.argmax(taken, axis=1)[:, None]
        any_taken = taken.any(axis=1)

        def select(edges: Any, edge_of_image: int) -> Any:
            first_edges = xp.take_along_axis(edges, first, axis=1)[:, 0]
            return xp.where(any_taken, first_edges, edge_of_image).astype(np.int32)

        return Box(select(top, 0), select(left, 0), select(rows, height), select(columns, width))

    def _find_covering(
        self, xp: Any, boxes: Any, edges: tuple[Any, Any, Any, Any], width: int, height: int
    ) -> Any:
        """Return which drawn boxes cover enough of a bounding box, bool (batch, attempts)."""
        sides = boxes * xp.asarray([height, width, height, width], dtype=np.float32)
        areas = (sides[..., 2] - sides[..., 0]).clip(0) * (sides[..., 3] - sides[..., 1]).clip(0)
        has_box = (areas > 0).any(axis=1)[:, None, None]
        image_box = xp.asarray([0, 0, height, width], dtype=np.float32)
        sides = xp.where(has_box, sides, image_box)
        areas = xp.where(has_box[..., 0], areas, np.float32(height * width))
        low_y, low_x, high_y, high_x = (edge[..., None].astype(np.float32) for edge in edges)
        top, left, bottom, right = (sides[:, None, :, edge] for edge in range(4))
        rows = (xp.minimum(high_y, bottom) - xp.maximum(low_y, top)).clip(0)
        columns = (xp.minimum(high_x, right) - xp.maximum(low_x, left)).clip(0)
        areas = areas[:, None, :]
        return ((areas > 0) & (rows * columns >= np.float32(self.min_covered) * areas)).any(axis=2)
