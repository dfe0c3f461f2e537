"""Weights in numpy's files, `.npz`, with arbitrary names."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from pipeline.core.files.error_text import shown
from pipeline.core.files.npy import open_archive
from pipeline.models.weights.files.named_arrays import Arrays, add

_SUFFIX = ".npy"


def read_npz(path: Path) -> Arrays:
    """The arrays of an archive. Raises OSError, and ValueError that says what is wrong."""
    arrays: Arrays = {}
    with open_archive(path) as archive:
        for file in archive.files:
            if not file.endswith(_SUFFIX):
                raise ValueError(f"its part {shown(file)} is no array")
        for name in archive.names:
            add(arrays, name, archive.read(name))
    return arrays


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, uncompressed, as numpy.savez does; names are arbitrary."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}{_SUFFIX}", "w", force_zip64=True) as file:
                npy.write_array(file, array, allow_pickle=False)
