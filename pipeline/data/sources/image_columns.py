"""Columns of image files and of masks, decoded on demand (D-14)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from pipeline.core.errors import DataError, first_line
from pipeline.data.columns import DECODING_THREADS, Column, rows_at
from pipeline.data.image_file import (
    FORMATS,
    UNREADABLE_IMAGE,
    eight_bits,
    open_image,
    read_pixels,
    require_whole,
    upright,
    upright_size,
)
from pipeline.data.padding.buckets import Ragged

_MASK_FORMATS = ("PNG", "BMP")
_MASK_MODES = ("1", "L", "P")
"""Modes of Pillow in which a pixel is one number: a bit, a grey level, an entry of a palette."""


@dataclass(frozen=True)
class DecodedFiles:
    """Base of the columns of files that are decoded to one size whenever they are indexed."""

    paths: Sequence[str]
    height: int
    width: int

    dtype = np.dtype(np.uint8)
    trailing: ClassVar[tuple[int, ...]] = ()
    """The dimensions after height and width."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(files, height, width, *trailing)."""
        return (len(self.paths), self.height, self.width, *self.trailing)

    def __getitem__(self, indices: Any) -> np.ndarray:
        """The values at an integer array of indices or a slice, uint8 (n, height, width, ...)."""
        chosen = rows_at(indices, len(self.paths))
        values = np.empty((len(chosen), *self.shape[1:]), np.uint8)
        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            for position, value in enumerate(pool.map(self.sample, chosen)):
                values[position] = value
        return values

    @abstractmethod
    def sample(self, index: int) -> np.ndarray:
        """One value, uint8 (height, width, ...). Raises DataError that names a bad file."""

    def sample_name(self, index: int) -> str:
        """The file."""
        return self.paths[index]


@dataclass(frozen=True)
class ImageFiles(DecodedFiles):
    """A column of image files, decoded to RGB of one size whenever they are indexed."""

    trailing: ClassVar[tuple[int, ...]] = (3,)

    def sample(self, index: int) -> np.ndarray:
        """One image, uint8 (height, width, 3). Raises DataError that names a bad file."""
        return decode(self.paths[index], self.height, self.width)


@dataclass(frozen=True)
class ImagesOfSeveralSizes(Ragged):
    """A column of image files, decoded to RGB in their own size on demand."""

    paths: Sequence[str]
    sizes: np.ndarray

    dtype = np.dtype(np.uint8)
    trailing = (3,)

    def value(self, index: int) -> np.ndarray:
        """One image, uint8 (height, width, 3). Raises DataError that names a bad file."""
        height, width = self.sizes[index].tolist()
        return decode(self.paths[index], height, width)

    def sample_name(self, index: int) -> str:
        """The image's file."""
        return self.paths[index]


@dataclass(frozen=True)
class MaskValues:
    """The values that pixels of masks may have: 0 to `classes` - 1, and the one to ignore."""

    classes: int
    ignored: int | None

    def require(self, path: str, mask: np.ndarray) -> np.ndarray:
        """The mask. Raises DataError that names a mask with another value."""
        wrong = mask >= self.classes
        if self.ignored is not None:
            wrong &= mask != self.ignored
        if wrong.any():
            but = "" if self.ignored is None else f", or {self.ignored}, which is not counted"
            raise DataError(
                f"{path}: has pixels of the value {int(mask[wrong].min())}; the values of "
                f"{self.classes} classes are 0 to {self.classes - 1}{but}"
            )
        return mask


@dataclass(frozen=True)
class MaskFiles(DecodedFiles):
    """A column of masks, the classes of pixels, decoded to one size whenever they are indexed."""

    values: MaskValues

    def sample(self, index: int) -> np.ndarray:
        """One mask, uint8 (height, width). Raises DataError that names a bad file."""
        path = self.paths[index]
        return self.values.require(path, decode_mask(path, self.height, self.width))


@dataclass(frozen=True)
class MasksOfSeveralSizes(Ragged):
    """A column of masks, decoded in their own size on demand."""

    paths: Sequence[str]
    sizes: np.ndarray
    values: MaskValues

    dtype = np.dtype(np.uint8)
    trailing: tuple[int, ...] = ()

    def value(self, index: int) -> np.ndarray:
        """One mask, uint8 (height, width). Raises DataError that names a bad file."""
        path, (height, width) = self.paths[index], self.sizes[index].tolist()
        return self.values.require(path, decode_mask(path, height, width))

    def sample_name(self, index: int) -> str:
        """The mask's file."""
        return self.paths[index]


def image_columns(
    paths: Sequence[Sequence[str]], size: Sequence[int] | None, *, several_sizes: bool
) -> list[Column]:
    """A column for each list of image files: of `size`, else of the one size that all have.

    With `several_sizes` and no size, each image keeps its own. Raises DataError that names an
    image of another size, or one that can't be read.
    """
    require_readable_images([path for own in paths for path in own])
    if several_sizes and size is None:
        return [ImagesOfSeveralSizes(own, read_sizes(own)) for own in paths]
    height, width = size or common_size([path for own in paths for path in own])
    return [ImageFiles(own, height, width) for own in paths]


def read_sizes(paths: Sequence[str]) -> np.ndarray:
    """(height, width) of each image, int32 (files, 2)."""
    return np.array([_read_size(path) for path in paths], np.int32)


def common_size(paths: Sequence[str]) -> tuple[int, int]:
    """(height, width) of all images. Raises DataError that names one which differs."""
    sizes = [_read_size(path) for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        if size != sizes[0]:
            raise DataError(
                f"{path}: is {size[0]}x{size[1]} where {paths[0]} is {sizes[0][0]}x{sizes[0][1]}; "
                "give dataset.image_size=[H,W] to resize all"
            )
    return sizes[0]


def decode(path: str, height: int, width: int) -> np.ndarray:
    """An image as RGB, resized bilinearly where its size differs: uint8 (height, width, 3)."""
    with _opened(path, FORMATS) as image:
        return read_pixels(image, height, width)


def decode_mask(path: str, height: int, width: int) -> np.ndarray:
    """A mask, resized to the nearest pixels where its size differs: uint8 (height, width).

    The values are grey levels, or entries of a palette. Raises DataError that names a file of
    colours, whose values mean nothing by themselves.
    """
    with _opened(path, _MASK_FORMATS) as image:
        mask = upright(_one_number_each(image)).copy()
    if mask.size != (width, height):
        mask = mask.resize((width, height), Image.Resampling.NEAREST)
    return np.asarray(mask).astype(np.uint8)


def _one_number_each(image: Image.Image) -> Image.Image:
    """The image. Raises ValueError if its pixels have several channels or more than 8 bits."""
    if image.mode not in _MASK_MODES:
        raise ValueError(
            f"its pixels are {image.mode}; those of a mask are classes, one number of 8 bits each: "
            "save it as grey or with a palette"
        )
    return image


def require_readable_images(paths: Sequence[str]) -> None:
    """Raise DataError that names the first image that is cut off, damaged or of 16 bits, and the
    number of others."""
    _require_readable(paths, FORMATS, eight_bits)


def require_readable_masks(paths: Sequence[str]) -> None:
    """Raise DataError that names the first mask that is cut off, damaged or of colours, and the
    number of others."""
    _require_readable(paths, _MASK_FORMATS, _one_number_each)


def _require_readable(
    paths: Sequence[str], formats: Sequence[str], check: Callable[[Image.Image], object]
) -> None:
    def read(path: str) -> DataError | None:
        try:
            require_whole(Path(path), formats, check)
        except UNREADABLE_IMAGE as error:
            return _unreadable(path, error)
        return None

    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        errors = [error for error in pool.map(read, paths) if error is not None]
    if errors:
        others = f"; nor can {len(errors) - 1:,} of the others" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}{others}") from errors[0]


def _read_size(path: str) -> tuple[int, int]:
    with _opened(path, FORMATS) as image:
        return upright_size(image)


@contextmanager
def _opened(path: str, formats: Sequence[str]) -> Iterator[Image.Image]:
    try:
        with open_image(Path(path), formats) as image:
            yield image
    except UNREADABLE_IMAGE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"{path}: can't be read as an image: {first_line(error)}")
