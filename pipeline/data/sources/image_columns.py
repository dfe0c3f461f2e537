"""Columns of image files and of masks, decoded on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pipeline.core.errors import DataError, system_reason
from pipeline.data.columns import DECODING_THREADS, Column, read_samples
from pipeline.data.image_file import (
    FORMATS,
    UNREADABLE_IMAGE,
    open_image,
    read_pixels,
    require_eight_bits,
    require_whole,
    upright,
    upright_size,
)
from pipeline.data.padding.buckets import Ragged

_MASK_FORMATS = ("PNG", "BMP")
_MASK_MODES = ("1", "L", "P")
"""Modes of Pillow in which a pixel is one number: a bit, a grey level, an entry of a palette."""


@dataclass(frozen=True)
class MaskValues:
    """The values that pixels of masks may have: 0 to `classes` - 1, and the one to ignore."""

    classes: int
    ignored: int | None

    def require(self, path: str, mask: np.ndarray) -> None:
        """Raise DataError that names a mask with another value."""
        wrong = mask >= self.classes
        if self.ignored is not None:
            wrong &= mask != self.ignored
        if wrong.any():
            but = "" if self.ignored is None else f", or {self.ignored}, which is not counted"
            raise DataError(
                f"{path}: has pixels of the value {int(mask[wrong].min())}; the values of "
                f"{self.classes} classes are 0 to {self.classes - 1}{but}"
            )


@dataclass(frozen=True)
class ImageFiles:
    """A column of image files, decoded to one size when they are indexed.

    Images are RGB, uint8 (files, height, width, 3). With `masks`, the files are masks, uint8
    (files, height, width), whose pixels must have these values.
    """

    paths: Sequence[str]
    height: int
    width: int
    masks: MaskValues | None = None

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        """(files, height, width), and 3 for images."""
        return (len(self.paths), self.height, self.width, *_trailing(self.masks))

    def __getitem__(self, indices: Any) -> np.ndarray:
        """The values at an integer array of indices or a slice, uint8 (n, height, width, ...)."""
        return read_samples(self, indices)

    def sample(self, index: int) -> np.ndarray:
        """One value, uint8 (height, width, ...). Raises DataError that names a bad file."""
        return _decode(self.paths[index], self.height, self.width, self.masks)

    def sample_name(self, index: int) -> str:
        """The file."""
        return self.paths[index]


@dataclass(frozen=True)
class RaggedImageFiles(Ragged):
    """A column of image files, or of masks, decoded in the size of each file on demand."""

    paths: Sequence[str]
    sizes: np.ndarray
    masks: MaskValues | None = None

    dtype = np.dtype(np.uint8)

    @property
    def trailing(self) -> tuple[int, ...]:
        """3 for images."""
        return _trailing(self.masks)

    def value(self, index: int) -> np.ndarray:
        """One value, uint8 (height, width, ...). Raises DataError that names a bad file."""
        height, width = self.sizes[index].tolist()
        return _decode(self.paths[index], height, width, self.masks)

    def sample_name(self, index: int) -> str:
        """The file."""
        return self.paths[index]


def _trailing(masks: MaskValues | None) -> tuple[int, ...]:
    return (3,) if masks is None else ()


def _decode(path: str, height: int, width: int, masks: MaskValues | None) -> np.ndarray:
    if masks is None:
        return decode(path, height, width)
    mask = decode_mask(path, height, width)
    masks.require(path, mask)
    return mask


def image_columns(
    paths: Sequence[Sequence[str]], size: Sequence[int] | None, *, several_sizes: bool
) -> list[Column]:
    """A column for each list of image files: of `size`, else of the one size that all have.

    With `several_sizes` and no size, each image keeps its size. Raises DataError that names an
    image of another size, or one that can't be read.
    """
    all_paths = [path for listed in paths for path in listed]
    require_readable(all_paths)
    if several_sizes and size is None:
        return [RaggedImageFiles(listed, read_sizes(listed)) for listed in paths]
    height, width = size or common_size(all_paths)
    return [ImageFiles(listed, height, width) for listed in paths]


def read_sizes(paths: Sequence[str]) -> np.ndarray:
    """(height, width) of each image, int32 (files, 2)."""
    sizes = np.empty((len(paths), 2), np.int32)
    for row, path in enumerate(paths):
        with _open_named(path, FORMATS) as image:
            sizes[row] = upright_size(image)
    return sizes


def common_size(paths: Sequence[str]) -> tuple[int, int]:
    """(height, width) of all images. Raises DataError that names one of another size."""
    sizes = read_sizes(paths).tolist()
    height, width = sizes[0]
    for path, size in zip(paths, sizes, strict=True):
        if size != sizes[0]:
            raise DataError(
                f"{path}: is {size[0]}x{size[1]} where {paths[0]} is {height}x{width}; "
                "give dataset.image_size=[H,W] to resize all"
            )
    return height, width


def decode(path: str, height: int, width: int) -> np.ndarray:
    """An image as RGB, resized bilinearly if its size differs: uint8 (height, width, 3)."""
    with _open_named(path, FORMATS) as image:
        return read_pixels(image, height, width)


def decode_mask(path: str, height: int, width: int) -> np.ndarray:
    """A mask, resized to the nearest pixels if its size differs: uint8 (height, width).

    The values are grey levels, or entries of a palette. Raises DataError that names a file of
    colours, whose values mean nothing by themselves.
    """
    with _open_named(path, _MASK_FORMATS) as image:
        _require_one_channel(image)
        mask = upright(image).copy()
    if mask.size != (width, height):
        mask = mask.resize((width, height), Image.Resampling.NEAREST)
    return np.asarray(mask).astype(np.uint8)


def _require_one_channel(image: Image.Image) -> None:
    if image.mode not in _MASK_MODES:
        raise ValueError(
            f"its pixels are {image.mode}; those of a mask are classes, one number of 8 bits each: "
            "save it as grey or with a palette"
        )


def require_readable(paths: Sequence[str], *, masks: bool = False) -> None:
    """Raise DataError that names the first bad file and counts the others.

    An image must not be cut off, damaged or of 16 bits. A mask must have one channel.
    """

    def read(path: str) -> DataError | None:
        try:
            if masks:
                require_whole(Path(path), _MASK_FORMATS, _require_one_channel)
            else:
                require_whole(Path(path), FORMATS, require_eight_bits)
        except UNREADABLE_IMAGE as error:
            return _unreadable(path, error)
        return None

    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        errors = [error for error in pool.map(read, paths) if error is not None]
    if errors:
        count = f"; nor can {len(errors) - 1:,} of the others" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}{count}") from errors[0]


@contextmanager
def _open_named(path: str, formats: Sequence[str]) -> Iterator[Image.Image]:
    try:
        with open_image(Path(path), formats) as image:
            yield image
    except UNREADABLE_IMAGE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"{path}: can't be read as an image: {system_reason(error)}")
