"""Charts as SVG: curves, points and bars, coloured by the variables of a style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 34
MAX_POINTS = 240
"""Points of a curve: there are not more pixels to see."""
MAX_DOTS = 1500
"""Dots of a scatter plot, evenly chosen from the samples."""

COLOURS = """
  --ground: #fbfbf9; --card: #ffffff; --ink: #1d2429; --quiet: #5d6971; --rule: #e2e5e4;
  --first: #2364aa; --second: #c8501f; --third: #2f855a; --bad: #b3261e;
""".strip()
DARK_COLOURS = """
  --ground: #14181b; --card: #1c2226; --ink: #e8ecee; --quiet: #9aa7af; --rule: #313a40;
  --first: #74aef0; --second: #f0925f; --third: #6cc79a; --bad: #f2857d;
""".strip()
CHART_STYLE = """
svg text { font: 12px system-ui, "Segoe UI", Arial, sans-serif; fill: var(--quiet); }
svg .title { fill: var(--ink); font-weight: 600; font-size: 13px; }
svg .rule { stroke: var(--rule); stroke-width: 1; }
svg .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
svg .first { stroke: var(--first); } svg .second { stroke: var(--second); }
svg .third { stroke: var(--third); }
svg .range { stroke: none; opacity: .18; }
svg .fill-first { fill: var(--first); } svg .fill-second { fill: var(--second); }
svg .fill-third { fill: var(--third); }
svg .dot { opacity: .55; }
svg .ideal { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 4 4; }
""".strip()
SERIES = ("first", "second", "third")


@dataclass(frozen=True)
class Curve:
    """Values over steps; `marked` draws a dot at each value."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    marked: bool = False


@dataclass(frozen=True)
class Scale:
    """The part of two axes that a chart shows."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        """The place of a value from the left edge, in pixels."""
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """The place of a value from the top edge, in pixels."""
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def curve_chart(title: str, curves: Sequence[Curve]) -> str | None:
    """Draw curves over steps; None where no two steps have a finite value.

    A curve of more than `MAX_POINTS` values is drawn as the means of as many groups of consecutive
    values, over their range.
    """
    drawn = [(curve, _grouped(curve)) for curve in curves]
    drawn = [(curve, groups) for curve, groups in drawn if len(groups)]
    if not drawn:
        return None
    every = np.concatenate([groups for _, groups in drawn])
    if every[0, 0] == every[:, 0].max() == every[:, 0].min():
        return None
    scale = Scale(*_around(every[:, 0], 0), *_around(every[:, 2:], 0.05))
    marks = []
    for (curve, groups), kind in zip(drawn, SERIES, strict=False):
        marks += _curve_marks(scale, curve, groups, kind)
    return _svg(title, scale, "step", [*marks, *_legend([curve.name for curve, _ in drawn])])


def _grouped(curve: Curve) -> np.ndarray:
    """(groups, 4): last step, mean, least and greatest value of each group of finite values."""
    finite = np.isfinite(curve.values)
    steps, values = curve.steps[finite].astype(float), curve.values[finite].astype(float)
    if not len(values):
        return np.zeros((0, 4))
    cuts = np.unique(np.linspace(0, len(values), min(len(values), MAX_POINTS) + 1).astype(int))
    starts, ends = cuts[:-1], cuts[1:]
    means = np.add.reduceat(values, starts) / (ends - starts)
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return np.stack([steps[ends - 1], means, low, high], axis=1)


def _curve_marks(scale: Scale, curve: Curve, groups: np.ndarray, kind: str) -> list[str]:
    marks = []
    if (groups[:, 2] < groups[:, 3]).any():
        upper = [_point(scale, step, high) for step, _, _, high in groups]
        lower = [_point(scale, step, low) for step, _, low, _ in groups[::-1]]
        marks.append(f'<polygon class="range fill-{kind}" points="{" ".join(upper + lower)}"/>')
    points = [_point(scale, step, mean) for step, mean, _, _ in groups]
    if len(points) > 1:
        marks.append(f'<polyline class="curve {kind}" points="{" ".join(points)}"/>')
    if curve.marked or len(points) == 1:
        places = (point.split(",") for point in points)
        marks += [_dot(x, y, f"fill-{kind}", 2.6) for x, y in places]
    return marks


def scatter_chart(title: str, true: np.ndarray, predicted: np.ndarray) -> str | None:
    """Draw predicted against true numbers (n,), with the line where they are equal."""
    finite = np.isfinite(true) & np.isfinite(predicted)
    true, predicted = true[finite], predicted[finite]
    if not len(true):
        return None
    chosen = np.unique(np.linspace(0, len(true) - 1, min(len(true), MAX_DOTS)).astype(int))
    low, high = _around(np.concatenate([true, predicted]), 0.04)
    scale = Scale(low, high, low, high)
    marks = [
        f'<line class="ideal" x1="{scale.x(low):.1f}" y1="{scale.y(low):.1f}" '
        f'x2="{scale.x(high):.1f}" y2="{scale.y(high):.1f}"/>'
    ]
    for x, y in zip(true[chosen], predicted[chosen], strict=True):
        marks.append(_dot(f"{scale.x(x):.1f}", f"{scale.y(y):.1f}", "dot fill-first", 2.2))
    return _svg(title, scale, "true", marks)


def bar_chart(title: str, values: np.ndarray, axis: str, bars: int = 31) -> str | None:
    """Draw how many of the values (n,) lie in each of `bars` equal ranges."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    reach = float(np.abs(values).max()) or 1.0
    counts, edges = np.histogram(values, bars, (-reach, reach))
    scale = Scale(-reach, reach, 0, float(counts.max()) * 1.05)
    marks = []
    for count, begin, end in zip(counts, edges[:-1], edges[1:], strict=True):
        x, y = scale.x(begin), scale.y(float(count))
        marks.append(
            f'<rect class="fill-first" x="{x + 0.5:.1f}" y="{y:.1f}" '
            f'width="{scale.x(end) - x - 1:.1f}" height="{scale.y(0) - y:.1f}"/>'
        )
    return _svg(title, scale, axis, marks)


def standalone(chart: str) -> str:
    """A chart as a file of its own, light or dark as the viewer is."""
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {DARK_COLOURS} }} }}"
    style = f"<style>svg {{ {COLOURS} background: var(--card); }}\n{dark}\n{CHART_STYLE}</style>"
    head, rest = chart.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


def _svg(title: str, scale: Scale, axis: str, marks: Sequence[str]) -> str:
    frame = [f'<text class="title" x="2" y="14">{escape(title)}</text>']
    for value in _round_values(scale.low, scale.high):
        y = scale.y(value)
        frame.append(
            f'<line class="rule" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>'
        )
    frame += [
        f'<text x="{scale.x(value):.1f}" y="{HEIGHT - BOTTOM + 17}" '
        f'text-anchor="middle">{_short(value)}</text>'
        for value in _round_values(scale.left, scale.right)
    ]
    frame.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(axis)}</text>'
    )
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return "\n".join((head, *frame, *marks, "</svg>"))


def _legend(names: Sequence[str]) -> list[str]:
    """Names of the curves at the upper right; one alone needs none."""
    if len(names) < 2:
        return []
    marks, right = [], WIDTH - RIGHT
    for name, kind in reversed(list(zip(names, SERIES, strict=False))):
        marks.append(f'<text x="{right}" y="14" text-anchor="end">{escape(name)}</text>')
        right -= 7 * len(name) + 6
        marks.append(_dot(f"{right:.1f}", "10", f"fill-{kind}", 4))
        right -= 14
    return marks


def _point(scale: Scale, x: float, y: float) -> str:
    return f"{scale.x(x):.1f},{scale.y(y):.1f}"


def _dot(x: str, y: str, kind: str, radius: float) -> str:
    """A dot at a place that is formatted already."""
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius:g}"/>'


def _around(values: np.ndarray, margin: float) -> tuple[float, float]:
    """Bounds of values, with a margin as a share of their range."""
    low, high = float(values.min()), float(values.max())
    reach = high - low or abs(high) or 1.0
    # A curve of one value is drawn in the middle of its chart.
    aside = margin * reach if high > low else 0.5 * reach
    return low - aside, high + aside


def _round_values(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most one more than `most`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _short(value: float) -> str:
    """A number of an axis in few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value:.2g}"
    return f"{value:.4g}"
