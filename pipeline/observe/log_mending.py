"""A log that is not what was written into it: put right as far as a checkpoint can.

What the log has of whole lines before those that are in the mark, and then these, are the log
again. Where the digest says that this is what was written, all is well; else it is named what is
missing, and the file as it was found is kept beside.
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

from pipeline.errors import DataError
from pipeline.observe.kept_log import CHUNK_BYTES, KeptLog, Mark, digest_of
from pipeline.observe.log_flaws import WHOLE, Flaws, Ranges, ranges_of, steps_text, with_gap
from pipeline.runner.record.log_lines import LONGEST_BYTES, LogLine, parse_line


@dataclass(frozen=True)
class Found:
    """What was found of a log when its run was resumed."""

    path: Path
    flaws: Flaws = WHOLE
    restored: Ranges = ()
    """Ranges of steps whose lines were lost or others, and are there again."""
    set_aside: str | None = None
    """The name of the file as it was found."""
    changed: bool = False

    def __bool__(self) -> bool:
        return bool(self.flaws) or self.changed

    def __str__(self) -> str:
        told = [f"{self.path.name}: was not as it was written"] if self.changed else []
        if self.restored:
            told.append(f"lines of {steps_text(self.restored)} are restored from the checkpoint")
        if self.flaws:
            told.append(str(self.flaws) if told else f"{self.path.name}: {self.flaws}")
        elif self.changed:
            told.append("it is whole again")
        if self.set_aside:
            told.append(f"as it was found it is kept as {self.set_aside}")
        return "; ".join(told)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        aside = {"set_aside": self.set_aside} if self.set_aside else {}
        return {**self.flaws.to_dict(), "restored": self.restored, **aside}


def open_log(
    path: Path, step: int, mark: Mark | None, *, every_step: bool, own: bool
) -> tuple[KeptLog, Found]:
    """Open a log to be continued behind boundary `step`, and say what was found of it.

    `mark` is that of the checkpoint; without one, what comes after the step is cut. The gaps of a
    log of `every_step` are named where the run has done the steps before by its `own`. Raises
    OSError, and DataError for a log without a mark that can't be read.
    """
    with ExitStack() as failing:
        log = KeptLog(path, every_step=every_step)
        failing.callback(log.release)
        if mark is None:
            flaws = log.cut(step)
            log.flaws = flaws if own else WHOLE
            found = Found(path, log.flaws)
        elif log.continue_from(mark, step):
            found = Found(path, log.flaws)
        else:
            mended, found = _mend(path, mark, step, every_step=every_step)
            log.reopen()
            log.continue_from(mended, step)
        failing.pop_all()
    return log, found


@dataclass
class _Draft:
    """A log that is being put together, line by line."""

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
        """Take the lines before the tail of a mark, which end at step `last`, where all are there.

        They need not be looked at one by one then. `source` is at its start else.
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


def _mend(path: Path, mark: Mark, step: int, *, every_step: bool) -> tuple[Mark, Found]:
    """Put a log together again; the mark of what it is then, and what was found."""
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
    os.replace(part, path)
    restored = ranges_of(sorted(wanted.keys() - intact))
    mended = Mark(draft.size_bytes, draft.lines, sha256, mark.tail, flaws)
    return mended, Found(path, flaws, restored, aside, changed=True)


def _flaws(draft: _Draft, mark: Mark) -> Flaws:
    """What a log lacks that is not, line by line, what was marked."""
    if draft.every_step:
        return Flaws(draft.flaws.missing, draft.flaws.missing_lines, verified=False)
    lost = max(0, mark.lines - draft.lines)
    return Flaws((), mark.flaws.missing_lines + lost, verified=False)


def _whole_lines(file: BinaryIO) -> Iterator[LogLine]:
    """The lines of a log among whatever else a file may hold by now.

    Of a file whose blocks were not written, nulls are left; an editor may have put CR LF.
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
    """Give a file another name; none where it is empty."""
    if path.stat().st_size == 0:
        return None
    names = (path.with_name(f"damaged-{path.name}-{number}") for number in range(1, 1000))
    free = next(name for name in names if not os.path.lexists(name))
    path.rename(free)
    return free.name
