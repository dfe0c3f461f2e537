"""A log that is appended to, and the mark of it in a checkpoint, by which it is verified.

A checkpoint survives where a log does not: lines had not reached the disk at a power failure, or
the file was edited, cut or removed. So it keeps a mark of each log: length, digest and last lines.
The digest is updated with every line that is written, so a mark costs no second reading.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import sync
from pipeline.core.files.real_files import open_unshared
from pipeline.engine.monitors.log_lines import (
    LONGEST_BYTES,
    WHOLE,
    Flaws,
    parse_line,
    read_flaws,
    read_lines,
    with_gap,
)

TAIL_BYTES = 128 << 10
"""Bytes of the end of a log in a checkpoint: about a thousand steps."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Mark:
    """A log as it was at a checkpoint."""

    size_bytes: int
    lines: int
    sha256: str
    tail: bytes
    """The last lines, as many as `TAIL_BYTES` hold."""
    flaws: Flaws = WHOLE
    """Flaws that the log had already."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "size_bytes": self.size_bytes,
            "lines": self.lines,
            "sha256": self.sha256,
            "tail": self.tail.decode(),
            "flaws": self.flaws.to_dict(),
        }


def read_mark(tree: Any, step: int) -> Mark | None:
    """Return the mark in a checkpoint of `step`; None where there is none that is valid.

    The checkpoint may be somebody else's.
    """
    if not isinstance(tree, Mapping):
        return None
    size_bytes, lines, sha256, tail = map(tree.get, ("size_bytes", "lines", "sha256", "tail"))
    if type(size_bytes) is not int or type(lines) is not int:
        return None
    if not isinstance(sha256, str) or not isinstance(tail, str):
        return None
    try:
        mark = Mark(size_bytes, lines, sha256, tail.encode(), read_flaws(tree.get("flaws")))
        steps = [parse_line(line, "").step for line in mark.tail.splitlines(keepends=True)]
    except (ValueError, DataError):
        return None
    if steps != sorted(set(steps)) or not tail.endswith("\n" if steps else ""):
        return None
    fits = mark.size_bytes >= len(mark.tail) and mark.lines >= len(steps)
    return mark if fits and max(steps, default=0) <= step else None


class KeptLog:
    """Log to which whole lines are appended; the file is created where it is missing.

    A log of `every_step` has a line for each step from 1. Raises OSError where the file can't be
    opened, is a link, or is no regular file.
    """

    def __init__(self, path: Path, *, every_step: bool) -> None:
        self.path, self.flaws = path, WHOLE
        self._every_step = every_step
        self._file = _open(path)
        self._size_bytes, self._lines = 0, 0
        self._digest, self._tail_bytes = hashlib.sha256(), 0
        """Digest of the lines before the tail, which has whole lines of at least `TAIL_BYTES`."""
        self._tail: deque[bytes] = deque()

    def append(self, text: bytes) -> None:
        """Add whole lines."""
        self._file.write(text)
        self._add(text)

    def flush(self) -> None:
        """Hand all lines to the system. Raises OSError where they are not in the file of that name.

        That file must be as long as what was written: nobody else writes or cuts it.
        """
        self._file.flush()
        status = os.fstat(self._file.fileno())
        if not os.path.samestat(os.stat(self.path), status):
            raise FileNotFoundError(errno.ENOENT, "it was replaced by another file", str(self.path))
        if status.st_size != self._size_bytes:
            raise OSError(errno.EIO, "another process has changed it", str(self.path))

    def close(self) -> None:
        """Write the rest to the disk and close: a summary says next that the run has ended."""
        with self._file:
            self.flush()
            sync(self.path)

    def release(self) -> None:
        """Close without checking the file, which may be somebody else's."""
        self._file.close()

    def reopen(self) -> None:
        """Continue with the file that has the name now."""
        self.release()
        self._file = _open(self.path)

    def mark(self, step: int) -> Mark:
        """Return the mark of the lines up to `step`.

        A later line is that of a bad step that ends a run; the state is saved as before it.
        """
        text = b"".join(self._tail)
        end = len(text)
        while end and parse_line(text[(start := _last_line(text, end)) : end], "").step > step:
            end = start
        begin = 0 if end <= TAIL_BYTES else text.index(b"\n", end - TAIL_BYTES - 1) + 1
        self._tail = deque([text])
        self._shorten_tail(begin)
        tail = text[begin:end]
        digest = self._digest.copy()
        digest.update(tail)
        size_bytes = self._size_bytes - len(text) + end
        lines = self._lines - text.count(b"\n", end)
        return Mark(size_bytes, lines, digest.hexdigest(), tail, self.flaws)

    def continue_from(self, mark: Mark, step: int) -> bool:
        """Continue from a mark; False where the file does not begin with what was marked.

        The rest is cut, except lines in order up to `step`: an evaluation at the end is written
        after the last checkpoint.
        """
        self._file.seek(0)
        digest = digest_of(self._file, mark.size_bytes - len(mark.tail))
        if digest is None:
            return False
        whole = digest.copy()
        whole.update(self._file.read(len(mark.tail)))
        if whole.hexdigest() != mark.sha256:
            return False
        self._digest, self._tail, self._tail_bytes = digest, deque([mark.tail]), len(mark.tail)
        self._size_bytes, self._lines, self.flaws = mark.size_bytes, mark.lines, mark.flaws
        self._take_further_lines(mark.tail, step)
        os.ftruncate(self._file.fileno(), self._size_bytes)
        return True

    def _take_further_lines(self, tail: bytes, step: int) -> None:
        last = parse_line(tail[_last_line(tail, len(tail)) :], "").step if tail else 0
        if last == step:
            return
        self._file.seek(self._size_bytes)
        for text in iter(partial(self._file.readline, LONGEST_BYTES), b""):
            try:
                next_step = parse_line(text, "").step
            except DataError:
                return
            if not last < next_step <= step or not text.endswith(b"\n"):
                return
            last = next_step
            self._add(text)

    def cut(self, step: int) -> Flaws:
        """Cut everything after the last whole line whose step is at most `step`.

        Returns the gaps up to there in a log of every step. Raises DataError for a line that is not
        of a log; nothing is cut then.
        """
        self._file.flush()
        end, lines, last, flaws = 0, 0, 0, WHOLE
        for line in read_lines(self.path):
            if line.step > step:
                break
            end, lines = end + len(line.text), lines + 1
            flaws = self._with_gap(flaws, last, line.step)
            last = line.step
        os.ftruncate(self._file.fileno(), end)
        self._trust_file(end, lines)
        return self._with_gap(flaws, last, step + 1)

    def _with_gap(self, flaws: Flaws, last: int, step: int) -> Flaws:
        is_gap = self._every_step and step > last + 1
        return with_gap(flaws, last + 1, step - 1) if is_gap else flaws

    def _trust_file(self, size_bytes: int, lines: int) -> None:
        """Take the file as it is for the log: `size_bytes` bytes in `lines` lines."""
        self._size_bytes, self._lines = size_bytes, lines
        self._file.seek(0)
        before = max(0, size_bytes - TAIL_BYTES)
        self._digest = digest_of(self._file, before) or hashlib.sha256()
        text = self._file.read(size_bytes - before)
        begin = text.find(b"\n") + 1 if before else 0
        self._digest.update(text[:begin])
        self._tail = deque([text[begin:]])
        self._tail_bytes = len(text) - begin

    def _add(self, text: bytes) -> None:
        self._tail.append(text)
        self._tail_bytes += len(text)
        self._size_bytes += len(text)
        self._lines += text.count(b"\n")
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._shorten_tail(len(self._tail[0]))

    def _shorten_tail(self, size_bytes: int) -> None:
        """Drop `size_bytes` bytes of the first entry of the tail."""
        text = self._tail.popleft()
        self._digest.update(text[:size_bytes])
        if size_bytes < len(text):
            self._tail.appendleft(text[size_bytes:])
        self._tail_bytes -= size_bytes


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, open(path, "a+b", opener=open_unshared))


def digest_of(file: BinaryIO, size_bytes: int) -> hashlib._Hash | None:
    """Return the SHA-256 object of the next bytes of a file; None where the file is shorter."""
    digest, left = hashlib.sha256(), size_bytes
    buffer = memoryview(bytearray(min(size_bytes, CHUNK_BYTES)))
    while left and (count := file.readinto(buffer[: min(left, CHUNK_BYTES)])):  # type: ignore[attr-defined]
        digest.update(buffer[:count])
        left -= count
    return None if left else digest


def _last_line(text: bytes, end: int) -> int:
    """Return the start of the last line before `end`."""
    return text.rfind(b"\n", 0, end - 1) + 1
