"""The file operations of a run, in order, recorded by a preloaded library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("record.c")
HEAD = re.compile(rb"(\w+) (\d+) (-?\d+) ([^\n]*)\n")
SAVED = re.compile(rb"checkpoint of step (\d+) is on disk\n")
"""A line of run.log with monitor.log_level=info: from now on the run relies on the checkpoint."""


@dataclass(frozen=True)
class Call:
    """A successful file operation."""

    kind: str
    path: str
    """Below the recorded folder."""
    place: int = 0
    """The start of a write, the size after a truncation, whether an open file was emptied."""
    content: bytes = b""
    """The written bytes; the new path of a rename."""


def make_settings(folder: Path, log: Path) -> Mapping[str, str]:
    """Return the environment of a process that records its calls below a folder."""
    return {"RECORD_ROOT": str(folder), "RECORD_LOG": str(log)}


def read_calls(folder: Path, log: Path) -> Sequence[Call]:
    """Read the recorded calls. Raises AssertionError for an unknown kind of call."""
    text = log.read_bytes()
    end = 0
    calls = []
    while end < len(text):
        head = HEAD.match(text, end)
        assert head is not None, text[end : end + 200]
        kind = head[1].decode()
        path = _make_relative(head[4], folder)
        assert kind != "other", path
        end = head.end() + int(head[2])
        content = text[head.end() : end]
        if kind == "rename":
            content = _make_relative(content, folder).encode()
        calls.append(Call(kind, path, int(head[3]), content))
    return calls


def _make_relative(path: bytes, folder: Path) -> str:
    return os.path.relpath(os.path.normpath(os.fsdecode(path)), folder)


def find_newest_saved(calls: Sequence[Call]) -> int:
    """Return the step of the newest checkpoint that the run relies on, 0 before the first."""
    writes = (call for call in calls if call.kind == "write" and call.path.endswith("/run.log"))
    steps = [int(step) for call in writes for step in SAVED.findall(call.content)]
    return max(steps, default=0)
