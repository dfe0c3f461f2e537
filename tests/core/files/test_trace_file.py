"""Trace files as Perfetto reads them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from pipeline.core.files.trace_file import TraceRow, write_trace_file


def test_trace_file_has_spans_and_row_names(tmp_path: Path) -> None:
    row = TraceRow(pid=1, tid=7)
    events = [
        row.make_name("thread_name", "Host"),
        row.make_span("matmul", "AI_CORE", 1.00049, 2.5),
    ]
    write_trace_file(tmp_path / "trace.json", events, {"mode": "loop"})
    assert json.loads((tmp_path / "trace.json").read_text()) == {
        "displayTimeUnit": "ms",
        "otherData": {"mode": "loop"},
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Host"}},
            {
                "ph": "X", "name": "matmul", "cat": "AI_CORE", "ts": 1.0, "dur": 1.5, "pid": 1,
                "tid": 7,
            },
        ],
    }  # fmt: skip


def test_adjacent_spans_do_not_overlap_by_rounding() -> None:
    row = TraceRow(1, 1)
    ends = [0.0, 0.3334, 0.6665, 1.0004]
    spans = [row.make_span("", "", a, b) for a, b in itertools.pairwise(ends)]
    for before, after in itertools.pairwise(spans):
        assert round(before["ts"] + before["dur"], 3) == after["ts"]


def test_nan_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_trace_file(
            tmp_path / "trace.json", [TraceRow(1, 1).make_span("", "", float("nan"), 1)]
        )
    assert not (tmp_path / "trace.json").exists()
