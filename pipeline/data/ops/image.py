"""Base classes, types and functions of image ops: sizes, ranges, shapes and reading of pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, Strict

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Op
from pipeline.data.random import scale_to_integers

Size = Annotated[tuple[PositiveInt, PositiveInt], Strict(False)]
"""[height, width] in pixels."""
Padding = Annotated[
    tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt], Strict(False)
]
"""[top, bottom, left, right] in pixels."""
Probability = Annotated[float, Field(ge=0, le=1)]
Axis = Literal[1, 2]
"""The axis of rows (1) or columns (2) in a batch of images."""
MAX_SUMMED_PIXELS = 2**31 // 255
"""The most pixels of bytes that are averaged: their sum must fit into int32."""
STEPS = 4096
"""Number of even steps of a range, one of which is drawn. The host computes functions such as sine
for all steps, in float64, and the compiled step looks them up. XLA's functions differ from numpy's
in the last digit, which after rounding could be a whole pixel."""


class ImageOp(Op):
    """Base of the map ops on images."""

    column: str = "image"
    """The name of the column."""


class GeometricOp(ImageOp):
    """Base of the ops on images that move pixels, and can move labels of pixels in the same way."""

    moves_pixels: ClassVar[bool] = True

    @property
    def creates_border(self) -> bool:
        """Whether the op adds pixels from outside the image, which have no label."""
        return False

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        """Move labels (batch, height, width, 1) like the pixels, without mixing labels. Pixels from
        outside the image get the label `fill`. The default is for ops that only copy pixels."""
        return self(xp, labels, uniforms)

    def find_window(self, xp: Any, uniforms: Any, height: int, width: int) -> Window:
        """Return the part of each image of height x width that becomes the whole image. Raises
        ValueError if the op has none, so that boxes can't follow it."""
        raise ValueError(
            "moves pixels in a way that boxes can't follow; leave out the op or the boxes"
        )

    def move_boxes(self, xp: Any, boxes: Any, uniforms: Any, height: int, width: int) -> Any:
        """Move boxes, float32 (batch, boxes, 4), of images of height x width like the pixels.

        They are shares of height and width (top, left, bottom, right), and are clipped at the edges
        of the result. A box without an area becomes zeros. Raises ValueError if boxes can't follow.
        """
        return crop_boxes(xp, boxes, self.find_window(xp, uniforms, height, width), height, width)


Window = tuple[Any, Any, Any, Any]
"""Top, left, height and width in pixels, each a number or (batch,). A height or width below 0 is of
a mirrored part, whose top or left is the edge that comes first in the result."""


def crop_boxes(xp: Any, boxes: Any, window: Window, height: int, width: int) -> Any:
    """Return boxes of images of height x width as boxes of a part of them, as `move_boxes` does."""
    top, left, rows, columns = (
        xp.asarray(edge, dtype=np.float32).reshape(-1, 1, 1) for edge in window
    )
    y = (boxes[..., 0::2] * np.float32(height) - top) / rows
    x = (boxes[..., 1::2] * np.float32(width) - left) / columns
    return make_boxes(xp, y, x)


def make_boxes(xp: Any, y: Any, x: Any) -> Any:
    """Return the upright boxes around points, float32 (batch, boxes, 4): y and x are the points'
    shares of height and width, (batch, boxes, points), clipped at 0 and 1. Boxes without an area
    are zeros."""
    y = y.clip(0, 1)
    x = x.clip(0, 1)
    edges = [y.min(axis=-1), x.min(axis=-1), y.max(axis=-1), x.max(axis=-1)]
    has_area = (edges[2] > edges[0]) & (edges[3] > edges[1])
    return xp.where(has_area[..., None], xp.stack(edges, axis=-1), 0).astype(np.float32)


def require_image(value: ColumnSpec) -> tuple[int, int, int]:
    """Return (height, width, channels) of an image. Raises ValueError for other values."""
    if len(value.shape) != 3:
        raise ValueError(
            f"needs images of shape (height, width, channels), not values of shape {value.shape}"
        )
    if value.layout != "hwc":
        raise ValueError(
            f"needs images with channels last, not the {value.shape} that hwc2chw made of them; "
            "list it before hwc2chw"
        )
    height, width, channels = value.shape
    return height, width, channels


def require_image_dtype(dtype: str) -> None:
    """Raise ValueError for a dtype that interpolating ops don't support."""
    if dtype not in ("uint8", "float16", "float32"):
        raise ValueError(f"needs uint8, float16 or float32 images, not {dtype}")


def read_crossings(xp: Any, values: Any, rows: Any, columns: Any) -> Any:
    """Return the pixels at the crossings of `rows` and `columns` of each image. `values` are
    (batch, height, width, channels), `rows` int32 (batch or 1, I) and `columns` int32 (batch or 1,
    J), all within the image. The result is (batch, I, J, channels)."""
    return read_points(xp, values, rows[:, :, None], columns[:, None, :])


def read_along(xp: Any, values: Any, pixels: Any, axis: Axis) -> Any:
    """Return the rows (axis 1) or columns (axis 2) of images, (batch, height, width, channels),
    whose numbers are `pixels`, int32 (batch or 1, length), all within the image."""
    if pixels.shape[0] == 1:
        # All indices are in range; "clip" avoids numpy's check, which doubles the time.
        return xp.take(values, pixels[0], axis=axis, mode="clip")
    other_pixels = np.arange(values.shape[3 - axis], dtype=np.int32)[None]
    rows, columns = (pixels, other_pixels) if axis == 1 else (other_pixels, pixels)
    return read_crossings(xp, values, rows, columns)


def read_points(xp: Any, values: Any, rows: Any, columns: Any) -> Any:
    """Return the pixels at (rows, columns) of each image, (batch, I, J, channels). `rows` and
    `columns` are int32, within the image, and broadcast to (batch, I, J)."""
    index = np.arange(len(values), dtype=np.int32)[:, None, None], rows, columns
    if xp is np:
        return values[index]
    # By default jax.numpy checks and wraps indices, which doubles the time of a gather.
    return values.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def repeat_op(xp: Any, change: Callable[[Any, Any], Any], iterations: int, values: Any) -> Any:
    """Return `values` after `iterations` calls of `change(iteration, values)`, which must leave
    shape and dtype the same. The compiled step has a loop too. Without it XLA would fuse the
    iterations and compute their inputs several times: four iterations of four changes would take
    457 ms instead of 74."""
    if xp is np or iterations < 2:
        for iteration in range(iterations):
            values = change(iteration, values)
        return values
    from jax import lax

    return lax.fori_loop(0, iterations, change, values)


def _require_order(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the range {list(bounds)} must be [least, most]")
    return bounds


Range = Annotated[tuple[float, float], Strict(False), AfterValidator(_require_order)]
"""[least, most], for numbers that are drawn evenly from the range."""


def list_steps(low: float, high: float) -> np.ndarray:
    """Return the middles of a range's steps, float64 (STEPS,), or (1,) if the bounds are equal."""
    if low == high:
        return np.array([low])
    return low + (high - low) * (np.arange(STEPS) + 0.5) / STEPS


def draw_rows(xp: Any, uniforms: Any, table: np.ndarray) -> Any:
    """Return rows of a table, all equally likely, drawn by uniform random numbers:
    (*uniforms.shape, *table.shape[1:])."""
    return xp.asarray(table)[scale_to_integers(xp, uniforms, len(table))]
