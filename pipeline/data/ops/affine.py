"""Affine maps of images, in the fixed point of OpenCV's warpAffine, ops that draw such maps, and a
linear map of whole images, such as ZCA whitening."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, Strict, model_validator

from pipeline.core.files.npy import open_archive
from pipeline.core.registry import Expected, FilePath, Seq, component
from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.image import (
    GeometricOp,
    ImageOp,
    Range,
    list_steps,
    make_boxes,
    read_points,
    require_image,
)
from pipeline.data.order import draw_permutation
from pipeline.data.random import scale_to_integers

ARRAYS = ("mean", "matrix")


@component("op")
class LinearMap(ImageOp):
    """(image - mean) @ matrix of an image as one vector, in float32.

    The file is an .npz with mean (n,) and matrix (n, n), for images of n values: MindSpore's
    LinearTransformation. `compute_zca` computes such arrays. Last digits depend on the device.
    """

    name: Literal["linear_map"] = "linear_map"
    file: FilePath

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = require_image(value)
        self._read(height * width * channels)
        return ColumnSpec(value.shape, "float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        mean, matrix = self._read(int(np.prod(values.shape[1:])))
        vectors = values.reshape(values.shape[0], -1).astype(np.float32) - mean
        if xp is np:
            return (vectors @ matrix).reshape(values.shape)
        return xp.matmul(vectors, matrix, precision="highest").reshape(values.shape)

    def _read(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and matrix, float32. Raises ValueError if the file can't be read, or isn't
        for images of `size` values."""
        try:
            mean, matrix = _read_arrays(self.file, self.file.stat().st_mtime_ns)
        except OSError as error:
            raise ValueError(f"file = {self.file}: can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"file = {self.file}: {error}") from error
        if mean.shape != (size,) or matrix.shape != (size, size):
            raise ValueError(
                f"file = {self.file}: has mean {mean.shape} and matrix {matrix.shape}; images of "
                f"{size:,} values need ({size},) and ({size}, {size})"
            )
        return mean, matrix


@lru_cache(maxsize=4)
def _read_arrays(path: Path, _changed_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and matrix, float32. `_changed_ns`, the time of the file's last change, is a part
    of the cache's key alone. Raises OSError, and ValueError for a damaged file."""
    with open_archive(path) as archive:
        missing = [name for name in ARRAYS if name not in archive.names]
        if missing:
            raise ValueError(f"lacks {', '.join(missing)}; must have {' and '.join(ARRAYS)}")
        mean, matrix = (archive.read(name) for name in ARRAYS)
    for values in (mean, matrix):
        if values.dtype.kind != "f" or not np.isfinite(values).all():
            raise ValueError("must hold finite floats")
    return mean.astype(np.float32), matrix.astype(np.float32)


def compute_zca(images: np.ndarray, epsilon: float) -> dict[str, np.ndarray]:
    """Return mean and matrix, float32, that whiten images (B, H, W, C) and change them least.

    The matrix is V diag(1 / sqrt(d + epsilon)) V^T, with the eigenvectors V and eigenvalues d of
    the covariance (Bell and Sejnowski, The "independent components" of natural scenes are edge
    filters, Vision Research 37, 1997).
    """
    vectors = images.reshape(len(images), -1).astype(np.float64)
    eigenvalues, basis = np.linalg.eigh(np.cov(vectors, rowvar=False))
    matrix = basis / np.sqrt(eigenvalues.clip(min=0) + epsilon) @ basis.T
    arrays = {"mean": vectors.mean(axis=0), "matrix": matrix}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


Interpolation = Literal["linear", "nearest"]
_UNIT_BITS = 10
"""Bits after the point of source coordinates, whose unit is 1/1024 pixel."""
_FRACTION_BITS = 5
"""Bits after the point of the weights in a linear interpolation, which are multiples of 1/32."""


_FAR = 1 << 30
"""Largest shift, in 1/1024 pixel."""


@dataclass(frozen=True)
class Maps:
    """Affine maps from target to source pixels, in fixed point. The arrays are int32 (n, 2, 3): a
    row for the source's x and a row for its y."""

    pixels: Any
    """Whole units of 1/1024 pixel, rounded down."""
    remainders: Any
    """The rest, in units of 2**-remainder_bits / 1024 pixel."""
    remainder_bits: int

    def select(self, xp: Any, numbers: Any) -> Maps:
        """Return the maps with these numbers, int32 (batch,)."""
        pixels = xp.asarray(self.pixels)[numbers]
        return Maps(pixels, xp.asarray(self.remainders)[numbers], self.remainder_bits)


def to_fixed_point(matrices: np.ndarray, height: int, width: int) -> Maps:
    """Convert maps from target to source pixels, float64 (n, 2, 3), of images of a size."""
    # A remainder times a coordinate is then below 2**29, so the sum of three fits into int32.
    bits = 29 - int(max(height, width)).bit_length()
    scaled = matrices * (1 << _UNIT_BITS)
    # A limited shift still leads out of the image, by what `require_fixed_point` accepts.
    scaled[..., 2] = scaled[..., 2].clip(-_FAR, _FAR)
    pixels = np.floor(scaled)
    remainders = np.rint((scaled - pixels) * (1 << bits))
    return Maps(pixels.astype(np.int32), remainders.astype(np.int32), bits)


def require_fixed_point(matrices: np.ndarray, height: int, width: int) -> None:
    """Raise ValueError for maps from target to source pixels, (n, 2, 3), by which the source of an
    image is so large that its coordinates don't fit into int32 with any shift."""
    extent = float((np.abs(matrices[..., :2]) @ np.array([width, height])).max())
    limit = (_FAR // 2) >> _UNIT_BITS
    if extent > limit:
        raise ValueError(
            f"shrinks or shears images of {height}x{width} to parts of {extent:,.0f} pixels; must "
            f"be at most {limit:,}"
        )


def _compute_sources(maps: Maps, height: int, width: int) -> tuple[Any, Any]:
    """Return the source x and y of each target pixel in 1024ths, int32 (batch, H, W) each."""
    row = np.arange(height, dtype=np.int32)
    column = np.arange(width, dtype=np.int32)
    bits = maps.remainder_bits
    half = 1 << (bits - 1)
    coordinates = []
    for axis in range(2):
        x_factor, y_factor, shift = (maps.pixels[:, axis, i, None] for i in range(3))
        x_low, y_low, shift_low = (maps.remainders[:, axis, i, None] for i in range(3))
        # As in OpenCV, the contributions of x and y are rounded separately.
        x_part = x_factor * column + ((x_low * column + half) >> bits)
        y_part = y_factor * row + shift + ((y_low * row + shift_low + half) >> bits)
        coordinates.append(x_part[:, None, :] + y_part[:, :, None])
    return coordinates[0], coordinates[1]


def warp(xp: Any, values: Any, maps: Maps, interpolation: Interpolation, fill: np.ndarray) -> Any:
    """Transform bytes (batch, height, width, channels) by one map per sample. Pixels from outside
    the image are `fill`, (channels,) of the same dtype. "nearest" supports any integer dtype."""
    x, y = _compute_sources(maps, *values.shape[1:3])
    if interpolation == "nearest":
        half = 1 << (_UNIT_BITS - 1)
        rows = (y + half) >> _UNIT_BITS
        columns = (x + half) >> _UNIT_BITS
        return _read_pixels(xp, values, rows, columns, fill).astype(values.dtype)
    shift = _UNIT_BITS - _FRACTION_BITS
    half = 1 << (shift - 1)
    mask = (1 << _FRACTION_BITS) - 1
    x = (x + half) >> shift
    y = (y + half) >> shift
    total: Any = 1 << (2 * _FRACTION_BITS - 1)  # a half, so that the shift at the end rounds
    for down in range(2):
        rows = (y >> _FRACTION_BITS) + down
        for right in range(2):
            columns = (x >> _FRACTION_BITS) + right
            weight = _weigh_neighbour(y & mask, down) * _weigh_neighbour(x & mask, right)
            pixels = _read_pixels(xp, values, rows, columns, fill)
            total = total + weight[..., None] * pixels.astype(np.int32)
    return (total >> (2 * _FRACTION_BITS)).astype(np.uint8)


def _weigh_neighbour(fraction: Any, neighbour: int) -> Any:
    """Return the weight, in 32nds, of the pixel before (`neighbour` 0) or after (1) a coordinate
    with this fraction, in 32nds."""
    return fraction if neighbour else (1 << _FRACTION_BITS) - fraction


def _read_pixels(xp: Any, values: Any, rows: Any, columns: Any, fill: np.ndarray) -> Any:
    """Return the pixels at points; `fill` for points outside the image."""
    height, width = values.shape[1:3]
    is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    pixels = read_points(xp, values, rows.clip(0, height - 1), columns.clip(0, width - 1))
    return xp.where(is_inside[..., None], pixels, fill)


def make_rotation(degrees: np.ndarray, centre: tuple[float, float]) -> np.ndarray:
    """Return the maps from target to source, (n, 2, 3), of counter-clockwise rotations by `degrees`
    (n,) about `centre`, (x, y) in pixels."""
    angle = np.deg2rad(degrees)
    cosine = np.cos(angle)
    sine = np.sin(angle)
    x, y = centre
    source_x = [cosine, -sine, x - cosine * x + sine * y]
    source_y = [sine, cosine, y - sine * x - cosine * y]
    return np.stack([np.stack(source_x, -1), np.stack(source_y, -1)], axis=-2)


def make_shear(along: float, across: float, centre: tuple[float, float]) -> np.ndarray:
    """Return the map from target to source, (2, 3), of shears about `centre`, (x, y) in pixels. As
    in MindSpore's Affine, rows are sheared by `along` and columns by `across`, in radians."""
    x, y = centre
    slope = np.tan(along)
    c = -np.tan(across)
    d = np.tan(across) * slope + 1
    source_to_target = np.array([[1.0, -slope, slope * y], [c, d, y - c * x - d * y], [0, 0, 1]])
    return np.linalg.inv(source_to_target)[:2]


def make_translation(right: float, down: float) -> np.ndarray:
    """Return the map from target to source, (2, 3), of a shift by pixels to the right and down."""
    return np.array([[1, 0, -right], [0, 1, -down]], np.float64)


Byte = Annotated[int, Field(ge=0, le=255)]
Fill = Annotated[
    Byte | Seq[Byte], Expected("a whole number from 0 to 255, or one for each channel")
]
Degrees = Annotated[
    Range | NonNegativeFloat, Expected("[least, most] in degrees, or one number from 0 up")
]
Point = Annotated[tuple[float, float], Strict(False)]
MAPS = 4096
"""Number of maps in a table, one of which is drawn for each sample. A table takes 200 kB."""
LEAST_SCALE = 0.01
"""With smaller scales, coordinates in fixed point wouldn't fit into int32."""
_TABLE_KEY = 0xAFF1
"""Seed of the random orders in the tables of maps, which are the same in every run."""


def list_fill_levels(fill: int | tuple[int, ...], channels: int) -> np.ndarray:
    """Return the fill of each channel, uint8 (channels,). Raises ValueError for a wrong length."""
    levels = (fill,) * channels if isinstance(fill, int) else fill
    if len(levels) != channels:
        raise ValueError(f"fill has {len(levels)} values for images of {channels} channels")
    return np.array(levels, np.uint8)


class _AffineOp(GeometricOp):
    """Base of the ops that draw an affine map from a table for each image, and keep its size."""

    if TYPE_CHECKING:  # Each op declares these fields last, for the order of a recipe's keys.
        interpolation: Interpolation
        fill: Fill

    draws: ClassVar[int] = 1
    creates_border: ClassVar[bool] = True

    @abstractmethod
    def make_matrices(self, height: int, width: int) -> np.ndarray:
        """Return the maps from target to source pixels, float64 (maps, 2, 3), for a size."""

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = require_image(value)
        if value.dtype != "uint8":
            raise ValueError(f"needs uint8 images, not {value.dtype}; list it before rescale")
        list_fill_levels(self.fill, channels)
        require_fixed_point(self.make_matrices(height, width), height, width)
        return value

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        fill = list_fill_levels(self.fill, values.shape[-1])
        return warp(xp, values, self._draw_maps(xp, values, uniforms), self.interpolation, fill)

    def move_labels(self, xp: Any, labels: Any, uniforms: Any, fill: int) -> Any:
        level = np.array([fill], labels.dtype)
        return warp(xp, labels, self._draw_maps(xp, labels, uniforms), "nearest", level)

    def move_boxes(self, xp: Any, boxes: Any, uniforms: Any, height: int, width: int) -> Any:
        """Move boxes: each becomes the upright box around its corners."""
        matrices = self.make_matrices(height, width)
        linear = np.linalg.inv(matrices[..., :2])
        shift = -np.einsum("nij,nj->ni", linear, matrices[..., 2])
        table = np.concatenate([linear, shift[..., None]], axis=-1).astype(np.float32)
        numbers = scale_to_integers(xp, uniforms[:, 0], len(table))
        maps = xp.asarray(table)[numbers][:, :, :, None, None]
        # Pixel i is from i - 0.5 to i + 0.5 in the coordinates of a map.
        y = boxes[..., [0, 0, 2, 2]] * np.float32(height) - np.float32(0.5)
        x = boxes[..., [1, 3, 1, 3]] * np.float32(width) - np.float32(0.5)
        moved_x, moved_y = (
            maps[:, axis, 0] * x + maps[:, axis, 1] * y + maps[:, axis, 2] for axis in range(2)
        )
        half = np.float32(0.5)
        has_area = (boxes[..., 2] > boxes[..., 0]) & (boxes[..., 3] > boxes[..., 1])
        moved = make_boxes(
            xp, (moved_y + half) / np.float32(height), (moved_x + half) / np.float32(width)
        )
        return xp.where(has_area[..., None], moved, 0)

    def _draw_maps(self, xp: Any, values: Any, uniforms: Any) -> Maps:
        height, width = values.shape[1:3]
        maps = to_fixed_point(self.make_matrices(height, width), height, width)
        return maps.select(xp, scale_to_integers(xp, uniforms[:, 0], len(maps.pixels)))


@component("op")
class RandomRotation(_AffineOp):
    """Rotate the image counter-clockwise by an angle drawn from `degrees`, keeping its size.

    `degrees` is [least, most], or one number d for [-d, d]. `center` is [x, y] in pixels from the
    top left; null: the middle of the image. Pixels from outside are `fill`.
    """

    name: Literal["random_rotation"] = "random_rotation"
    degrees: Degrees
    interpolation: Interpolation = "nearest"
    center: Point | None = None
    fill: Fill = 0

    def make_matrices(self, height: int, width: int) -> np.ndarray:
        degrees = self.degrees if isinstance(self.degrees, tuple) else (-self.degrees, self.degrees)
        centre = self.center or ((width - 1) / 2, (height - 1) / 2)
        low, high = degrees
        return make_rotation(list_steps(low, high), centre)


@component("op")
class RandomAffine(_AffineOp):
    """Rotate by `degrees`, scale, shear and move the image, keeping its size.

    Relative to the middle, x is sheared by `shear_x` degrees and y by `shear_y`. Then both are
    scaled, rotated counter-clockwise, and moved by shares of the width and of the height. Each
    amount is drawn from [least, most]. `degrees` may be one number d for [-d, d]. Pixels from
    outside are `fill`.

    One of 4,096 maps is drawn, whose parameters fill their ranges evenly in separate random orders
    (McKay et al. 1979). The maps are computed on the host, so that they are the same bit for bit on
    every device.
    """

    name: Literal["random_affine"] = "random_affine"
    degrees: Degrees = 0.0
    translate_x: Range = (0.0, 0.0)
    translate_y: Range = (0.0, 0.0)
    scale: Range = (1.0, 1.0)
    shear_x: Range = (0.0, 0.0)
    shear_y: Range = (0.0, 0.0)
    interpolation: Interpolation = "nearest"
    fill: Fill = 0

    @model_validator(mode="after")
    def _require_invertible(self) -> Self:
        if self.scale[0] < LEAST_SCALE:
            raise ValueError(f"scale = {list(self.scale)}: must be {LEAST_SCALE} or more")
        for name, bounds in (("shear_x", self.shear_x), ("shear_y", self.shear_y)):
            if max(map(abs, bounds)) >= 90:
                raise ValueError(f"{name} = {list(bounds)}: must be within -90 and 90 degrees")
        slopes = np.tan(np.deg2rad([max(map(abs, self.shear_x)), max(map(abs, self.shear_y))]))
        if slopes.prod() >= 1:  # the determinant of both shears is 1 minus the product
            raise ValueError(
                "shear_x, shear_y: too large together: the image would be turned inside out"
            )
        return self

    def make_matrices(self, height: int, width: int) -> np.ndarray:
        degrees = self.degrees if isinstance(self.degrees, tuple) else (-self.degrees, self.degrees)
        angle = np.deg2rad(_spread_evenly(0, degrees))
        right = _spread_evenly(1, self.translate_x)
        down = _spread_evenly(2, self.translate_y)
        scale = _spread_evenly(3, self.scale)
        along = np.tan(np.deg2rad(_spread_evenly(4, self.shear_x)))
        across = np.tan(np.deg2rad(_spread_evenly(5, self.shear_y)))
        cosine = scale * np.cos(angle)
        sine = scale * np.sin(angle)
        # The y axis points down, so this matrix rotates counter-clockwise.
        rotations = np.array([[cosine, sine], [-sine, cosine]]).transpose(2, 0, 1)
        ones = np.ones(MAPS)
        shears = np.array([[ones, along], [across, ones]]).transpose(2, 0, 1)
        to_source = np.linalg.inv(rotations @ shears)
        middle = np.array([(width - 1) / 2, (height - 1) / 2])
        target_middle = middle + np.stack([right * width, down * height], axis=-1)
        shift = middle - np.einsum("nij,nj->ni", to_source, target_middle)
        return np.concatenate([to_source, shift[..., None]], axis=-1)


def _spread_evenly(column: int, bounds: Range) -> np.ndarray:
    """Return the middles of MAPS even steps of a range, in a random order for each column."""
    positions = (draw_permutation(_TABLE_KEY, column, MAPS) + 0.5) / MAPS
    low, high = bounds
    return low + (high - low) * positions
