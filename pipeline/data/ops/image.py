"""What image ops have in common: how sizes are written and what shape they take."""

from __future__ import annotations

from typing import Annotated

from pydantic import NonNegativeInt, PositiveInt, Strict

from pipeline.data.columns import ColumnSpec

Size = Annotated[tuple[PositiveInt, PositiveInt], Strict(False)]
"""[height, width] in pixels."""

Padding = Annotated[
    tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt], Strict(False)
]
"""[top, bottom, left, right] in pixels."""


def image_shape(value: ColumnSpec) -> tuple[int, int, int]:
    """(height, width, channels) of an image.

    Raises ValueError for what is not an image, and for one that has its channels first.
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
