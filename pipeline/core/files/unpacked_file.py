"""Reading of files that may be compressed by gzip or zip, up to a size limit."""

from __future__ import annotations

import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, cast

MOST_UNPACKED_BYTES = 256 << 20
MOST_RATIO = 100
"""Limit of the unpacked size relative to the file's size. The larger limit applies."""
_GZIP = b"\x1f\x8b"
_ZIP = b"PK\x03\x04"
_DAMAGED = (
    *(OSError, EOFError, RuntimeError, NotImplementedError, ValueError),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, or the content of a gzip file or of a zip file of one file, under any name.

    Raises OSError if the file can't be opened, and ValueError for a zip file that is damaged or has
    several files. Reading raises ValueError for damage, and for content beyond the limit.
    """
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        start = file.read(4)
        file.seek(0)
        limit_bytes = max(MOST_UNPACKED_BYTES, MOST_RATIO * path.stat().st_size)
        if start.startswith(_GZIP):
            unpacked = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=file)))
        elif start == _ZIP:
            unpacked = stack.enter_context(_open_only_member(file, stack))
        else:
            yield file
            return
        yield io.BufferedReader(_LimitedReader(unpacked, limit_bytes))


def _open_only_member(file: IO[bytes], stack: ExitStack) -> IO[bytes]:
    try:
        archive = stack.enter_context(zipfile.ZipFile(file))
        names = [name for name in archive.namelist() if not _is_hidden(name)]
        if len(names) == 1:
            return archive.open(names[0])
    except _DAMAGED as error:
        raise ValueError(f"can't be unpacked: {error}") from error
    listed = ", ".join(f"{name!r:.60}" for name in names[:3]) + ", ..." * (len(names) > 3)
    raise ValueError(f"holds {len(names)} files ({listed}); a zip file must hold one")


def _is_hidden(name: str) -> bool:
    """Return whether an entry is a folder, or a file that systems add."""
    return name.endswith("/") or any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


class _LimitedReader(io.RawIOBase):
    """Reads a compressed file. Raises ValueError for damage, and for content beyond the limit."""

    def __init__(self, unpacked: IO[bytes], limit_bytes: int) -> None:
        self._unpacked = unpacked
        self._limit_bytes = limit_bytes
        self._read_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        try:
            content = self._unpacked.read(len(view))
        except _DAMAGED as error:
            raise ValueError(f"can't be unpacked: {error}") from error
        view[: len(content)] = content
        self._read_bytes += len(content)
        if self._read_bytes > self._limit_bytes:
            raise ValueError(
                f"unpacks to more than {self._limit_bytes:,} bytes, over {MOST_RATIO} times its "
                "size; unpack it to read it"
            )
        return len(content)
