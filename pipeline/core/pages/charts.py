"""Charts: curves, scatter plots, histograms, and lanes of blocks for timelines and shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.pages.drawing import Drawing

WIDTH = 420
HEIGHT = 260
LEFT = 52
RIGHT = 12
TOP = 26
BOTTOM = 34
MAX_POINTS = 240
"""Points of a curve: there are not more pixels to see."""
MAX_DOTS = 1500
"""Dots of a scatter plot, evenly chosen from the samples."""
SERIES = ("blue", "orange", "green")
PALE = ("gap", "pale-sand", "pale-blue", "pale-red")
"""Colours of blocks whose words are dark."""

WIDE = 1056.0
LABELS = 150.0
NOTES = 70.0
"""Room for the labels of lanes and for the notes at their ends."""
LANE = 22.0
LANE_GAP = 6.0
LETTER = 7.0
"""Width of a letter, roughly."""


@dataclass(frozen=True)
class Curve:
    """Values over steps; `marked` draws a dot at each value."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    marked: bool = False


@dataclass(frozen=True)
class ChartAxis:
    """Values from `low` to `high` along an edge, at the pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


@dataclass(frozen=True)
class LaneBar:
    """A part of a lane, of a colour of the style; the words are drawn if they fit."""

    begin: float
    end: float
    colour: str
    tip: str
    words: str = ""


@dataclass(frozen=True)
class Lane:
    """Blocks beside each other, with a label before them and a note after them."""

    label: str
    blocks: Sequence[LaneBar]
    note: str = ""


def horizontal_axis(low: float, high: float) -> ChartAxis:
    """Return the axis below a chart."""
    return ChartAxis(low, high, LEFT, WIDTH - RIGHT)


def vertical_axis(low: float, high: float) -> ChartAxis:
    """Return the axis on the left of a chart."""
    return ChartAxis(low, high, HEIGHT - BOTTOM, TOP)


def pixels(places: Iterable[tuple[float, float]]) -> str:
    """Return places as the points of a line."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def draw_frame(
    title: str, x: ChartAxis, y: ChartAxis, label: str, x_ticks: Mapping[float, str] | None = None
) -> Drawing:
    """Return a chart that has its title, its axes and the label of the lower one."""
    chart = Drawing(WIDTH, HEIGHT, title)
    chart.add("text", "title", title, x=2, y=14)
    for value in round_values(y.low, y.high):
        place = y.place(value)
        chart.add("line", "rule", x1=LEFT, y1=place, x2=WIDTH - RIGHT, y2=place)
        chart.add("text", "end", _short(value), x=LEFT - 7, y=place + 4)
    if x_ticks is None:
        x_ticks = {value: _short(value) for value in round_values(x.low, x.high)}
    for value, words in x_ticks.items():
        chart.add("text", "middle", words, x=x.place(value), y=HEIGHT - BOTTOM + 17)
    chart.add("text", "end", label, x=WIDTH - RIGHT, y=HEIGHT - 3)
    return chart


def curve_chart(title: str, curves: Sequence[Curve]) -> Drawing | None:
    """Draw curves over steps; None if no two steps have a finite value.

    A curve of more than `MAX_POINTS` values is drawn as means of `MAX_POINTS` groups of consecutive
    values, over their range.
    """
    groups_by_curve = [(curve, _group(curve)) for curve in curves]
    groups_by_curve = [(curve, groups) for curve, groups in groups_by_curve if len(groups)]
    if not groups_by_curve:
        return None
    points = np.concatenate([groups for _, groups in groups_by_curve])
    if points[:, 0].max() == points[:, 0].min():
        return None
    x = horizontal_axis(*_range_of(points[:, 0], 0))
    y = vertical_axis(*_range_of(points[:, 2:], 0.05))
    chart = draw_frame(title, x, y, "step")
    right = WIDTH - RIGHT
    for (curve, groups), colour in reversed(list(zip(groups_by_curve, SERIES, strict=False))):
        places = [(x.place(step), *map(y.place, values)) for step, *values in groups]
        _draw_curve(chart, np.array(places), colour, curve.marked)
        if len(groups_by_curve) > 1:
            chart.add("text", "end", curve.name, x=right, y=14)
            right -= 7 * len(curve.name) + 6
            chart.add("circle", colour, cx=right, cy=10, r=4)
            right -= 14
    return chart


def _draw_curve(chart: Drawing, places: np.ndarray, colour: str, marked: bool) -> None:
    """Draw the pixels (groups, 4) of steps, means, least and greatest values."""
    x, mean, low, high = places.T
    if (low != high).any():
        edges = [*zip(x, high, strict=True), *zip(x[::-1], low[::-1], strict=True)]
        chart.add("polygon", f"range {colour}", points=pixels(edges))
    if len(x) > 1:
        chart.add("polyline", f"curve {colour}", points=pixels(zip(x, mean, strict=True)))
    if marked or len(x) == 1:
        for place, value in zip(x, mean, strict=True):
            chart.add("circle", colour, cx=place, cy=value, r=2.6)


def _group(curve: Curve) -> np.ndarray:
    """(groups, 4): last step, mean, least and greatest value of each group of finite values."""
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


def scatter_chart(title: str, true: np.ndarray, predicted: np.ndarray) -> Drawing | None:
    """Draw predicted against true numbers (n,), with the line where they are equal."""
    finite = np.isfinite(true) & np.isfinite(predicted)
    true = true[finite]
    predicted = predicted[finite]
    if not len(true):
        return None
    dots = np.unique(np.linspace(0, len(true) - 1, min(len(true), MAX_DOTS)).astype(int))
    low, high = _range_of(np.concatenate([true, predicted]), 0.04)
    x = horizontal_axis(low, high)
    y = vertical_axis(low, high)
    chart = draw_frame(title, x, y, "true")
    chart.add("line", "ideal", x1=x.begin, y1=y.begin, x2=x.end, y2=y.end)
    for across, up in zip(true[dots], predicted[dots], strict=True):
        chart.add("circle", "dot blue", cx=x.place(across), cy=y.place(up), r=2.2)
    return chart


def histogram(title: str, values: np.ndarray, label: str, bars: int = 31) -> Drawing | None:
    """Draw how many of the values (n,) lie in each of `bars` equal ranges around zero."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    reach = float(np.abs(values).max()) or 1.0
    counts, edges = np.histogram(values, bars, (-reach, reach))
    x = horizontal_axis(-reach, reach)
    y = vertical_axis(0, float(counts.max()) * 1.05)
    chart = draw_frame(title, x, y, label)
    wide = x.place(edges[1]) - x.begin - 1
    for count, edge in zip(counts, edges[:-1], strict=True):
        top = y.place(count)
        chart.add("rect", "blue", x=x.place(edge) + 0.5, y=top, width=wide, height=y.begin - top)
    return chart


def lane_chart(title: str, lanes: Sequence[Lane], end: float, *, ticks: bool = False) -> Drawing:
    """Draw lanes of blocks from 0 to `end`; `ticks` writes round values above them.

    Lanes leave room for labels and notes if any has one.
    """
    left = LABELS if any(lane.label for lane in lanes) else 0.0
    x = ChartAxis(0, end or 1.0, left, WIDE - (NOTES if any(lane.note for lane in lanes) else 0.0))
    head = 24.0 if ticks else 0.0
    chart = Drawing(WIDE, head + len(lanes) * (LANE + LANE_GAP) - LANE_GAP, title, "wide")
    for value in round_values(0, end, 8) if ticks else ():
        place = x.place(value)
        chart.add("line", "rule", x1=place, y1=head - 6, x2=place, y2=chart.height)
        chart.add("text", "middle", f"{value:g}", x=place, y=12)
    for number, lane in enumerate(lanes):
        top = head + number * (LANE + LANE_GAP)
        chart.add("text", "ink", lane.label, x=0, y=top + 15)
        for block in lane.blocks:
            _draw_block(chart, block, x, top)
        if lane.note:
            last = max((block.end for block in lane.blocks), default=0.0)
            chart.add("text", "", lane.note, x=x.place(last) + 6, y=top + 15)
    return chart


def _draw_block(chart: Drawing, block: LaneBar, x: ChartAxis, top: float) -> None:
    begin, end = (min(max(x.place(at), x.begin), x.end) for at in (block.begin, block.end))
    # Thin gaps keep wide blocks apart.
    wide = max(end - begin - (0.6 if end - begin > 4 else 0.0), 0.2)
    chart.add("rect", block.colour, tip=block.tip, x=begin, y=top, width=wide, height=LANE)
    if block.words and wide > LETTER * len(block.words):
        tone = "ink" if block.colour in PALE else "light"
        chart.add("text", f"{tone} middle", block.words, x=begin + wide / 2, y=top + 15)


def pile_blocks(parts: Iterable[tuple[str, float, str]]) -> list[LaneBar]:
    """Return blocks laid end to end, from their colours, sizes and words; none of no size."""
    blocks = []
    at = 0.0
    for colour, size, words in parts:
        if size > 0:
            blocks.append(LaneBar(at, at + size, colour, words, words))
            at += size
    return blocks


def round_values(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`, at most one more than `most`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _range_of(values: np.ndarray, margin: float) -> tuple[float, float]:
    """Return bounds of values, with a margin as a share of their range."""
    low = float(values.min())
    high = float(values.max())
    reach = high - low or abs(high) or 1.0
    # A curve of one value is drawn in the middle of its chart.
    aside = margin * reach if high > low else 0.5 * reach
    return low - aside, high + aside


def _short(value: float) -> str:
    """Return a number of an axis in few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value:.2g}"
    return f"{value:.4g}"
