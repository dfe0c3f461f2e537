"""Trace files (Trace Event Format), which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.files.atomic_write import write_whole

TraceEvent = dict[str, Any]


@dataclass(frozen=True)
class TraceRow:
    """A row of a trace: a thread of a process."""

    pid: int
    tid: int

    def make_name(self, kind: str, name: str) -> TraceEvent:
        """Return the event that names the row (`thread_name`) or its process (`process_name`)."""
        return self.make_metadata(kind, {"name": name})

    def make_metadata(self, kind: str, args: Mapping[str, Any]) -> TraceEvent:
        """Return an event about the row, such as `thread_sort_index`."""
        return {"ph": "M", "name": kind, "pid": self.pid, "tid": self.tid, "args": dict(args)}

    def make_span(self, name: str, category: str, begin_us: float, end_us: float) -> TraceEvent:
        """Return an event with a begin and an end, in microseconds."""
        # Both are rounded before they are subtracted, so that adjacent spans don't overlap.
        begin = round(begin_us, 3)
        end = round(end_us, 3)
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "ts": begin,
            "dur": round(end - begin, 3),
            "pid": self.pid,
            "tid": self.tid,
        }


def write_trace_file(
    path: Path, events: Iterable[TraceEvent], metadata: Mapping[str, Any] | None = None
) -> None:
    """Write a trace, and its `metadata`. Raises OSError, and ValueError for a NaN."""
    other_data = {} if metadata is None else {"otherData": dict(metadata)}
    trace = {"displayTimeUnit": "ms", **other_data, "traceEvents": list(events)}
    write_whole(path, json.dumps(trace, allow_nan=False, separators=(",", ":")))
