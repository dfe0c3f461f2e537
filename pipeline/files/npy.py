"""Arrays in numpy's files, `.npy` and `.npz`, read without pickle and within bounds.

An array's header is checked against the size of its entry, and that against the available memory,
before any memory is allocated.
"""

from __future__ import annotations

import io
import lzma
import math
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from pipeline.files.error_text import shown
from pipeline.host.memory import require_room

MAX_AXES = 32
MAX_ENTRIES = 100_000

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_SUFFIX = ".npy"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The compression methods that numpy writes."""
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, EOFError),
    *(RuntimeError, SyntaxError, TypeError, OverflowError, LookupError, MemoryError),
)
"""Errors, besides ValueError, that zipfile and numpy raise for damaged files."""


class ArrayArchive:
    """An .npz file, open for reading."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        infos = archive.infolist()
        if len(infos) > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES:,} entries")
        self.files = tuple(info.filename for info in infos)
        """The names of all entries, with their suffixes."""
        arrays = [info for info in infos if info.filename.endswith(_SUFFIX)]
        self.names = tuple(info.filename.removesuffix(_SUFFIX) for info in arrays)
        """The names of the arrays, in the order of the file."""
        self._infos = dict(zip(self.names, arrays, strict=True))

    def read(self, name: str) -> np.ndarray:
        """One array. Raises ValueError that says what is wrong with it."""
        info = self._infos[name]
        require_room(info.file_size, shown(name))
        if info.compress_type not in _METHODS:
            raise ValueError(f"{shown(name)} is compressed in a way that numpy does not write")
        with _telling_damage():
            with self._archive.open(info) as file:
                check_header(name, file, info.file_size)
            with self._archive.open(info) as file:
                return npy.read_array(file, allow_pickle=False)


@contextmanager
def open_archive(path: Path) -> Iterator[ArrayArchive]:
    """An .npz file. Raises OSError, and ValueError that says what is wrong with it."""
    if not path.is_file():
        raise ValueError("there is no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError("must be an .npz file")
    with _telling_damage():
        archive = zipfile.ZipFile(path)
    with archive:
        yield ArrayArchive(archive)


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file. Raises OSError, and ValueError that says what is wrong with it."""
    size = path.stat().st_size
    require_room(size, "its array")
    with _telling_damage(), path.open("rb") as file:
        check_header(path.stem, file, size)
        file.seek(0)
        return npy.read_array(file, allow_pickle=False)


def parse_npy(name: str, content: bytes) -> np.ndarray:
    """The array of a .npy file's bytes. Raises ValueError that says what is wrong with them."""
    with _telling_damage(), io.BytesIO(content) as file:
        check_header(name, file, len(content))
        file.seek(0)
        return npy.read_array(file, allow_pickle=False)


def check_header(name: str, file: IO[bytes], size: int) -> None:
    """Raise ValueError unless the header's array fills the entry of `size` bytes exactly."""
    read_header = _HEADERS.get(npy.read_magic(file))
    if read_header is None:
        raise ValueError(f"{shown(name)} is of a version of .npy that is not read")
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError(f"{shown(name)} holds objects; must be plain numbers")
    if not dtype.itemsize or array_bytes(name, dtype, shape) != size - file.tell():
        raise ValueError(f"{shown(name)} has shape {shape} and the file has another size")


def array_bytes(name: str, dtype: np.dtype, shape: Sequence[int]) -> int:
    """The size of an array in bytes. Raises ValueError for a shape that no array can have."""
    if len(shape) > MAX_AXES or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shown(name)} has no possible shape; the file is damaged")
    return math.prod(shape) * dtype.itemsize


@contextmanager
def _telling_damage() -> Iterator[None]:
    with warnings.catch_warnings():
        # numpy warns of headers that Python 2 wrote.
        warnings.simplefilter("ignore")
        try:
            yield
        except _DAMAGED as error:
            raise ValueError(str(error) or type(error).__name__) from error
