"""Drawing of a profile: one iteration by thread, the phases, and the slowest layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from textwrap import wrap

from pipeline.core.pages.charts import WIDE, Lane, LaneBar, lane_chart, pile_blocks
from pipeline.core.pages.drawing import Drawing, stack_drawings
from pipeline.inspect.profiler.iterations import Iteration, Traced
from pipeline.inspect.profiler.step_profile import LayerTime, StepProfile, StepVerdict

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
MAX_LAYERS = 12
LINE_CHARACTERS = 150


def profile_picture(traced: Traced, profiles: Sequence[StepProfile], verdict: StepVerdict) -> str:
    """Return the text of an SVG file without scripts or links to other files."""
    first = profiles[0]
    title = f"{first.recipe} on {first.device}, batch {first.batch_size:,}"
    lines = wrap(f"Verdict: {verdict}", LINE_CHARACTERS)
    drawings = [_draw_lines("head", [title]), _draw_lines("", lines)]
    typical_pair = _find_typical_iteration(traced)
    if typical_pair is not None:
        drawings.append(_draw_lines("title", ["One iteration, ms"]))
        before, median_iteration = typical_pair
        drawings.append(_draw_iteration(traced, before, median_iteration))
    for profile in profiles:
        drawings += _draw_profile(profile)
    return stack_drawings(drawings, title, gap=10).file_text()


def _draw_lines(kind: str, lines: Sequence[str]) -> Drawing:
    """Draw lines of text in the style class `kind`."""
    drawing = Drawing(WIDE, 18 * len(lines), "")
    for number, label in enumerate(lines):
        drawing.add("text", kind, label, x=0, y=13 + 18 * number)
    return drawing


def _find_typical_iteration(traced: Traced) -> tuple[Iteration, Iteration] | None:
    """Return the iteration of median length and, as the first value, its predecessor."""
    pairs = list(pairwise(traced.iterations))
    pairs.sort(key=lambda pair: pair[1].end - pair[0].end)
    return pairs[len(pairs) // 2] if pairs else None


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
    lanes = [Lane("Iteration", pile_blocks(lane_parts))]
    for number, thread in enumerate(sorted(threads), 1):
        lanes.append(Lane(f"Thread {number}", threads[thread]))
    return lane_chart("One iteration", lanes, (end - begin) / 1e6, ticks=True)


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
    yield lane_chart("Phases", [Lane("", pile_blocks(phases))], total_ms)
    layers = profile.layers[:MAX_LAYERS]
    lanes = [
        Lane(layer.layer[-22:], pile_blocks(_split_layer(layer)), f"{layer.ms:.3g} ms")
        for layer in layers
    ]
    yield lane_chart("Layers", lanes, max((layer.ms for layer in layers), default=0.0))


def _split_layer(layer: LayerTime) -> Iterator[tuple[str, float, str]]:
    """Yield the colour, the ms and the label of each phase of a layer."""
    update_ms = layer.ms - layer.forward_ms - layer.backward_ms
    # Operations outside of layers have the colour of their phase.
    outside = layer.layer.strip("()")
    phase = outside if outside in COLOURS else "update"
    yield COLOURS["forward"], layer.forward_ms, f"forward {layer.forward_ms:.3g} ms"
    yield COLOURS["backward"], layer.backward_ms, f"backward {layer.backward_ms:.3g} ms"
    yield COLOURS[phase], update_ms, f"{phase} {update_ms:.3g} ms"
