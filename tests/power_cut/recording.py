"""The file operations of a run, in order, as the preloaded library has recorded them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("record.c")
HEAD = re.compile(rb"(\w+) (\d+) (-?\d+) ([^\n]*)\n")
SAVED = re.compile(rb"checkpoint of step (\d+) is on disk\n")
"""What a run says in run.log once it relies on a checkpoint, with monitor.log_level=info."""


@dataclass(frozen=True)
class Call:
    """A file operation that has taken effect."""

    kind: str
    path: str
    """Below the recorded folder."""
    place: int = 0
    """Where a write begins, the size after a truncation, whether an open file was emptied."""
    content: bytes = b""
    """What was written; the new path of a rename."""


def recorded(folder: Path, log: Path) -> Mapping[str, str]:
    """Return the environment of a process whose calls below a folder are recorded."""
    return {"RECORD_ROOT": str(folder), "RECORD_LOG": str(log)}


def read_calls(folder: Path, log: Path) -> Sequence[Call]:
    """Read what was recorded; raises AssertionError for calls that are not understood."""
    text, at, calls = log.read_bytes(), 0, []
    while at < len(text):
        head = HEAD.match(text, at)
        assert head is not None, text[at : at + 200]
        kind, path = head[1].decode(), _relative(head[4], folder)
        assert kind != "other", path
        at = head.end() + int(head[2])
        content = text[head.end() : at]
        if kind == "rename":
            content = _relative(content, folder).encode()
        calls.append(Call(kind, path, int(head[3]), content))
    return calls


def _relative(path: bytes, folder: Path) -> str:
    return os.path.relpath(os.path.normpath(os.fsdecode(path)), folder)


def newest_saved(calls: Sequence[Call]) -> int:
    """Return the newest checkpoint that a run has said is on disk, 0 before the first."""
    written = (call for call in calls if call.kind == "write" and call.path.endswith("/run.log"))
    steps = [int(step) for call in written for step in SAVED.findall(call.content)]
    return max(steps, default=0)
