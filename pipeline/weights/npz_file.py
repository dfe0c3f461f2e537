"""numpy's files, `.npz` and `.npy`: an array's header must fit what the file holds."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from pipeline.weights.arrays import MAX_BYTES, MAX_ENTRIES, Arrays, add, array_bytes, shown

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_SUFFIX = ".npy"


def read_npz(path: Path) -> Arrays:
    """The arrays of an archive. Raises ValueError that says what is wrong, and BadZipFile."""
    if not zipfile.is_zipfile(path):
        raise ValueError("it is not an .npz file")
    arrays: Arrays = {}
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if len(infos) > MAX_ENTRIES or sum(info.file_size for info in infos) > MAX_BYTES:
            raise ValueError(f"it says it holds more than {MAX_BYTES:,} bytes")
        for info in infos:
            if not info.filename.endswith(_SUFFIX):
                raise ValueError(f"its part {shown(info.filename)} is no array")
            name = info.filename.removesuffix(_SUFFIX)
            with archive.open(info) as file:
                _check_header(name, file, info.file_size)
            with archive.open(info) as file:
                add(arrays, name, npy.read_array(file, allow_pickle=False))
    return arrays


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file. Raises ValueError that says what is wrong with it."""
    with path.open("rb") as file:
        _check_header(path.stem, file, path.stat().st_size)
        file.seek(0)
        return npy.read_array(file, allow_pickle=False)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, uncompressed, as numpy.savez does; any name will do."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}{_SUFFIX}", "w", force_zip64=True) as file:
                npy.write_array(file, array, allow_pickle=False)


def _check_header(name: str, file: IO[bytes], size: int) -> None:
    """Raise ValueError unless the array is as large as the part that should hold it."""
    read_header = _HEADERS.get(npy.read_magic(file))
    if read_header is None:
        raise ValueError(f"{shown(name)} is of a version of .npy that is not read")
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError(f"{shown(name)} holds objects; must be plain numbers")
    if array_bytes(name, dtype, shape) != size - file.tell():
        raise ValueError(f"{shown(name)} has shape {shape} and the file has another size")
