"""Input files of `infer`: images, folders of them, or arrays, read as a dataset would read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.npy import read_npy
from pipeline.data.image_file import (
    FORMATS,
    SUFFIXES,
    UNREADABLE_IMAGE,
    open_image,
    read_pixels,
    upright_size,
)
from pipeline.data.tables.fit_table import read_rows
from pipeline.models.weights.files.weight_files import read_npz
from pipeline.stages.export.trained_run import Samples

_MODES = {1: "L", 3: "RGB"}
_ARRAYS = (".npy", ".npz")


def files_in(path: Path) -> list[Path]:
    """The images of a folder and of folders in it, in the order of their paths; a file is itself.

    Links to folders are not followed. Raises DataError for a folder without images.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    files = [file for file in found if file.is_file()]
    if not files:
        raise DataError(f"{path}: holds no images; they end in one of {', '.join(SUFFIXES)}")
    return files


def read_images(path: Path, samples: Samples) -> np.ndarray:
    """The images of a file, (n, height, width, channels), of the shape and dtype of the samples;
    the encoded rows (n, columns) of a CSV or Parquet file where these are of a table.

    An image file is turned upright, converted to grey or RGB, and resized bilinearly if its size
    differs. A .npy or .npz file holds one array of one image or more, whose shape must match.
    Raises DataError for any other file.
    """
    if samples.table is not None:
        return read_rows(path, samples.table)
    suffix = path.suffix.lower()
    if suffix not in (*SUFFIXES, *_ARRAYS):
        kinds = ", ".join((*SUFFIXES, *_ARRAYS))
        raise DataError(f"{path}: is no kind of image file; must end in one of {kinds}")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        return _decode(path, samples) if suffix in SUFFIXES else _array(path, samples)
    except UNREADABLE_IMAGE as error:
        raise DataError(f"{path}: can't be read as images: {error}") from error


def size_of(path: Path) -> tuple[int, int] | None:
    """(width, height) of an image file; None for a file of arrays.

    Raises one of `UNREADABLE_IMAGE` where it can't be read.
    """
    if path.suffix.lower() not in SUFFIXES:
        return None
    with open_image(path, FORMATS) as image:
        height, width = upright_size(image)
    return width, height


def _decode(path: Path, samples: Samples) -> np.ndarray:
    height, width, channels = samples.shape
    if samples.dtype != "uint8" or channels not in _MODES:
        raise ValueError(
            f"the network was trained on {samples.dtype} of {channels} channels; give an array"
        )
    with open_image(path, FORMATS) as image:
        pixels = read_pixels(image, height, width, _MODES[channels])
    return pixels.reshape(1, height, width, channels)


def _array(path: Path, samples: Samples) -> np.ndarray:
    """The only array of a file, with missing batch and channel axes added."""
    if path.suffix.lower() == ".npy":
        array = read_npy(path)
    else:
        arrays = read_npz(path)
        if len(arrays) != 1:
            raise ValueError(f"it holds {len(arrays)} arrays, {', '.join(arrays)}; must be one")
        (array,) = arrays.values()
    height, width, channels = samples.shape
    if channels == 1 and array.shape[-2:] == (height, width):
        array = array[..., np.newaxis]
    if array.shape[-3:] != samples.shape or array.ndim not in (3, 4):
        raise ValueError(
            f"it has shape {array.shape}; must be ({height}, {width}, {channels}) or n of these"
        )
    if not array.size:
        raise ValueError("it holds no images")
    if array.dtype != samples.dtype:
        raise ValueError(f"it is {array.dtype}; must be {samples.dtype} as in training")
    return array.reshape(-1, *samples.shape)
