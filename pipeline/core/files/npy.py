"""Arrays in numpy's files, `.npy` and `.npz`, read without pickle and within bounds.

Before memory is allocated, the shape in an array's header is compared with the size of the file or
entry, and the size with the available memory.
"""

from __future__ import annotations

import io
import lzma
import math
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike

from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room

CHUNK_BYTES = 2**20
ALIGNMENT_BYTES = 64
"""XLA uses a host buffer in place if its address is a multiple of this, and copies any other."""
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
        """Names of all entries, with their suffixes."""
        arrays = [info for info in infos if info.filename.endswith(_SUFFIX)]
        self.names = tuple(info.filename.removesuffix(_SUFFIX) for info in arrays)
        """Names of the arrays, in the order of the file."""
        for name, count in Counter(self.names).most_common(1):
            if count > 1:
                raise ValueError(f"{count:,} entries are called {show_name(name)}")
        self._infos = dict(zip(self.names, arrays, strict=True))

    def read(self, name: str) -> np.ndarray:
        """Return an array by name. Raises ValueError if it isn't valid."""
        info = self._infos[name]
        require_room(info.file_size, show_name(name))
        if info.compress_type not in _METHODS:
            raise ValueError(f"{show_name(name)} must be stored or deflated, as numpy writes it")
        with _report_damage(), self._archive.open(info) as file:
            return _read_aligned(file, *check_header(name, file, info.file_size))


@contextmanager
def open_archive(path: Path) -> Iterator[ArrayArchive]:
    """Open an .npz file. Raises OSError, and ValueError if it isn't valid."""
    if not path.is_file():
        raise ValueError("there is no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError("must be an .npz file")
    with _report_damage():
        archive = zipfile.ZipFile(path)
    with archive:
        yield ArrayArchive(archive)


def read_npy(path: Path) -> np.ndarray:
    """Return the array of a .npy file, not aligned. Raises OSError, and ValueError if it isn't
    valid or the file isn't regular: a pipe may never end."""
    if path.exists() and not path.is_file():
        raise ValueError("isn't a regular file")
    size_bytes = path.stat().st_size
    require_room(size_bytes, "its array")
    with path.open("rb") as file:
        return _read_array(path.stem, file, size_bytes)


def parse_npy(name: str, content: bytes) -> np.ndarray:
    """Return the array in the bytes of a .npy file. Raises ValueError if they aren't valid."""
    return _read_array(name, io.BytesIO(content), len(content))


def _read_array(name: str, file: IO[bytes], size_bytes: int) -> np.ndarray:
    with _report_damage():
        check_header(name, file, size_bytes)
        file.seek(0)
        return npy.read_array(file, allow_pickle=False)


def _read_aligned(
    file: IO[bytes], shape: tuple[int, ...], in_fortran_order: bool, dtype: np.dtype
) -> np.ndarray:
    """Read an array after its header, into memory that a CPU device uses without a copy."""
    array = make_aligned_zeros(shape[::-1] if in_fortran_order else shape, dtype)
    content = array.reshape(-1).view(np.uint8).data
    num_read = 0
    while num_read < len(content):
        chunk = file.read(min(CHUNK_BYTES, len(content) - num_read))
        if not chunk:
            raise EOFError(f"the array ends after {num_read:,} of {len(content):,} bytes")
        content[num_read : num_read + len(chunk)] = chunk
        num_read += len(chunk)
    file.read()  # zipfile compares the checksum at the end.
    return array.T if in_fortran_order else array


def check_header(
    name: str, file: IO[bytes], size_bytes: int
) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read a header; return the shape, whether the array is in Fortran's order, and the dtype.
    Raises ValueError unless the array ends where the file or entry does, at `size_bytes`."""
    read_header = _HEADERS.get(npy.read_magic(file))
    if read_header is None:
        raise ValueError(f"{show_name(name)} must be in version 1.0 or 2.0 of .npy")
    shape, in_fortran_order, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError(f"{show_name(name)} holds objects; must be plain numbers")
    if not dtype.itemsize or count_array_bytes(name, dtype, shape) != size_bytes - file.tell():
        raise ValueError(
            f"{show_name(name)} has shape {shape}, which doesn't match the file's size"
        )
    return shape, in_fortran_order, dtype


def count_array_bytes(name: str, dtype: np.dtype, shape: Sequence[int]) -> int:
    """Return the size of an array in bytes. Raises ValueError for an impossible shape."""
    if len(shape) > MAX_AXES or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{show_name(name)} has an impossible shape; the file is damaged")
    return math.prod(shape) * dtype.itemsize


@contextmanager
def _report_damage() -> Iterator[None]:
    """Raise ValueError for the errors that zipfile and numpy raise for damaged files."""
    with warnings.catch_warnings():
        # numpy warns about headers that Python 2 wrote.
        warnings.simplefilter("ignore")
        try:
            yield
        except _DAMAGED as error:
            raise ValueError(str(error) or type(error).__name__) from error


def make_aligned_zeros(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Return an array of zeros that a CPU device uses without a copy."""
    dtype = np.dtype(dtype)
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    return buffer[start : start + size_bytes].view(dtype).reshape(shape)
