"""A profile as a drawing: one iteration by thread, the phases, and the slowest layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipeline.core.files.svg_page import line, rectangle, text, ticks
from pipeline.inspect.profiler.iterations import Iteration, Traced
from pipeline.inspect.profiler.step_profile import StepProfile, StepVerdict

COLOURS = {
    "data": "#6f7f8a",
    "forward": "#2b5c8f",
    "backward": "#4e9b82",
    "update": "#dd9f36",
    "communication": "#b94a55",
    "other": "#8267ab",
    "between operators": "#e3e6e5",
}
"""Colours of phases; others are those of `other`."""
WIDTH, LEFT, RIGHT, MARGIN = 1056.0, 150.0, 70.0, 24.0
LANE, GAP, BAR = 22.0, 8.0, 18.0
GRID = "#e3e6e5"
LAYERS = 12
WORD = 7.0
"""Width of a character, roughly."""
LONGEST_LINE = 150


def profile_picture(traced: Traced, profiles: Sequence[StepProfile], verdict: StepVerdict) -> str:
    """Return an SVG file: no script, no other file."""
    first = profiles[0]
    marks = [text(0, 0, f"{first.recipe} on {first.device}, batch {first.batch_size:,}", size=18)]
    foot = 22.0
    for words in _wrapped(f"Verdict: {verdict}"):
        marks.append(text(0, foot, words, size=13, quiet=True))
        foot += 18
    foot += 14
    one = _typical(traced)
    if one is not None:
        drawn, foot = _iteration(traced, *one, foot)
        marks += drawn
    for profile in profiles:
        drawn, foot = _bars(profile, foot + 16)
        marks += drawn
    height = foot + 2 * MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * MARGIN:g}" '
        f'height="{height:g}" viewBox="{-MARGIN:g} {-MARGIN - 12:g} {WIDTH + 2 * MARGIN:g} '
        f'{height + 12:g}" font-family="Inter, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    style = "<style>text{fill:#1d2429}.quiet{fill:#5d6971}.light{fill:#fff}</style>"
    ground = rectangle(-MARGIN, -MARGIN - 12, WIDTH + 2 * MARGIN, height + 12, "#fbfbf9")
    return "\n".join([head, style, ground, *marks, "</svg>", ""])


def _wrapped(words: str) -> Iterator[str]:
    line_ = ""
    for word in words.split(" "):
        if line_ and len(line_) + len(word) >= LONGEST_LINE:
            yield line_
            line_ = ""
        line_ = f"{line_} {word}" if line_ else word
    yield line_


def _typical(traced: Traced) -> tuple[Iteration, Iteration] | None:
    """Return the iteration of median length, and the one before it."""
    pairs = list(pairwise(traced.iterations))
    pairs.sort(key=lambda pair: pair[1].end - pair[0].end)
    return pairs[len(pairs) // 2] if pairs else None


def _iteration(
    traced: Traced, before: Iteration, point: Iteration, y: float
) -> tuple[list[str], float]:
    begin, end = before.end, point.end
    width = WIDTH - LEFT - RIGHT

    def x(ns: float) -> float:
        return LEFT + max(0.0, min(1.0, (ns - begin) / (end - begin))) * width

    shown = [e for e in traced.events if e.end_ns > begin and e.begin_ns < end]
    threads = sorted({event.thread for event in shown})
    foot = y + 26 + (LANE + GAP) * (len(threads) + 1)
    marks = [text(0, y, "One iteration, ms", size=13)]
    for tick in ticks((end - begin) / 1e6):
        place = x(begin + 1e6 * tick)
        marks += [
            line(place, y + 8, place, foot - GAP, GRID),
            text(place, y, f"{tick:g}", anchor="middle", quiet=True),
        ]
    parts = (
        ("data tail", begin, point.fp_begin, "#eceae4"),
        ("FP and BP", point.fp_begin, point.bp_end, "#d5e0ea"),
        ("update tail", point.bp_end, point.end, "#efdcdc"),
    )
    top = y + 16
    marks.append(text(0, top + 15, "Iteration"))
    for name, start, stop, colour in parts:
        wide = x(stop) - x(start)
        words = f"{name} {(stop - start) / 1e6:.3g} ms"
        marks.append(rectangle(x(start), top, max(wide, 0.0), LANE, colour, words))
        if wide > WORD * len(words):
            marks.append(text((x(start) + x(stop)) / 2, top + 15, words, anchor="middle"))
    for number, thread in enumerate(threads, 1):
        top = y + 16 + (LANE + GAP) * number
        marks.append(text(0, top + 15, f"Thread {number}"))
        for event in (one for one in shown if one.thread == thread):
            operation = traced.operations[event.name]
            wide = x(event.end_ns) - x(event.begin_ns)
            where = operation.layer or operation.phase
            tip = f"{event.name}, {where}, {operation.kind}, {event.ns / 1e3:.1f} us"
            colour = COLOURS.get(operation.phase, COLOURS["other"])
            marks.append(rectangle(x(event.begin_ns), top, max(wide - 0.5, 0.2), LANE, colour, tip))
            if wide > WORD * len(where):
                middle = (x(event.begin_ns) + x(event.end_ns)) / 2
                marks.append(text(middle, top + 15, where, anchor="middle", light=True))
    return marks, foot


def _bars(profile: StepProfile, y: float) -> tuple[list[str], float]:
    """Draw a profile's phases as one bar and its layers as rows."""
    how = "measured" if profile.source == "measured" else "modelled, not measured"
    marks = [text(0, y, f"{profile.device}, {how}: {profile.step_ms:.4g} ms a step", size=13)]
    at, top = 0.0, y + 10
    whole = sum(phase.ms for phase in profile.phases) or 1.0
    for phase in profile.phases:
        wide = phase.ms / whole * WIDTH
        words = f"{phase.phase} {phase.ms:.3g} ms, {phase.share:.1%}"
        colour = COLOURS.get(phase.phase, COLOURS["other"])
        marks.append(rectangle(at, top, wide, BAR, colour, words))
        if wide > WORD * len(words):
            light = phase.phase != "between operators"
            marks.append(text(at + wide / 2, top + 13, words, anchor="middle", light=light))
        at += wide
    top += BAR + 12
    most = max((layer.ms for layer in profile.layers[:LAYERS]), default=0.0) or 1.0
    for layer in profile.layers[:LAYERS]:
        marks.append(text(0, top + 13, layer.layer[-22:]))
        rest = max(0.0, layer.ms - layer.forward_ms - layer.backward_ms)
        at = LEFT
        parts = ("forward", layer.forward_ms), ("backward", layer.backward_ms), ("update", rest)
        for name, ms in parts:
            wide = ms / most * (WIDTH - LEFT - RIGHT)
            # What is in no layer has the colour of its phase.
            phase_name = layer.layer.strip("()") if name == "update" else name
            colour = COLOURS.get(phase_name, COLOURS["other"])
            if wide > 0:
                marks.append(rectangle(at, top, wide, BAR, colour, f"{name} {ms:.3g} ms"))
            at += wide
        marks.append(text(at + 6, top + 13, f"{layer.ms:.3g} ms", quiet=True))
        top += BAR + 5
    return marks, top
