"""Common types and functions of image ops: sizes, shapes, reading pixels."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, Strict

from pipeline.data.columns import ColumnSpec

Size = Annotated[tuple[PositiveInt, PositiveInt], Strict(False)]
"""[height, width] in pixels."""

Padding = Annotated[
    tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt], Strict(False)
]
"""[top, bottom, left, right] in pixels."""


Probability = Annotated[float, Field(ge=0, le=1)]

Axis = Literal[1, 2]
"""The axis of a batch of images that runs down (rows) or across (columns)."""


def image_shape(value: ColumnSpec) -> tuple[int, int, int]:
    """(height, width, channels) of an image.

    Raises ValueError for values that are no images, and for images with channels first.
    """
    if len(value.shape) != 3:
        raise ValueError(
            f"takes images of shape (height, width, channels), not values of shape {value.shape}"
        )
    if value.layout != "hwc":
        raise ValueError(
            f"takes images with channels last, not the {value.shape} that hwc2chw made of them; "
            "list it before hwc2chw"
        )
    height, width, channels = value.shape
    return height, width, channels


def pixels_at(xp: Any, values: Any, rows: Any, columns: Any) -> Any:
    """The pixels where `rows` and `columns` of each image cross.

    `values` are (batch, height, width, channels), `rows` int32 (batch or 1, I) and `columns`
    int32 (batch or 1, J), all within the image; the result is (batch, I, J, channels).
    """
    return pixels_at_points(xp, values, rows[:, :, None], columns[:, None, :])


def pixels_along(xp: Any, values: Any, pixels: Any, axis: Axis) -> Any:
    """The rows (axis 1) or columns (axis 2) `pixels` of each image.

    `pixels` are int32 (batch or 1, length), all within the image; one row is for all images.
    """
    if pixels.shape[0] == 1:
        # The indices are in range; "clip" avoids a check of numpy that doubles the time.
        return xp.take(values, pixels[0], axis=axis, mode="clip")
    every = np.arange(values.shape[3 - axis], dtype=np.int32)[None]
    return pixels_at(xp, values, *((pixels, every) if axis == 1 else (every, pixels)))


def pixels_at_points(xp: Any, values: Any, rows: Any, columns: Any) -> Any:
    """The pixels at (rows, columns) of each image, int32 that broadcast to (batch, I, J)."""
    index = np.arange(len(values), dtype=np.int32)[:, None, None], rows, columns
    if xp is np:
        return values[index]
    # By default jax.numpy checks and wraps every index, which doubles the time of a gather.
    return values.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
