"""Columns of image files and of masks, decoded on demand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.core.errors import DataError, get_system_reason, printable
from pipeline.data.columns import DECODING_THREADS, Column, LazyColumn
from pipeline.data.image_file import (
    FORMATS,
    UNREADABLE_IMAGE,
    has_16_bits,
    open_image,
    read_pixels,
    read_upright_size,
    require_bytes,
    require_complete,
    turn_upright,
)
from pipeline.data.padding.buckets import Ragged

_MASK_FORMATS = ("PNG", "BMP", "TIFF")
_PAGED_SUFFIXES = (".gif", ".tif", ".tiff", ".webp")
_DESCRIBED = 8
"""Images whose brightest pixel a note has."""
_FEW_LEVELS = 128
"""Grey levels below which half of 8 bits or more is lost."""
_MASK_MODES = ("1", "L", "P")
"""Pillow's modes with one number per pixel: a bit, a grey level or an entry of a palette."""


@dataclass(frozen=True)
class MaskValues:
    """The valid pixel values of masks: 0 to `classes` - 1, and `ignored` unless it is None."""

    classes: int
    ignored: int | None


@dataclass(frozen=True)
class ImageFiles(LazyColumn):
    """A column of image files, decoded on demand and resized to one size.

    Images are RGB, uint8 (files, height, width, 3). If `mask_values` is set, the files are masks,
    uint8 (files, height, width), and reading another value raises DataError.
    """

    paths: Sequence[str]
    height: int
    width: int
    mask_values: MaskValues | None = None

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        channels = () if self.mask_values else (3,)
        return (len(self.paths), self.height, self.width, *channels)

    def sample(self, index: int) -> np.ndarray:
        return _decode(self.paths[index], self.height, self.width, self.mask_values)

    def sample_name(self, index: int) -> str:
        return self.paths[index]


@dataclass(frozen=True)
class RaggedImageFiles(Ragged):
    """A column like `ImageFiles`, but of images in their own sizes, without a resize."""

    paths: Sequence[str]
    sizes: np.ndarray
    mask_values: MaskValues | None = None

    dtype = np.dtype(np.uint8)

    @property
    def trailing(self) -> tuple[int, ...]:
        """(3,) for images, () for masks."""
        return () if self.mask_values else (3,)

    def value(self, index: int) -> np.ndarray:
        height, width = self.sizes[index].tolist()
        return _decode(self.paths[index], height, width, self.mask_values)

    def sample_name(self, index: int) -> str:
        return self.paths[index]


def _decode(path: str, height: int, width: int, mask_values: MaskValues | None) -> np.ndarray:
    """Decode an image, or if `mask_values` is set a mask. Raises DataError for a mask with another
    value."""
    if mask_values is None:
        return decode(path, height, width)
    mask = decode_mask(path, height, width)
    classes = mask_values.classes
    ignored = mask_values.ignored
    is_wrong = mask >= classes
    if ignored is not None:
        is_wrong &= mask != ignored
    if is_wrong.any():
        ignored_text = "" if ignored is None else f", or {ignored}, which is ignored"
        raise DataError(
            f"{path}: has pixels of the value {int(mask[is_wrong].min())}; the values of "
            f"{classes} classes are 0 to {classes - 1}{ignored_text}"
        )
    return mask


def make_image_columns(
    split_paths: Sequence[Sequence[str]],
    size: Sequence[int] | None,
    *,
    several_sizes: bool,
    may_be_damaged: Sequence[bool] = (False, False),
) -> list[Column]:
    """Make a column of the image files of each split.

    All images are resized to `size`, (height, width). If `size` is None they keep their sizes if
    `several_sizes` is true, else they must have one size. If a split `may_be_damaged`, its column
    has the unreadable images too, and raises DataError when it reads one. Otherwise raises
    DataError for an unreadable image now. Raises DataError for an image of another size.
    """
    damaged: set[str] = set()
    for paths, is_allowed in zip(split_paths, may_be_damaged, strict=True):
        if is_allowed:
            damaged.update(_find_unreadable(paths))
        else:
            require_readable(paths)
    if several_sizes and size is None:
        return [RaggedImageFiles(paths, read_sizes(paths, damaged)) for paths in split_paths]
    if size is None:
        readable = [path for path in chain.from_iterable(split_paths) if path not in damaged]
        size = find_common_size(readable or split_paths[0])
    height, width = size
    return [ImageFiles(paths, height, width) for paths in split_paths]


def read_sizes(paths: Sequence[str], damaged: Collection[str] = ()) -> np.ndarray:
    """Return (height, width) of each image, int32 (files, 2); (1, 1) for a path in `damaged`."""
    sizes = np.ones((len(paths), 2), np.int32)
    for row, path in enumerate(paths):
        if path not in damaged:
            with _open_named(path, FORMATS) as image:
                sizes[row] = read_upright_size(image)
    return sizes


def find_common_size(paths: Sequence[str]) -> tuple[int, int]:
    """Return the (height, width) that all images have. Raises DataError if they differ."""
    sizes = read_sizes(paths).tolist()
    height, width = sizes[0]
    for path, size in zip(paths, sizes, strict=True):
        if size != sizes[0]:
            raise DataError(
                f"{path}: is {size[0]}x{size[1]}, but {paths[0]} is {height}x{width}; "
                "set dataset.image_size=[H,W] to resize all"
            )
    return height, width


def decode(path: str, height: int, width: int) -> np.ndarray:
    """Decode an image as RGB, resized bilinearly if its size differs: uint8 (height, width, 3)."""
    with _open_named(path, FORMATS) as image:
        return read_pixels(image, height, width)


def decode_mask(path: str, height: int, width: int) -> np.ndarray:
    """Decode a mask, resized by nearest pixels if its size differs: uint8 (height, width). Values
    are grey levels or indices of a palette. Raises DataError with the path if the mask can't be
    read or has several channels."""
    with _open_named(path, _MASK_FORMATS) as image:
        _require_one_channel(image)
        mask = turn_upright(image).copy()
    if mask.size != (width, height):
        mask = mask.resize((width, height), Image.Resampling.NEAREST)
    return np.asarray(mask).astype(np.uint8)


def _require_one_channel(image: Image.Image) -> None:
    """Raise ValueError for a mask with several channels, or with more than 8 bits."""
    if image.mode not in _MASK_MODES:
        raise ValueError(
            f"its pixels are {image.mode}; pixels of a mask must be classes, one 8-bit number "
            "each: save it as grey or with a palette"
        )


def require_readable(paths: Sequence[str], *, masks: bool = False) -> None:
    """Raise DataError with the first unreadable file and the number of other ones."""
    errors = list(_find_unreadable(paths, masks=masks).values())
    if errors:
        others = f"; nor can {len(errors) - 1:,} of the others" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}{others}") from errors[0]


def _find_unreadable(paths: Sequence[str], *, masks: bool = False) -> dict[str, DataError]:
    """Return the errors of unreadable files, by path. Images must be complete, with 8 or
    16 bits per channel. Masks must have one channel."""

    def find_error(path: str) -> DataError | None:
        try:
            if masks:
                require_complete(Path(path), _MASK_FORMATS, _require_one_channel)
            else:
                require_complete(Path(path), FORMATS, require_bytes)
        except UNREADABLE_IMAGE as error:
            return _make_read_error(path, error)
        return None

    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        errors = pool.map(find_error, paths)
        return {path: error for path, error in zip(paths, errors, strict=True) if error is not None}


def describe_16_bits(paths: Sequence[str]) -> tuple[str, ...]:
    """Return a tuple of one note if some of the first images have grey levels of 16 bits, else ().
    Few levels are left of cameras with 10 or 12 bits, whose files aren't bright enough."""
    brightest = []
    for path in paths[:_DESCRIBED]:
        # Unreadable images are refused, or left out, elsewhere.
        with suppress(*UNREADABLE_IMAGE), open_image(Path(path), FORMATS) as image:
            if has_16_bits(image):
                brightest.append(int(np.asarray(image).max()))
    if not brightest:
        return ()
    levels = (max(brightest) >> 8) + 1
    hint = "; multiply them to use all of 65,535" if levels < _FEW_LEVELS else ""
    return (
        f"images of 16 bits: the upper 8 are read; the brightest pixel of {len(brightest)} such "
        f"images is {max(brightest):,}, so {levels} grey levels are left{hint}",
    )


def describe_pages(paths: Sequence[str]) -> tuple[str, ...]:
    """Return a tuple of one note if files have several pages or frames, of which the first is read,
    else ()."""

    def count_pages(path: str) -> int:
        with suppress(*UNREADABLE_IMAGE), open_image(Path(path), FORMATS) as image:
            return int(getattr(image, "n_frames", 1))
        return 1

    candidates = [path for path in paths if path.lower().endswith(_PAGED_SUFFIXES)]
    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        counts = dict(zip(candidates, pool.map(count_pages, candidates), strict=True))
    paged = [path for path, count in counts.items() if count > 1]
    if not paged:
        return ()
    first = paged[0]
    return (
        f"{len(paged):,} of {len(paths):,} files have several pages or frames, such as "
        f"{printable(first)} with {counts[first]:,}: only the first is read; save the others as "
        "files if they are images too",
    )


@contextmanager
def _open_named(path: str, formats: Sequence[str]) -> Iterator[Image.Image]:
    """Open an image. Raises DataError with its path if it can't be opened or read in the block."""
    try:
        with open_image(Path(path), formats) as image:
            yield image
    except UNREADABLE_IMAGE as error:
        raise _make_read_error(path, error) from error


def _make_read_error(path: str, error: Exception) -> DataError:
    return DataError(f"{path}: can't be read as an image: {get_system_reason(error)}")
