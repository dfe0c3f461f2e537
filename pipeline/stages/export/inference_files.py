"""Files of the command `infer`: images, sound and arrays to read, rows and masks to write."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError, first_line, get_system_reason
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import read_npy
from pipeline.core.files.value_text import join_first
from pipeline.data.audio import SUFFIXES as SOUND_SUFFIXES
from pipeline.data.columns import Targets
from pipeline.data.image_file import (
    FORMATS,
    SUFFIXES,
    UNREADABLE_IMAGE,
    make_mask_image,
    open_image,
    read_pixels,
    read_upright_size,
)
from pipeline.data.tables.fit_table import read_encoded_rows
from pipeline.models.weights.files.weight_files import read_npz
from pipeline.stages.record.trained_run import Samples
from pipeline.training.contrastive import compute_cosines
from pipeline.training.sequences import read_symbols

_MODES = {1: "L", 3: "RGB"}
"""Pillow's modes by number of channels."""
_ARRAY_SUFFIXES = (".npy", ".npz")


def list_inputs(path: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """List the files below a folder with one of the suffixes, by default of images, sorted by
    path; for a file, return the file.

    Links to folders aren't followed. Raises DataError for a folder without such files.
    """
    if not path.is_dir():
        return [path]
    entries = sorted(path.rglob("*"))
    ends = tuple(suffixes)
    files = [file for file in entries if file.name.lower().endswith(ends) and file.is_file()]
    if not files:
        nouns = {SUFFIXES: "images", SOUND_SUFFIXES: "sounds"}
        noun = nouns.get(tuple(suffixes), "series")
        raise DataError(f"{path}: holds no {noun}; names must end in one of {', '.join(suffixes)}")
    return files


def list_suffixes(samples: Samples) -> tuple[str, ...]:
    """Return the suffixes of the files in a folder that are read as samples."""
    if samples.series is not None:
        return (*samples.series.suffixes, *_ARRAY_SUFFIXES)
    return SUFFIXES if samples.audio is None else SOUND_SUFFIXES


Arrays = np.ndarray | dict[str, np.ndarray]
"""Samples (n, *shape), or several arrays by column."""


def read_samples(path: Path, samples: Samples) -> Arrays:
    """Read the samples of a file, (n, *shape), in the format of the samples.

    For a table, reads the encoded rows (n, columns) of a CSV or Parquet file. An image file is
    turned upright, converted to grey or RGB, and resized bilinearly if its size differs. A sound
    file is cut or padded as in training. A .npy or .npz file holds an array of one sample or
    several. If a network reads several columns, an .npz file holds an array for each. Series are
    read from the files of their dataset too. Raises DataError for any other file.
    """
    if samples.table is not None and len(samples.columns) == 1:
        rows, _ = read_encoded_rows(path, samples.table)
        return rows
    if samples.series is not None and samples.series.reads(path):
        return samples.series.read(path, samples.single, samples.scale)
    suffix = path.suffix.lower()
    suffixes = tuple(dict.fromkeys((*list_suffixes(samples), *_ARRAY_SUFFIXES)))
    if suffix not in suffixes:
        raise DataError(f"{path}: must end in one of {', '.join(suffixes)}")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if samples.audio is not None and suffix in SOUND_SUFFIXES:
        return samples.audio.read_windows(path)
    try:
        if suffix in SUFFIXES:
            return _decode_image(path, samples)
        if len(samples.columns) > 1:
            return _read_columns(path, samples)
        return _read_array(path, samples)
    except UNREADABLE_IMAGE as error:
        raise DataError(f"{path}: can't be read as samples: {get_system_reason(error)}") from error


def count_samples(arrays: Arrays) -> int:
    """Return the number of samples."""
    return len(next(iter(arrays.values())) if isinstance(arrays, dict) else arrays)


def _read_columns(path: Path, samples: Samples) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by column. Raises ValueError for a missing array, and for
    arrays of other shapes or lengths."""
    arrays = read_npz(path) if path.suffix.lower() == ".npz" else {}
    missing = [name for name in samples.columns if name not in arrays]
    if missing:
        names = ", ".join(samples.columns)
        raise ValueError(f"lacks {', '.join(missing)}; must be an .npz file with {names}")
    columns = {}
    for name, spec in samples.columns.items():
        array = arrays[name]
        if array.shape == spec.shape:
            array = array[np.newaxis]
        if array.shape[1:] != spec.shape or array.dtype != spec.dtype:
            raise ValueError(
                f"{name} is {array.dtype} of shape {array.shape}; must be {spec.dtype} of shape "
                f"(n, {', '.join(map(str, spec.shape))})"
            )
        columns[name] = array
    lengths = {name: len(array) for name, array in columns.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise ValueError(f"must have equally many samples, at least one, not {lengths}")
    return columns


def _decode_image(path: Path, samples: Samples) -> np.ndarray:
    """Decode a file to (1, height, width, channels). Raises ValueError if samples aren't images."""
    spec = samples.single
    if samples.image is None or spec.dtype != "uint8" or spec.shape[-1] not in _MODES:
        raise ValueError(
            f"the network was trained on {spec.dtype} of shape {spec.shape}; give an array"
        )
    height, width, channels = spec.shape
    with open_image(path, FORMATS) as image:
        pixels = read_pixels(image, height, width, _MODES[channels])
    return pixels.reshape(1, height, width, channels)


def _read_array(path: Path, samples: Samples) -> np.ndarray:
    """Return a file's array, with axes of batch and channel. Raises ValueError for other shapes."""
    if path.suffix.lower() == ".npy":
        array = read_npy(path)
    else:
        arrays = read_npz(path)
        (name,) = samples.columns
        if len(arrays) != 1 and name not in arrays:
            names = ", " + join_first([show_name(key) for key in arrays], 8) if arrays else ""
            raise ValueError(
                f"it holds {len(arrays)} arrays{names}; must be one, or {name} among others"
            )
        array = arrays[name] if name in arrays else next(iter(arrays.values()))
    spec = samples.single
    shape = spec.shape
    axes = len(shape)
    start = array.ndim - axes
    has_channel = start >= 0 and array.shape[start:] == shape
    if axes > 1 and shape[-1] == 1 and array.shape[1 - axes :] == shape[:-1] and not has_channel:
        array = array[..., np.newaxis]
        has_channel = True
    if samples.series is not None and array.dtype.kind in "fiu":
        array = array.astype(np.float32)
    if not has_channel or array.ndim > axes + 1:
        sizes = ", ".join(map(str, ("n", *shape)))
        raise ValueError(f"it has shape {array.shape}; must be {shape} or ({sizes})")
    if not array.size:
        raise ValueError("it holds no samples")
    if array.dtype != spec.dtype:
        raise ValueError(f"it is {array.dtype}; must be {spec.dtype} as in training")
    return array.reshape(-1, *shape)


def make_prediction_row(
    name: str, outputs: np.ndarray, targets: Targets, top: int
) -> dict[str, Any]:
    """Return the columns of one sample, whose outputs are float64 (K,).

    The first column is `file`. For classes, `class` and `probability` follow, and with `top` above
    1 `class_2`, `probability_2` and so on. For a regression, the numbers follow by name, in the
    units of the data; for several labels, the probability of each; for a pair to match, `cosine`;
    for a sequence, whose outputs are (T, K), `sequence`, its symbols with spaces between.
    Targets have the columns of `name_columns`.
    """
    if targets.task == "matching":
        return {"file": name, "cosine": f"{compute_cosines(outputs[np.newaxis])[0]:.6f}"}
    if targets.task == "sequence":
        symbols = [targets.names[number] for number in read_symbols(outputs)]
        return {"file": name, "sequence": " ".join(symbols)}
    if targets.task in ("regression", "multi_label"):
        values: list[Any] = targets.to_data_units(outputs).tolist()
        if targets.task == "multi_label":
            sigmoid = 0.5 * (1 + np.tanh(outputs / 2))
            values = [f"{probability:.6f}" for probability in sigmoid]
        return {"file": name, **dict(zip(name_columns(targets), values, strict=True))}
    exponentials = np.exp(outputs - outputs.max())
    probabilities = exponentials / exponentials.sum()
    row: dict[str, Any] = {"file": name}
    for rank, index in enumerate(np.argsort(-probabilities, kind="stable")[:top], start=1):
        suffix = "" if rank == 1 else f"_{rank}"
        row[f"class{suffix}"] = targets.names[index]
        row[f"probability{suffix}"] = f"{probabilities[index]:.6f}"
    return row


def name_columns(targets: Targets) -> tuple[str, ...]:
    """Return the names of the targets, beside the column `file`: a target of this name is called
    `predicted_file`, or if another one is, `predicted_predicted_file` and so on."""
    column = "file"
    while column in targets.names:
        column = f"predicted_{column}"
    return tuple(column if name == "file" else name for name in targets.names)


MAX_MASK_CLASSES = 256
"""Most classes of a mask, since its values have 8 bits."""


def make_mask_path(folder: Path, file: Path, index: int, count: int) -> Path:
    """Return the path of the mask for image `index` of a file with `count` images."""
    return folder / (f"{file.stem}.png" if count == 1 else f"{file.stem}_{index}.png")


def require_new_names(folder: Path, files: Sequence[Path]) -> None:
    """Raise DataError if two masks would have the same path, or a mask would replace an input, also
    if that depends on the number of images in an array."""
    files_by_mask: dict[Path, Path] = {}
    inputs = {file.resolve() for file in files}
    arrays = {file.stem: file for file in files if file.suffix.lower() in _ARRAY_SUFFIXES}
    for file in files:
        mask = make_mask_path(folder, file, 0, 1)
        other = files_by_mask.setdefault(mask, file)
        if other is not file:
            raise DataError(f"{file}: its mask and that of {other} would both be {mask}")
        stem, _, number = file.stem.rpartition("_")
        if stem in arrays and re.fullmatch("0|[1-9][0-9]*", number):
            raise DataError(
                f"{file}: its mask and the one of image {number} of {arrays[stem]} would both be "
                f"{mask}; rename one"
            )
        if mask.resolve() in inputs:
            raise DataError(f"{folder}: the mask of {file} would replace an image; name another")


def write_mask(path: Path, file: Path, mask: np.ndarray, classes: int) -> None:
    """Write a mask (H, W) as a PNG with a palette, in the size of the image file `file`.

    Raises DataError for more classes than a mask can have, RunError if it can't be written.
    """
    if classes > MAX_MASK_CLASSES:
        raise DataError(
            f"{path}: a mask must have at most {MAX_MASK_CLASSES} classes, not {classes:,}"
        )
    size = mask.shape[1], mask.shape[0]
    if file.suffix.lower() in SUFFIXES:
        try:
            with open_image(file, FORMATS) as image:
                height, width = read_upright_size(image)
        except UNREADABLE_IMAGE as error:
            raise DataError(f"{file}: can't be read as an image: {first_line(error)}") from error
        size = width, height
    if path.resolve() == file.resolve():
        raise DataError(f"{path}: the mask of {file} would replace it; name another folder")
    content = io.BytesIO()
    make_mask_image(mask, classes, size).save(content, "PNG")
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
