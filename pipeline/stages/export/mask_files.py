"""Masks that `infer` writes: the most probable class of every pixel of an image."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError, RunError, first_line
from pipeline.core.files.atomic_write import write_whole
from pipeline.data.image_file import UNREADABLE_IMAGE, mask_image
from pipeline.stages.export.image_inputs import size_of

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
