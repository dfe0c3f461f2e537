"""A timeline as a page: streams as lanes, shares of the time, the slowest layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.report.time_by_layer import Layer, slowest_layers
from pipeline.backends.ascend.simulate.timeline import KINDS, STREAMS, Kind, Span, Timeline
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.svg_page import drawing, line, page, rectangle, text, ticks

COLOURS: dict[Kind, str] = {
    "cube": "#2b5c8f",
    "vector": "#4e9b82",
    "format": "#dd9f36",
    "communication": "#b94a55",
    "ai_cpu": "#8267ab",
    "data": "#6f7f8a",
    "host": "#b3aa9c",
}
LABELS: dict[Kind, str] = {
    "cube": "Cube",
    "vector": "Vector",
    "format": "Format conversion",
    "communication": "Communication",
    "ai_cpu": "AI CPU",
    "data": "Data",
    "host": "Host",
}
MODES = {"op_by_op": "op by op", "graph_sink": "graph sink", "loop_sink": "loop sink"}

WIDTH, LEFT, RIGHT = 1056.0, 112.0, 8.0
LANE, GAP = 24.0, 10.0
GRID, AXIS = "#e3e6e5", "#5d6971"


def write_picture(
    timeline: Timeline, graph: TaskGraph, path: Path, *, title: str = "Modelled step"
) -> None:
    """Write one steady step as an HTML page without script or other files."""
    write_whole(path, picture(timeline, graph, title))


def picture(timeline: Timeline, graph: TaskGraph, title: str) -> str:
    """Return the page's text."""
    return page(
        title,
        (
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(_subtitle(timeline))}</p>",
            _figures(timeline),
            "<h2>One step</h2>",
            _lanes(timeline, graph),
            "<h2>Shares of the step</h2>",
            _shares(timeline),
            "<h2>Slowest layers</h2>",
            _table(slowest_layers(timeline, graph), timeline),
            "<footer>All times are modelled, none was measured on a device. Overlapped "
            "time counts in no share.</footer>",
        ),
    )


def _subtitle(timeline: Timeline) -> str:
    devices = "1 device" if timeline.devices == 1 else f"{timeline.devices:,} devices"
    mode = MODES[timeline.mode]
    if timeline.mode == "loop_sink":
        count = timeline.steps_per_launch
        mode = f"{mode} of {count:,} step{'s' if count > 1 else ''}"
    return f"Emulated device, {mode}, {devices}"


def _figures(timeline: Timeline) -> str:
    trace = timeline.iteration
    rows = (
        ("Step", _ms(timeline.step_us)),
        ("Interval", _ms(trace.interval_us)),
        ("FP + BP", _ms(trace.fp_bp_us)),
        ("Tail", _ms(trace.tail_us)),
        ("Critical path", _ms(timeline.critical_path_us)),
        ("Limited by", timeline.bound),
    )
    items = (f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    return f"<dl>{''.join(items)}</dl>"


def _ms(us: float) -> str:
    if us < 10:
        return f"{us:.1f} us"
    return f"{us / 1e3:.3g} ms" if us < 1e5 else f"{us / 1e3:.0f} ms"


def _x(us: float, timeline: Timeline) -> float:
    return LEFT + us / timeline.step_us * (WIDTH - LEFT - RIGHT)


def _lanes(timeline: Timeline, graph: TaskGraph) -> str:
    used = sorted(
        {(span.stream, span.lane) for span in timeline.spans},
        key=lambda lane: ([stream for stream, _ in STREAMS].index(lane[0]), lane[1]),
    )
    rows = {lane: 34 + (LANE + GAP) * number for number, lane in enumerate(used, 1)}
    foot = 34 + (LANE + GAP) * (len(used) + 1)
    marks = [*_axis(timeline, foot), *_iteration(timeline, 34)]
    for (stream, lane), y in rows.items():
        own = [span for span in timeline.spans if (span.stream, span.lane) == (stream, lane)]
        label = dict(STREAMS)[stream] + (f" {lane + 1}" if lane else "")
        marks.append(text(0, y + 16, label, size=13))
        marks += _blocks(own, y, timeline, graph)
    return drawing(WIDTH, foot, "Streams of one step over time", marks)


def _axis(timeline: Timeline, foot: float) -> Iterator[str]:
    for tick in ticks(timeline.step_us):
        x = _x(tick, timeline)
        yield line(x, 22, x, foot - GAP, GRID)
        yield text(x, 14, f"{tick / 1e3:g}", anchor="middle", quiet=True)
    yield text(0, 14, "ms", quiet=True)


def _iteration(timeline: Timeline, y: float) -> Iterator[str]:
    trace = timeline.iteration
    yield text(0, y + 16, "Iteration", size=13)
    at_us = 0.0
    parts = (
        ("Interval", trace.interval_us, "#eceae4"),
        ("FP + BP", trace.fp_bp_us, "#d5e0ea"),
        ("Tail", trace.tail_us, "#efdcdc"),
    )
    for name, us, colour in parts:
        x, end = _x(at_us, timeline), _x(at_us + us, timeline)
        yield rectangle(x, y, end - x, LANE, colour, f"{name} {_ms(us)}")
        words = f"{name} {_ms(us)}"
        if end - x > 7 * len(words):
            yield text((x + end) / 2, y + 16, words, anchor="middle")
        at_us += us


def _blocks(spans: Sequence[Span], y: float, timeline: Timeline, graph: TaskGraph) -> Iterator[str]:
    for span, count in _merged(spans, timeline.step_us / (WIDTH - LEFT - RIGHT)):
        x, end = _x(span.start_us, timeline), _x(span.end_us, timeline)
        scope = graph.tasks[span.task].scope if span.task is not None and count == 1 else ""
        what = f"{span.name} {scope}".strip() if count == 1 else f"{count} x {LABELS[span.kind]}"
        tip = f"{what}, {span.duration_us:.1f} us"
        width = end - x - (0.8 if end - x > 4 else 0)
        yield rectangle(x, y, width, LANE, COLOURS[span.kind], tip)
        words = f"{span.name} {_ms(span.duration_us)}"
        if count == 1 and width > 7 * len(words):
            yield text(x + width / 2, y + 16, words, anchor="middle", light=True)


def _merged(spans: Sequence[Span], pixel_us: float) -> Iterator[tuple[Span, int]]:
    """Merge neighbours of one kind that are too thin to distinguish."""
    held: Span | None = None
    count = 0
    for span in spans:
        if held is not None and _touch(held, span, pixel_us):
            held = replace(held, duration_us=span.end_us - held.start_us)
            count += 1
            continue
        if held is not None:
            yield held, count
        held, count = span, 1
    if held is not None:
        yield held, count


def _touch(first: Span, second: Span, pixel_us: float) -> bool:
    thin = second.end_us - first.start_us < 2 * pixel_us
    near = second.start_us - first.end_us < 0.1 * pixel_us
    return thin and near and first.kind == second.kind


def _shares(timeline: Timeline) -> str:
    marks, legend, at = [], [], 0.0
    for kind in KINDS:
        us = timeline.exposed_us[kind]
        width = us / timeline.step_us * WIDTH
        if us <= 0:
            continue
        share = f"{LABELS[kind]} {us / timeline.step_us:.1%}, {_ms(us)}"
        marks.append(rectangle(at, 0, width, 18, COLOURS[kind], share))
        legend.append(f'<li><i style="background:{COLOURS[kind]}"></i>{escape(share)}</li>')
        at += width
    bar = drawing(WIDTH, 18, "Shares of the step", marks)
    return f'{bar}\n<ul class="legend">{"".join(legend)}</ul>'


def _table(layers: Sequence[Layer], timeline: Timeline) -> str:
    heads = ("Layer", "Tasks", "Forward", "Backward", "Update", "All", "Of the step")
    rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for layer in layers:
        times = (layer.forward_us, layer.backward_us, layer.update_us, layer.us)
        cells = (
            escape(layer.name),
            str(layer.tasks),
            *(_ms(us) if us else "" for us in times),
            f"{layer.us / timeline.step_us:.1%}",
        )
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"
