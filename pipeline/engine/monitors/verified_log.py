"""A log that is appended to, and its mark in a checkpoint, by which it is verified and repaired.

A power cut may lose lines of a log, and the file may be edited, truncated or removed. So a
checkpoint has a mark of each log: its length, its digest and its last lines, the tail. The digest
is updated with every line, so the file isn't read again for a mark.

A damaged log is rebuilt from its complete lines before the tail, and from the tail. If the digest
is the same then, the log is as it was written. Otherwise the missing lines are reported, and the
damaged file is kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import commit, sync
from pipeline.core.files.trusted_files import open_unshared
from pipeline.engine.monitors.log_lines import (
    LONGEST_BYTES,
    MAX_RANGES,
    NO_FLAWS,
    Flaws,
    LogLine,
    Ranges,
    find_ranges,
    format_steps,
    parse_line,
    read_lines,
)

TAIL_BYTES = 128 << 10
"""Largest size of a mark's tail, about a thousand steps."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Mark:
    """A log as it was at a checkpoint."""

    size_bytes: int
    lines: int
    """Number of lines."""
    sha256: str
    tail: bytes
    """The last lines, at most `TAIL_BYTES`."""
    flaws: Flaws = NO_FLAWS
    """Flaws that the log had at the checkpoint."""

    def to_dict(self) -> dict[str, Any]:
        """Return the mark as JSON."""
        return {**asdict(self), "tail": self.tail.decode()}


def read_mark(tree: Any, step: int) -> Mark | None:
    """Return the mark in a checkpoint of `step`; None if it is invalid."""
    try:
        flaws_tree = tree["flaws"]
        missing = tuple((first, last) for first, last in flaws_tree["missing"])
        flaws = Flaws(missing, flaws_tree["missing_lines"], flaws_tree["verified"])
        tail = tree["tail"].encode()
        mark = Mark(tree["size_bytes"], tree["lines"], tree["sha256"], tail, flaws)
        steps = [parse_line(line, "").step for line in tail.splitlines(keepends=True)]
    except (ValueError, TypeError, KeyError, AttributeError, DataError):
        return None
    numbers = [mark.size_bytes, mark.lines, flaws.missing_lines]
    numbers += [number for steps_of_range in missing for number in steps_of_range]
    if any(type(number) is not int or number < 0 for number in numbers):
        return None
    if type(mark.sha256) is not str or type(flaws.verified) is not bool:
        return None
    if len(missing) > MAX_RANGES:
        return None
    if steps != sorted(set(steps)) or (steps and not mark.tail.endswith(b"\n")):
        return None
    is_long_enough = mark.size_bytes >= len(mark.tail) and mark.lines >= len(steps)
    return mark if is_long_enough and max(steps, default=0) <= step else None


class VerifiedLog:
    """Log to which whole lines are appended; the file is created if it is missing.

    If `has_all_steps`, it has a line for each step from 1. Raises OSError if the file can't be
    opened, is a link, or isn't a regular file.
    """

    def __init__(self, path: Path, *, has_all_steps: bool) -> None:
        self.path = path
        self.flaws = NO_FLAWS
        self._has_all_steps = has_all_steps
        self._file = _open(path)
        self._size_bytes = 0
        self._lines = 0
        self._tail = bytearray()
        """Last lines, at least `TAIL_BYTES` of a log of this size or more."""
        self._digest = hashlib.sha256()
        """Digest of the lines before the tail."""

    def append(self, text: bytes) -> None:
        """Add whole lines."""
        self._file.write(text)
        self._add(text)

    def flush(self) -> None:
        """Pass all lines to the system. Raises OSError if the file was replaced, or another process
        has written or truncated it."""
        self._file.flush()
        status = os.fstat(self._file.fileno())
        if not os.path.samestat(os.stat(self.path), status):
            raise FileNotFoundError(errno.ENOENT, "it was replaced by another file", str(self.path))
        if status.st_size != self._size_bytes:
            raise OSError(errno.EIO, "another process has changed it", str(self.path))

    def close(self) -> None:
        """Sync the file to the disk and close it, before a summary reports the end of the run."""
        with self._file:
            self.flush()
            sync(self.path)

    def release(self) -> None:
        """Close the file without checking it."""
        self._file.close()

    def mark(self, step: int) -> Mark:
        """Return the mark of the lines up to `step`.

        There is a later line if a non-finite step ends the run, since the state before is saved.
        """
        text = bytes(self._tail)
        end = len(text)
        while end:
            start = _find_last_line(text, end)
            if parse_line(text[start:end], "").step <= step:
                break
            end = start
        begin = 0 if end <= TAIL_BYTES else text.index(b"\n", end - TAIL_BYTES - 1) + 1
        digest = self._digest.copy()
        digest.update(text[:end])
        size_bytes = self._size_bytes - len(text) + end
        lines = self._lines - text.count(b"\n", end)
        return Mark(size_bytes, lines, digest.hexdigest(), text[begin:end], self.flaws)

    def continue_from(self, mark: Mark, step: int) -> bool:
        """Continue from a mark; return False if the file doesn't begin with the marked lines.

        Later lines stay while their steps grow up to `step`, such as that of an evaluation after
        the checkpoint. All others are removed.
        """
        digest = _hash_before_tail(self._file, mark)
        if digest is None or self._file.read(len(mark.tail)) != mark.tail:
            return False
        self._digest = digest
        self._tail = bytearray(mark.tail)
        self._size_bytes = mark.size_bytes
        self._lines = mark.lines
        self.flaws = mark.flaws
        self._read_further_lines(mark.tail, step)
        os.ftruncate(self._file.fileno(), self._size_bytes)
        return True

    def _read_further_lines(self, tail: bytes, step: int) -> None:
        """Add the lines after the tail of a mark while their steps grow up to `step`."""
        last = parse_line(tail[_find_last_line(tail, len(tail)) :], "").step if tail else 0
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

    def truncate(self, step: int) -> Flaws:
        """Remove everything after the last complete line whose step is at most `step`.

        Returns the missing steps if the log must have all steps. Raises DataError for an invalid
        line, before anything is removed.
        """
        self._file.flush()
        self._size_bytes = 0
        self._lines = 0
        self._tail.clear()
        self._digest = hashlib.sha256()
        last = 0
        flaws = NO_FLAWS
        for line in read_lines(self.path):
            if line.step > step:
                break
            self._add(line.text)
            flaws = self.add_gap(flaws, last, line.step)
            last = line.step
        os.ftruncate(self._file.fileno(), self._size_bytes)
        return self.add_gap(flaws, last, step + 1)

    def add_gap(self, flaws: Flaws, last: int, step: int) -> Flaws:
        """Return flaws with the steps that are missing between lines of steps `last` and `step`."""
        if not self._has_all_steps or step <= last + 1:
            return flaws
        ranges = (*flaws.missing, (last + 1, step - 1))[:MAX_RANGES]
        missing_lines = flaws.missing_lines + step - last - 1
        return replace(flaws, missing=ranges, missing_lines=missing_lines)

    def _add(self, text: bytes) -> None:
        """Update size, tail and digest for lines that were written or read."""
        self._size_bytes += len(text)
        self._lines += text.count(b"\n")
        self._tail += text
        if len(self._tail) > 2 * TAIL_BYTES:
            begin = self._tail.rfind(b"\n", 0, -TAIL_BYTES) + 1
            self._digest.update(self._tail[:begin])
            del self._tail[:begin]


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, open(path, "a+b", opener=open_unshared))


def _hash_before_tail(file: BinaryIO, mark: Mark) -> hashlib._Hash | None:
    """Return the SHA-256 object of the bytes before the tail of a mark; None if they aren't those
    that the mark is of, or fewer."""
    size_bytes = mark.size_bytes - len(mark.tail)
    file.seek(0)
    digest = hashlib.sha256()
    for chunk in _read_chunks(file, size_bytes):
        digest.update(chunk)
    if file.tell() < size_bytes:
        return None
    marked_digest = digest.copy()
    marked_digest.update(mark.tail)
    return digest if marked_digest.hexdigest() == mark.sha256 else None


def _read_chunks(file: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """Yield the next bytes of a file, fewer if it is shorter."""
    while size_bytes and (chunk := file.read(min(size_bytes, CHUNK_BYTES))):
        yield chunk
        size_bytes -= len(chunk)


def _find_last_line(text: bytes, end: int) -> int:
    """Return the start of the line that ends at `end`."""
    return text.rfind(b"\n", 0, end - 1) + 1


@dataclass(frozen=True)
class LogFindings:
    """Findings about a log when it was opened."""

    path: Path
    flaws: Flaws = NO_FLAWS
    restored: Ranges = ()
    """Ranges of steps whose lines were lost or changed, and are restored."""
    set_aside: str | None = None
    """New name of the damaged file."""
    is_changed: bool = False
    """Whether the file differs from what was written."""

    def __bool__(self) -> bool:
        return bool(self.flaws) or self.is_changed

    def __str__(self) -> str:
        texts = [f"{self.path.name}: differs from what was written"] if self.is_changed else []
        if self.restored:
            texts.append(f"lines of {format_steps(self.restored)} are restored from the checkpoint")
        if self.flaws:
            texts.append(str(self.flaws) if texts else f"{self.path.name}: {self.flaws}")
        elif self.is_changed:
            texts.append("it is complete again")
        if self.set_aside:
            texts.append(f"the damaged file is kept as {self.set_aside}")
        return "; ".join(texts)

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as JSON."""
        set_aside = {"set_aside": self.set_aside} if self.set_aside else {}
        return {**asdict(self.flaws), "restored": self.restored, **set_aside}


def open_log(
    path: Path, step: int, mark: Mark | None, *, has_all_steps: bool, resumed: bool
) -> tuple[VerifiedLog, LogFindings]:
    """Open a log to be continued after boundary `step`, and return the findings about it.

    `mark` is from the checkpoint; without it, the lines after `step` are removed, and missing steps
    are reported if the run is `resumed`. Raises OSError, and DataError for a log that has no mark
    and can't be read.
    """
    with ExitStack() as on_failure:
        log = VerifiedLog(path, has_all_steps=has_all_steps)
        on_failure.callback(log.release)
        if mark is None:
            flaws = log.truncate(step)
            log.flaws = flaws if resumed else NO_FLAWS
            findings = LogFindings(path, log.flaws)
        elif log.continue_from(mark, step):
            findings = LogFindings(path, log.flaws)
        else:
            rebuilt_mark, findings = _rebuild(path, mark, step, has_all_steps=has_all_steps)
            log.release()
            log = VerifiedLog(path, has_all_steps=has_all_steps)
            on_failure.callback(log.release)
            log.continue_from(rebuilt_mark, step)
        on_failure.pop_all()
    return log, findings


def _rebuild(path: Path, mark: Mark, step: int, *, has_all_steps: bool) -> tuple[Mark, LogFindings]:
    """Rebuild a log; return the mark of the result, and the findings."""
    tail = [parse_line(line, "") for line in mark.tail.splitlines(keepends=True)]
    text_by_step = {line.step: line.text for line in tail}
    begin = tail[0].step if tail else step + 1
    end = tail[-1].step if tail else step
    intact: set[int] = set()
    further_lines: list[bytes] = []
    flaws = NO_FLAWS
    last = 0
    draft_path = path.with_name(f"{path.name}.{os.getpid()}.part")
    draft_path.unlink(missing_ok=True)
    draft = VerifiedLog(draft_path, has_all_steps=has_all_steps)

    def add(line: LogLine) -> None:
        nonlocal flaws, last
        flaws = draft.add_gap(flaws, last, line.step)
        draft.append(line.text)
        last = line.step

    with ExitStack() as files:
        source = files.enter_context(path.open("rb"))
        files.callback(draft.release)
        is_intact = _hash_before_tail(source, mark) is not None
        source.seek(0)
        if is_intact:
            # The lines before the tail needn't be parsed one by one.
            last = begin - 1
            for chunk in _read_chunks(source, mark.size_bytes - len(mark.tail)):
                draft.append(chunk)
        for line in _read_whole_lines(source):
            if last < line.step < begin:
                add(line)
            elif text_by_step.get(line.step) == line.text:
                intact.add(line.step)
            elif end < line.step <= step:
                further_lines.append(line.text)
        for line in tail:
            add(line)
        rebuilt = draft.mark(end)
        draft.append(b"".join(further_lines))
    if rebuilt.sha256 == mark.sha256:
        flaws = mark.flaws
        set_aside = None
    else:
        flaws = replace(flaws, verified=False)
        if not has_all_steps:
            num_lost = max(0, mark.lines - rebuilt.lines)
            flaws = Flaws((), mark.flaws.missing_lines + num_lost, verified=False)
        set_aside = _set_aside(path)
    commit(draft_path, path)
    restored = find_ranges(text_by_step.keys() - intact)
    findings = LogFindings(path, flaws, restored, set_aside, is_changed=True)
    return replace(rebuilt, flaws=flaws), findings


def _read_whole_lines(file: BinaryIO) -> Iterator[LogLine]:
    """Yield the valid lines of a damaged log, without the null bytes of blocks that weren't
    written, and without the BOM and CRs of an editor."""
    for text in iter(partial(file.readline, LONGEST_BYTES), b""):
        text = text.lstrip(b"\0").removeprefix(BOM_UTF8)
        if text.endswith(b"\r\n"):
            text = text[:-2] + b"\n"
        if not text.endswith(b"\n"):
            continue
        try:
            yield parse_line(text, "")
        except DataError:
            continue


def _set_aside(path: Path) -> str | None:
    """Rename a damaged file and return its new name; None if it is empty."""
    if path.stat().st_size == 0:
        return None
    names = (path.with_name(f"damaged-{path.name}-{number}") for number in range(1, 1000))
    new_path = next(name for name in names if not os.path.lexists(name))
    path.rename(new_path)
    return new_path.name
