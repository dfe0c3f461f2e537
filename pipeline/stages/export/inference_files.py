"""Input files of `infer`: images, folders of them, or arrays, read as a dataset would read them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError, RunError, first_line
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.npy import read_npy
from pipeline.data.image_file import (
    FORMATS,
    SUFFIXES,
    UNREADABLE_IMAGE,
    open_image,
    read_pixels,
    upright_size,
)
from pipeline.data.mask_pictures import mask_image
from pipeline.data.tables.fit_table import read_rows
from pipeline.data.targets import Targets
from pipeline.models.weights.files.npz_file import read_npz
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


def prediction_row(name: str, outputs: np.ndarray, targets: Targets, top: int) -> dict[str, Any]:
    """The columns of one sample, whose outputs are float64 (K,).

    file, class, probability, and with `top` above 1 class_2, probability_2 and so on; the numbers
    of a regression, in the units of the data, or the probability of each label, by name; a target
    that is called file is predicted_file.
    """
    match targets.task:
        case "regression":
            numbers = targets.in_units(outputs).tolist()
            return {"file": name, **dict(zip(_columns(targets), numbers, strict=True))}
        case "multi_label":
            shares = (f"{share:.6f}" for share in 0.5 * (1 + np.tanh(outputs / 2)))
            return {"file": name, **dict(zip(_columns(targets), shares, strict=True))}
    powers = np.exp(outputs - outputs.max())
    probabilities = powers / powers.sum()
    row: dict[str, Any] = {"file": name}
    for rank, best in enumerate(np.argsort(-probabilities, kind="stable")[:top], start=1):
        suffix = "" if rank == 1 else f"_{rank}"
        row[f"class{suffix}"] = targets.names[best]
        row[f"probability{suffix}"] = f"{probabilities[best]:.6f}"
    return row


def _columns(targets: Targets) -> list[str]:
    return ["predicted_file" if name == "file" else name for name in targets.names]


MAX_MASK_CLASSES = 256
"""A value of a mask has 8 bits."""


def mask_path(folder: Path, file: Path, index: int, count: int) -> Path:
    """The file of the mask of one of `count` images of a file."""
    return folder / (f"{file.stem}.png" if count == 1 else f"{file.stem}_{index}.png")


def require_new_names(folder: Path, files: Sequence[Path]) -> None:
    """Raise DataError where two masks would have one name, or a mask that of a file to read."""
    written: dict[Path, Path] = {}
    read = {file.resolve() for file in files}
    for file in files:
        target = mask_path(folder, file, 0, 1)
        other = written.setdefault(target, file)
        if other is not file:
            raise DataError(f"{file}: its mask and that of {other} would both be {target}")
        if target.resolve() in read:
            raise DataError(f"{folder}: the mask of {file} would replace an image; name another")


def write_mask(path: Path, file: Path, mask: np.ndarray, classes: int) -> None:
    """Write a mask (H, W) as a PNG with a palette, in the size of the image that it is of.

    Raises DataError for more classes than a mask can have, RunError where it can't be written.
    """
    if classes > MAX_MASK_CLASSES:
        raise DataError(f"{path}: a mask has {MAX_MASK_CLASSES} classes at most, not {classes:,}")
    try:
        size = size_of(file) or (mask.shape[1], mask.shape[0])
    except UNREADABLE_IMAGE as error:
        raise DataError(f"{file}: can't be read as an image: {first_line(error)}") from error
    if path.resolve() == file.resolve():
        raise DataError(f"{path}: the mask of {file} would replace it; name another folder")
    content = io.BytesIO()
    mask_image(mask, classes, size).save(content, "PNG")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
    except OSError as error:
        raise RunError(f"{path}: can't write: {error.strerror or error}") from error
