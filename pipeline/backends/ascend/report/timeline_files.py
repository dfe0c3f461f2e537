"""A timeline as files: an HTML page, and a trace that Perfetto and chrome://tracing open.

The page has streams as lanes, shares of the time, and the slowest layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.report.priced_step import Layer, find_slowest_layers
from pipeline.backends.ascend.simulate.timeline import KINDS, STREAMS, Kind, Span, Stream, Timeline
from pipeline.core.files.trace_file import TraceEvent, TraceRow, write_trace_file
from pipeline.core.pages.charts import LABELS as LABEL_WIDTH
from pipeline.core.pages.charts import WIDE, Lane, LaneBar, draw_lanes, stack_blocks
from pipeline.core.pages.page import Charts, Drawing, Legend, Page, RowTable, Section, render_page

COLOURS: dict[Kind, str] = {
    "cube": "blue", "vector": "green", "format": "amber", "communication": "red",
    "ai_cpu": "purple", "data": "slate", "host": "sand",
}  # fmt: skip
LABELS: dict[Kind, str] = {
    "cube": "Cube", "vector": "Vector", "format": "Format conversion",
    "communication": "Communication", "ai_cpu": "AI CPU", "data": "Data", "host": "Host",
}  # fmt: skip
MODES = {"op_by_op": "op by op", "graph_sink": "graph sink", "loop_sink": "loop sink"}
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


def render_picture(timeline: Timeline, graph: TaskGraph, title: str) -> str:
    """Return one steady step as an HTML page without script or other files."""
    exposed = [(kind, timeline.exposed_us[kind]) for kind in KINDS if timeline.exposed_us[kind] > 0]
    shares = {
        COLOURS[kind]: f"{LABELS[kind]} {us / timeline.step_us:.1%}, {_format_time(us)}"
        for kind, us in exposed
    }
    bar = Lane("", stack_blocks((COLOURS[kind], us, shares[COLOURS[kind]]) for kind, us in exposed))
    layers = [_make_layer_row(layer, timeline) for layer in find_slowest_layers(timeline, graph)]
    sections = [
        Section("One step, ms", "", [Charts([_draw_lanes(timeline, graph)])]),
        Section(
            "Shares of the step",
            "",
            [Charts([draw_lanes("Shares of the step", [bar], timeline.step_us)]), Legend(shares)],
        ),
        Section("Slowest layers", "", [RowTable(layers)] if layers else []),
    ]
    footer = (
        "All times are modelled, none was measured on a device. Overlapped time counts in no share."
    )
    iteration = timeline.iteration
    figures = {
        "Step": _format_time(timeline.step_us),
        "Interval": _format_time(iteration.interval_us),
        "FP + BP": _format_time(iteration.fp_bp_us),
        "Tail": _format_time(iteration.tail_us),
        "Critical path": _format_time(timeline.critical_path_us),
        "Limited by": timeline.bound,
    }
    devices = "1 device" if timeline.devices == 1 else f"{timeline.devices:,} devices"
    mode = MODES[timeline.mode]
    if timeline.mode == "loop_sink":
        count = timeline.steps_per_launch
        mode = f"{mode} of {count:,} step{'s' if count > 1 else ''}"
    subtitle = f"Emulated device, {mode}, {devices}"
    page = Page("timeline", title, subtitle, sections, figures, footer)
    return render_page(page)


def _format_time(us: float) -> str:
    if us < 10:
        return f"{us:.1f} us"
    return f"{us / 1e3:.3g} ms" if us < 1e5 else f"{us / 1e3:.0f} ms"


def _draw_lanes(timeline: Timeline, graph: TaskGraph) -> Drawing:
    """Draw the iteration and each stream in milliseconds."""
    step = timeline.iteration
    parts = (
        ("pale-sand", step.interval_us / 1e3, f"Interval {_format_time(step.interval_us)}"),
        ("pale-blue", step.fp_bp_us / 1e3, f"FP + BP {_format_time(step.fp_bp_us)}"),
        ("pale-red", step.tail_us / 1e3, f"Tail {_format_time(step.tail_us)}"),
    )
    lanes = [Lane("Iteration", stack_blocks(parts))]
    for stream, label in STREAMS.items():
        spans = [span for span in timeline.spans if span.stream == stream]
        if spans:
            lanes.append(Lane(label, list(_draw_blocks(spans, timeline, graph))))
    title = "Streams of one step over time"
    return draw_lanes(title, lanes, timeline.step_us / 1e3, ticks=True)


def _draw_blocks(spans: Sequence[Span], timeline: Timeline, graph: TaskGraph) -> Iterator[LaneBar]:
    for span, count in _merge_thin(spans, timeline.step_us / (WIDE - LABEL_WIDTH)):
        scope = graph.tasks[span.task].scope if span.task is not None and count == 1 else ""
        label = f"{span.name} {scope}".strip() if count == 1 else f"{count} x {LABELS[span.kind]}"
        words = f"{span.name} {_format_time(span.duration_us)}" if count == 1 else ""
        tip = f"{label}, {span.duration_us:.1f} us"
        yield LaneBar(span.start_us / 1e3, span.end_us / 1e3, COLOURS[span.kind], tip, words)


def _merge_thin(spans: Sequence[Span], pixel_us: float) -> Iterator[tuple[Span, int]]:
    """Yield spans and their counts. Close spans of a kind are merged up to a width of 2 pixels."""
    merged: Span | None = None
    count = 0
    for span in spans:
        if (
            merged is not None
            and merged.kind == span.kind
            and span.end_us - merged.start_us < 2 * pixel_us
            and span.start_us - merged.end_us < 0.1 * pixel_us
        ):
            merged = replace(merged, duration_us=span.end_us - merged.start_us)
            count += 1
            continue
        if merged is not None:
            yield merged, count
        merged = span
        count = 1
    if merged is not None:
        yield merged, count


def _make_layer_row(layer: Layer, timeline: Timeline) -> dict[str, str]:
    times = {
        "Forward": layer.forward_us,
        "Backward": layer.backward_us,
        "Update": layer.update_us,
        "All": layer.us,
    }
    return {
        "Layer": layer.name,
        "Tasks": str(layer.tasks),
        **{name: _format_time(us) if us else "" for name, us in times.items()},
        "Of the step": f"{layer.us / timeline.step_us:.1%}",
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
        yield row.make_name("process_name", name)
        yield row.make_metadata("process_sort_index", {"sort_index": pid})
    names = {ROWS[span.stream]: STREAMS[span.stream] for span in spans}
    names[TraceRow(DEVICE_PID, ITERATION_TID)] = "Iterations"
    for row, name in sorted(names.items(), key=lambda entry: (entry[0].pid, entry[0].tid)):
        yield row.make_name("thread_name", name)
        yield row.make_metadata("thread_sort_index", {"sort_index": row.tid})
