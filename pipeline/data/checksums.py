"""Checksums of data files, computed once a process for a file that stays as it is.

Nothing of them is kept from one run to the next but what was written when data were unpacked: 0.3 s
for CIFAR is little beside reading it, and to take a file's size and time for its content would let
what was changed in place pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from functools import lru_cache, partial
from pathlib import Path

from pipeline.files.bounded_read import read_text

SUMS = "SHA256SUMS"
"""The file of a folder that lists what was written there, for `sha256sum -c` too."""


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file in hexadecimal. Raises OSError where it can't be read."""
    found = path.stat()
    # The time of a change of state can't be set, unlike that of a change of content.
    as_it_is = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return _checksum(path.absolute(), algorithm, as_it_is)


@lru_cache(maxsize=256)
def _checksum(path: Path, algorithm: str, as_it_is: tuple[int, ...]) -> str:
    # No checksum of these is for keeping secrets; some systems refuse MD5 for that.
    start = partial(hashlib.new, algorithm, usedforsecurity=False)
    with path.open("rb") as content:
        return hashlib.file_digest(content, start).hexdigest()


def list_sums(folder: Path, names: Iterable[str]) -> str:
    """The lines of `sha256sum` for files of a folder. Raises OSError where one can't be read."""
    return "".join(f"{checksum(folder / name)}  {name}\n" for name in names)


def is_as_written(folder: Path, names: Collection[str]) -> bool:
    """Whether files of a folder are those that its list has, byte for byte."""
    if not all((folder / name).is_file() for name in names):
        return False
    try:
        return read_text(folder / SUMS) == list_sums(folder, names)
    except (OSError, ValueError):
        return False
