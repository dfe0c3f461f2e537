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
LANES_PER_STREAM = 16
"""Thread numbers of a stream; its first lane has this multiple of the stream's number."""
HOST_STREAMS = frozenset({"host", "feed", "pcie"})
CATEGORIES: dict[Stream, str] = {
    "get_next": "AI_CPU",
    "compute": "AI_CORE",
    "ai_cpu": "AI_CPU",
    "hccl": "HCCL",
}
"""Task types of msprof by stream. Other streams are on the host."""


def write_trace(timeline: Timeline, graph: TaskGraph, path: Path, *, steps: int = 3) -> None:
    """Write some steps in the Trace Event Format (a JSON object, times in microseconds).

    Each sink has one launch. All durations are modelled. Raises ValueError for fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"steps = {steps}: must be at least 1")
    spans = tuple(_repeat_steps(timeline, steps))
    metadata = {
        "what": "modelled, not measured",
        "mode": timeline.mode,
        "devices": timeline.devices,
        "modelled_step_us": round(timeline.step_us, 3),
        "bound": timeline.bound,
    }
    events = (_make_event(span, graph) for span in spans)
    write_trace_file(
        path, (*_list_names(spans), *_list_iterations(timeline, steps), *events), metadata
    )


def _repeat_steps(timeline: Timeline, steps: int) -> Iterator[Span]:
    """Yield the spans of steps one after another, each sink after its launch."""
    if timeline.steps_per_launch == 1:
        for step in range(steps):
            yield from _shift_spans(timeline.spans, step * timeline.step_us)
        return
    launch = [span for span in timeline.spans if span.stream == "host" and span.task is None]
    loading = [span for span in timeline.spans if span.stream in ("feed", "pcie")]
    per_step = [span for span in timeline.spans if span not in launch and span not in loading]
    for step in range(steps):
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


def _list_iterations(timeline: Timeline, steps: int) -> Iterator[TraceEvent]:
    """Yield the events of the step trace: interval, FP and BP, tail."""
    share_us = timeline.launch_us / timeline.steps_per_launch
    parts = (
        ("Interval", timeline.iteration.interval_us - share_us),
        ("FP_BP", timeline.iteration.fp_bp_us),
        ("Tail", timeline.iteration.tail_us),
    )
    row = TraceRow(DEVICE_PID, ITERATION_TID)
    for step in range(steps):
        at_us = _compute_begin_us(timeline, step)
        for name, us in parts:
            span = row.make_span(name, "ITERATION", at_us, at_us + us)
            yield span | {"args": {"iteration": step + 1}}
            at_us += us


def _make_event(span: Span, graph: TaskGraph) -> TraceEvent:
    category = CATEGORIES.get(span.stream, "HOST")
    row = TraceRow(_find_pid(span), _find_tid(span))
    event = row.make_span(span.name, category, span.start_us, span.end_us)
    args: dict[str, Any] = {"kind": span.kind, "phase": span.phase}
    if span.task is not None:
        task = graph.tasks[span.task]
        args |= {"type": task.type, "scope": task.scope, "repeat": task.repeat}
        args |= {"bound": span.bound} if span.bound else {}
        args |= {"fused": list(task.fused)} if task.fused else {}
    return event | {"args": args}


def _find_pid(span: Span) -> int:
    return HOST_PID if span.stream in HOST_STREAMS else DEVICE_PID


def _find_tid(span: Span) -> int:
    number = [stream for stream, _ in STREAMS].index(span.stream) + 1
    return number * LANES_PER_STREAM + span.lane


def _list_names(spans: tuple[Span, ...]) -> Iterator[TraceEvent]:
    """Yield the names of processes and threads, in the order of their numbers."""
    for pid, name in ((HOST_PID, "Host (modelled)"), (DEVICE_PID, "Ascend (modelled)")):
        row = TraceRow(pid, 0)
        yield row.name("process_name", name)
        yield row.make_metadata("process_sort_index", {"sort_index": pid})
    labels = dict(STREAMS)
    threads = {(_find_pid(span), _find_tid(span)): labels[span.stream] for span in spans}
    threads[DEVICE_PID, ITERATION_TID] = "Iterations"
    for (pid, tid), name in sorted(threads.items()):
        row = TraceRow(pid, tid)
        yield row.name("thread_name", name)
        yield row.make_metadata("thread_sort_index", {"sort_index": tid})
