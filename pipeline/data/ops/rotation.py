"""Rotate images by a random angle (D-05)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, Strict

from pipeline.core.registry import Expected, Seq, part
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import GeometricOp
from pipeline.data.ops.affine import Interpolation, Maps, fixed_maps, rotation, warp
from pipeline.data.ops.image import image_shape
from pipeline.data.ops.ranges import Range, steps
from pipeline.data.random import integers

Byte = Annotated[int, Field(ge=0, le=255)]
Fill = Annotated[
    Byte | Seq[Byte], Expected("a whole number from 0 to 255, or one for each channel")
]
Point = Annotated[tuple[float, float], Strict(False)]


@part("op")
class RandomRotation(GeometricOp):
    """Rotate the image counter-clockwise by an angle drawn from `degrees`, keeping its size.

    `degrees` are [least, most], or one number d for [-d, d]; `center` is [x, y] in pixels from the
    top left, null the image's middle. Pixels from outside are `fill`.
    """

    name: Literal["random_rotation"] = "random_rotation"
    degrees: Annotated[
        Range | NonNegativeFloat, Expected("[least, most] in degrees, or one number from 0 up")
    ]
    interpolation: Interpolation = "nearest"
    center: Point | None = None
    fill: Fill = 0

    draws: ClassVar[int] = 1

    def output(self, value: ColumnSpec) -> ColumnSpec:
        *_, channels = image_shape(value)
        if value.dtype != "uint8":
            raise ValueError(f"takes uint8 images, not {value.dtype}; list it before rescale")
        fill_levels(self.fill, channels)
        return value

    @property
    def creates_border(self) -> bool:
        return True

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        fill = fill_levels(self.fill, values.shape[-1])
        return warp(xp, values, self._maps(xp, values, uniforms), self.interpolation, fill)

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        level = np.array([fill], labels.dtype)
        return warp(xp, labels, self._maps(xp, labels, uniforms), "nearest", level)

    def _maps(self, xp: Any, values: Any, uniforms: Any) -> Maps:
        """The affine map of each image."""
        height, width = values.shape[1:3]
        centre = self.center or ((width - 1) / 2, (height - 1) / 2)
        maps = fixed_maps(rotation(self._angles(), centre), height, width)
        return maps.at(xp, integers(xp, uniforms[:, 0], len(maps.whole)))

    def _angles(self) -> np.ndarray:
        if isinstance(self.degrees, tuple):
            return steps(*self.degrees)
        return steps(-self.degrees, self.degrees)


def fill_levels(fill: int | tuple[int, ...], channels: int) -> np.ndarray:
    """The fill of each channel, uint8 (channels,). Raises ValueError for another number of them."""
    levels = (fill,) * channels if isinstance(fill, int) else fill
    if len(levels) != channels:
        raise ValueError(f"fill has {len(levels)} values for images of {channels} channels")
    return np.array(levels, np.uint8)
