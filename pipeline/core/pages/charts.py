"""Charts: curves, scatter plots, histograms, and lanes of blocks for timelines and shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.pages.page import Drawing

WIDTH = 420
HEIGHT = 260
LEFT = 52
RIGHT = 12
TOP = 26
BOTTOM = 34
"""Size of a chart, and its margins, in pixels."""
MAX_POINTS = 240
"""Most points of a curve, since a chart has few pixels."""
MAX_DOTS = 1500
"""Most dots of a scatter plot, which are spread evenly over the samples."""
SERIES = ("blue", "orange", "green")
"""Colours of curves."""
PALE = ("gap", "pale-sand", "pale-blue", "pale-red")
"""Pale colours of blocks, on which the words are dark."""

WIDE = 1056.0
LABELS = 150.0
NOTES = 70.0
"""Width of a chart of lanes, and the room for labels before and notes after the lanes."""
LANE = 22.0
LANE_GAP = 6.0
LETTER = 7.0
"""Approximate width of a letter, in pixels."""


@dataclass(frozen=True)
class Curve:
    """Values over steps, both of shape (n,); `marked` draws a dot at each value."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    marked: bool = False


@dataclass(frozen=True)
class ChartAxis:
    """An axis along an edge: values from `low` to `high` at the pixels from `begin` to `end`.

    On a logarithmic axis, `low` must be above 0.
    """

    low: float
    high: float
    begin: float
    end: float
    is_logarithmic: bool = False

    def to_pixel(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, place = self.low, self.high, value
        if self.is_logarithmic:
            low, high, place = math.log(low), math.log(high), math.log(value)
        return self.begin + (place - low) / (high - low) * (self.end - self.begin)


@dataclass(frozen=True)
class LaneBar:
    """A block of a lane, from `begin` to `end` in the unit of the lane's axis."""

    begin: float
    end: float
    colour: str
    """Name of a colour of the pages' style."""
    tip: str
    """Text that is shown when the pointer is over the block."""
    words: str = ""
    """Text inside the block, if it fits."""


@dataclass(frozen=True)
class Lane:
    """A row of blocks, with a label before the blocks and a note after them."""

    label: str
    blocks: Sequence[LaneBar]
    note: str = ""


def make_horizontal_axis(low: float, high: float, *, is_logarithmic: bool = False) -> ChartAxis:
    """Return the axis below a chart."""
    return ChartAxis(low, high, LEFT, WIDTH - RIGHT, is_logarithmic)


def make_vertical_axis(low: float, high: float) -> ChartAxis:
    """Return the axis on the left of a chart."""
    return ChartAxis(low, high, HEIGHT - BOTTOM, TOP)


def format_points(points: Iterable[tuple[float, float]]) -> str:
    """Return the pixels (x, y) of a line as SVG's attribute `points`."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def draw_frame(
    title: str, x: ChartAxis, y: ChartAxis, label: str, x_ticks: Mapping[float, str] | None = None
) -> Drawing:
    """Return a chart with its title, its axes and the label of its horizontal axis."""
    chart = Drawing(WIDTH, HEIGHT, title)
    chart.add("text", "title", title, x=2, y=14)
    for value in round_values(y.low, y.high):
        place = y.to_pixel(value)
        chart.add("line", "rule", x1=LEFT, y1=place, x2=WIDTH - RIGHT, y2=place)
        chart.add("text", "end", _format_tick(value), x=LEFT - 7, y=place + 4)
    if x_ticks is None:
        values = powers_of_ten(x.low, x.high) if x.is_logarithmic else round_values(x.low, x.high)
        x_ticks = {value: _format_tick(value) for value in values}
    for value, words in x_ticks.items():
        chart.add("text", "middle", words, x=x.to_pixel(value), y=HEIGHT - BOTTOM + 17)
    chart.add("text", "end", label, x=WIDTH - RIGHT, y=HEIGHT - 3)
    return chart


def draw_curves(
    title: str,
    curves: Sequence[Curve],
    label: str = "step",
    *,
    is_logarithmic: bool = False,
    marks: Mapping[float, str] | None = None,
) -> Drawing | None:
    """Draw curves over steps, or what `label` names; None if no two steps have a finite value.

    If `is_logarithmic` is true, the axis of steps is, and they must be above 0. `marks` are words
    at vertical lines, by step.

    A curve of more than `MAX_POINTS` values is drawn as `MAX_POINTS` groups of consecutive values:
    their means, and the ranges between their least and greatest values.
    """
    all_groups = [(curve, _group_values(curve)) for curve in curves]
    groups_by_curve = [(curve, groups) for curve, groups in all_groups if len(groups)]
    if not groups_by_curve:
        return None
    points = np.concatenate([groups for _, groups in groups_by_curve])
    if points[:, 0].max() == points[:, 0].min():
        return None
    bounds = _find_bounds(points[:, 0], 0)
    x = make_horizontal_axis(*bounds, is_logarithmic=is_logarithmic)
    y = make_vertical_axis(*_find_bounds(points[:, 2:], 0.05))
    chart = draw_frame(title, x, y, label)
    # From right to left, and each lower than the one before, so that no line crosses words.
    for number, (value, words) in enumerate(sorted((marks or {}).items(), reverse=True)):
        _draw_mark(chart, x.to_pixel(value), words, TOP + 15 * number)
    right = float(WIDTH - RIGHT)
    for (curve, groups), colour in reversed(list(zip(groups_by_curve, SERIES, strict=False))):
        pixels = [(x.to_pixel(step), *map(y.to_pixel, values)) for step, *values in groups]
        _draw_curve(chart, np.array(pixels), colour, curve.marked)
        if len(groups_by_curve) > 1:
            chart.add("text", "end", curve.name, x=right, y=14)
            right -= LETTER * len(curve.name) + 6
            chart.add("circle", colour, cx=right, cy=10, r=4)
            right -= 14
    return chart


def _draw_curve(chart: Drawing, pixels: np.ndarray, colour: str, marked: bool) -> None:
    """Draw the pixels (groups, 4) of steps, means, least and greatest values."""
    x, mean, low, high = pixels.T
    if (low != high).any():
        edges = [*zip(x, high, strict=True), *zip(x[::-1], low[::-1], strict=True)]
        chart.add("polygon", f"range {colour}", points=format_points(edges))
    points = list(zip(x, mean, strict=True))
    if len(points) > 1:
        chart.add("polyline", f"curve {colour}", points=format_points(points))
    if marked or len(points) == 1:
        for cx, cy in points:
            chart.add("circle", colour, cx=cx, cy=cy, r=2.6)


def _draw_mark(chart: Drawing, x: float, words: str, top: float) -> None:
    """Draw a vertical line from `top` to the axis, with words before it, or after it at the left
    edge."""
    chart.add("line", "ideal", x1=x, y1=top, x2=x, y2=HEIGHT - BOTTOM)
    if x - LEFT > LETTER * len(words):
        chart.add("text", "ink end", words, x=x - 4, y=top + 11)
    else:
        chart.add("text", "ink", words, x=x + 4, y=top + 11)


def _group_values(curve: Curve) -> np.ndarray:
    """Return (groups, 4): last step, mean, least and greatest value of each group of values.

    Values that aren't finite are left out.
    """
    finite = np.isfinite(curve.values)
    steps = curve.steps[finite].astype(float)
    values = curve.values[finite].astype(float)
    if not len(values):
        return np.zeros((0, 4))
    bounds = np.unique(np.linspace(0, len(values), min(len(values), MAX_POINTS) + 1).astype(int))
    starts = bounds[:-1]
    ends = bounds[1:]
    means = np.add.reduceat(values, starts) / (ends - starts)
    low = np.minimum.reduceat(values, starts)
    high = np.maximum.reduceat(values, starts)
    return np.stack([steps[ends - 1], means, low, high], axis=1)


def draw_scatter(title: str, true: np.ndarray, predicted: np.ndarray) -> Drawing | None:
    """Draw predicted against true numbers (n,), and the diagonal; None if no pair is finite."""
    finite = np.isfinite(true) & np.isfinite(predicted)
    true = true[finite]
    predicted = predicted[finite]
    if not len(true):
        return None
    dots = np.unique(np.linspace(0, len(true) - 1, min(len(true), MAX_DOTS)).astype(int))
    low, high = _find_bounds(np.concatenate([true, predicted]), 0.04)
    x = make_horizontal_axis(low, high)
    y = make_vertical_axis(low, high)
    chart = draw_frame(title, x, y, "true")
    chart.add("line", "ideal", x1=x.begin, y1=y.begin, x2=x.end, y2=y.end)
    for across, up in zip(true[dots], predicted[dots], strict=True):
        chart.add("circle", "dot blue", cx=x.to_pixel(across), cy=y.to_pixel(up), r=2.2)
    return chart


def draw_histogram(title: str, values: np.ndarray, label: str) -> Drawing | None:
    """Draw counts of values (n,) in 31 equal ranges around zero; None if none is finite."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    reach = float(np.abs(values).max()) or 1.0
    counts, edges = np.histogram(values, 31, (-reach, reach))
    x = make_horizontal_axis(-reach, reach)
    y = make_vertical_axis(0, float(counts.max()) * 1.05)
    chart = draw_frame(title, x, y, label)
    width = x.to_pixel(edges[1]) - x.begin - 1
    for count, edge in zip(counts, edges[:-1], strict=True):
        top = y.to_pixel(count)
        chart.add(
            "rect", "blue", x=x.to_pixel(edge) + 0.5, y=top, width=width, height=y.begin - top
        )
    return chart


def draw_lanes(title: str, lanes: Sequence[Lane], end: float, *, ticks: bool = False) -> Drawing:
    """Draw lanes of blocks from 0 to `end`, with round values above them if `ticks` is true.

    There is room for labels and notes if a lane has one.
    """
    left = LABELS if any(lane.label for lane in lanes) else 0.0
    right = WIDE - NOTES if any(lane.note for lane in lanes) else WIDE
    x = ChartAxis(0, end or 1.0, left, right)
    head = 24.0 if ticks else 0.0
    chart = Drawing(WIDE, head + len(lanes) * (LANE + LANE_GAP) - LANE_GAP, title, "wide")
    tick_values = round_values(0, end, 8) if ticks else []
    for value in tick_values:
        place = x.to_pixel(value)
        chart.add("line", "rule", x1=place, y1=head - 6, x2=place, y2=chart.height)
        chart.add("text", "middle", f"{value:g}", x=place, y=12)
    for number, lane in enumerate(lanes):
        top = head + number * (LANE + LANE_GAP)
        chart.add("text", "ink", lane.label, x=0, y=top + 15)
        for block in lane.blocks:
            _draw_block(chart, block, x, top)
        if lane.note:
            last = max((block.end for block in lane.blocks), default=0.0)
            chart.add("text", "", lane.note, x=x.to_pixel(last) + 6, y=top + 15)
    return chart


def _draw_block(chart: Drawing, block: LaneBar, x: ChartAxis, top: float) -> None:
    begin = min(max(x.to_pixel(block.begin), x.begin), x.end)
    end = min(max(x.to_pixel(block.end), x.begin), x.end)
    gap = 0.6 if end - begin > 4 else 0.0  # between wide blocks
    width = max(end - begin - gap, 0.2)
    chart.add("rect", block.colour, tip=block.tip, x=begin, y=top, width=width, height=LANE)
    if block.words and width > LETTER * len(block.words):
        tone = "ink" if block.colour in PALE else "light"
        chart.add("text", f"{tone} middle", block.words, x=begin + width / 2, y=top + 15)


def stack_blocks(parts: Iterable[tuple[str, float, str]]) -> list[LaneBar]:
    """Return adjacent blocks from their colours, sizes and words; parts of size 0 are left out."""
    blocks = []
    begin = 0.0
    for colour, size, words in parts:
        if size > 0:
            blocks.append(LaneBar(begin, begin + size, colour, words, words))
            begin += size
    return blocks


def round_values(low: float, high: float, max_intervals: int = 5) -> list[float]:
    """Return at most `max_intervals + 1` round numbers from `low` to `high`."""
    exact_step = (high - low) / max_intervals
    power = 10.0 ** math.floor(math.log10(exact_step)) if exact_step > 0 else 1.0
    # The tolerances of 1e-9 are for rounding.
    steps = (factor * power for factor in (1, 2, 5, 10))
    step = next(step for step in steps if step >= exact_step * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def powers_of_ten(low: float, high: float) -> list[float]:
    """Return the powers of ten from `low`, which must be above 0, to `high`."""
    first = math.ceil(math.log10(low) - 1e-9)
    last = math.floor(math.log10(high) + 1e-9)
    return [10.0**power for power in range(first, last + 1)]


def _find_bounds(values: np.ndarray, margin: float) -> tuple[float, float]:
    """Return the bounds of an axis for values, with a margin: a share of the values' range."""
    low = float(values.min())
    high = float(values.max())
    reach = high - low or abs(high) or 1.0
    # A curve of equal values is drawn in the middle of its chart.
    padding = margin * reach if high > low else 0.5 * reach
    return low - padding, high + padding


def _format_tick(value: float) -> str:
    """Return a number of an axis in at most six characters."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value:.2g}"
    return f"{value:.4g}"
