"""Reading and writing of weight files, whose suffix determines the format.

The formats of other frameworks are imported when a file has them.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.lib import format as npy
from safetensors import SafetensorError

from pipeline.core.errors import DataError, RunError
from pipeline.core.files.atomic_write import commit
from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import open_archive
from pipeline.core.host.memory import require_room
from pipeline.models.weights.files.named_arrays import (
    BFLOAT16,
    Arrays,
    add_array,
    decode_array,
    make_natural_key,
)

_ZIP = b"PK\x03\x04"
_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,  # zipfile and pickle, for cut data
    MemoryError,
    OverflowError,  # numpy, for sizes beyond 64 bits
    RuntimeError,  # zipfile, for encrypted parts and other compressions; h5py
    zipfile.BadZipFile,
    zlib.error,
    SafetensorError,
)
"""Errors that the readers and their libraries raise for damaged files."""

_HDF5_SUFFIXES = (".h5", ".hdf5", ".keras")
TENSORFLOW_SUFFIXES = (".index", *_HDF5_SUFFIXES)
_SAFETENSORS_DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": BFLOAT16,
    "BOOL": np.dtype(bool),
}


def read_weights(path: Path) -> Arrays:
    """Return the arrays of a weight file by name. Raises DataError if the file can't be read.

    They are in the order of the file, for a .safetensors in natural order of names. Nothing in a
    file is executed.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        kinds = ", ".join(_READERS)
        raise DataError(f"{path}: isn't a weight file; must end in one of {kinds}")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        require_room(2 * path.stat().st_size, "reading it")
        arrays = reader(path)
        if not arrays:
            raise ValueError("it holds no arrays")
        for name, array in arrays.items():
            _require_numbers(name, array)
    except _UNREADABLE as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{path}: can't read these weights: {reason.splitlines()[0]}") from error
    return arrays


def _require_numbers(name: str, array: np.ndarray) -> None:
    """Raise ValueError for an array of texts, dates or records."""
    # Types of ml_dtypes, such as bfloat16, have the kind of records but no fields.
    is_number = array.dtype.kind in "biufc" or array.dtype.type.__module__ == "ml_dtypes"
    if not is_number:
        raise ValueError(f"{show_name(name)} is {array.dtype}; must be numbers")


def require_writable_suffix(path: Path) -> None:
    """Raise DataError if files with this suffix can't be written."""
    if path.suffix.lower() in _WRITERS:
        return
    kinds = ", ".join(_WRITERS)
    hint = "; PyTorch reads .safetensors" if path.suffix.lower() in (".pt", ".pth") else ""
    raise DataError(f"{path}: can't be written; must end in one of {kinds}{hint}")


def write_weights(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays under their names, replacing the file atomically.

    Raises DataError for a suffix that can't be written and if the format can't hold an array or its
    name, and RunError if writing fails.
    """
    require_writable_suffix(path)
    writer = _WRITERS[path.suffix.lower()]
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        checked: Arrays = {}
        for name, array in arrays.items():
            add_array(checked, name, np.asarray(array, order="C"))
        writer(draft, checked)
        commit(draft, path)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition(". Supported")[0]
        kind = RunError if isinstance(error, OSError) else DataError
        raise kind(f"{path}: can't be written: {reason}") from error
    finally:
        # It is there only if an error or a signal came before the commit.
        with suppress(OSError):
            draft.unlink()


def is_weight_file(path: Path) -> bool:
    """Return whether a path has the suffix of a weight file and isn't a directory."""
    return path.suffix.lower() in _READERS and not path.is_dir()


def keeps_order(file: str) -> bool:
    """Return whether a file with this name has its arrays in the order in which they were written.

    A .safetensors has them sorted by dtype and name, TensorFlow's files by name.
    """
    return Path(file).suffix.lower() not in (".safetensors", *TENSORFLOW_SUFFIXES)


def _read_safetensors(path: Path) -> Arrays:
    arrays: Arrays = {}
    entries = dict(safetensors.deserialize(path.read_bytes()))
    for name in sorted(entries, key=make_natural_key):
        entry = entries[name]
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            raise ValueError(f"{show_name(name)} is {entry['dtype']}, which can't be read")
        dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
        add_array(arrays, name, decode_array(name, dtype, entry["shape"], entry["data"]))
    return arrays


def _read_ckpt(path: Path) -> Arrays:
    """Read a .ckpt of MindSpore, or of Lightning, which writes PyTorch's zip with this suffix."""
    with path.open("rb") as file:
        if file.read(len(_ZIP)) == _ZIP:
            return _read_torch(path)
    from pipeline.models.weights.files.mindspore_file import read_mindspore

    return read_mindspore(path.read_bytes())


def _write_ckpt(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    from pipeline.models.weights.files.mindspore_file import write_mindspore

    write_mindspore(path, arrays)


def _read_torch(path: Path) -> Arrays:
    from pipeline.models.weights.files.torch_file import read_torch

    return read_torch(path)


def _read_index(path: Path) -> Arrays:
    from pipeline.models.weights.files.tensorflow_checkpoint import read_tensorflow

    return read_tensorflow(path)


def _read_hdf5(path: Path) -> Arrays:
    from pipeline.models.weights.files.keras_file import read_keras

    return read_keras(path)


def read_npz(path: Path) -> Arrays:
    """Read the arrays of numpy's `.npz`. Raises OSError, and ValueError for an invalid file."""
    arrays: Arrays = {}
    with open_archive(path) as archive:
        for file in archive.files:
            if not file.endswith(".npy"):
                raise ValueError(f"its part {show_name(file)} isn't an array")
        for name in archive.names:
            add_array(arrays, name, archive.read(name))
    return arrays


def _write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as numpy.savez does, which however refuses some names, such as `file`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            if "\0" in name:
                raise ValueError(f"{show_name(name)} has a zero byte, which cuts a .npz's names")
            if array.dtype.kind == "V" or array.dtype.type.__module__ == "ml_dtypes":
                # numpy would write bfloat16 as bytes without a type, float8_e5m2 as an unknown one.
                raise ValueError(f"{show_name(name)} is {array.dtype}, which a .npz can't hold")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                npy.write_array(file, array, allow_pickle=False)


def _write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    if "__metadata__" in arrays:
        raise ValueError("a .safetensors can't hold an array called __metadata__")
    for name, array in arrays.items():
        # The format has further types, such as complex64, which aren't read.
        if array.dtype.newbyteorder("=") not in _SAFETENSORS_DTYPES.values():
            raise ValueError(f"{show_name(name)} is {array.dtype}, which couldn't be read again")
    # The package's save_file makes the file readable only by its owner.
    path.write_bytes(safetensors.numpy.save(dict(arrays)))


_READERS: dict[str, Callable[[Path], Arrays]] = {
    ".safetensors": _read_safetensors,
    ".ckpt": _read_ckpt,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".npz": read_npz,
    ".index": _read_index,
    **dict.fromkeys(_HDF5_SUFFIXES, _read_hdf5),
}
_WRITERS: dict[str, Callable[[Path, Mapping[str, np.ndarray]], None]] = {
    ".safetensors": _write_safetensors,
    ".ckpt": _write_ckpt,
    ".npz": _write_npz,
}
