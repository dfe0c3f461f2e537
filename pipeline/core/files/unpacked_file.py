"""Files that may be compressed, gzip or zip, read as what they hold, up to a size limit."""

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
"""A file may unpack to this multiple of its size, if that is more. Zeros shrink to a thousandth."""
_GZIP = b"\x1f\x8b"
_ZIP = b"PK\x03\x04"
_DAMAGED = (
    *(OSError, EOFError, RuntimeError, NotImplementedError, ValueError),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, or what a gzip file or a zip file of one file holds, under any name.

    Reading raises ValueError for a damaged file and one that unpacks to too much; opening it too,
    for a zip file of several. Raises OSError for a file that can't be opened.
    """
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        start = file.read(4)
        file.seek(0)
        limit_bytes = max(MOST_UNPACKED_BYTES, MOST_RATIO * path.stat().st_size)
        if start.startswith(_GZIP):
            unpacked = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=file)))
        elif start == _ZIP:
            unpacked = stack.enter_context(_only_member(file, stack))
        else:
            yield file
            return
        yield io.BufferedReader(_Limited(unpacked, limit_bytes))


def _only_member(file: IO[bytes], stack: ExitStack) -> IO[bytes]:
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
    """Whether an entry is a folder, or what systems add."""
    return name.endswith("/") or any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


class _Limited(io.RawIOBase):
    """Bytes of a compressed file, up to a limit; damage becomes a ValueError."""

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
