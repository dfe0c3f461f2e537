"""Files of a profile: profile.json, table.txt, trace.json, picture.svg, and the run's record.

The command `profile RUN` writes the report again from this record, as `msprof` parses raw data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.core.errors import DataError, first_line, get_system_reason
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.trace_file import TraceEvent, TraceRow, write_trace_file
from pipeline.core.files.value_text import format_bytes
from pipeline.core.pages.charts import WIDE, Lane, LaneBar, draw_lanes, stack_blocks
from pipeline.core.pages.page import Drawing, stack_drawings
from pipeline.inspect.profiler.measured_profile import ProfiledRun, measured_profile
from pipeline.inspect.profiler.step_profile import LayerTime, StepProfile, StepVerdict
from pipeline.inspect.profiler.trace import Iteration, Traced, read_operations
from pipeline.inspect.profiler.verdict import Evidence, decide
from pipeline.stages.record.run_directory import PROFILE

JSON = "profile.json"
TABLE = "table.txt"
TRACE = "trace.json"
PICTURE = "picture.svg"
FORMAT = 1
"""Version of the format of profile.json."""
ITERATION_PARTS = ("data tail", "FP and BP", "update tail")
PID = 1
ITERATIONS_TID = 0
MAX_TRACE_OPERATIONS = 30_000
"""trace.json has at most this many operations. A file of 6 MB opens at once in a browser."""
ROWS = 12
"""Number of layers, and of operators, that are printed; table.txt has all."""
NAME_WIDTH = 34
"""Width, in characters, of the column of names."""
KILO = 1e3
GIGA = 1e9
COLOURS = {
    "data": "slate",
    "forward": "blue",
    "backward": "green",
    "update": "amber",
    "communication": "red",
    "other": "purple",
    "between operators": "gap",
}
"""Colours by phase; a phase that isn't listed has the colour of `other`."""
PICTURED_LAYERS = 12
LINE_CHARACTERS = 150
RAW = "raw"
"""Folder of the record in the folder of a profile."""
RECORD = "record.json"
XSPACE = "trace.xplane.pb"
MAX_RAW_BYTES = 1 << 30


@dataclass(frozen=True)
class ProfileReport:
    """The profiles of a step, the measured one first, and the verdict."""

    profiles: tuple[StepProfile, ...]
    verdict: StepVerdict
    traced: Traced

    def __str__(self) -> str:
        return profile_table(self)

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
    write_whole(folder / JSON, format_json(report.to_dict(), indent=1) + "\n")
    write_whole(folder / TABLE, profile_table(report, rows=None) + "\n")
    write_trace_file(folder / TRACE, list(_trace_events(report.traced, report.profiles[0])))
    write_whole(folder / PICTURE, profile_picture(report))
    return folder


def _trace_events(traced: Traced, profile: StepProfile) -> Iterator[TraceEvent]:
    """Yield the parts of iterations, then operations, in us from the first operation."""
    if not traced.events:
        return
    first_ns = traced.events[0].begin_ns

    def span(name: str, category: str, begin_ns: float, end_ns: float, tid: int) -> TraceEvent:
        row = TraceRow(PID, tid)
        return row.make_span(name, category, (begin_ns - first_ns) / 1e3, (end_ns - first_ns) / 1e3)

    yield TraceRow(PID, 0).make_name(
        "process_name", f"{profile.recipe} on {profile.device}, measured"
    )
    yield TraceRow(PID, ITERATIONS_TID).make_name("thread_name", "Iterations")
    for place, thread in enumerate(sorted({event.thread for event in traced.events}), 1):
        yield TraceRow(PID, thread).make_name("thread_name", f"Thread {place}")
    # An iteration begins at the end of the one before it.
    begins = [iteration.begin for iteration in traced.iterations[:1]]
    begins += [iteration.end for iteration in traced.iterations[:-1]]
    for number, (begin, point) in enumerate(zip(begins, traced.iterations, strict=True), 1):
        times = (begin, point.fp_begin, point.bp_end, point.end)
        for name, (start, end) in zip(ITERATION_PARTS, pairwise(times), strict=True):
            if end > start:
                event = span(name, "iteration", start, end, ITERATIONS_TID)
                yield event | {"args": {"iteration": number}}
    for op in traced.events[:MAX_TRACE_OPERATIONS]:
        operation = traced.operations[op.name]
        args: TraceEvent = {"kind": operation.kind, "phase": operation.phase}
        args |= {"layer": operation.layer} if operation.layer else {}
        args |= {"scope": operation.instruction.scope} if operation.instruction.scope else {}
        event = span(op.name, operation.phase, op.begin_ns, op.end_ns, op.thread)
        yield event | {"args": args}


def profile_table(report: ProfileReport, rows: int | None = ROWS) -> str:
    """Return profiles and verdict as text, with at most `rows` layers and operators, or all."""
    profiles = report.profiles
    lines: list[str] = []
    for profile in profiles:
        lines += [*_format_head(profile), ""]
    lines += [*_format_phases(profiles), "", *_format_layers(profiles, rows), ""]
    for profile in profiles:
        lines += [*_format_operators(profile, rows), ""] if profile.operators else []
    doubt = "; doubtful, as said above" if profiles[0].doubts else ""
    return "\n".join([*lines, f"Verdict: {report.verdict}{doubt}"])


def _format_head(profile: StepProfile) -> Iterator[str]:
    is_measured = profile.source == "measured"
    steps = f"{profile.steps} traced steps" if is_measured else "MODELLED, not measured"
    yield f"{profile.recipe} on {profile.device}, batch {profile.batch_size:,}: {steps}"
    traced_ms = profile.traced_step_ms
    traced = "" if traced_ms is None else f" ({_format_ms(traced_ms)} traced)"
    yield f"  step       {_format_ms(profile.step_ms)} ms{traced}{_format_rates(profile)}"
    for doubt in profile.doubts:
        yield f"  doubtful   {doubt}"
    if profile.iteration is not None:
        times = profile.iteration
        yield (
            f"  iteration  {_format_ms(times.iteration)} ms = data tail "
            f"{_format_ms(times.data_tail)} + forward and backward {_format_ms(times.fp_bp)} + "
            f"update tail {_format_ms(times.update_tail)}"
        )
    if profile.host is not None:
        host = profile.host
        yield (
            f"  host       {_format_ms(host.device)} ms in the program, {_format_ms(host.wait)} "
            f"waiting for data, {_format_ms(host.between)} between dispatches "
            f"({host.share(host.between):.1%}); "
            f"{host.dispatches:,} dispatches of {host.steps:,} untraced steps"
        )
        yield from _format_preparation(profile.feed)
    if profile.shares:
        shares = (f"{name} {share:.1%}" for name, share in profile.shares.items() if share)
        yield f"  shares     {', '.join(shares)}"
    if profile.memory:
        cells = (f"{name} {format_bytes(count)}" for name, count in profile.memory.items())
        yield f"  memory     {', '.join(cells)}"
    if profile.coverage is not None:
        coverage = profile.coverage
        yield (
            f"  coverage   {coverage.named:.1%} of the operators' time has a layer or a phase; "
            f"parts are {coverage.parts_of_step:.1%} of the traced steps; "
            f"{coverage.overlap:.2f} operators at once"
        )


def _format_rates(profile: StepProfile) -> str:
    peaks = profile.peaks
    if peaks is None or not profile.step_ms:
        return ""
    seconds = profile.step_ms / KILO
    flops = profile.flops / seconds
    nbytes = profile.nbytes / seconds
    return (
        f"; {flops / GIGA:,.1f} GFLOP/s, {flops / peaks.flops:.0%} of {peaks.flops / GIGA:,.0f}; "
        f"{nbytes / GIGA:,.1f} GB/s, {nbytes / peaks.bytes_per_s:.0%} of "
        f"{peaks.bytes_per_s / GIGA:,.1f}"
    )


def _format_preparation(feed: Mapping[str, object]) -> Iterator[str]:
    """Yield the time that a streaming loader takes to prepare each column of a batch."""
    ms_by_column = feed.get("prepare_ms_per_step")
    if feed.get("kind") != "stream" or not isinstance(ms_by_column, Mapping) or not ms_by_column:
        return
    ordered = sorted(ms_by_column.items(), key=lambda item: -item[1])
    slowest, _ = ordered[0]
    costs = ", ".join(f"{name} {_format_ms(ms)}" for name, ms in ordered)
    yield f"  data       ms a step to prepare, all threads: {costs}; slowest {slowest}"


def _format_phases(profiles: Sequence[StepProfile]) -> Iterator[str]:
    yield _format_row("phase", [head for profile in profiles for head in _name_columns(profile)])
    for name in dict.fromkeys(phase.phase for profile in profiles for phase in profile.phases):
        cells = []
        for profile in profiles:
            match = next((phase for phase in profile.phases if phase.phase == name), None)
            cells += ["", ""] if match is None else [_format_ms(match.ms), f"{match.share:.1%}"]
        yield _format_row(name, cells)


def _name_columns(profile: StepProfile) -> tuple[str, str]:
    return ("ms" if profile.source == "measured" else "modelled ms"), "share"


def _format_layers(profiles: Sequence[StepProfile], rows: int | None) -> Iterator[str]:
    first = profiles[0]
    heads = ["forward", "backward", "ms", "share", "GFLOP/s", "GB/s"]
    other_profiles = profiles[1:]
    heads += [head for profile in other_profiles for head in _name_columns(profile)]
    yield _format_row("layer", heads)
    for layer in first.layers[:rows]:
        cells = [_format_ms(layer.forward_ms), _format_ms(layer.backward_ms), _format_ms(layer.ms)]
        rates = ["", ""]
        if layer.ms:
            seconds = layer.ms / KILO
            rates = [f"{amount / seconds / GIGA:,.1f}" for amount in (layer.flops, layer.nbytes)]
        cells += [f"{layer.share:.1%}", *rates]
        for other in other_profiles:
            match = next((row for row in other.layers if row.layer == layer.layer), None)
            cells += ["", ""] if match is None else [_format_ms(match.ms), f"{match.share:.1%}"]
        yield _format_row(layer.layer, cells)
    hidden_layers = first.layers[rows:] if rows is not None else ()
    if hidden_layers:
        ms = sum(layer.ms for layer in hidden_layers)
        share = sum(layer.share for layer in hidden_layers)
        yield _format_row(f"{len(hidden_layers)} others", ["", "", _format_ms(ms), f"{share:.1%}"])


def _format_operators(profile: StepProfile, rows: int | None) -> Iterator[str]:
    heads = ["ms", "share", "calls", "of FLOP/s", "of GB/s", "phase"]
    yield _format_row("operator", heads) + "  layer, kind"
    for operator in profile.operators[:rows]:
        cells = [_format_ms(operator.ms), f"{operator.share:.1%}", f"{operator.calls:g}"]
        shares = (operator.of_flops, operator.of_bytes)
        cells += ["" if share is None else f"{share:.0%}" for share in shares]
        place = f"{operator.layer}, {operator.kind}" if operator.layer else operator.kind
        yield f"{_format_row(operator.name, [*cells, operator.phase])}  {place}"


def _format_row(name: str, cells: Sequence[str]) -> str:
    name = name if len(name) <= NAME_WIDTH else f"...{name[3 - NAME_WIDTH :]}"
    return "  " + (f"{name:<{NAME_WIDTH}}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()


def _format_ms(ms: float) -> str:
    return f"{ms:,.4f}" if ms < 1 else f"{ms:,.3f}" if ms < 100 else f"{ms:,.1f}"


def profile_picture(report: ProfileReport) -> str:
    """Return the text of an SVG file without scripts or links to other files."""
    first = report.profiles[0]
    title = f"{first.recipe} on {first.device}, batch {first.batch_size:,}"
    lines = wrap(f"Verdict: {report.verdict}", LINE_CHARACTERS)
    drawings = [_draw_lines("head", [title]), _draw_lines("", lines)]
    pairs = sorted(pairwise(report.traced.iterations), key=lambda pair: pair[1].end - pair[0].end)
    if pairs:
        drawings.append(_draw_lines("title", ["One iteration, ms"]))
        before, median_iteration = pairs[len(pairs) // 2]
        drawings.append(_draw_iteration(report.traced, before, median_iteration))
    for profile in report.profiles:
        drawings += _draw_profile(profile)
    return stack_drawings(drawings, title, gap=10).to_file_text()


def _draw_lines(kind: str, lines: Sequence[str]) -> Drawing:
    """Draw lines of text in the style class `kind`."""
    drawing = Drawing(WIDE, 18 * len(lines), "")
    for number, label in enumerate(lines):
        drawing.add("text", kind, label, x=0, y=13 + 18 * number)
    return drawing


def _draw_iteration(traced: Traced, before: Iteration, iteration: Iteration) -> Drawing:
    """Draw the parts of an iteration and the operations of each thread; `before` precedes it."""
    begin = before.end
    end = iteration.end
    parts = (
        ("pale-sand", iteration.fp_begin - begin, "data tail"),
        ("pale-blue", iteration.bp_end - iteration.fp_begin, "FP and BP"),
        ("pale-red", end - iteration.bp_end, "update tail"),
    )
    lane_parts = [(colour, ns / 1e6, f"{name} {ns / 1e6:.3g} ms") for colour, ns, name in parts]
    threads: dict[int, list[LaneBar]] = {}
    for event in traced.events:
        if event.end_ns > begin and event.begin_ns < end:
            operation = traced.operations[event.name]
            label = operation.layer or operation.phase
            tip = f"{event.name}, {label}, {operation.kind}, {event.ns / 1e3:.1f} us"
            colour = COLOURS.get(operation.phase, COLOURS["other"])
            start, stop = ((ns - begin) / 1e6 for ns in (event.begin_ns, event.end_ns))
            threads.setdefault(event.thread, []).append(LaneBar(start, stop, colour, tip, label))
    lanes = [Lane("Iteration", stack_blocks(lane_parts))]
    for number, thread in enumerate(sorted(threads), 1):
        lanes.append(Lane(f"Thread {number}", threads[thread]))
    return draw_lanes("One iteration", lanes, (end - begin) / 1e6, ticks=True)


def _draw_profile(profile: StepProfile) -> Iterator[Drawing]:
    """Draw a profile's phases as a bar and its layers as rows."""
    source = "measured" if profile.source == "measured" else "modelled, not measured"
    yield _draw_lines("title", [f"{profile.device}, {source}: {profile.step_ms:.4g} ms a step"])
    phases = [
        (
            COLOURS.get(phase.phase, COLOURS["other"]),
            phase.ms,
            f"{phase.phase} {phase.ms:.3g} ms, {phase.share:.1%}",
        )
        for phase in profile.phases
    ]
    total_ms = sum(phase.ms for phase in profile.phases)
    yield draw_lanes("Phases", [Lane("", stack_blocks(phases))], total_ms)
    layers = profile.layers[:PICTURED_LAYERS]
    lanes = [
        Lane(layer.layer[-22:], stack_blocks(_split_layer(layer)), f"{layer.ms:.3g} ms")
        for layer in layers
    ]
    yield draw_lanes("Layers", lanes, max((layer.ms for layer in layers), default=0.0))


def _split_layer(layer: LayerTime) -> Iterator[tuple[str, float, str]]:
    """Yield the colour, the ms and the label of each phase of a layer."""
    update_ms = layer.ms - layer.forward_ms - layer.backward_ms
    # Operations outside of layers have the colour of their phase.
    outside = layer.layer.strip("()")
    phase = outside if outside in COLOURS else "update"
    yield COLOURS["forward"], layer.forward_ms, f"forward {layer.forward_ms:.3g} ms"
    yield COLOURS["backward"], layer.backward_ms, f"backward {layer.backward_ms:.3g} ms"
    yield COLOURS[phase], update_ms, f"{phase} {update_ms:.3g} ms"


@dataclass(frozen=True)
class ProfileRecord:
    """A profiled run without its trace."""

    run: ProfiledRun
    evidence: Evidence
    verdict: StepVerdict
    """The verdict, with the measured gain of its change."""
    modelled: StepProfile | None
    """The profile of an emulated device."""


def write_record(record: ProfileRecord, raw: bytes, folder: Path) -> None:
    """Write a record and the profiler's file into the folder of a profile. Raises OSError."""
    (folder / RAW).mkdir(exist_ok=True)
    write_whole(folder / RAW / XSPACE, raw)
    write_whole(folder / RAW / RECORD, TypeAdapter(ProfileRecord).dump_json(record).decode())


def find_profile(path: Path) -> Path:
    """Return the folder of a recorded profile, at `path` or in the run there. Raises DataError."""
    folder = path if (path / RAW).is_dir() else path / PROFILE
    if not (folder / RAW).is_dir():
        raise DataError(
            f"{path}: has no recorded trace, {PROFILE}/{RAW}; profile the run with "
            "profile.mode=on, or name the folder of its profile.output"
        )
    return folder


def read_report(folder: Path) -> ProfileReport:
    """Return the report of a recorded run. Raises DataError if its files are damaged."""
    try:
        events = read_operations(read_bytes(folder / RAW / XSPACE, MAX_RAW_BYTES))
        text = read_bytes(folder / RAW / RECORD, MAX_RAW_BYTES)
        record = TypeAdapter(ProfileRecord).validate_json(text)
        evidence = record.evidence
        peaks = evidence.profile.peaks
        if peaks is None:
            raise ValueError(f"{RECORD} has no peaks of the device")
        profile, traced = measured_profile(record.run, peaks, events)
    except OSError as error:
        raise DataError(f"{folder / RAW}: can't be read: {get_system_reason(error)}") from error
    except ValidationError as error:
        raise DataError(f"{folder / RAW / RECORD}: isn't a record: {first_line(error)}") from error
    except (ValueError, LookupError, ArithmeticError) as error:
        raise DataError(f"{folder / RAW}: isn't a recorded trace: {first_line(error)}") from error
    host = evidence.host
    evidence = replace(evidence, profile=replace(profile, host=host, step_ms=host.step))
    verdict = decide(evidence)
    # The recorded verdict has a measured gain, so it is replaced only if the rules now differ.
    if verdict.name != record.verdict.name:
        record = replace(record, verdict=verdict)
    return make_report(record, evidence, traced)


def make_report(record: ProfileRecord, evidence: Evidence, traced: Traced) -> ProfileReport:
    """Return the report of a recorded run and its traced operations."""
    profiles = tuple(filter(None, (evidence.profile, record.modelled)))
    return ProfileReport(profiles, record.verdict, traced)
