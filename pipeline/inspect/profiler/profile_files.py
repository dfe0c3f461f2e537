"""Files of a profile: profile.json, table.txt, trace.json and picture.svg."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.strict_json import json_text
from pipeline.core.files.trace_file import TraceEvent, TraceRow, write_trace_file
from pipeline.inspect.profiler.iterations import Traced
from pipeline.inspect.profiler.profile_picture import profile_picture
from pipeline.inspect.profiler.profile_table import profile_table
from pipeline.inspect.profiler.step_profile import StepProfile, StepVerdict

JSON = "profile.json"
TABLE = "table.txt"
TRACE = "trace.json"
PICTURE = "picture.svg"
FORMAT = 1
ITERATION_PARTS = ("data tail", "FP and BP", "update tail")
PID = 1
ITERATIONS_TID = 0
MAX_TRACE_OPERATIONS = 30_000
"""Most operations in trace.json. A file of 6 MB opens at once in a browser."""


@dataclass(frozen=True)
class ProfileReport:
    """The profiles of a step, the measured one first, and the verdict."""

    profiles: tuple[StepProfile, ...]
    verdict: StepVerdict
    traced: Traced

    def __str__(self) -> str:
        return profile_table(self.profiles, self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of profile.json."""
        return {
            "format": FORMAT,
            "verdict": {**asdict(self.verdict), "text": str(self.verdict)},
            "profiles": [profile.to_dict() for profile in self.profiles],
        }


def write_profile(report: ProfileReport, folder: Path) -> Path:
    """Write a profile's files into a folder, which is created if needed. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / JSON, json_text(report.to_dict(), indent=1) + "\n")
    write_whole(folder / TABLE, profile_table(report.profiles, report.verdict, rows=None) + "\n")
    write_trace_file(folder / TRACE, list(_trace_events(report.traced, report.profiles[0])))
    write_whole(folder / PICTURE, profile_picture(report.traced, report.profiles, report.verdict))
    return folder


def _trace_events(traced: Traced, profile: StepProfile) -> Iterator[TraceEvent]:
    """Yield the parts of iterations, then operations, in us from the first operation."""
    if not traced.events:
        return
    zero = traced.events[0].begin_ns

    def span(name: str, category: str, begin_ns: float, end_ns: float, tid: int) -> TraceEvent:
        row = TraceRow(PID, tid)
        return row.span(name, category, (begin_ns - zero) / 1e3, (end_ns - zero) / 1e3)

    yield TraceRow(PID, 0).name("process_name", f"{profile.recipe} on {profile.device}, measured")
    yield TraceRow(PID, ITERATIONS_TID).name("thread_name", "Iterations")
    for place, thread in enumerate(sorted({event.thread for event in traced.events}), 1):
        yield TraceRow(PID, thread).name("thread_name", f"Thread {place}")
    begins = [iteration.begin for iteration in traced.iterations[:1]]
    begins += [iteration.end for iteration in traced.iterations]
    for number, (begin, point) in enumerate(zip(begins, traced.iterations, strict=False), 1):
        times = (begin, point.fp_begin, point.bp_end, point.end)
        for name, (start, end) in zip(ITERATION_PARTS, pairwise(times), strict=True):
            if end > start:
                event = span(name, "iteration", start, end, ITERATIONS_TID)
                yield event | {"args": {"iteration": number}}
    for traced_op in traced.events[:MAX_TRACE_OPERATIONS]:
        operation = traced.operations[traced_op.name]
        args: TraceEvent = {"kind": operation.kind, "phase": operation.phase}
        args |= {"layer": operation.layer} if operation.layer else {}
        args |= {"scope": operation.instruction.scope} if operation.instruction.scope else {}
        begin_ns = traced_op.begin_ns
        end_ns = traced_op.end_ns
        event = span(traced_op.name, operation.phase, begin_ns, end_ns, traced_op.thread)
        yield event | {"args": args}
