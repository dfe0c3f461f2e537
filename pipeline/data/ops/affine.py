"""Affine maps of images, in the fixed point of OpenCV's warpAffine.

Source coordinates are 1024ths of a pixel, so that the pixels read are the same on every device. A
matrix comes as whole 1024ths and the remainder of each, and so needs no float64 on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.data.ops.image import pixels_at_points

Interpolation = Literal["linear", "nearest"]

_UNIT_BITS = 10
_FRACTION_BITS = 5


@dataclass(frozen=True)
class Maps:
    """Maps from target to source pixels, (n, 2, 3): the source's x, then its y.

    `whole` are 1024ths of a pixel and `rest` the remainders in 2**-rest_bits of them, int32.
    """

    whole: Any
    rest: Any
    rest_bits: int

    def at(self, xp: Any, numbers: Any) -> Maps:
        """The maps with these numbers, int32 (batch,)."""
        whole, rest = (xp.asarray(part)[numbers] for part in (self.whole, self.rest))
        return Maps(whole, rest, self.rest_bits)


def fixed_maps(matrices: np.ndarray, height: int, width: int) -> Maps:
    """Matrices from target to source, float64 (n, 2, 3), for images of a size, in fixed point."""
    rest_bits = 29 - int(max(height, width)).bit_length()
    scaled = matrices * (1 << _UNIT_BITS)
    whole = np.floor(scaled)
    rest = np.rint((scaled - whole) * (1 << rest_bits))
    return Maps(whole.astype(np.int32), rest.astype(np.int32), rest_bits)


def _source(xp: Any, maps: Maps, height: int, width: int) -> tuple[Any, Any]:
    """Source coordinates of each target pixel, x and y in 1024ths, int32 (batch, H, W)."""
    row, column = np.arange(height, dtype=np.int32), np.arange(width, dtype=np.int32)
    half = 1 << (maps.rest_bits - 1)
    coordinates = []
    for axis in range(2):
        by_x, by_y, shift = (maps.whole[:, axis, i, None] for i in range(3))
        x_rest, y_rest, shift_rest = (maps.rest[:, axis, i, None] for i in range(3))
        # As in OpenCV, the contributions of x and y are rounded separately.
        of_x = by_x * column + ((x_rest * column + half) >> maps.rest_bits)
        of_y = by_y * row + shift + ((y_rest * row + shift_rest + half) >> maps.rest_bits)
        coordinates.append(of_x[:, None, :] + of_y[:, :, None])
    return coordinates[0], coordinates[1]


def warp(xp: Any, values: Any, maps: Maps, interpolation: Interpolation, fill: np.ndarray) -> Any:
    """Read bytes (batch, height, width, channels) through one map per sample.

    Pixels outside of the source are `fill`, (channels,) of their dtype. "nearest" takes any integer
    dtype.
    """
    x, y = _source(xp, maps, *values.shape[1:3])
    if interpolation == "nearest":
        half = 1 << (_UNIT_BITS - 1)
        rows, columns = (y + half) >> _UNIT_BITS, (x + half) >> _UNIT_BITS
        return _pixels(xp, values, rows, columns, fill).astype(values.dtype)
    shift = _UNIT_BITS - _FRACTION_BITS
    half, mask = 1 << (shift - 1), (1 << _FRACTION_BITS) - 1
    x, y = (x + half) >> shift, (y + half) >> shift
    total: Any = 1 << (2 * _FRACTION_BITS - 1)
    for down in range(2):
        for right in range(2):
            weight = _share(y & mask, down) * _share(x & mask, right)
            rows, columns = (y >> _FRACTION_BITS) + down, (x >> _FRACTION_BITS) + right
            pixels = _pixels(xp, values, rows, columns, fill)
            total = total + weight[..., None] * pixels.astype(np.int32)
    return (total >> (2 * _FRACTION_BITS)).astype(np.uint8)


def _share(fraction: Any, neighbour: int) -> Any:
    """The weight in 32nds of the pixel before (0) or after (1) a place."""
    return fraction if neighbour else (1 << _FRACTION_BITS) - fraction


def _pixels(xp: Any, values: Any, rows: Any, columns: Any, fill: np.ndarray) -> Any:
    """Pixels at points, `fill` where they lie outside of the image."""
    height, width = values.shape[1:3]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    read = pixels_at_points(xp, values, rows.clip(0, height - 1), columns.clip(0, width - 1))
    return xp.where(inside[..., None], read, fill)


def rotation(degrees: np.ndarray, centre: tuple[float, float]) -> np.ndarray:
    """Maps from target to source, (n, 2, 3), of counter-clockwise rotations about a centre."""
    angle = np.deg2rad(degrees)
    cosine, sine = np.cos(angle), np.sin(angle)
    x, y = centre
    along = [cosine, -sine, x - cosine * x + sine * y]
    across = [sine, cosine, y - sine * x - cosine * y]
    return np.stack([np.stack(along, -1), np.stack(across, -1)], axis=-2)


def shear(along: float, across: float, centre: tuple[float, float]) -> np.ndarray:
    """The map from target to source, (2, 3), of shears by angles in radians about `centre`.

    Rows move by `along` and columns by `across`, as in MindSpore's Affine.
    """
    (x, y), slope = centre, np.tan(along)
    a, b = 1.0, -slope
    c, d = -np.tan(across), np.tan(across) * slope + 1
    forth = np.array([[a, b, x - a * x - b * y], [c, d, y - c * x - d * y], [0, 0, 1]])
    return np.linalg.inv(forth)[:2]


def translation(right: float, down: float) -> np.ndarray:
    """The map from target to source, (2, 3), of a shift by numbers of pixels."""
    return np.array([[1, 0, -right], [0, 1, -down]], np.float64)
