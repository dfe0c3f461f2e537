"""The transfer of one file from mirrors, over http or https, resumed after an interruption."""

from __future__ import annotations

import logging
import re
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pipeline.core.errors import DataError, printable
from pipeline.core.files.atomic_write import commit
from pipeline.core.reporter import can_redraw
from pipeline.data.copies.checksums import RemoteFile, compute_checksum

STALL_S = 30.0
"""Seconds without data from a mirror, also while connecting, after which another is tried."""
MIN_BYTES_PER_STALL = 16 * 2**10
"""Fewest bytes that a mirror must send in `STALL_S`, else the next mirror is tried."""
MAX_BYTES = 2 * 2**30
"""Most bytes of a file. A limit keeps mirrors from filling the disk."""
ROUNDS = 5
"""The most rounds through all mirrors. A round that adds no bytes is the last."""
_CHUNK_BYTES = 1 << 20
log = logging.getLogger(__name__)


def transfer(file: RemoteFile, mirrors: Sequence[str], path: Path) -> None:
    """Download a file to `path` from the first mirror that delivers it. Raises DataError with the
    reason of each mirror."""
    if not mirrors:
        raise DataError(f"{file.name} could not be downloaded: dataset.mirrors is empty")
    part = path.with_name(f"{path.name}.part")
    for _ in range(ROUNDS):
        size_before = _measure_file(part)
        reasons = []
        for mirror in mirrors:
            url = f"{mirror.rstrip('/')}/{file.name}"
            log.info("downloading %s", url)
            try:
                _complete_file(part, file, url)
            except (OSError, HTTPException, ValueError) as error:
                reasons.append(f"{url}: {_describe_error(error)}")
            else:
                commit(part, path)
                text = f"file is downloaded and saved in the path {path.parent} after processing"
                print(printable(f"The {file.name} {text}"))
                return
        if _measure_file(part) <= size_before:
            break
    raise DataError("\n  ".join([f"{file.name} could not be downloaded:", *reasons]))


def _complete_file(part: Path, file: RemoteFile, url: str) -> None:
    """Complete `part` from one mirror, and verify it. Raises OSError, HTTPException or ValueError
    for a failed transfer, ValueError for a wrong checksum."""
    is_resumed = part.exists()
    _append_missing_bytes(part, file, url)
    md5 = compute_checksum(part, "md5")
    if md5 == file.md5:
        return
    part.unlink()
    if not is_resumed:
        raise ValueError(f"wrong checksum: md5 {md5} instead of {file.md5}")
    # The bytes of the interrupted download may be wrong, so all are downloaded again.
    _complete_file(part, file, url)


def _append_missing_bytes(part: Path, file: RemoteFile, url: str) -> None:
    """Download the bytes that `part` lacks, or all bytes if the server can't send a range."""
    present_bytes = _measure_file(part)
    headers = {"User-Agent": "recipe-pipeline"}
    if present_bytes:
        headers["Range"] = f"bytes={present_bytes}-"
    try:
        response = _make_opener().open(Request(url, headers=headers), timeout=STALL_S)
    except HTTPError as error:
        error.close()
        if present_bytes and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # The mirror has no further bytes.
        raise
    with response:
        content_range = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        start = int(content_range[1]) if content_range else 0
        if start not in (0, present_bytes):
            raise ValueError(f"sent bytes from {start:,} instead of {present_bytes:,}")
        length = response.headers.get("Content-Length")
        total_bytes = start + int(length) if length else file.size_bytes
        if file.size_bytes not in (None, total_bytes):
            raise ValueError(f"offers {total_bytes:,} bytes instead of {file.size_bytes:,}")
        if total_bytes is not None and not 0 <= total_bytes <= MAX_BYTES:
            raise ValueError(f"offers {total_bytes:,} bytes; must be at most {MAX_BYTES:,}")
        with part.open("ab" if start else "wb") as target:
            for chunk in _read_chunks(response, file.name, start, total_bytes):
                target.write(chunk)


def _read_chunks(
    response: HTTPResponse, name: str, num_bytes: int, total_bytes: int | None
) -> Iterator[bytes]:
    """Yield the body of a response in chunks, and show a progress bar on a terminal.

    The file already has `num_bytes` bytes, and will have `total_bytes`; None: unknown. Raises
    ConnectionError if the mirror is too slow or closes the connection early, and ValueError for
    more than `MAX_BYTES`.
    """
    progress = Progress(
        TextColumn(name),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(file=sys.stderr),
        disable=not can_redraw(sys.stderr),
    )
    with progress:
        task = progress.add_task(name, total=total_bytes, completed=num_bytes)
        deadline_s = time.monotonic() + STALL_S
        bytes_at_deadline = num_bytes + MIN_BYTES_PER_STALL
        while total_bytes is None or num_bytes < total_bytes:
            chunk = response.read1(_CHUNK_BYTES)
            if not chunk:
                break
            num_bytes += len(chunk)
            if num_bytes > MAX_BYTES:
                raise ValueError(f"sent more than {MAX_BYTES:,} bytes")
            if num_bytes >= bytes_at_deadline:
                deadline_s = time.monotonic() + STALL_S
                bytes_at_deadline = num_bytes + MIN_BYTES_PER_STALL
            elif time.monotonic() > deadline_s:
                raise ConnectionError(
                    f"sent fewer than {MIN_BYTES_PER_STALL:,} bytes in {STALL_S:g} s"
                )
            progress.update(task, completed=num_bytes)
            yield chunk
    if total_bytes is not None and num_bytes < total_bytes:
        raise ConnectionError(f"closed after {num_bytes:,} of {total_bytes:,} bytes")


def _make_opener() -> OpenerDirector:
    """Return an opener for http and https alone, also in redirects, that checks certificates."""
    opener = OpenerDirector()
    for handler in (
        ProxyHandler(),
        HTTPHandler(),
        HTTPSHandler(context=ssl.create_default_context()),
        HTTPRedirectHandler(),
        HTTPErrorProcessor(),
        HTTPDefaultErrorHandler(),
        UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _measure_file(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it doesn't exist."""
    return path.stat().st_size if path.exists() else 0


def _describe_error(error: Exception) -> str:
    """Return the reason of a failed download, for a message."""
    cause: object = error
    if isinstance(error, URLError) and not isinstance(error, HTTPError):
        cause = error.reason  # An HTTPError is described by its own text.
    if isinstance(cause, TimeoutError):
        return f"sent nothing for {STALL_S:g} s"
    return str(cause) or type(cause).__name__
