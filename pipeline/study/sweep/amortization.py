"""A curve of step time against steps per launch, as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pipeline.core.files.atomic_write import write_whole
from pipeline.core.pages.charts import draw_frame, horizontal_axis, pixels, vertical_axis
from pipeline.core.pages.drawing import Drawing
from pipeline.core.pages.page import Charts, Page, Section, render_page

Point = tuple[int, float]


def write_amortisation(
    points: Sequence[Point], path: Path, *, title: str = "What longer sinks buy"
) -> None:
    """Write modelled steps in ms, by sink size, as an HTML page with one drawing.

    Raises:
        ValueError: no point, a sink of no step, or a time that is not above zero and finite.
    """
    if not points:
        raise ValueError("no sink size to draw")
    for size, ms in points:
        if size < 1 or not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"sink of {size} steps at {ms} ms: both should be above zero")
    write_whole(path, amortisation(sorted(points), title))


def amortisation(points: Sequence[Point], title: str) -> str:
    """Return the page's text; points are sorted by sink size."""
    (first, first_ms), (last, last_ms) = points[0], points[-1]
    words = (
        f"A step takes {first_ms:.3g} ms in sinks of {first:,} and {last_ms:.3g} ms in sinks of "
        f"{last:,}: {first_ms / last_ms:.2f} times as fast."
    )
    sections = [Section("Milliseconds a step, by steps per launch", "", [Charts([_draw(points)])])]
    footer = "All times are modelled, none was measured on a device."
    return render_page(Page("amortisation", title, words, sections, footer=footer))


def _draw(points: Sequence[Point]) -> Drawing:
    """Draw the points over the logarithm of their sink sizes."""
    sizes = {math.log10(size): f"{size:,}" for size, _ in points}
    aside = 0.1 * (max(sizes) - min(sizes)) or 0.5
    x = horizontal_axis(min(sizes) - aside, max(sizes) + aside)
    y = vertical_axis(0, max(ms for _, ms in points) * 1.08)
    chart = draw_frame("Time of a step against sink size", x, y, "steps per launch", sizes)
    places = [(x.place(math.log10(size)), y.place(ms)) for size, ms in points]
    chart.add("polyline", "curve blue", points=pixels(places))
    for (size, ms), (across, up) in zip(points, places, strict=True):
        chart.add("circle", "blue", tip=f"sink of {size}: {ms:.3f} ms", cx=across, cy=up, r=3.5)
        chart.add("text", "ink", f"{ms:.3g}", x=across + 5, y=up - 7)
    return chart
