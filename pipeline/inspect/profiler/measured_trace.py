"""Traced steps as a file that Perfetto and chrome://tracing open (Trace Event Format)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.inspect.profiler.iterations import Iteration, Traced
from pipeline.inspect.profiler.step_profile import StepProfile

TraceEvent = dict[str, Any]
PID, ITERATIONS_TID = 1, 0
MOST_SHOWN = 30_000
"""Operations in the file, the first ones: 6 MB, which a browser opens at once."""


def trace_events(traced: Traced, profile: StepProfile) -> list[TraceEvent]:
    """Return events in us from the first operation on: iterations with their parts, operations."""
    if not traced.events:
        return []
    zero = traced.events[0].begin_ns
    return [
        *_thread_names(traced, profile),
        *(event for one in _iterations(traced.iterations, zero) for event in one),
        *_operations(traced, zero),
    ]


def _thread_names(traced: Traced, profile: StepProfile) -> Iterator[TraceEvent]:
    yield _name("process_name", 0, f"{profile.recipe} on {profile.device}, measured")
    yield _name("thread_name", ITERATIONS_TID, "Iterations")
    for place, thread in enumerate(sorted({event.thread for event in traced.events}), 1):
        yield _name("thread_name", thread, f"Thread {place}")


def _name(kind: str, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": PID, "tid": tid, "args": {"name": name}}


def _iterations(points: tuple[Iteration, ...], zero: float) -> Iterator[tuple[TraceEvent, ...]]:
    before = None
    for number, point in enumerate(points, 1):
        begin = before.end if before is not None else point.begin
        parts = (
            ("data tail", begin, point.fp_begin),
            ("FP and BP", point.fp_begin, point.bp_end),
            ("update tail", point.bp_end, point.end),
        )
        yield tuple(
            _complete(name, "iteration", begin - zero, end - zero, ITERATIONS_TID)
            | {"args": {"iteration": number}}
            for name, begin, end in parts
            if end > begin
        )
        before = point


def _operations(traced: Traced, zero: float) -> Iterator[TraceEvent]:
    for event in traced.events[:MOST_SHOWN]:
        operation = traced.operations[event.name]
        args: TraceEvent = {"kind": operation.kind, "phase": operation.phase}
        args |= {"layer": operation.layer} if operation.layer else {}
        args |= {"scope": operation.instruction.scope} if operation.instruction.scope else {}
        yield _complete(
            event.name, operation.phase, event.begin_ns - zero, event.end_ns - zero, event.thread
        ) | {"args": args}


def _complete(name: str, category: str, begin_ns: float, end_ns: float, tid: int) -> TraceEvent:
    # Both ends are rounded alike, so that neighbours don't overlap by a rounding error.
    begin, end = round(begin_ns / 1e3, 3), round(end_ns / 1e3, 3)
    about = {"ts": begin, "dur": round(end - begin, 3), "pid": PID, "tid": tid}
    return {"ph": "X", "name": name, "cat": category, **about}
