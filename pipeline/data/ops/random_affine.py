"""Rotate, move, scale and shear images by random amounts at once (D-19)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import NonNegativeFloat, model_validator

from pipeline.core.registry import Expected, part
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import GeometricOp
from pipeline.data.ops.affine import Interpolation, Maps, fixed_maps, warp
from pipeline.data.ops.image import image_shape
from pipeline.data.ops.ranges import Range
from pipeline.data.ops.rotation import Fill, fill_levels
from pipeline.data.random import integers

MAPS = 4096
"""Maps of which one is drawn for each sample: enough that none is seen twice in most passes, few
enough for a table of 200 kB."""

LEAST_SCALE = 0.01
"""Below, coordinates in fixed point would not fit in int32."""

_TABLE_KEY = 0xAFF1


@part("op")
class RandomAffine(GeometricOp):
    """Rotate by `degrees`, scale, shear and move the image, keeping its size.

    Of a pixel's place relative to the middle, x is sheared by `shear_x` degrees and y by
    `shear_y`, then both are scaled, rotated counter-clockwise and moved by the shares of the width
    and of the height. Each is drawn from [least, most]; `degrees` may be one number d for [-d, d].
    Pixels from outside are `fill`.

    One of 4,096 maps is drawn, whose parameters fill their ranges evenly in orders of their own
    (McKay et al. 1979): maps computed on the host are the same to the bit on every device.
    """

    name: Literal["random_affine"] = "random_affine"
    degrees: Annotated[
        Range | NonNegativeFloat, Expected("[least, most] in degrees, or one number from 0 up")
    ] = 0.0
    translate_x: Range = (0.0, 0.0)
    translate_y: Range = (0.0, 0.0)
    scale: Range = (1.0, 1.0)
    shear_x: Range = (0.0, 0.0)
    shear_y: Range = (0.0, 0.0)
    interpolation: Interpolation = "nearest"
    fill: Fill = 0

    draws: ClassVar[int] = 1

    @model_validator(mode="after")
    def _can_be_turned_back(self) -> Self:
        if self.scale[0] < LEAST_SCALE:
            raise ValueError(f"scale = {list(self.scale)}: must be {LEAST_SCALE} or more")
        for name, shear in (("shear_x", self.shear_x), ("shear_y", self.shear_y)):
            if max(map(abs, shear)) >= 90:
                raise ValueError(f"{name} = {list(shear)}: must be within -90 and 90 degrees")
        steep = np.tan(np.deg2rad([max(map(abs, self.shear_x)), max(map(abs, self.shear_y))]))
        if steep.prod() >= 1:
            raise ValueError("shear_x, shear_y: too much of both, which turns images inside out")
        return self

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
        maps = fixed_maps(self.matrices(height, width), height, width)
        return maps.at(xp, integers(xp, uniforms[:, 0], MAPS))

    def matrices(self, height: int, width: int) -> np.ndarray:
        """The maps from target to source pixels, float64 (MAPS, 2, 3), for images of a size."""
        degrees = self.degrees if isinstance(self.degrees, tuple) else (-self.degrees, self.degrees)
        ranges = degrees, self.translate_x, self.translate_y, self.scale, self.shear_x, self.shear_y
        angle, right, down, scale, along, across = (
            _spread(column, *bounds) for column, bounds in enumerate(ranges)
        )
        angle, along, across = np.deg2rad([angle, along, across])
        along, across = np.tan(along), np.tan(across)
        cosine, sine = scale * np.cos(angle), scale * np.sin(angle)
        # Rows point down, so that this matrix turns counter-clockwise.
        turned = np.array([[cosine, sine], [-sine, cosine]]).transpose(2, 0, 1)
        one = np.ones(MAPS)
        sheared = np.array([[one, along], [across, one]]).transpose(2, 0, 1)
        back = np.linalg.inv(turned @ sheared)
        middle = np.array([(width - 1) / 2, (height - 1) / 2])
        moved = middle + np.stack([right * width, down * height], axis=-1)
        shift = middle - np.einsum("nij,nj->ni", back, moved)
        return np.concatenate([back, shift[..., None]], axis=-1)


def _spread(column: int, least: float, most: float) -> np.ndarray:
    """The middles of as many even steps of a range as there are maps, in an order of its own."""
    words = np.random.Philox(key=np.array([_TABLE_KEY, column], np.uint64)).random_raw(MAPS)
    places = (np.argsort(words, kind="stable") + 0.5) / MAPS
    return least + (most - least) * places
