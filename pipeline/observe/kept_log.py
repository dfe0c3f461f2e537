"""A log that is appended to, and what a checkpoint keeps of it to know it again.

A checkpoint outlives what a log does not: lines that had not reached the disk when the power went,
a file that was edited, cut or removed. So it keeps a mark of each log: length, digest and last
lines. The digest goes on with the lines that are written, so that a mark costs no more than they.
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

from pipeline.errors import DataError
from pipeline.files.real_files import open_unshared
from pipeline.observe.log_flaws import WHOLE, Flaws, read_flaws, with_gap
from pipeline.runner.record.log_lines import LONGEST_BYTES, parse_line, read_lines

TAIL_BYTES = 128 << 10
"""So much of the end of a log is in a checkpoint: about a thousand steps."""
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
    """What it lacked already."""

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
    """Return the mark in a checkpoint of `step`; None where there is none, or it can be none.

    The checkpoint may be of an older version, or somebody else's.
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
    """Appends whole lines to a file, which is made where it is missing.

    In a log of `every_step` there is a line for each step from 1. Raises OSError where it can't be
    opened, and for what is a link or no regular file.
    """

    def __init__(self, path: Path, *, every_step: bool) -> None:
        self.path, self.flaws = path, WHOLE
        self._every_step = every_step
        self._file = _open(path)
        self._size_bytes, self._lines = 0, 0
        self._digest, self._tail_bytes = hashlib.sha256(), 0
        """Of what comes before the tail: whole lines, the last `TAIL_BYTES` of them at least."""
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
        """Write what is left and close."""
        with self._file:
            self.flush()

    def release(self) -> None:
        """Close without a look: what is in the file is somebody else's."""
        self._file.close()

    def reopen(self) -> None:
        """Go on with the file that has the name now."""
        self.release()
        self._file = _open(self.path)

    def mark(self, step: int) -> Mark:
        """Return the mark of the lines up to `step`.

        Those beyond are of the bad step that ends a run, which is saved as it was before.
        """
        text = b"".join(self._tail)
        end = len(text)
        while end and parse_line(text[(start := _last_line(text, end)) : end], "").step > step:
            end = start
        begin = 0 if end <= TAIL_BYTES else text.index(b"\n", end - TAIL_BYTES - 1) + 1
        self._tail = deque([text])
        self._let_go(begin)
        tail = text[begin:end]
        digest = self._digest.copy()
        digest.update(tail)
        size_bytes = self._size_bytes - len(text) + end
        lines = self._lines - text.count(b"\n", end)
        return Mark(size_bytes, lines, digest.hexdigest(), tail, self.flaws)

    def continue_from(self, mark: Mark, step: int) -> bool:
        """Go on from a mark; False where the file does not begin with what was marked.

        What comes beyond is cut, but for lines in order up to `step`: an evaluation of the end is
        written once the last checkpoint is.
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
                found = parse_line(text, "").step
            except DataError:
                return
            if not last < found <= step or not text.endswith(b"\n"):
                return
            last = found
            self._add(text)

    def cut(self, step: int) -> Flaws:
        """Cut off what comes after the last whole line whose step is at most `step`.

        Gives what a log of every step lacks up to there. Raises DataError for a line that is none
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
        self._go_on(end, lines)
        return self._with_gap(flaws, last, step + 1)

    def _with_gap(self, flaws: Flaws, last: int, step: int) -> Flaws:
        is_gap = self._every_step and step > last + 1
        return with_gap(flaws, last + 1, step - 1) if is_gap else flaws

    def _go_on(self, size_bytes: int, lines: int) -> None:
        """Take what is in the file as written: so many bytes, so many lines."""
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
            self._let_go(len(self._tail[0]))

    def _let_go(self, size_bytes: int) -> None:
        """Keep so many bytes less of the first lines that are kept."""
        text = self._tail.popleft()
        self._digest.update(text[:size_bytes])
        if size_bytes < len(text):
            self._tail.appendleft(text[size_bytes:])
        self._tail_bytes -= size_bytes


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, open(path, "a+b", opener=open_unshared))


def digest_of(file: BinaryIO, size_bytes: int) -> hashlib._Hash | None:
    """Return the SHA-256, to be gone on with, of the next bytes of a file; None where it ends."""
    digest, left = hashlib.sha256(), size_bytes
    while left and (chunk := file.read(min(left, CHUNK_BYTES))):
        digest.update(chunk)
        left -= len(chunk)
    return None if left else digest


def _last_line(text: bytes, end: int) -> int:
    """Where the last line before `end` starts."""
    return text.rfind(b"\n", 0, end - 1) + 1
