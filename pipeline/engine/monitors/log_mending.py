"""Repair of a log that is not what was written into it, as far as a checkpoint can.

The log is rebuilt of its whole lines before the tail of the mark, and of that tail. Where the
digest agrees, this is what was written. Else the missing lines are reported, and the file as it was
found is kept beside the log.
"""

from __future__ import annotations

import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import commit
from pipeline.engine.monitors.kept_log import CHUNK_BYTES, KeptLog, Mark, digest_of
from pipeline.engine.monitors.log_lines import (
    LONGEST_BYTES,
    WHOLE,
    Flaws,
    LogLine,
    Ranges,
    parse_line,
    ranges_of,
    steps_text,
    with_gap,
)


@dataclass(frozen=True)
class LogFindings:
    """Findings about a log when its run was resumed."""

    path: Path
    flaws: Flaws = WHOLE
    restored: Ranges = ()
    """Ranges of steps whose lines were lost or changed, and are restored."""
    set_aside: str | None = None
    """The name of the file as it was found."""
    changed: bool = False

    def __bool__(self) -> bool:
        return bool(self.flaws) or self.changed

    def __str__(self) -> str:
        text = [f"{self.path.name}: was not as it was written"] if self.changed else []
        if self.restored:
            text.append(f"lines of {steps_text(self.restored)} are restored from the checkpoint")
        if self.flaws:
            text.append(str(self.flaws) if text else f"{self.path.name}: {self.flaws}")
        elif self.changed:
            text.append("it is whole again")
        if self.set_aside:
            text.append(f"as it was found it is kept as {self.set_aside}")
        return "; ".join(text)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        aside = {"set_aside": self.set_aside} if self.set_aside else {}
        return {**self.flaws.to_dict(), "restored": self.restored, **aside}


def open_log(
    path: Path, step: int, mark: Mark | None, *, every_step: bool, own: bool
) -> tuple[KeptLog, LogFindings]:
    """Open a log to be continued after boundary `step`, and return the findings about it.

    `mark` is that of the checkpoint; without one, the lines after `step` are cut. Gaps of a log of
    `every_step` are reported where the run itself has done the steps before (`own`). Raises
    OSError, and DataError for a log without a mark that can't be read.
    """
    with ExitStack() as failing:
        log = KeptLog(path, every_step=every_step)
        failing.callback(log.release)
        if mark is None:
            flaws = log.cut(step)
            log.flaws = flaws if own else WHOLE
            findings = LogFindings(path, log.flaws)
        elif log.continue_from(mark, step):
            findings = LogFindings(path, log.flaws)
        else:
            mended, findings = _mend(path, mark, step, every_step=every_step)
            log.reopen()
            log.continue_from(mended, step)
        failing.pop_all()
    return log, findings


@dataclass
class _Draft:
    """A log that is being rebuilt, line by line."""

    file: BinaryIO
    every_step: bool
    last: int = 0
    lines: int = 0
    size_bytes: int = 0
    flaws: Flaws = WHOLE
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, line: LogLine) -> None:
        if self.every_step and line.step > self.last + 1:
            self.flaws = with_gap(self.flaws, self.last + 1, line.step - 1)
        self.file.write(line.text)
        self.digest.update(line.text)
        self.last, self.lines = line.step, self.lines + 1
        self.size_bytes += len(line.text)

    def add_start(self, source: BinaryIO, mark: Mark, last: int) -> None:
        """Copy the lines before the tail of a mark, up to step `last`, where all are intact.

        They need not be parsed one by one then. Else `source` is left at its start.
        """
        size_bytes = mark.size_bytes - len(mark.tail)
        digest = digest_of(source, size_bytes)
        is_start = digest is not None and _with(digest, mark.tail) == mark.sha256
        source.seek(0)
        if is_start:
            left = size_bytes
            while left:
                left -= self.file.write(source.read(min(left, CHUNK_BYTES)))
            self.size_bytes, self.digest, self.last = size_bytes, digest, last
            self.lines = mark.lines - mark.tail.count(b"\n")


def _mend(path: Path, mark: Mark, step: int, *, every_step: bool) -> tuple[Mark, LogFindings]:
    """Rebuild a log; return the mark of the result, and the findings."""
    tail = [parse_line(line, "") for line in mark.tail.splitlines(keepends=True)]
    wanted = {line.step: line.text for line in tail}
    begin, end = (tail[0].step, tail[-1].step) if tail else (step + 1, step)
    intact, further = set(), []
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    with path.open("rb") as source, part.open("xb") as file:
        draft = _Draft(file, every_step)
        draft.add_start(source, mark, begin - 1)
        for line in _whole_lines(source):
            if draft.last < line.step < begin:
                draft.add(line)
            elif wanted.get(line.step) == line.text:
                intact.add(line.step)
            elif end < line.step <= step:
                further.append(line)
        for line in tail:
            draft.add(line)
        file.writelines(line.text for line in further)
    sha256 = draft.digest.hexdigest()
    proven = sha256 == mark.sha256
    flaws = mark.flaws if proven else _flaws(draft, mark)
    aside = None if proven else _set_aside(path)
    commit(part, path)
    restored = ranges_of(sorted(wanted.keys() - intact))
    mended = Mark(draft.size_bytes, draft.lines, sha256, mark.tail, flaws)
    return mended, LogFindings(path, flaws, restored, aside, changed=True)


def _flaws(draft: _Draft, mark: Mark) -> Flaws:
    """Return the flaws of a rebuilt log whose digest is not that of the mark."""
    if draft.every_step:
        return Flaws(draft.flaws.missing, draft.flaws.missing_lines, verified=False)
    lost = max(0, mark.lines - draft.lines)
    return Flaws((), mark.flaws.missing_lines + lost, verified=False)


def _whole_lines(file: BinaryIO) -> Iterator[LogLine]:
    """Yield the lines of a log, without anything else that the file may hold.

    A file whose blocks were not written has null bytes; an editor may have written CR LF.
    """
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


def _with(digest: Any, tail: bytes) -> str:
    whole = digest.copy()
    whole.update(tail)
    return str(whole.hexdigest())


def _set_aside(path: Path) -> str | None:
    """Rename a damaged file and return its new name; None where it is empty."""
    if path.stat().st_size == 0:
        return None
    names = (path.with_name(f"damaged-{path.name}-{number}") for number in range(1, 1000))
    free = next(name for name in names if not os.path.lexists(name))
    path.rename(free)
    return free.name
