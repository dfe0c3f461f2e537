"""Checksums of data files, which a process computes once while a file's status stays the same.

They aren't stored: size and times don't reveal all changes between processes. CIFAR takes 0.3 s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from pipeline.core.files.bounded_read import read_text

SUMS = "SHA256SUMS"
"""Name of the file that lists the checksums of a folder, readable by `sha256sum -c`."""


def compute_checksum(path: Path, algorithm: str = "sha256") -> str:
    """Return the checksum of a file in hexadecimal. Raises OSError if it can't be read."""
    stat = path.stat()
    # Programs can set mtime, but not ctime, the time of the last change of the file's status.
    status = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return _compute_cached(path.absolute(), algorithm, status)


@lru_cache(maxsize=256)
def _compute_cached(path: Path, algorithm: str, status: tuple[int, ...]) -> str:
    """Return the checksum of a file. `status` is a part of the cache's key alone."""
    # Some systems allow MD5 only if it isn't used for security.
    make_hash = partial(hashlib.new, algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, make_hash).hexdigest()


def format_checksums(folder: Path, names: Iterable[str]) -> str:
    """Return the lines that `sha256sum` prints for files of a folder, in the order of `names`.
    Raises OSError if a file can't be read."""
    return "".join(f"{compute_checksum(folder / name)}  {name}\n" for name in names)


def has_recorded_sums(folder: Path, names: Collection[str]) -> bool:
    """Return whether a folder has all these files, and a `SUMS` with exactly their checksums."""
    if not all((folder / name).is_file() for name in names):
        return False
    try:
        return read_text(folder / SUMS) == format_checksums(folder, names)
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class RemoteFile:
    """A published file, which has this name on every mirror. `md5` is in hexadecimal."""

    name: str
    md5: str
    size_bytes: int | None = None
    """None: unknown."""
