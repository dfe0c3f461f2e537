"""A timeline as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.simulate.timeline import STREAMS, Span, Stream, Timeline
from pipeline.core.files.trace_file import TraceEvent, TraceRow, write_trace_file

HOST_PID = 1
DEVICE_PID = 2
ITERATION_TID = 1
STEPS = 3
"""Steps of a trace."""
CATEGORIES: dict[Stream, str] = {
    "get_next": "AI_CPU",
    "compute": "AI_CORE",
    "ai_cpu": "AI_CPU",
    "hccl": "HCCL",
}
"""Task types of msprof by stream. Other streams are on the host."""
ROWS = {
    stream: TraceRow(DEVICE_PID if stream in CATEGORIES else HOST_PID, 16 * number)
    for number, stream in enumerate(STREAMS, 1)
}


def write_trace(timeline: Timeline, graph: TaskGraph, path: Path) -> None:
    """Write `STEPS` steps in the Trace Event Format (a JSON object, times in microseconds).

    Each sink has one launch. All durations are modelled.
    """
    spans = tuple(_repeat_steps(timeline))
    metadata = {
        "what": "modelled, not measured",
        "mode": timeline.mode,
        "devices": timeline.devices,
        "modelled_step_us": round(timeline.step_us, 3),
        "bound": timeline.bound,
    }
    events = (_make_event(span, graph) for span in spans)
    write_trace_file(path, (*_list_names(spans), *_list_iterations(timeline), *events), metadata)


def _repeat_steps(timeline: Timeline) -> Iterator[Span]:
    """Yield the spans of steps one after another, each sink after its launch."""
    if timeline.steps_per_launch == 1:
        for step in range(STEPS):
            yield from _shift_spans(timeline.spans, step * timeline.step_us)
        return
    launch = [span for span in timeline.spans if span.stream == "host" and span.task is None]
    loading = [span for span in timeline.spans if span.stream in ("feed", "pcie")]
    per_step = [span for span in timeline.spans if span not in launch and span not in loading]
    for step in range(STEPS):
        begin_us = _compute_begin_us(timeline, step)
        if step % timeline.steps_per_launch == 0:
            at_us = begin_us - timeline.launch_us
            yield from (
                replace(span, start_us=at_us, duration_us=timeline.launch_us) for span in launch
            )
        yield from _shift_spans(per_step, begin_us - timeline.launch_us / timeline.steps_per_launch)
        # The queue's loader runs at the mean pace, also during the launches of sinks.
        yield from _shift_spans(loading, step * timeline.step_us)


def _shift_spans(spans: Sequence[Span], by_us: float) -> Iterator[Span]:
    return (replace(span, start_us=span.start_us + by_us) for span in spans)


def _compute_begin_us(timeline: Timeline, step: int) -> float:
    """Return the microsecond at which a step starts, after the launch of the step or its sink."""
    launches = step // timeline.steps_per_launch + 1
    within_us = timeline.step_us - timeline.launch_us / timeline.steps_per_launch
    return launches * timeline.launch_us + step * within_us


def _list_iterations(timeline: Timeline) -> Iterator[TraceEvent]:
    """Yield the events of the step trace: interval, FP and BP, tail."""
    share_us = timeline.launch_us / timeline.steps_per_launch
    parts = (
        ("Interval", timeline.iteration.interval_us - share_us),
        ("FP_BP", timeline.iteration.fp_bp_us),
        ("Tail", timeline.iteration.tail_us),
    )
    row = TraceRow(DEVICE_PID, ITERATION_TID)
    for step in range(STEPS):
        at_us = _compute_begin_us(timeline, step)
        for name, us in parts:
            span = row.make_span(name, "ITERATION", at_us, at_us + us)
            yield span | {"args": {"iteration": step + 1}}
            at_us += us


def _make_event(span: Span, graph: TaskGraph) -> TraceEvent:
    category = CATEGORIES.get(span.stream, "HOST")
    event = ROWS[span.stream].make_span(span.name, category, span.start_us, span.end_us)
    args: dict[str, Any] = {"kind": span.kind, "phase": span.phase}
    if span.task is not None:
        task = graph.tasks[span.task]
        args |= {"type": task.type, "scope": task.scope, "repeat": task.repeat}
        args |= {"bound": span.bound} if span.bound else {}
        args |= {"fused": list(task.fused)} if task.fused else {}
    return event | {"args": args}


def _list_names(spans: tuple[Span, ...]) -> Iterator[TraceEvent]:
    """Yield the names of processes and threads, in the order of their numbers."""
    for pid, name in ((HOST_PID, "Host (modelled)"), (DEVICE_PID, "Ascend (modelled)")):
        row = TraceRow(pid, 0)
        yield row.name("process_name", name)
        yield row.make_metadata("process_sort_index", {"sort_index": pid})
    names = {ROWS[span.stream]: STREAMS[span.stream] for span in spans}
    names[TraceRow(DEVICE_PID, ITERATION_TID)] = "Iterations"
    for row, name in sorted(names.items(), key=lambda entry: (entry[0].pid, entry[0].tid)):
        yield row.name("thread_name", name)
        yield row.make_metadata("thread_sort_index", {"sort_index": row.tid})
